"""FP8 products on tensor cores against the float64 product of the same operands; needs a Hopper GPU."""

from typing import Any

import pytest
import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gemm.native import scaled_gemm
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import HistorySpec, QuantSpec

pytestmark = pytest.mark.gpu

PAIRS = [("tensor", "tensor"), ("row", "row"), ("row", "tensor"), ("1x128", "128x128"), ("1x128", "1x128")]
K = 1152
# Hopper's tensor cores add 32 products at a time to a sum of which they keep about 14 bits (arXiv 2412.19437, section
# 3.3.2): each such step loses at most 2^-14 of all magnitudes so far. A promotion to fp32 follows 4 steps, or all.
FULL, FAST = 4 * 2.0**-14, K / 32 * 2.0**-14


def operand(rows: int, columns: int, tile: str, fmt: str, side: int) -> QuantizedTensor:
    """[rows, columns] of random entries over six binades, contracted along the last dimension: x, or x.T for side 1."""
    from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
    from megatron_lowprec.kernels.cast_fp8.triton import cast_fp8

    generator = torch.Generator("cuda").manual_seed(side)
    x = torch.randn(columns, rows, device="cuda", generator=generator)
    x *= torch.exp2(torch.randint(-3, 3, (1, rows), device="cuda", generator=generator).float())
    x = x.bfloat16() if side else x.bfloat16().t().contiguous()
    made = cast_fp8(x, Fp8Rule(FORMATS[fmt], tile), rowwise=not side, columnwise=bool(side))
    data, scale = made[2:4] if side else made[:2]
    assert data is not None
    assert (data[rows:].view(torch.uint8) == 0).all()
    return QuantizedTensor(
        torch.Size((rows, columns)), torch.bfloat16, QuantSpec(fmt, granularity=tile), data, scale
    ).validate()


def exact(one: QuantizedTensor) -> torch.Tensor:
    return one.dequantize(torch.float64)  # fp32 holds the product of a code and a scale but for its last bit


def multiply(a: QuantizedTensor, b: QuantizedTensor, **options: Any) -> torch.Tensor:
    assert a.spec is not None
    assert b.spec is not None
    (x, x_scale), (w, w_scale) = a.rowwise(), b.rowwise()
    assert x_scale is not None
    assert w_scale is not None
    granularities = {"a_granularity": a.spec.granularity, "b_granularity": b.spec.granularity}
    return scaled_gemm(x, w, a_scale=x_scale, b_scale=w_scale, **granularities, **options)


