"""Serves the golden cases of the FP4 family from the project's own functions, for ``golden_adapter.py``.

Each peer is a row or a few of ``QuantSpec``'s fields. A case's name gives the rule, the largest block scale and the
block; its draws are turned into those of ``quantize``, which rounds up where a fraction is at least 1 - u.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.reference import block_amax
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.quantizer import quantize, quantize_by_reference
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.registry import MXFP4
from megatron_lowprec.recipe.schema import GemmSpec, HadamardSpec, QuantSpec

Inputs = Mapping[str, torch.Tensor]
Results = dict[str, torch.Tensor]

NVFP4 = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0))
NVFP4_2D = replace(NVFP4, granularity="16x16")
RHT = HadamardSpec(block=16, signs="nvfp4", output="operand")
UE5M3 = replace(NVFP4, scale=ScaleSpec("1x16", "ue5m3", "product", zero_code="one"))


# ---- NVFP4 of TransformerEngine and torchao
def _nvfp4(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    """One or both of x, in blocks of 1x16 or 16x16, and x.T, behind the transform where the case has one."""
    spec = NVFP4_2D if "16x16" in case else NVFP4
    if "ragged" not in case:
        x = _whole_blocks(x, spec)
    results = {} if case == "nvfp4_te_1x16_rht" else _codes_and_scales(quantize(x, spec))
    if case.endswith("_rht"):
        x = x[: len(x) // 16 * 16]
        transformed = Transform(RHT).apply(x.t()).to(x.dtype)
        results |= {f"{key}_t": value for key, value in _codes_and_scales(quantize(transformed, NVFP4)).items()}
    elif case.startswith("nvfp4_te"):
        results |= {f"{key}_t": value for key, value in _codes_and_scales(quantize(x.t(), spec)).items()}
    return results | {"amax": block_amax(x, (x.shape[0], x.shape[1])).view(1)}


def _whole_blocks(x: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The peers cut surplus rows."""
    assert spec.block is not None
    return x[: len(x) // spec.block[0] * spec.block[0]]


def _codes_and_scales(q: QuantizedTensor) -> Results:
    assert q.spec is not None
    assert q.spec.block is not None
    # the peers repeat the scale of 16x16 on its rows
    return {"codes": q.packed_codes, "scale_e4m3": q.scale.repeat_interleave(q.spec.block[0], 0)[: q.shape[0]]}


def _nvfp4_torchao(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    results: Results = {}
    for kind, level in (("two", TensorScaleSpec(2688.0)), ("single", None)):
        q = quantize(x, replace(NVFP4, scale_rule="quotient", tensor_scale=level)).validate()
        results |= {f"{kind}.{key}": value for key, value in _codes_and_scales(q).items()}
        if q.rowwise_tensor_scale is not None:
            results[f"{kind}.tensor_scale"] = q.rowwise_tensor_scale.view(1)
    return results


def _nvfp4_linear(case: str, name: str, x: torch.Tensor | None, inputs: Inputs) -> Results:
    """A layer's own operands and products, these in fp32."""
    recipe = Recipe(
        "nvfp4_nearest",
        "",
        fprop=GemmSpec(input=NVFP4, weight=NVFP4_2D),
        dgrad=GemmSpec(grad_output=NVFP4, weight=NVFP4_2D),
        wgrad=GemmSpec(grad_output=NVFP4, input=NVFP4, hadamard=RHT),
    )
    backend = LinearGemms(recipe, LinearId(1, "linear"), 0, AmaxHistory).backends.built("emulated")
    assert isinstance(backend, EmulatedGemms)
    results: Results = {}
    operands: dict[str, tuple[QuantizedTensor, QuantizedTensor]] = {}
    for key, tensor in (("x", "input"), ("w", "weight"), ("dy", "grad_output")):
        matrix, by_row, by_column = inputs[key], *(CastRequest(rowwise, not rowwise) for rowwise in (True, False))
        operands[key] = tuple(backend.quantize(tensor, matrix, RngStep(0, 0), side)[0] for side in (by_row, by_column))  # type: ignore[assignment]
        for suffix, request in (("", by_row), ("_t", by_column)):
            q, _ = backend.quantize(tensor, matrix, RngStep(0, 0), request._replace(codes=True))
            data, scale = q.columnwise() if suffix else q.rowwise()
            made = QuantizedTensor(data.shape, data.dtype, q.spec, data, scale)
            results |= {f"{key}.{each}{suffix}": value for each, value in _codes_and_scales(made).items()}
    for product, gemm, a, b in (("y", "fprop", "x", "w"), ("dx", "dgrad", "dy", "w"), ("dw", "wgrad", "dy", "x")):
        sides = operands[a][gemm == "wgrad"], operands[b][gemm != "fprop"]
        results[product] = backend.gemm(gemm, *sides, torch.float32)
    return results


# ---- four over six
def _four_over_six_te(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    measure, bound, tile = case.removeprefix("nvfp4_4over6_te_").split("_")
    scale = ScaleSpec(tile, "e4m3", "base", four_over_six=measure)  # type: ignore[arg-type]
    spec = QuantSpec("e2m1", scale=scale, tensor_scale=TensorScaleSpec(6.0 * int(bound)))
    return _codes_and_scales(quantize(_whole_blocks(x, spec), spec))


MIT = re.compile(r"nvfp4_(?:4over6|sr)_mit_(mse|mae|abs_max|static_6|static_4)(?:_(plain|unbiased))?(?:_(1x16|16x16))?")


def _mit(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    """The fixed rules map a block's amax to 6 or to 4; unbiased ones map it to 16/17 of that, so nothing saturates."""
    found = MIT.fullmatch(case)
    assert found, case
    rule, rounding, tile = found.groups()
    fixed, largest = rule.startswith("static"), 4.0 if rule == "static_4" else 6.0
    largest *= 16 / 17 if rounding == "unbiased" else 1.0
    scale = ScaleSpec(tile or "1x16", "e4m3", "base", block_target=largest, zero_code="flush")
    spec = QuantSpec(
        "e2m1",
        scale=scale if fixed else replace(scale, four_over_six=rule),  # type: ignore[arg-type]
        tensor_scale=TensorScaleSpec(largest * (448 if fixed else 256)),
        rounding="stochastic" if rounding else "nearest_even",
    )
    noise = [inputs[key] for key in ("noise0", "noise1") if key in inputs]
    return _codes_and_scales(quantize(_whole_blocks(x, spec), spec, random=torch.stack(noise) if noise else None))


# ---- Quartet II
def _quartet2(case: str, name: str, x: torch.Tensor | None, inputs: Inputs) -> Results:
    kind, chooses = case.split("_")[1], case.endswith("_46")
    eden = kind in ("eden", "mseden")
    largest = 6 / (17 / 16 * 0.93 if eden else 17 / 16 if kind == "sr" else 1.0)
    spec = QuantSpec(
        "e2m1",
        scale=ScaleSpec(
            "1x16",
            "e4m3",
            "divided",
            "stochastic" if eden else "nearest_even",
            block_target=largest,
            four_over_six="mse" if chooses else None,
            zero_code="one",
        ),
        tensor_scale=TensorScaleSpec(largest * (255.99 if eden else 256 if chooses else 448)),
        rounding="stochastic" if kind == "sr" else "half_away",
        correction="eden" if eden else None,
    )
    x = inputs["x"] if x is None else x
    group = 32 if x.shape[1] % 128 else 128
    if "sign" in inputs:
        x, group = hadamard_transform(x, inputs["sign"].float()), inputs["sign"].numel()
    draws = None
    if "noise" in inputs:  # up where it is below the fraction; one a block for scales
        draws = (1.0 - inputs["noise"]).clamp(max=1.0 - 2.0**-24).repeat_interleave(16 if eden else 1, 1)
    made = _of_known_amax(x, spec, inputs["amax"], draws, group)
    return {"dequant": made.dequantize(), "next_amax": x.abs().amax().view(1)}


def _of_known_amax(
    x: torch.Tensor, spec: QuantSpec, amax: torch.Tensor, draws: torch.Tensor | None = None, group: int | None = None
) -> QuantizedTensor:
    data, scale, above = quantize_by_reference(x, spec, draws, tensor_amax=amax, group=group)
    return QuantizedTensor(x.shape, x.dtype, spec, data, scale, rowwise_tensor_scale=above)


# ---- others
def _ue5m3(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    spec = replace(UE5M3, granularity="16x16") if "16x16" in case else UE5M3
    if "held" in case:  # room for growth: the amax is an older one
        spec = replace(spec, tensor_scale=TensorScaleSpec(6 * 2048.0))
    draws = None
    if "noise" in inputs:
        spec, draws = replace(spec, rounding="stochastic"), (inputs["noise"].float() + 0.5) / 256
    q = _of_known_amax(x, spec, inputs["amax"], draws)
    return {"codes": q.packed_codes, "scale_ue5m3": q.scale, "dequant": q.dequantize(x.dtype)}


def _tetrajet(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    noise, axis = inputs.get("noise"), 0 if case.endswith("32x1") else -1
    x = x if axis else x[: len(x) // 32 * 32]
    rounding = "nearest_even" if noise is None else "stochastic"
    q = quantize(x, replace(MXFP4, scale_rule="round_up", rounding=rounding), axis=axis, random=noise)
    return {"codes": q.codes[:, ::2] | (q.codes[:, 1::2] << 4), "scale_e8m0": q.scale}


KINDS: dict[str, Callable[..., Results]] = {
    r"nvfp4_te_(1x16|16x16|1x16_rht)|nvfp4_ragged_te_\w+|nvfp4_train_torchao_\w+": _nvfp4,
    r"nvfp4_torchao": _nvfp4_torchao,
    r"nvfp4_linear_te": _nvfp4_linear,
    r"nvfp4_4over6_te_(mse|mae)_\d+_(1x16|16x16)": _four_over_six_te,
    MIT.pattern: _mit,
    r"nvfp4_(rtn|sr|eden|mseden)_quartet2(_46)?": _quartet2,
    r"fp4_ue5m3_graphcore_\w+": _ue5m3,
    r"mxfp4_tetrajet_(sr_)?(1x32|32x1)": _tetrajet,
}
"""Pattern of a case's name -> its answer."""
