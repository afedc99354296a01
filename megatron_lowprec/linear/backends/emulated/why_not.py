"""What the emulated backend runs: every GEMM. Conditions of --emulate-accumulator. No torch."""

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.backends.hopper_fp8.why_not import operands_of
from megatron_lowprec.linear.backends.hopper_fp8.why_not import why_not as why_not_hopper_fp8
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GemmSpec


def why_not(name: str, gemm: GemmSpec, target: Target) -> None:
    """None: it runs every GEMM on any device, also an unquantized one."""


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
        reason = why_not_hopper_fp8(name, gemm, Target("sm90"))
        if reason is None and any(quant.block is not None for quant in operands_of(name, gemm)):
            reason = "operands of granularity 1x128 are promoted to fp32 every 128 terms"
        if reason is not None:
            raise UserError(
                f"--emulate-accumulator was asked, but Hopper has no fast accumulation for {name} of recipe "
                f"{recipe.name}: {reason}; leave it out, or set --recipe-override {name}.fast_accumulation=false"
            )
        if why_not_hopper_fp8(name, gemm, Target(arch)) is None:
            raise UserError(
                f"--emulate-accumulator was asked, but {name} may run on this GPU's own FP8 units; add --emulate, "
                "or leave it out"
            )
