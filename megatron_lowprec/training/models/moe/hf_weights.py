"""Mixtral's tensors in model.safetensors: Llama's, with a router and experts one by one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.interface import TensorMap
from megatron_lowprec.training.models.common.tensor_layout import gated_mlp_maps
from megatron_lowprec.training.models.llama import hf_weights as llama

known_name = llama.known_name


def tensor_maps(config: Config) -> Iterator[TensorMap]:
    """Every weight once, except the output layer's."""

    def experts(ours: str, theirs: str) -> Iterator[TensorMap]:
        block = f"{theirs}.block_sparse_moe"
        yield TensorMap(f"{ours}.mlp.router.weight", (f"{block}.gate.weight",))
        for expert in range(config.experts.num_experts):
            here, there = f"{ours}.mlp.experts.local_experts.{expert}", f"{block}.experts.{expert}"
            yield from gated_mlp_maps(here, there, ("w1", "w3", "w2"))

    return llama.maps_with_mlp(config.shape, experts)
