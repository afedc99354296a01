"""Casts to FP8 of all experts' operands by one launch, beside the reference."""

from unittest.mock import patch

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.kernels.grouped_cast_fp8 import reference as cast_reference
from megatron_lowprec.kernels.matrices import Matrices
from tests.kernels.mx_launch import difference


def cast_differences(device: str) -> list[str]:
    """Codes, scales and amaxes of matrices with a scale each."""
    from megatron_lowprec.kernels.grouped_cast_fp8 import triton

    generator, found = torch.Generator().manual_seed(0), []
    sources = [
        torch.randn(rows, 48, generator=generator).bfloat16().to(device) * 2.0**power
        for rows, power in ((5, 3), (0, 0), (130, -9), (1, 0))
    ]
    sources[3].zero_()
    whole = Matrices(torch.cat(sources), [len(source) for source in sources])
    observed = [torch.tensor([value], device=device) for value in (1e9, 3.0, 0.0, 0.0)]
    for fmt, margin, observes in (("e4m3", 0, False), ("e5m2", 1, True)):
        rule = Fp8Rule(FORMATS[fmt], "tensor", margin=margin)
        amaxes = [cast_reference.amax_of_groups(sources), triton.amax_of_groups(whole)]
        found += difference("amax", amaxes[0] == amaxes[1], amaxes[1], amaxes[0])
        results = []
        for module in (cast_reference, triton):
            raised = [cell.clone() for cell in observed] if observes else None
            cast = module.cast_fp8_groups(
                sources, rule, amax=amaxes[0].split(1), observed=raised, rowwise=True, columnwise=True
            )
            assert cast.rowwise_data is not None
            assert cast.columnwise_data is not None
            both = cast.rowwise_data.view(torch.uint8), cast.columnwise_data.view(torch.uint8)
            results.append((*both, cast.rowwise_scale, torch.cat(raised or observed)))
        for name, want, got in zip(("rows", "columns", "scale", "observed"), *results, strict=True):
            found += difference(f"{name} of {fmt}", got == want, got, want)
    rule = Fp8Rule(FORMATS["e4m3"], "row", "amax_pow2", 1e-12)
    amaxes = [module.amax_of_groups(sources, columns=True) for module in (cast_reference, triton)]
    found += difference("amax of columns", amaxes[0] == amaxes[1], amaxes[1], amaxes[0])
    casts = [
        module.cast_fp8_groups(sources, rule, amax=amaxes[0].unbind(), rowwise=False, columnwise=True)
        for module in (cast_reference, triton)
    ]
    codes = [cast.columnwise_data.view(torch.uint8) for cast in casts if cast.columnwise_data is not None]
    found += difference("columns with a scale each", codes[0] == codes[1], codes[1], codes[0])
    want, got = (cast.columnwise_scale for cast in casts)
    found += difference("their scales", want == got, got, want)
    for granularity in ("tensor", "row"):  # of the current amax, another rank's is twice as large
        rule, ways = Fp8Rule(FORMATS["e4m3"], granularity), {"rowwise": False, "columnwise": True}
        want, got = (
            module.cast_fp8_groups(given, rule, reduce_amax=lambda own: 2 * own, **ways)
            for module, given in ((cast_reference, sources), (triton, whole))
        )
        for name, one, other in zip(("codes", "scale"), want[2:4], got[2:4], strict=True):
            found += difference(f"current {name} of a {granularity}", one == other, other, one)
    own, newest = torch.rand(2, len(sources), device=device)
    casts, raised = [], [newest.clone(), newest.clone()]
    for module, observes in zip((cast_reference, triton), raised, strict=True):
        rule = Fp8Rule(FORMATS["e4m3"], "tensor")
        casts.append(module.cast_fp8_groups(sources, rule, amax=own, observed=observes, rowwise=True, columnwise=False))
    want, got = (cast.rowwise_scale for cast in casts)
    found += difference("scales of one tensor's amaxes", want == got, got, want)
    found += difference("observed in one tensor", raised[0] == raised[1], raised[1], raised[0])
    return found + cast_tiling_differences(device)


def cast_tiling_differences(device: str) -> list[str]:
    """Codes and scales by tilings of each height and part, NaN and Inf among the entries."""
    from megatron_lowprec.kernels.grouped_cast_fp8 import triton

    generator, found = torch.Generator().manual_seed(0), []
    directions = [(True, False), (False, True), (True, True)]
    ways_of = {"1x128": directions, "128x128": directions, "tensor": [(True, True)], "row": [(False, True)]}
    for granularity, (rowwise, columnwise) in ((name, way) for name, ways in ways_of.items() for way in ways):
        columns = 256 if granularity in cast_reference.BLOCKS else 144
        sources = [
            torch.randn(rows, columns, generator=generator).bfloat16().to(device) * 2.0**power
            for rows, power in ((5, 3), (0, 0), (130, -9), (7, 0), (3, 0))
        ]
        sources[2][:, 128:256], sources[3][2, 5], sources[4][1, 140] = 0, torch.nan, -torch.inf
        whole = Matrices(torch.cat(sources), [len(source) for source in sources])
        rule, ways = Fp8Rule(FORMATS["e4m3"], granularity), {"rowwise": rowwise, "columnwise": columnwise}
        tilings = triton.tilings_of(granularity, rowwise, columnwise)
        for tiling in {(each.rows, each.part_rows, each.part_columns): each for each in tilings}.values():
            with patch.object(triton.Tuned, "choose", lambda *_, tiling=tiling, **__: tiling):
                want, got = (
                    module.cast_fp8_groups(given, rule, **ways)
                    for module, given in ((cast_reference, sources), (triton, whole))
                )
            for name in want._fields[:4]:
                one, other = getattr(want, name), getattr(got, name)
                assert (one is None) == (other is None)
                if one is not None:
                    nan = one.float().isnan() & other.float().isnan()  # of either sign
                    if name.endswith("data"):
                        one, other = one.view(torch.uint8), other.view(torch.uint8)
                    same = (one == other) | nan
                    found += difference(f"{name} of {granularity}, {tiling}", same, other, one)
    return found
