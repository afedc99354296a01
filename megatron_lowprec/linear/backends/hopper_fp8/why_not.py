"""GEMMs that torch's FP8 products run on Ada, Hopper and Blackwell: pure functions, no torch."""

from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, LinearRecipe, QuantSpec

_BLOCK = 128
_CONTRACTED = {"fprop": "input", "dgrad": "output", "wgrad": "tokens"}

# first compute capability with torch's GEMMs of these granularities; 1x128 exists on Hopper only
_SINCE: dict[frozenset[str], int] = {
    frozenset({"tensor"}): 89,
    frozenset({"row"}): 90,
    frozenset({"row", "tensor"}): 90,
    frozenset({"1x128"}): 90,
    frozenset({"1x128", "128x128"}): 90,
}

# Ada, Hopper and Blackwell; what runs on the last runs on later ones too.
WITH_FP8 = ("sm89", "sm90", "sm100")

# Weights of up to this many entries, [2048, 2048] or [4096, 1024], take longer in FP8 than in bf16: forward and
# backward with 8192 tokens, called from Python, on an H200 (docs/results/native-fp8.md#linear-layers). The next larger
# one measured, [6144, 2048], is faster.
_SLOWER_UP_TO = {"sm90": 2048 * 2048}


def slower_than_bf16(recipe: LinearRecipe, target: Target) -> bool:
    """Whether a bf16 layer of these sizes was measured to be slower in FP8; False if a GEMM runs on another backend."""
    reasons = [why_not(name, gemm, target) for name, gemm in recipe.gemms.items() if gemm.quantized]
    small = target.in_features * target.out_features <= _SLOWER_UP_TO.get(target.arch, 0)
    return small and bool(reasons) and not any(reasons)


def operands_of(name: str, gemm: GemmSpec) -> list[QuantSpec]:
    """The quantized operands of a GEMM."""
    return [quant for operand in GEMM_OPERANDS[name] if (quant := getattr(gemm, operand)) is not None]


def has_fp32_scales(gemm: GemmSpec) -> bool:
    """Whether the scales of all operands are fp32 numbers, as these units take them."""
    operands = (gemm.input, gemm.weight, gemm.grad_output)
    return all(quant is None or quant.scale_format == "fp32" for quant in operands)


def why_not(name: str, gemm: GemmSpec, target: Target) -> str | None:
    """Reason why the FP8 units do not run a GEMM of a layer; None if they do.

    Args:
        name: fprop, dgrad or wgrad.
    """
    arch = target.arch
    if not gemm.quantized:
        return "not quantized"
    operands = operands_of(name, gemm)
    if len(operands) < 2:
        return "an operand stays in the compute dtype"
    formats = {quant.format for quant in operands}
    if not formats <= {"e4m3", "e5m2"} or formats == {"e5m2"}:
        return f"no GEMM of {' and '.join(sorted(formats))} on {arch}"
    if any(quant.scale_format == "e8m0" for quant in operands):
        return f"no MX GEMM on {arch}"
    if any(quant.scale_format != "fp32" or quant.source != "original" for quant in operands):
        return "FP8 casts have fp32 scales, from the original tensor"
    if gemm.hadamard is not None or any((q.rounding, q.headroom) != ("nearest_even", 1.0) for q in operands):
        return "FP8 casts have no transform, no other rounding and no headroom"
    granularities = frozenset(quant.granularity for quant in operands)
    since = _SINCE.get(granularities)
    number = int(arch[2:]) if arch.startswith("sm") else 0
    if since is None or granularities == {"128x128"}:
        return f"no FP8 GEMM of granularity {' and '.join(sorted(granularities))}"
    if number < since or ("1x128" in granularities and number != since):
        return f"no FP8 GEMM of granularity {' and '.join(sorted(granularities))} on {arch}"
    if "1x128" in granularities and formats != {"e4m3"}:
        return "FP8 GEMMs of granularity 1x128 take only E4M3"
    if (reason := target.why_not_native("FP8 GEMMs")) is not None:
        return reason
    contracted = {"input": target.in_features, "output": target.out_features, "tokens": 0}[_CONTRACTED[name]]
    if "1x128" in granularities and contracted % _BLOCK:
        return f"the contracted size {contracted} is no multiple of {_BLOCK}"
    return None
