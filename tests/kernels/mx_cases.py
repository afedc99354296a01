"""Cases of the fused MX kernel against the reference, bit for bit; run interpreted on a CPU, and natively on a GPU.

``python -m tests.kernels.mx_cases`` runs the small set under Triton's interpreter, which must be chosen before Triton
is imported, and prints what differs.
"""

import os
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from megatron_lowprec.formats import ELEMENT_FORMATS, FORMATS
from megatron_lowprec.kernels.quantize.coded_scale import CodedOptions
from megatron_lowprec.scaling import scale_rules
from tests.kernels.mx_launch import Case, differences
from tests.kernels.mx_layers import coded_differences, linear_differences


def small_cases() -> list[Case]:
    """A few launches that together pass through every branch; about a second each under the interpreter."""
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = [
        Case(37, 128, bf16, "e2m1", "floor", "nearest_even", 0, "r"),
        Case(37, 128, bf16, "e2m1", "floor", "nearest_even", 0, "c"),
        Case(40, 128, fp32, "e4m3", "round_up", "nearest_even", 0, "rc"),
        Case(37, 128, bf16, "e5m2", "even", "half_away", 0, "rc"),
        Case(37, 128, fp32, "e2m3", "ceil", "stochastic", 0, "rc", mx=16),
        Case(37, 128, bf16, "e2m1", "floor", "stochastic", 64, "rc", sharded=True),
        Case(70, 64, fp32, "e2m1", "floor", "stochastic", 32, "rc", random_bits=8),
        Case(20, 128, bf16, "e3m2", "floor", "half_away", 128, "c", mx=64),
        Case(20, 256, bf16, "e2m1", "floor", "stochastic", 256, "rc"),
        Case(37, 64, bf16, "e4m3", "round_up", "nearest_even", 0, "rc", codes=True),
        Case(37, 64, bf16, "e5m2", "even", "nearest_even", 0, "c", codes=True),
        Case(37, 64, bf16, "e2m1", "floor", "stochastic", 64, "rc", mx=16, codes=True),
        Case(37, 64, fp32, "e3m2", "ceil", "nearest_even", 0, "r", codes=True),
        *nvfp4_cases(),
    ]
    return cases + [Case(37, 64, fp32, *row, "nearest_even", 0, "rc", codes=True) for row in uncovered(cases)]


def nvfp4_cases() -> list[Case]:
    """Coded scales, tensor scales, transforms of one direction and square blocks: each branch once."""
    bf16, fp32 = torch.bfloat16, torch.float32
    nvfp4, nearest, sr = ("e2m1", "product"), "nearest_even", "stochastic"
    scales: dict[str, Any] = {"mx": 16, "scale": "e4m3", "target": 2688.0}
    return [
        Case(37, 128, bf16, *nvfp4, nearest, 0, "r", **scales),
        Case(37, 128, bf16, *nvfp4, sr, 16, "rc", plain="r", rounds=True, sharded=True, **scales),
        Case(37, 64, bf16, *nvfp4, nearest, 16, "rc", plain="r", rounds=True, codes=True, **scales),
        Case(37, 64, fp32, *nvfp4, nearest, 0, "c", codes=True, finite=False, **scales),
        Case(37, 104, bf16, *nvfp4, nearest, 0, "rc", square=True, **scales),
        Case(37, 64, bf16, "e1m2", "quotient", sr, 0, "c", random_bits=8, **(scales | {"scale": "ue4m3"})),
        Case(37, 64, bf16, "e4m3", "quotient", nearest, 0, "rc", codes=True, mx=16, scale="ue5m3"),
        Case(70, 64, bf16, "e4m3", "round_up", nearest, 0, "rc", square=True),
        *(
            Case(20, 128, bf16, *nvfp4, nearest, 128, "rc", plain=way, rounds=True, codes=True, **scales)
            for way in "rc"
        ),
        *rival_cases(),
    ]


