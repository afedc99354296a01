"""Whole tensors and even parts of Megatron-core's buckets, as the tool spreads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model
from tests.mcore.one_process import one_process
from tests.training.conftest import Drive
from tests.training.helpers import REPOSITORY, argv
from tools import shard_balance
from tools.shard_balance import Weight, even_parts, flat_ranges, greedy_partition, weights_of, whole_tensors

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "position_embedding_type": "rope",
}


def test_the_largest_tensor_goes_first_and_ties_by_index() -> None:
    # loads of 5 and 6 when the two of size 1 are left; then 6 and 6, and the lower rank is first
    assert greedy_partition([1, 5, 3, 3, 1], 2) == [0, 0, 1, 1, 0]
    # of one size: 0 and 2, whose index is even, then 1
    assert greedy_partition([4, 4, 4], 2) == [0, 0, 1]
    assert greedy_partition([], 3) == []


def test_a_tensor_larger_than_the_mean_keeps_the_other_ranks_waiting() -> None:
    weights = [Weight("a", (100, 10)), *(Weight(str(i), (10, 10)) for i in range(10))]
    assert whole_tensors(weights, 2).imbalance == 1.0
    assert whole_tensors(weights, 4).imbalance == 2.0
    assert sum(whole_tensors(weights, 4).state) == sum(weight.state_bytes for weight in weights)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("bucket", [None, 5000])
def test_even_parts_are_those_of_megatron_core(ranks: int, bucket: int | None) -> None:
    sizes = [(70, 33), (33,), (128, 64), (1,), (64, 64), (500,)]
    with one_process():
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

        group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
        parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in sizes]
        buffer = _ParamAndGradBuffer(
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            torch.bfloat16,
            torch.float32,
            parameters,
            group,
            bucket,
            dict.fromkeys(parameters, ""),
            1.0,
            list(range(len(sizes))),
            False,
            SimpleNamespace(tp=group, dp_cp=group),  # type: ignore[arg-type]
        )
    found = list(flat_ranges([parameter.numel() for parameter in parameters], ranks, bucket))
    expected = []
    for parameter in reversed(parameters):
        first, last, number = buffer.param_index_map[parameter]
        expected.append((first, last, *buffer.bucket_indices[number]))
    assert found == expected
    weights = [Weight(str(shape), shape) for shape in sizes]
    spread = even_parts(weights, ranks, bucket)
    assert sum(spread.state) == pytest.approx(sum(weight.state_bytes for weight in weights))
    assert (spread.split > 0) == (ranks > 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True, "position_embedding_type": "rope"},
        {"untie_embeddings_and_output_weights": True, "disable_bias_linear": True, "add_qkv_bias": True},
        {"qk_layernorm": True},
        LATENT,
        {**LATENT, "q_lora_rank": 24, "qk_layernorm": True},
        {**LATENT, "qk_layernorm": True, "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True},
    ],
)
def test_weights_are_those_of_the_model(drive: Drive, changes: dict[str, Any]) -> None:
    from megatron_lowprec.recipe.parsing import load_recipe
    from megatron_lowprec.training import model
    from megatron_lowprec.training.config.resolve import resolve_run
    from megatron_lowprec.training.distributed import startup

    ranks = startup.prepare_environment()
    config = resolve_run(resolve_model(parse(argv(**changes))[0]), 1, gpus=False)
    startup.initialize(config, ranks)
    (chunk,) = model.build_model(config, load_recipe("bf16"), 256).chunks
    found = [(name, tuple(weight.shape)) for name, weight in chunk.named_parameters()]
    assert [tuple(weight) for weight in weights_of(config, 256)] == found


def test_the_page_has_the_table_of_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert shard_balance.main([]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 2 + len(shard_balance.MODELS) * len(shard_balance.RANKS)
    assert printed in (REPOSITORY / "docs/results/tensor-distribution.md").read_text(encoding="utf-8")


def test_experts_and_pipelines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert shard_balance.main(["--config", str(SHIPPED / "configs/models/moe_tiny.yaml"), "--ranks", "2"]) == 2
    assert "give a dense model" in capsys.readouterr().err
    config = resolve_model(parse(argv(pipeline_model_parallel_size=2))[0])
    with pytest.raises(UserError, match="pipeline stages"):
        weights_of(config, 256)
