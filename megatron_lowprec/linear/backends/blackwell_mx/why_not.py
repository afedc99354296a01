"""GEMMs that Blackwell's block-scaled tensor cores run, and by which product: pure functions, no torch."""

from typing import Literal

from megatron_lowprec.linear.backends.hopper_fp8.why_not import has_fp32_scales, operands_of
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.schema import GemmSpec, QuantSpec

WITH_BLOCK_SCALES = ("sm100", "sm103", "sm120")
"""GPUs for which the kernel's instructions are tested. None of them has run it for this project."""

Product = Literal["scaled_mm", "dot_scaled"]

WITH_SCALED_MM = ("sm100", "sm103")
"""GPUs on which torch has scaled products of blocks."""

_FP8 = frozenset({"e4m3", "e5m2"})
# (elements, format of scales, entries along the contracted dimension that share one)
_KINDS = {
    **{(fmt, "e8m0", 32): "MXFP8" for fmt in _FP8},
    ("e2m1", "e8m0", 32): "MXFP4",
    **{("e2m1", scale, 16): "NVFP4" for scale in ("e4m3", "ue4m3")},
}


def has_block_scales(gemm: GemmSpec) -> bool:
    """Whether an operand has scales of blocks that are no fp32 numbers, as these units take them."""
    return not has_fp32_scales(gemm)


def why_not(name: str, gemm: GemmSpec, target: Target) -> str | None:
    """Reason why the block-scaled units do not run a GEMM of a layer; None if they do.

    Args:
        name: fprop, dgrad or wgrad.
    """
    if not gemm.quantized:
        return "not quantized"
    operands = operands_of(name, gemm)
    if len(operands) < 2:
        return "an operand stays in the compute dtype"
    if (reason := next(filter(None, map(_why_not_operand, operands)), None)) is not None:
        return reason
    kinds = sorted({_kind(quant) for quant in operands})
    if len(kinds) > 1:
        return f"no product of {' and '.join(kinds)}"
    if target.arch not in WITH_BLOCK_SCALES:
        return f"no {kinds[0]} GEMM on {target.arch}"
    return target.why_not_native("block-scaled GEMMs")


def product_of(name: str, gemm: GemmSpec, arch: str) -> Product:
    """The product that runs a GEMM without a reason against it.

    torch's scaled product has MXFP8 of E4M3, without a factor for headroom, and NVFP4, on compute capability 10.
    """
    operands = operands_of(name, gemm)
    plain = all(quant.format == "e4m3" and quant.headroom == 1.0 for quant in operands)
    nvfp4 = all(_kind(quant) == "NVFP4" for quant in operands)
    return "scaled_mm" if arch in WITH_SCALED_MM and (plain or nvfp4) else "dot_scaled"


def _kind(quant: QuantSpec) -> str:
    assert quant.block is not None
    return _KINDS[quant.format, quant.scale_format, quant.block[1]]


def _why_not_operand(quant: QuantSpec) -> str | None:
    if quant.block is None or quant.scale_format == "fp32":
        return "block-scaled units take E8M0 scales of 32 entries or E4M3 scales of 16, not fp32 scales"
    if quant.outer_block is not None:
        return "one scale above the blocks' is that of the tensor, not of outer blocks"
    if (quant.format, quant.scale_format, quant.block[1]) not in _KINDS:
        return (
            f"no product of {quant.format.upper()} with {quant.scale_format.upper()} scales of {quant.block[1]} entries"
        )
    return None