def rival_cases() -> list[Case]:
    """Four-over-six by each measure, in square blocks too, scales that are not 0, and corrections."""
    bf16, nearest, sr = torch.bfloat16, "nearest_even", "stochastic"
    scales: dict[str, Any] = {"mx": 16, "scale": "e4m3"}
    mse, largest = CodedOptions(four_over_six="mse"), CodedOptions(4.0, "abs_max", "flush")
    eden = CodedOptions(6 / (17 / 16 * 0.93), zero_code="one", group=32)
    target = 255.99 * eden.largest(FORMATS["e2m1"])
    corrected: dict[str, Any] = {"target": target, "options": eden, "scale_rounding": sr}
    return [
        Case(37, 64, bf16, "e2m1", "base", nearest, 0, "rc", target=1536.0, options=mse, codes=True, **scales),
        Case(37, 72, bf16, "e2m1", "base", nearest, 0, "rc", target=1536.0, options=mse, square=True, **scales),
        Case(37, 64, bf16, "e2m1", "divided", sr, 16, "c", target=1536.0, options=CodedOptions(None, "mae"), **scales),
        Case(37, 72, bf16, "e2m1", "product", nearest, 0, "rc", options=largest, square=True, **scales),
        Case(37, 64, bf16, "e2m1", "divided", nearest, 32, "rc", sharded=True, **corrected, **scales),
        Case(37, 64, bf16, "e2m1", "product", nearest, 0, "r", scale_rounding=sr, random_bits=8, codes=True, **scales),
        *(
            Case(37, 64, torch.float32, "e2m1", rule, nearest, 0, "rc", target=2688.0, tiny=True, **scales)
            for rule in ("divided", "quotient")
        ),
    ]


def uncovered(cases: list[Case]) -> list[tuple[str, str]]:
    """(format, scale rule) pairs with each row of both tables that no case has."""
    formats, rules = list(ELEMENT_FORMATS), scale_rules("e8m0")
    pairs = [(formats[i % len(formats)], rules[i % len(rules)]) for i in range(max(len(formats), len(rules)))]
    known = {case.fmt for case in cases}, {case.rule for case in cases}
    return [(fmt, rule) for fmt, rule in pairs if fmt not in known[0] or rule not in known[1]]


def gpu_cases() -> list[Case]:
    """Every format, scale rule, rounding, block, direction and dtype, at odd sizes."""
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = [
        Case(*size, dtype, "e2m1", "floor", rounding, block, ways, sharded=block == 64)
        for (*size, dtype), rounding, block, ways in product(
            ((37, 256, bf16), (1000, 1024, bf16), (37, 256, fp32)),
            ("nearest_even", "stochastic"),
            (0, 32, 64, 128, 256),
            ("r", "c", "rc"),
        )
    ]
    rules = (("e4m3", "round_up"), ("e5m2", "even"), ("e2m3", "ceil"), ("e3m2", "floor"))
    cases += [
        Case(37, 256, bf16, *rule, rounding, block, "rc")
        for rule, rounding, block in product(rules, ("nearest_even", "half_away", "stochastic"), (0, 64))
    ]
    cases += [Case(333, 256, bf16, *rule, "nearest_even", 0, ways, codes=True) for rule in rules for ways in ("r", "c")]
    cases += [
        Case(333, 512, bf16, "e2m1", "floor", rounding, block, ways, codes=True)
        for rounding, block, ways in product(("nearest_even", "stochastic"), (0, 64), ("r", "c", "rc"))
    ]
    cases += [
        Case(333, 256, bf16, "e2m1", "floor", "stochastic", block, "rc", mx=mx, codes=codes)
        for mx, block, codes in product((16, 64), (0, 64), (False, True))
    ]
    cases += [
        replace(case, rows=rows, columns=columns + -columns % max(case.block, case.mx))
        for case, (rows, columns) in product(nvfp4_cases(), ((333, 512), (1000, 1056)))
    ]
    return cases + [Case(333, 256, bf16, *row, "nearest_even", 0, "rc", codes=True) for row in uncovered(cases)]


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels import block_sum_kernel

    found = [line for case in small_cases() for line in differences(case, "cpu")] + linear_differences()
    found += coded_differences("cpu")
    found += block_sum_kernel.differences("cpu")
    print(*found, f"{len(small_cases())} cases compared", sep="\n")
    sys.exit(bool(found))
