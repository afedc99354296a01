"""This project's quantizers as an adapter: from the metadata of a case, on a GPU where there is one."""

from __future__ import annotations

import json

import torch

from megatron_lowprec.conformance.reference_vectors import operand_results, transformed
from megatron_lowprec.conformance.vectors import Tensors
from megatron_lowprec.formats import ELEMENT_FORMATS, FORMATS
from megatron_lowprec.kernels.quantize.reference import decode, e8m0_decode_scale, encode, round_to_format
from megatron_lowprec.quantization.quantizer import quantize, quantize_by_reference
from megatron_lowprec.recipe.quant_spec import QuantSpec, ScaleSpec, TensorScaleSpec
from megatron_lowprec.scaling import scale_rules


def adapt(case: str, name: str, x: torch.Tensor | None, given: Tensors, meta: dict[str, str]) -> Tensors | None:
    """Results of a group of ``reference_vectors``; None for other cases."""
    if "spec" in meta and x is not None:
        return _operand(x, given, meta)
    if not case.startswith("format_"):
        return None
    if case == "format_e8m0":
        return {"values": e8m0_decode_scale(torch.arange(256))} if x is None else _e8m0_scales(x)
    fmt = FORMATS[meta["format"]]
    if x is None:
        return {"values": decode(torch.arange(1 << fmt.bits), fmt)}
    x = x if fmt.signed else x.abs()
    ways = {"codes": "nearest_even", "half_away.codes": "half_away"}
    return {key: encode(round_to_format(x, fmt, rounding), fmt) for key, rounding in ways.items()}


def _e8m0_scales(amaxes: torch.Tensor) -> Tensors:
    """Scales of blocks of one entry."""
    specs = {
        (fmt, rule): QuantSpec(fmt, "1x1", "e8m0", rule) for fmt in ELEMENT_FORMATS for rule in scale_rules("e8m0")
    }
    return {
        f"{fmt}.{rule}.scale_e8m0": quantize(amaxes.view(-1, 1), spec).scale.flatten()
        for (fmt, rule), spec in specs.items()
    }


def _operand(x: torch.Tensor, given: Tensors, meta: dict[str, str]) -> Tensors:
    """A recipe's operand by the ``QuantSpec`` in the metadata, behind its Hadamard transform."""
    fields = json.loads(meta["spec"])
    above = fields.pop("tensor_scale")
    spec = QuantSpec(
        **fields | {"scale": ScaleSpec(**fields["scale"])}, tensor_scale=above and TensorScaleSpec(**above)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, given = x.to(device), {key: value.to(device) for key, value in given.items()}
    hadamard = json.loads(meta.get("hadamard", "{}"))
    if hadamard:
        x = transformed(x, given["sign"], hadamard["output"])
    group, noise = hadamard.get("block"), given.get("noise")
    if "amax" in given:
        made = quantize_by_reference(x, spec, noise, tensor_amax=given["amax"], group=group)
        return operand_results(spec, *made)
    quantized = quantize(x, spec, random=noise, group=group)
    return operand_results(spec, quantized.elements, quantized.scale, quantized.rowwise_tensor_scale)
