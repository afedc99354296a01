"""Products of captured operands: a GPU's bf16 outputs beside those of the reference accumulator on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gemm.fp8_accumulator import fp8_product
from megatron_lowprec.kernels.gemm.reference import gemm as reference_gemm
from megatron_lowprec.lab.accumulator import FAST, FULL, HOPPER_CAPABILITY
from megatron_lowprec.lab.captured.operand_error import matrix_of, prepared, product, rows_of, with_captured
from megatron_lowprec.lab.experiment import Lab, Result, Table
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.capture_file import Capture
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, LinearRecipe
from megatron_lowprec.text_tables import Column, Row

SIZE = 256  # rows and columns of the compared part of a product
COLUMNS = (
    *(Column(key, key) for key in ("linear", "recipe")),
    Column("gemm", "GEMM"),
    Column("length", "length", "d"),
    Column("accumulation", "accumulation"),
    Column("equal", "equal in bf16", ".5f"),
    Column("fp32_sums", "equal, fp32 sums\nin its place", ".5f"),
    Column("difference", "largest relative\ndifference", ".2e"),
)


def run(lab: Lab, arguments: Sequence[str], recipes: Sequence[str], draws: int) -> Result:
    """Share of equal outputs by layer, recipe and GEMM; ``draws`` has no effect, since these casts have none.

    Raises:
        UserError: no file; one that is no capture; no Hopper GPU; no native FP8 GEMM.
    """
    if not arguments:
        raise UserError("captured-products was asked without a file; name files that --capture-step wrote")
    capability = torch.cuda.get_device_capability(lab.device) if lab.device.type == "cuda" else None
    if capability != HOPPER_CAPABILITY:
        remedy = "add --device cuda" if capability is None else "{}.{} is this GPU's; run it".format(*capability)
        raise UserError(
            f"captured-products compares with products of a Hopper GPU (compute capability 9.0), and was asked to run "
            f"on {lab.device}; {remedy} on a machine with one"
        )
    left_out: list[str] = []
    chosen: list[LinearRecipe] = [load_recipe(name) for name in recipes]
    rows = rows_of(arguments, chosen, lab.device, partial(equal_rows, left_out=left_out))
    if not rows:
        reasons = "".join(f"; {line}" for line in left_out)
        raise UserError(f"no recipe that was asked multiplies in FP8{reasons}; name fp8_current or another FP8 recipe")
    notes = (
        *dict.fromkeys(left_out),
        f"the first {SIZE} rows and columns of each product, rounded to bf16; operands have the same codes",
        "reference: kernels/gemm/fp8_accumulator.py on the CPU, promoted every 128 terms without fast accumulation",
        "fp32 sums: torch's fp32 product of the codes instead of the reference",
    )
    table = Table("products", "equal outputs", with_captured(COLUMNS, rows), rows)
    return Result("Products of captured operands", notes, [table], {})


def equal_rows(capture: Capture, recipe: LinearRecipe, left_out: list[str]) -> Iterator[Row]:
    """A row for each GEMM of two FP8 operands that the device's FP8 units run.

    Args:
        left_out: gets a line for each GEMM of two FP8 operands that is emulated. Its product is no Hopper GPU's.
    """
    capture = replace(capture, dy=capture.dy.to(capture.x.dtype))
    wide = prepared(capture, recipe)
    native = replace(wide, x=capture.x, w=capture.w, dy=capture.dy)
    gemms = native.linear_gemms()
    gemms.backends.resolve(native.w)
    for name, gemm in recipe.gemms.items():
        specs = [getattr(gemm, tensor) for tensor in GEMM_OPERANDS[name]]
        if not all(
            spec is not None and FORMATS[spec.format].bits == 8 and spec.scale_format == "fp32" for spec in specs
        ):
            continue
        if gemms.backends.resolved.gemms[name].name != "hopper_fp8":
            left_out.append(f"{capture.linear_id.path}: {name} of {recipe.name} is emulated and left out")
            continue
        found = product(gemms, native, name, native.rng_step)[:SIZE, :SIZE].float().cpu()
        expected = reference_outputs(wide, name, native.x.dtype)
        plain = reference_outputs(wide, name, native.x.dtype, fp32_sums=True)
        difference = (found - expected).abs() / expected.abs().clamp(min=torch.finfo(torch.float32).tiny)
        yield {
            "linear": capture.linear_id.path,
            "recipe": recipe.name,
            "gemm": name,
            "length": matrix_of(capture, name, GEMM_OPERANDS[name][0]).shape[1],
            "accumulation": "fast" if gemm.fast_accumulation else "promoted every 128",
            "equal": float((found == expected).double().mean()),
            "fp32_sums": float((found == plain).double().mean()),
            "difference": float(difference.max()),
        }


def reference_outputs(capture: Capture, name: str, dtype: torch.dtype, fp32_sums: bool = False) -> torch.Tensor:
    """fp32 [SIZE, SIZE] on the CPU: the beginning of a product, rounded to ``dtype``.

    Args:
        capture: in fp32, as ``prepared`` returns it.
        fp32_sums: torch's fp32 sums instead of the accumulator's.
    """
    gemms, gemm = capture.linear_gemms(), capture.recipe.gemms[name]
    accumulator = FAST if gemm.fast_accumulation else FULL
    parts = []
    for tensor in GEMM_OPERANDS[name]:
        matrix, rowwise = matrix_of(capture, name, tensor), SIDES[tensor][0] == name
        source = matrix if rowwise else matrix.t()
        request = CastRequest(rowwise, not rowwise, update_amax=False, codes=True)
        quantized, _ = gemms.backends.resolved.gemms[name].quantize(tensor, source, capture.rng_step, request)
        parts.append(_beginning(quantized, rowwise))
    (a, a_scale, a_block, a_format), (b, b_scale, b_block, b_format) = parts
    found = reference_gemm(
        a,
        b,
        a_scale=a_scale,
        b_scale=b_scale,
        a_block=a_block,
        b_block=b_block,
        out_dtype=dtype,
        product=None
        if fp32_sums
        else lambda x, y: fp8_product(x, y, FORMATS[a_format], FORMATS[b_format], accumulator),
    )
    return found.float()


def _beginning(quantized: QuantizedTensor, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int], str]:
    """(values of the first SIZE rows, their decode scales, block, format) on the CPU."""
    data, scale = quantized.rowwise() if rowwise else quantized.columnwise()
    spec = quantized.spec
    assert spec is not None
    assert scale is not None
    block = block_sizes(spec, data)
    rows = -(-SIZE // block[0]) if scale.shape[0] > 1 else 1
    return data[:SIZE].float().cpu(), scale[:rows].cpu(), (min(block[0], SIZE), block[1]), spec.format
