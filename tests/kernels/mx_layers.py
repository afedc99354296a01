"""A layer's operands by the fused MX kernel and by the reference, and those quantized again from codes."""

from typing import Any
from unittest.mock import patch

import torch

from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.kernels.quantize.rule import CodedMatrix, Direction
from megatron_lowprec.recipe.recipe import Recipe
from tests.kernels.mx_launch import MOMENT, Case, difference, input_of
from tests.kernels.mx_recipes import nvfp4_recipe, quartet2_recipe, two_outputs_recipe


def linear_differences() -> list[str]:
    """A layer's GEMMs with operands by the interpreted kernel and by the reference: the host's side of the path."""
    from megatron_lowprec.kernels import dispatch
    from megatron_lowprec.kernels.amax import triton as amax
    from megatron_lowprec.kernels.quantize import triton
    from megatron_lowprec.linear.layer_tensors import SavedForBackward
    from megatron_lowprec.linear.linear_gemms import LinearGemms
    from megatron_lowprec.linear.linear_id import LinearId
    from megatron_lowprec.quantization.amax_history import AmaxHistory
    from megatron_lowprec.recipe.registry import get_recipe

    generator = torch.Generator().manual_seed(4)
    x, w, dy = (torch.randn(size, generator=generator).bfloat16() for size in ((70, 64), (192, 64), (70, 192)))
    place = LinearId(3, "mlp.linear_fc1", spans={"O": ShardSlice(192, gate_offset=96, gate_stride=192)}, split="O")
    lines, of_codes = [], x.numel() // 2
    for recipe, caches, launches, amaxes, held in (
        (get_recipe("mxfp4_rht_sr"), True, 5, 0, x.nbytes),  # a call for both directions of dy makes one for each
        # wgrad takes codes that fprop's cast of x wrote; twice for the operand of fprop's w that dgrad takes
        (quartet2_recipe(), True, 8, 6, of_codes),
        (quartet2_recipe(), False, 8, 5, of_codes),  # the amax of fprop's w serves dgrad
        (nvfp4_recipe(), True, 5, 3, x.nbytes),  # one for the weight serves both GEMMs and is made by another
        (nvfp4_recipe(), False, 6, 3, x.nbytes),
        (two_outputs_recipe(), True, 2, 2, x.nbytes),  # no call for both directions
    ):
        saved_bytes: list[int] = []

        def products(
            recipe: Recipe = recipe, caches: bool = caches, saved_bytes: list[int] = saved_bytes
        ) -> list[torch.Tensor]:
            run = LinearGemms(recipe, place, 1, AmaxHistory, lambda amax: amax * 1.5, cache_weights=caches)
            y, saved = run.forward(x, w, MOMENT, save_input=True)
            assert saved.x is not None
            saved_bytes.append(saved.x.nbytes)
            saved = SavedForBackward(*saved.tensors(), layout=saved.layout)
            both, total = run.grad_output(dy, MOMENT), torch.zeros(192, 64)
            dx = run.dgrad(both, w, MOMENT, saved.weight_amax)
            return [y, dx, run.wgrad(both, saved.input(), MOMENT, total, input_amax=saved.input_amax)]

        want, quantize_mx, operand_amaxes = products(), triton.quantize_mx, amax.operand_amaxes
        with (
            patch.object(dispatch, "has_mx_kernel", lambda _, rule: rule is not None),
            patch.object(triton, "quantize_mx", side_effect=quantize_mx) as taken,
            patch.object(amax, "operand_amaxes", side_effect=operand_amaxes) as found,
        ):
            got = products()
        if saved_bytes != [x.nbytes, held]:
            lines.append(f"{recipe.name}: bytes of x by the reference and by the kernel are {saved_bytes}")
        for made, expected, what in ((taken, launches, "the fused kernel"), (found, amaxes, "amaxes of operands")):
            if made.call_count != expected:
                lines.append(f"{recipe.name}: {made.call_count} calls for {what} instead of {expected}")
        lines += [
            f"{recipe.name}: {gemm} differs"
            for gemm, a, b in zip("fdw", got, want, strict=True)
            if not torch.equal(a, b)
        ]
    return lines


def coded_differences(device: str) -> list[str]:
    """fprop's operand with codes beside it, and what is quantized again from them instead of from fp32 values."""
    from megatron_lowprec.kernels.amax.triton import operand_amaxes
    from megatron_lowprec.kernels.quantize.triton import quantize_mx
    from megatron_lowprec.quantization.quantizer import mx_rule
    from megatron_lowprec.quantization.tensor import QuantizedTensor

    lines = []
    for dtype, recipe, finite in (
        (torch.bfloat16, quartet2_recipe(), True),
        (torch.float32, quartet2_recipe(), False),
    ):
        x = input_of(Case(83, 208, dtype, "e2m1", "divided", "nearest_even", 0, "r"), device)
        spec, again = recipe.fprop.input, recipe.wgrad.input
        assert spec is not None
        assert again is not None
        first, second = mx_rule(spec), mx_rule(again, recipe.wgrad.hadamard)
        assert first is not None
        assert second is not None
        # NaN and Inf make NaN of their blocks, or of all
        amax = (x.float().nan_to_num(0.0, 0.0, 0.0) if finite else x.float()).abs().amax().view(1)
        rng_step, rows = torch.tensor(MOMENT, dtype=torch.int32, device=device), Direction(amax=amax)
        options: dict[str, Any] = {"rng_step": rng_step, "rows": rows}
        plain, both = (quantize_mx(x, first, **options, beside=beside) for beside in (False, True))
        values = quantize_mx(x, first, **options, whole=True, out_dtype=torch.float32).rowwise_data
        assert plain.rowwise_data is not None
        assert both.rowwise_data is not None
        assert both.beside is not None
        assert plain.beside is None
        assert values is not None
        codes = QuantizedTensor(x.shape, x.dtype, spec, *both.beside[:2])
        codes.rowwise_tensor_scale = both.beside.tensor_scale
        way = Direction(Key(5, 6), torch.ones(32, device=device), amax.new_ones(1), Key(7, 8))

        def again_from(source: torch.Tensor | CodedMatrix, way: Direction = way) -> torch.Tensor | None:
            made = quantize_mx(source, second, columns=way, rng_step=rng_step, out_dtype=dtype)  # noqa: B023
            return made.columnwise_data

        for what, got, want in (
            ("values beside codes", both.rowwise_data, plain.rowwise_data),
            ("values of codes", codes.dequantize(), values),
            ("again from codes", again_from(both.beside), again_from(values)),
            ("amax of codes", *(operand_amaxes(one, rows=None, columns=way) for one in (both.beside, values))),
        ):
            assert got is not None
            assert want is not None
            same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
            lines += difference(f"{what} of {dtype}", same, got, want)
    return lines
