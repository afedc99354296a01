"""Native support of a recipe's GEMMs on a device's FP8 units, and reasons for emulation: pure functions."""

from typing import Literal

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, LinearRecipe, QuantSpec

_MULTIPLE = 16
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


def slower_than_bf16(recipe: LinearRecipe, arch: str, in_features: int, out_features: int) -> bool:
    """Whether a bf16 layer of these sizes was measured to be slower in FP8; False if a GEMM is emulated.

    Args:
        arch: "cpu", or a GPU's compute capability as "sm90".
        in_features, out_features: of the layer on one rank.
    """
    quantized = {name for name, gemm in recipe.gemms.items() if gemm.quantized}
    native = quantized and native_gemms(recipe, arch, in_features, out_features) == quantized
    return bool(native) and in_features * out_features <= _SLOWER_UP_TO.get(arch, 0)


def execution(
    name: str, gemm: GemmSpec, arch: str, in_features: int = 0, out_features: int = 0
) -> Literal["native", "emulated"]:
    """Execution of one GEMM; arguments as in ``why_emulated``."""
    return "emulated" if why_emulated(name, gemm, arch, in_features, out_features) else "native"


def native_gemms(recipe: LinearRecipe, arch: str, in_features: int, out_features: int) -> frozenset[str]:
    """The quantized GEMMs of a bf16 layer that run natively."""
    return frozenset(
        name
        for name, gemm in recipe.gemms.items()
        if gemm.quantized and why_emulated(name, gemm, arch, in_features, out_features) is None
    )


def why_emulated_without_gpu(name: str, gemm: GemmSpec, in_features: int, out_features: int, dtype: str) -> str | None:
    """As ``why_emulated`` on "cpu", with the GPUs that would run the GEMM natively, else with Hopper's reason."""
    if not gemm.quantized:
        return None
    reasons = {arch: why_emulated(name, gemm, arch, in_features, out_features, dtype) for arch in WITH_FP8}
    native = [arch for arch, reason in reasons.items() if reason is None]
    if not native:
        return f"on GPUs as well: {reasons['sm90']}"
    later = " and later" if native[-1] == WITH_FP8[-1] else ""
    return f"no GPU here; native on {native[0]}{later}"


def fast_gemms(recipe: Recipe) -> list[str]:
    """The GEMMs that ask for fast accumulation where they are quantized, in any layer or phase."""
    return list(dict.fromkeys(name for name, _ in _fast_specs(recipe)))


def _fast_specs(recipe: Recipe) -> list[tuple[str, GemmSpec]]:
    found = [pair for linear in recipe.linear_recipes for pair in linear.gemms.items()]
    return list(dict.fromkeys((name, gemm) for name, gemm in found if gemm.quantized and gemm.fast_accumulation))


def check_accumulator(recipe: Recipe, arch: str) -> None:
    """Check that Hopper's FP8 accumulator can be emulated where a recipe asks for fast accumulation.

    Args:
        arch: "cpu" where all GEMMs are emulated, or a GPU's compute capability as "sm90".

    Raises:
        UserError: no GEMM asks for it; one does that Hopper's FP8 units do not run with it; or one runs natively.
    """
    specs = _fast_specs(recipe)
    if not specs:
        raise UserError(
            f"--emulate-accumulator was asked, but no GEMM of recipe {recipe.name} has fast_accumulation; leave it "
            "out, or set --recipe-override fprop.fast_accumulation=true under a recipe that quantizes fprop"
        )
    for name, gemm in specs:
        reason = why_emulated(name, gemm, "sm90")
        if reason is None and any(quant.block is not None for quant in _operands(name, gemm)):
            reason = "operands of granularity 1x128 are promoted to fp32 every 128 terms"
        if reason is not None:
            raise UserError(
                f"--emulate-accumulator was asked, but Hopper has no fast accumulation for {name} of recipe "
                f"{recipe.name}: {reason}; leave it out, or set --recipe-override {name}.fast_accumulation=false"
            )
        if why_emulated(name, gemm, arch) is None:
            raise UserError(
                f"--emulate-accumulator was asked, but {name} may run on this GPU's own FP8 units; add --emulate, "
                "or leave it out"
            )


def _operands(name: str, gemm: GemmSpec) -> list[QuantSpec]:
    """The quantized operands of a GEMM."""
    return [quant for operand in GEMM_OPERANDS[name] if (quant := getattr(gemm, operand)) is not None]


def why_emulated(
    name: str, gemm: GemmSpec, arch: str, in_features: int = 0, out_features: int = 0, dtype: str = "bfloat16"
) -> str | None:
    """Reason for emulating a GEMM of a layer in the compute dtype; None if it runs natively.

    Args:
        name: fprop, dgrad or wgrad.
        arch: "cpu", or a GPU's compute capability as "sm90".
        in_features, out_features: of the layer on one rank; 0 skips the size checks.
        dtype: of the layer's weight.
    """
    if not gemm.quantized:
        return None
    operands = _operands(name, gemm)
    if len(operands) < 2:
        return "one operand stays in the compute dtype"
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
    if dtype != "bfloat16":
        return f"FP8 GEMMs are for bf16 models, this one is {dtype}"
    for label, size in (("in_features", in_features), ("out_features", out_features)):
        if size % _MULTIPLE:
            return f"{label} {size} is no multiple of {_MULTIPLE}"
    contracted = {"input": in_features, "output": out_features, "tokens": 0}[_CONTRACTED[name]]
    if "1x128" in granularities and contracted % _BLOCK:
        return f"the contracted size {contracted} is no multiple of {_BLOCK}"
    return None
