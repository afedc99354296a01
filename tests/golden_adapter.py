"""Serves golden cases (outputs of peers' own code) from the project's own functions, with no numerics of its own.

``adapt(case, name, x, inputs, meta)`` answers a case by the pattern of its name with a dict of results keyed like the
case's, or with None where the project has no such quantizer. The cases lie in ``tests/golden/``;
``tests/test_golden.py`` compares.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.amax_history.reference import always_roll_history_
from megatron_lowprec.kernels.gemm.fp8_accumulator import fp8_product
from megatron_lowprec.kernels.gemm.reference import gemm
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.reference import (
    decode,
    e8m0_decode_scale,
    e8m0_scale,
    encode,
    quantize_operand,
    round_to_format,
)
from megatron_lowprec.kernels.scaled_adam.reference import encode_scale as adam_encode_scale
from megatron_lowprec.optimizer.adamw import DTYPES
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.quantizer import (
    current_encode_scale,
    delayed_encode_scale,
    kernel_arguments,
    quantize,
)
from megatron_lowprec.recipe.registry import FP8_1X128, FP8_128X128, MXFP4, MXFP4_SR, MXFP8
from megatron_lowprec.recipe.schema import HistorySpec, QuantSpec
from tests.golden_fp4 import KINDS as FP4_KINDS
from tests.golden_optim_adapter import OPTIM_KINDS
from tools.shard_balance import greedy_partition

Inputs = Mapping[str, torch.Tensor]
Results = dict[str, torch.Tensor]

ELEMENT = {"fp4_e2m1": "e2m1", "fp6_e2m3": "e2m3", "fp6_e3m2": "e3m2", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
MX_RULE = {"floor": "floor", "rceil": "round_up", "ceil": "ceil", "even": "even"}


def _mx(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    _, peer, mode, element = case.split("_", 3)
    # microxcaling's modes name the rounding; its scales follow the floor rule
    rule, rounding = (
        (MX_RULE[mode], "nearest_even")
        if peer == "torchao"
        else ("floor", {"even": "nearest_even", "nearest": "half_away"}[mode])
    )
    q = quantize(x, replace(MXFP8, format=ELEMENT[element], scale_rule=rule, rounding=rounding))
    return {"codes": q.packed_codes if peer == "torchao" and q.format.bits == 4 else q.codes, "scale_e8m0": q.scale}


def _mxfp4_alg2(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    q = quantize(x, MXFP4_SR, random=inputs["noise"].reshape(x.shape))
    return {"dequant": q.dequantize(), "scale_e8m0": q.scale}


def _rht(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    return {"y": hadamard_transform(inputs["x"], inputs["sign"].float())}


def _linear_backward(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    """dgrad and wgrad of the published modes: 1 plain, 2 RHT, 3 RHT + Algorithm 2, 4 Algorithm 2."""
    mode = int(case[-1])
    # the published nearest rounding is microxcaling's default
    spec = MXFP4_SR if mode in (3, 4) else replace(MXFP4, rounding="half_away")
    shape_in = inputs["x"].shape
    x_ti, dy_to, w = inputs["x"].flatten(0, 1), inputs["grad_output"].flatten(0, 1), inputs["w"]

    def product(a: torch.Tensor, b: torch.Tensor, which: int) -> torch.Tensor:
        sides = []
        for side, matrix in enumerate((a, b)):
            noise = inputs.get(f"noise{2 * which + side}")
            draws = None if noise is None else _noise(noise, matrix, transposed=side == 1)
            signs = inputs[f"sign{which}"].float() if f"sign{which}" in inputs else None
            arguments = kernel_arguments(matrix, spec, draws)
            elements, _ = quantize_operand(matrix, **arguments, signs=signs, dequantize=True)
            sides.append(elements)
        return gemm(*sides, alpha=spec.headroom**-2, out_dtype=torch.float32)

    dgrad = product(dy_to, w.t(), 0)
    wgrad = product(dy_to.t(), x_ti.t(), 1)
    return {"grad_input": dgrad.view(*shape_in[:-1], -1), "grad_weight": wgrad}


def _noise(noise: torch.Tensor, matrix: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Stored draws in the operand's [R, K] layout; second operands were drawn with the contracted dimension first."""
    rows, columns = matrix.shape
    return noise.reshape(columns, rows).t() if transposed else noise.reshape(rows, columns)


