"""Layers with experts whose tokens travel as codes, and as bf16: two processes with expert parallelism.

``test_token_dispatch.py`` starts it. On a CPU the GEMMs are emulated. On GPUs they are native where the
GPU has them, over NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megatron_lowprec import get_recipe
from megatron_lowprec.recipe.schema import GemmSpec
from tests.checks import run_checks
from tests.mcore.dispatch_bits import bits, layers_in_sequence, losses, under_spec
from tests.mcore.dispatch_bytes import (
    bytes_on_the_wire,
    gradients_in_bf16,
    header,
    inspected,
    quantized_once,
    saved_codes,
)
from tests.mcore.dispatch_model import DEVICE, FFN, RECIPES
from tests.mcore.dispatch_refusals import (
    REFUSALS,
    fused_permutation_refused,
    one_rank_refused,
    recipes_refused,
    refused,
    stock_experts_refused,
    tensor_parallel_experts_refused,
)

CHECKS: dict[str, Callable[[], None]] = {}
for _name in RECIPES:
    for _grouped in (False, True):
        CHECKS[f"bits, {_name}{', grouped' * _grouped}"] = partial(bits, _name, _grouped)
    CHECKS[f"bytes, {_name}"] = partial(bytes_on_the_wire, _name)
for _grouped in (False, True):
    CHECKS[f"uneven{', grouped' * _grouped}"] = partial(bits, "fp8_blockwise", _grouped, uneven=True)
    CHECKS[f"one expert a rank{', grouped' * _grouped}"] = partial(bits, "mxfp8", _grouped, num_moe_experts=2)
    CHECKS[f"quantized once{', grouped' * _grouped}"] = partial(quantized_once, _grouped)
_shared = {"moe_shared_expert_intermediate_size": FFN}
CHECKS["shared experts"] = partial(bits, "fp8_blockwise", False, **_shared)
_capacity = {"moe_expert_capacity_factor": 0.5, "moe_router_load_balancing_type": "none"}
CHECKS["dropped tokens"] = partial(bits, "mxfp8", False, **_capacity)
CHECKS["two layers"] = layers_in_sequence
CHECKS["two layers, recomputed"] = partial(
    layers_in_sequence, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
CHECKS["two layers, experts recomputed"] = partial(
    layers_in_sequence, recompute_granularity="selective", recompute_modules=["moe"]
)
CHECKS["saved codes"] = saved_codes
CHECKS["inspected"] = inspected
CHECKS["header"] = header
CHECKS["losses"] = losses
CHECKS["spec"] = under_spec
CHECKS["gradients in bf16, biases"] = partial(gradients_in_bf16, RECIPES["mxfp8"], add_bias_linear=True)
_plain_dgrad = replace(get_recipe("mxfp8"), dgrad=GemmSpec())
CHECKS["gradients in bf16, dgrad"] = partial(gradients_in_bf16, _plain_dgrad)
for _name, _reason, _more in REFUSALS:
    CHECKS[f"refused: {_name}"] = partial(refused, _reason, _more)
CHECKS["refused: recipe"] = recipes_refused
CHECKS["refused: fused permutation"] = fused_permutation_refused
CHECKS["refused: stock experts"] = stock_experts_refused
CHECKS["refused: one rank"] = one_rank_refused
CHECKS["refused: expert tensor parallelism"] = tensor_parallel_experts_refused
if DEVICE == "cuda":
    CHECKS = {name: check for name, check in CHECKS.items() if name.startswith(("bits", "bytes", "uneven", "one"))}


def main() -> None:
    from megatron_lowprec.mcore.cpu_compat import install

    install()
    from megatron.core import parallel_state

    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
