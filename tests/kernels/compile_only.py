"""Every kernel compiled for a GPU as its wrapper calls it, by a machine without one; nothing is launched.

Triton's interpreter takes other branches than a GPU (no inline PTX, no native casts), and knows no types to mismatch.
``python -m tests.kernels.compile_only 100`` compiles for sm_100 and prints how many specializations there were;
``compile_only 100 casts mx_operands`` only these parts, with one tiling each.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from megatron_lowprec import kernels
from tools.bench.instructions import compiling

compiled: list[str] = []


def every_tiling(name: str, tilings: Any, run: Any, device: torch.device) -> Any:
    """In the place of the tuning: tries them all and takes the first; of casts of computed sources the first and one
    in parts, which differ from a matrix's by code that all tilings share; of grouped products, which take longest, the
    first and the last.
    """
    computed = "'KIND'" in name and "'KIND': 0," not in name
    chosen = (tilings[0], tilings[-2]) if computed else (tilings[0], tilings[-1]) if "grouped" in name else tilings
    for tiling in dict.fromkeys(chosen):
        run(tiling)
    return tilings[0]


def casts(bf16: torch.dtype = torch.bfloat16) -> None:
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.kernels.cast_fp8.prologue import KINDS, CastPrologue
    from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
    from megatron_lowprec.kernels.cast_fp8.triton import amax_of, cast_fp8, plan
    from tests.kernels.cast_cases import Case, input_of, prologue_of

    def cast(
        source: CastPrologue | torch.Tensor, tile: str, fmt: str = "e4m3", ways: str = "rc", known: bool = True
    ) -> None:
        rule = Fp8Rule(FORMATS[fmt], tile, "amax_pow2" if tile == "row" else "amax", 1e-12 if tile == "row" else 0.0)
        amax = torch.ones(1) if known else None
        sums = ways == "rc"  # of gradients alone
        cast_fp8(source, rule, rowwise="r" in ways, columnwise="c" in ways, amax=amax, observed=amax, sums=sums)

    for kind in KINDS:
        case = Case(256, 1152, bf16, "e4m3", "tensor", "amax", "rc", kind=kind)
        source = prologue_of(case, input_of(case, "cpu"))
        cast(source, "tensor", "e5m2")
        if source.in_memory:
            cast(source, "1x128", known=False)
            cast(source, "128x128", known=False)
    x = torch.zeros(250, 1104, dtype=bf16)  # no tile divides it
    for tile in ("tensor", "row", "1x128", "128x128"):
        cast(x, tile, known=tile == "tensor")
    x = torch.zeros(256, 1152, dtype=bf16)
    for ways in ("r", "c"):
        cast(x, "tensor", ways=ways)
        cast(x, "1x128", ways=ways, known=False)
        cast(x, "128x128", ways=ways, known=False)
    for ways in ("r", "c", "rc"):
        cast(x, "row", ways=ways, known=False)
    amax_of(x, vectors=True)
    rule = Fp8Rule(FORMATS["e4m3"], "row", "amax", 0.0)
    planned = plan(x, rule, (True, True, True), len(x), bool)
    for launch in planned.launches:  # compiled from Inductor's code by tests/linear/inductor_codegen.py
        given = {name: torch.zeros(1) if isinstance(each, str) else each for name, each in launch.arguments.items()}
        launch.kernel.fn[launch.programs](**given)


def mx_operands() -> None:
    from tests.kernels.mx_cases import nvfp4_cases
    from tests.kernels.mx_launch import Case, differences

    for case in (
        *nvfp4_cases()[1:5:3],  # both directions under SR, square blocks
        Case(128, 256, torch.bfloat16, "e2m1", "floor", "stochastic", 64, "rc"),
        Case(128, 256, torch.bfloat16, "e4m3", "round_up", "nearest_even", 0, "rc"),
        Case(128, 256, torch.bfloat16, "e2m1", "floor", "stochastic", 64, "rc", codes=True),
        Case(128, 256, torch.bfloat16, "e1m2", "even", "nearest_even", 0, "rc", mx=64),
        Case(128, 256, torch.bfloat16, "e2m1", "floor", "nearest_even", 64, "rc", mx=16, codes=True),
    ):
        differences(case, "cpu")  # there are some: nothing has run


def mx_codes() -> None:
    from tests.kernels.mx_layers import coded_differences

    coded_differences("cpu")  # there are some: nothing has run


def groups() -> None:
    from tests.kernels.grouped_casts import cast_differences
    from tests.kernels.grouped_operands import CASES, operand_differences
    from tests.kernels.grouped_products import fp8_differences, product_differences

    for case in CASES:
        operand_differences(case, "cpu")  # there are some: nothing has run
    product_differences("cpu")
    product_differences("cpu", 16, torch.bfloat16)  # whole tiles
    fp8_differences("cpu")
    cast_differences("cpu")


def block_scaled() -> None:
    from megatron_lowprec.kernels.mx_gemm.triton import mx_gemm
    from tests.kernels.mx_gemm_cases import KINDS, operand

    for a_format, b_format, block in KINDS:
        a, b = operand(256, 512, a_format, block, 1), operand(256, 512, b_format, block, 2)
        # Triton has no product of bf16 values for scales of 16 entries
        folds = block == 16 and torch.cuda.get_device_capability() < (10, 0)
        mx_gemm(a, b, out_dtype=torch.bfloat16, folds=folds)


def around_linears() -> None:
    from megatron_lowprec.kernels.bias.triton import add_bias
    from megatron_lowprec.kernels.cross_entropy import triton as cross_entropy
    from megatron_lowprec.kernels.dropout.triton import bias_dropout_add, bias_dropout_add_backward
    from megatron_lowprec.kernels.gelu.triton import bias_gelu, bias_gelu_backward
    from megatron_lowprec.kernels.layernorm.triton import norm, norm_backward, statistics
    from megatron_lowprec.kernels.rope.triton import rope, rope_backward
    from megatron_lowprec.kernels.swiglu.triton import swiglu, swiglu_backward, weighted_swiglu_backward

    x, w, amax = torch.zeros(256, 1024).bfloat16(), torch.zeros(1024).bfloat16(), torch.zeros(1)
    key = torch.zeros(2, dtype=torch.int32)
    for bias in (w, None):
        found = norm(x, w, bias, 1e-5, amax)
        norm_backward(x, x, w, found.mean, found.rstd)
        norm_backward(x, x, w, found.mean, found.rstd, x)
        norm_backward(x, x, w, found.mean, found.rstd, x, amax)
        statistics(x, 1e-5, centered=bias is not None)
    add_bias(x, w)
    bias_gelu(x, w, amax)
    bias_gelu_backward(x, x, w, amax=amax)
    for turned in (128, 64):
        turn = torch.zeros(32, 1, 1, turned).bfloat16()
        rope(x.view(32, 2, 8, 4, 128), turn, turn)
        rope_backward(x.view(32, 2, 32, 128), turn, turn)
    swiglu(x, amax)
    swiglu_backward(x[:, :512].contiguous(), x, amax)
    weighted_swiglu_backward(x[:, :512].contiguous(), x, torch.zeros(256))
    bias_dropout_add(x, w, x, 0.1, key)
    bias_dropout_add_backward(x, 0.1, key, torch.bfloat16, amax=amax)
    targets = torch.zeros(256, dtype=torch.int64)
    cross_entropy.logit_sums(x, targets, 0)
    cross_entropy.logits_gradient_(x, targets, 0, torch.zeros(256), torch.zeros(256))


def updates() -> None:
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.kernels.amax_history.triton import update_history_
    from megatron_lowprec.kernels.gradient_codes import triton as gradient_codes
    from megatron_lowprec.kernels.multi_tensor_cast import triton as multi_tensor_cast
    from megatron_lowprec.kernels.packed_cast import triton as packed_cast
    from megatron_lowprec.kernels.partial_cast import triton as partial_cast
    from megatron_lowprec.kernels.partial_cast.reference import Shard
    from megatron_lowprec.kernels.scaled_adam import triton as adam
    from megatron_lowprec.kernels.scaled_adam.reference import FORMAT_OF, Hyperparameters
    from megatron_lowprec.kernels.transpose_codes import triton as transposes
    from tests.kernels.scaled_adam_cases import SIZES, STATES, STREAMS, slots_of

    step = Hyperparameters(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    for state, stream in product(STATES, STREAMS):
        slots, _ = slots_of(SIZES[0], state, torch.bfloat16, torch.float32, "cpu", stream)
        adam.update_amax(slots, step)
        adam.update_(slots, step, torch.ones(len(slots), 3))
        if not any(dtype in FORMAT_OF for dtype in state):
            adam.update_(slots, step, None, torch.ones(()))
    codes = torch.zeros(4096, dtype=torch.uint8)
    multi_tensor_cast.multi_tensor_cast_([torch.zeros(4096)], torch.ones(1), FORMATS["e4m3"], [codes])
    gradient_codes.gradient_scale(torch.zeros(300), FORMATS["e4m3"], torch.ones(1))
    gradient_codes.cast_gradient_(torch.zeros(4096), codes, torch.zeros(1), torch.ones(1), FORMATS["e4m3"])
    gradient_codes.count_saturated(codes, FORMATS["e4m3"])
    for name, bounds in product(("e4m3", "e5m2"), ([(0, 4096)], [(3, 5)])):
        gradient_codes.requantize_(codes, bounds, torch.ones(1), FORMATS[name])
        for ranks, rounds in ((1, False), (2, False), (2, True), (3, True)):
            received = torch.zeros(ranks, 4096, dtype=torch.uint8)
            total = torch.zeros(4096)
            gradient_codes.sum_codes_(received, bounds, torch.ones(1), FORMATS[name], rounds, total)
    for start in (0, 3):
        shards = [Shard(torch.zeros(4096), start, (256, 256))]
        amax = partial_cast.partial_amax(shards, (128, 128))
        partial_cast.partial_cast_(shards, amax, FORMATS["e4m3"], (128, 128), [codes])
    for name in ("e4m3", "e5m6"):
        packed = packed_cast.packed_cast(torch.zeros(256, 256).bfloat16(), FORMATS[name])
        packed_cast.packed_decode(*packed, FORMATS[name], torch.bfloat16)
    update_history_(torch.zeros(16), torch.zeros(64, 16), torch.zeros(16), True)
    for size, dtype in product(((256, 256), (255, 257)), (torch.float8_e4m3fn, torch.float8_e5m2)):
        transposes.transpose_codes(torch.zeros(size, dtype=dtype), 16)
        transposes.transpose_groups([torch.zeros(size, dtype=dtype)])


def operand_statistics() -> None:
    from megatron_lowprec.kernels.operand_stats.triton import operand_stats
    from tests.kernels.amax_cases import operand_faults
    from tests.kernels.operand_stats_cases import CASES, arguments

    list(operand_faults("cpu"))  # there are some: nothing has run
    for case in CASES[:-1]:
        operand_stats(**arguments(case, "cpu"))  # type: ignore[arg-type]


PARTS = {
    part.__name__: part
    for part in (casts, mx_operands, mx_codes, groups, block_scaled, around_linears, updates, operand_statistics)
}


def main(arch: int, *parts: str) -> None:
    """Compile all, or these parts; the exit code is 1 where something of all is not compiled."""
    # all tilings where kernels are tuned; the first one elsewhere, to save time
    large = 0 if arch == 90 and not parts else 1 << 62
    with (
        compiling(arch, lambda function, _: compiled.append(f"{function.__module__}.{function.__name__}")),
        patch.multiple("megatron_lowprec.kernels.tuning", LARGE_ENOUGH=large, fastest=every_tiling),
    ):
        for name in parts or PARTS:
            PARTS[name]()
    print(f"{len(compiled)} specializations of {len(set(compiled))} kernels compiled")
    print(*(sorted(set(compiled)) if parts else ()), sep="\n")
    left = set() if parts else _kernels() - set(compiled)
    sys.exit(f"not compiled: {', '.join(sorted(left))}" if left else None)


def _kernels() -> set[str]:
    """All of the package: what is launched has a name that ends so."""
    from triton.runtime.jit import JITFunction

    found = set()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for function in vars(importlib.import_module(module.name)).values():
            if isinstance(function, JITFunction) and function.__name__.endswith("_kernel"):
                found.add(f"{function.__module__}.{function.__name__}")
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