def _fp8_block_te(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    _, _, tile, *element, scales = case.split("_")
    spec = QuantSpec("_".join(element)[4:], granularity=tile, scale_rule="amax_pow2" if scales == "pow2" else "amax")
    q, q_t = quantize(x, spec), quantize(x.t(), spec)
    return {"codes": q.codes, "scale_inv": q.scale, "codes_t": q_t.codes, "scale_inv_t": q_t.scale}


def _fp8_block_deepgemm(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    rule = "amax_pow2" if case.endswith("ue8m0") else "amax"
    row = replace(FP8_1X128, scale_rule=rule, amax_floor=1e-4)
    results = {}
    for kind, spec in (
        ("token", row),
        ("block", replace(row, granularity="128x128")),
        ("token32", replace(row, granularity="1x32")),
    ):
        q = quantize(x, spec)
        results |= {f"{kind}.codes": q.codes, f"{kind}.sf": q.scale}
    q = quantize(x, row, axis=0)
    return results | {"channel.codes": q.codes, "channel.sf": q.scale}


def _fp8_block_torchao(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    row = replace(FP8_1X128, amax_floor=1e-12)
    operands = {"lhs": quantize(x, row), "rhs": quantize(x, row, axis=0)}
    operands["weight"] = quantize(x, replace(FP8_128X128, amax_floor=1e-12))
    return {f"{k}.codes": q.codes for k, q in operands.items()} | {
        f"{k}.scale_inv": q.scale for k, q in operands.items()
    }


def _fp8_torchao(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    results = {}
    for suffix, rule in (("", "amax"), (".pow2", "amax_pow2")):
        for kind, tile, source in (("tensorwise", "tensor", x), ("rowwise", "row", x), ("colwise", "row", x.t())):
            spec = QuantSpec(ELEMENT[case[len("fp8_torchao_") :]], granularity=tile, scale_rule=rule, amax_floor=1e-12)
            codes = quantize(source, spec).codes
            results[f"{kind}{suffix}.codes"] = codes.t() if kind == "colwise" else codes
            results[f"{kind}{suffix}.scale"] = current_encode_scale(source, spec).flatten()
    return results


def _fp8_te_current(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    results = {}
    for prefix, rule in (("", "amax"), ("pow2.", "amax_pow2")):
        q = quantize(x, QuantSpec(ELEMENT[case[len("fp8_te_current_") :]], granularity="tensor", scale_rule=rule))
        results |= {f"{prefix}codes": q.codes, f"{prefix}scale_inv": q.scale.flatten()}
    return results


def _fp8_te_delayed(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    found = re.fullmatch(r"\w+?_len(\d+)_(max|most_recent)_margin(\d+)_max(\d+)", name)
    assert found, name
    length, rule, margin, maximum = int(found[1]), found[2], int(found[3]), float(found[4])
    element = next(row.name for row in FORMATS.values() if row.max == maximum)
    spec = QuantSpec(element, granularity="tensor", scaling="delayed", history=length, history_rule=rule, margin=margin)  # type: ignore[arg-type]
    amax = inputs["amax"]
    history = AmaxHistory(HistorySpec(length, spec.history_rule))
    slots = [history.add_tensor() for _ in range(amax.shape[1])]
    used, after = [], []
    for step in amax:
        used.append([delayed_encode_scale(history.in_effect[slot], spec) for slot in slots])
        for slot, value in zip(slots, step, strict=True):
            history.update_amax(slot, value)
        # the update in Python also shifts zeros into the window, unlike the fused one
        always_roll_history_(history.newest, history.window, history.in_effect, history.rule == "max")
        after.append([delayed_encode_scale(history.in_effect[slot], spec) for slot in slots])
    return {"scale_used": torch.tensor(used), "scale_after": torch.tensor(after)}


def _mxfp8_te_2d(case: str, name: str, x: torch.Tensor, inputs: Inputs) -> Results:
    if not name:
        return {"amax.e8m0": e8m0_scale(inputs["amax"], FORMATS["e4m3"], "round_up")}
    x = x[: len(x) // 32 * 32, : x.shape[1] // 32 * 32]
    q = quantize(x, replace(MXFP8, granularity="32x32"))
    rows, columns = x.shape
    return {
        "codes": q.codes,
        "scale_rowwise": q.scale.repeat_interleave(32, 0)[:rows],
        "scale_columnwise": q.scale.repeat_interleave(32, 1)[:, :columns],
    }


def _element_formats(case: str, name: str, x: torch.Tensor | None, inputs: Inputs) -> Results:
    if x is None:
        values = {e: decode(torch.arange(1 << FORMATS[f].bits), FORMATS[f]) for e, f in ELEMENT.items()}
        return values | {"e8m0": e8m0_decode_scale(torch.arange(256))}
    rounded = {e: round_to_format(x.float(), FORMATS[f], "nearest_even") for e, f in ELEMENT.items()}
    return {e: encode(values, FORMATS[ELEMENT[e]]) for e, values in rounded.items()}


def _scale_msamp(case: str, name: str, x: torch.Tensor | None, inputs: Inputs) -> Results:
    amax = inputs["amax"]
    usable = (amax > 0) & amax.isfinite()  # the peer keeps the scale before, where we take 1 for a tensor of zeros
    found = {}
    for kind in ("e4m3", "e5m2", "fp16"):
        for margin in (0, 1):
            scale = adam_encode_scale(amax, DTYPES[kind], margin)
            found[f"{kind}.margin{margin}.scale"] = torch.where(usable, scale, inputs["old_scale"])
    return found


def _greedy_partition(case: str, name: str, x: torch.Tensor | None, inputs: Inputs) -> Results:
    """The groups are n2, n4 and n8, for as many ranks."""
    return {"rank": torch.tensor(greedy_partition(inputs["sizes"].tolist(), int(name[1:])))}


def _wgmma(case: str, name: str, x: torch.Tensor | None, inputs: Inputs) -> Results:
    """The groups are named by the formats of x and w."""
    formats = [FORMATS[each] for each in name.split("_")]
    x_MK, w_NK = (decode(inputs[key], fmt) for key, fmt in zip("xw", formats))
    return {"sum": fp8_product(x_MK, w_NK, *formats)}


_KINDS: dict[str, Callable[..., Results]] = {
    r"mx_torchao_(floor|rceil|ceil|even)_fp\d_e\dm\d": _mx,
    r"mx_microxcaling_(even|nearest)_fp\d_e\dm\d": _mx,
    r"mxfp4_alg2_amazon_fp32": _mxfp4_alg2,
    r"rht_amazon": _rht,
    r"linear_backward_amazon_mode[1-4]": _linear_backward,
    r"fp8block_te_(1x128|128x128)_fp8_e\dm\d_\w+": _fp8_block_te,
    r"fp8block_deepgemm_\w+": _fp8_block_deepgemm,
    r"fp8block_torchao": _fp8_block_torchao,
    r"fp8_torchao_fp8_e\dm\d": _fp8_torchao,
    r"fp8_te_current_fp8_e\dm\d": _fp8_te_current,
    r"fp8_te_delayed": _fp8_te_delayed,
    r"mxfp8_te_2d|mxfp8_2d_te_edges": _mxfp8_te_2d,
    r"scale_msamp": _scale_msamp,
    r"greedy_partition_msamp": _greedy_partition,
    r"wgmma_mmasim": _wgmma,
    r"element_formats": _element_formats,
    **FP4_KINDS,
    **OPTIM_KINDS,
}


def adapt(case: str, name: str, x: torch.Tensor | None, inputs: Inputs, meta: Mapping[str, str]) -> Results | None:
    """Results of one group of a golden case, or None where the project has no such quantizer."""
    for pattern, answer in _KINDS.items():
        if re.fullmatch(pattern, case):
            return answer(case, name, x, inputs)
    return None