@pytest.mark.parametrize("fast", [False, True], ids=["full", "fast"])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")], ids="-".join)
@pytest.mark.parametrize("tiles", PAIRS, ids="-".join)
@pytest.mark.parametrize("rows", [209, 224])
def test_product_is_within_its_accumulators_bound(
    tiles: tuple[str, str], formats: tuple[str, str], fast: bool, rows: int
) -> None:
    if "1x128" in tiles and "e5m2" in formats:
        pytest.skip("cuBLAS has no such product; its backend's why_not says so")
    a, b = (operand(n, K, t, f, i) for i, (n, t, f) in enumerate(zip((rows, 272), tiles, formats, strict=True)))
    want, bound = exact(a) @ exact(b).t(), exact(a).abs() @ exact(b).abs().t()
    bias = torch.randn(272, device="cuda").bfloat16()
    got = multiply(a, b, out_dtype=torch.bfloat16, fast_accumulation=fast, bias=bias)[:rows].double()
    unit = FAST if fast and "1x128" not in tiles else FULL
    total = want + bias.double()
    error = (got - total).abs()
    assert (error <= total.abs() * 2.0**-8 + bound * unit).all(), float((error / bound).max())
    # into fp32, where what the accumulator loses is not hidden by bf16
    if a.rowwise()[0].shape[0] != rows or rows % 16:
        return  # such an operand is a token's, not a weight's
    main_grad = torch.full((rows, 272), 0.5, device="cuda")
    allowed = bound * unit + want.abs() * (2.0**-8 if "row" in tiles else 2.0**-23)
    for overwrite, before in ((True, 0.0), (False, want)):
        kept = before if isinstance(before, float) else main_grad.double()
        out = multiply(
            a, b, out_dtype=torch.bfloat16, fast_accumulation=fast, accumulate_into=main_grad, overwrite=overwrite
        )
        assert out is main_grad
        error = (main_grad.double() - kept - want).abs()
        assert (error <= allowed + 2.0**-23 * main_grad.abs()).all(), float((error / bound).max())


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_blockwise"])
@pytest.mark.parametrize("cache", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("tokens", [96, 333])
def test_layer_multiplies_the_references_operands(recipe: str, cache: bool, tokens: int) -> None:
    """Two steps of two microbatches, native against emulated: the same codes, so only the summation differs."""
    from megatron_lowprec.linear.linear_gemms import LinearGemms
    from megatron_lowprec.linear.linear_id import LinearId
    from megatron_lowprec.quantization.amax_history import AmaxHistory
    from megatron_lowprec.quantization.random_stream import RngStep
    from megatron_lowprec.recipe.registry import get_recipe

    generator = torch.Generator("cuda").manual_seed(tokens)
    I, O = 256, 384  # noqa: E741
    histories: list[AmaxHistory] = []

    def history_of(remembered: HistorySpec) -> AmaxHistory:
        histories.append(AmaxHistory(remembered, "cuda"))
        return histories[-1]

    native, emulated = (
        LinearGemms(get_recipe(recipe), LinearId(1, "x"), 0, history_of, cache_weights=cache, emulate=emulate)
        for emulate in (False, True)
    )
    w = torch.randn(O, I, device="cuda", generator=generator).bfloat16() * 0.1
    grads = [torch.zeros(O, I, device="cuda") for _ in range(2)]
    for step in range(2):
        native.main_grad_is_zero = True
        grads[1].zero_()
        for microbatch in range(2):
            rng_step = RngStep(step, microbatch)
            x = torch.randn(tokens, I, device="cuda", generator=generator).bfloat16() * (1 + step)
            dy = torch.randn(tokens, O, device="cuda", generator=generator).bfloat16() * 1e-3
            y, saved = native.forward(x, w, rng_step, save_input=True)
            assert (saved.x_scale is not None) == ("gw_hp" not in recipe)  # in place of x itself
            both = native.grad_output(dy, rng_step, bias=True)
            found = [y, native.dgrad(both, w, rng_step, saved.weight_amax)]
            native.wgrad(both, saved.input(), rng_step, grads[0])
            plain = emulated.grad_output(dy, rng_step)
            wanted = [emulated.fprop(x, w, rng_step), emulated.dgrad(plain, w, rng_step)]
            emulated.wgrad(plain, x, rng_step, grads[1])
            for name, got, want in zip("yd", found, wanted, strict=True):
                error = (got.double() - want.double()).norm() / want.double().norm()
                assert error < 2.0**-8, (name, float(error))
            assert torch.allclose(both.bias.float(), dy.float().sum(0), rtol=2**-8, atol=1e-6)  # type: ignore[union-attr]
        error = (grads[0] - grads[1]).norm() / grads[1].norm()
        assert error < 2.0**-8, float(error)
        native.weight_cache.clear()
        emulated.weight_cache.clear()
        for history in histories:
            history.update()
    for one, other in zip(histories[: len(histories) // 2], histories[len(histories) // 2 :], strict=True):
        assert torch.equal(one.window, other.window)


@pytest.mark.parametrize("fast", [False, True], ids=["full", "fast"])
@pytest.mark.parametrize("tile", ["tensor", "row"])
@pytest.mark.parametrize("biased", [False, True])
def test_older_operator_of_torch_has_the_same_bits(tile: str, biased: bool, fast: bool) -> None:
    """Ours, ``torch._scaled_mm``, beside the operator of ``torch.nn.functional.scaled_mm``."""
    a, b = operand(224, K, tile, "e4m3", 0), operand(256, K, tile, "e4m3", 1)
    bias = torch.randn(256, device="cuda").bfloat16() if biased else None
    (x, x_scale), (w, w_scale) = a.rowwise(), b.rowwise()
    assert x_scale is not None
    assert w_scale is not None
    scaling = ["tensor", "row"].index(tile)  # of torch.nn.functional.ScalingType
    scales = [x_scale], [scaling], [], [w_scale.t()], [scaling], []
    want = torch._scaled_mm_v2(x, w.t(), *scales, bias, torch.bfloat16, [], fast)
    assert torch.equal(multiply(a, b, out_dtype=torch.bfloat16, fast_accumulation=fast, bias=bias), want)
