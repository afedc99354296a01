"""Which recipes can send tokens to their experts as codes, and the bytes of a token: pure functions of the recipe.

DeepSeek-V3 (arXiv 2412.19437, section 3.3.3) quantizes activations to FP8 before they are dispatched to the experts'
up-projections, and again along the tokens for the backward pass.
"""

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import LinearRecipe, QuantSpec


def why_not_dispatched(recipe: LinearRecipe, tensor: str = "input") -> str | None:
    """Reason why "input" or "grad_output" cannot travel as the codes of its first GEMM; None if it can.

    The first GEMM is fprop or dgrad, whose scales run along features. A rank must be able to quantize each of its
    tokens only, before it is known how many others an expert gets. The other GEMM, wgrad, takes dequantized codes.
    """
    name = "fprop" if tensor == "input" else "dgrad"
    spec: QuantSpec | None = getattr(recipe.gemms[name], tensor)
    if spec is None or recipe.gemms[name].hadamard is not None:
        return f"{name} takes {tensor} {'in the compute dtype' if spec is None else 'after a Hadamard transform'}"
    if (bits := FORMATS[spec.format].bits) > 8:
        return f"{tensor} has codes of {bits} bits in {spec.format}, and a code travels as one byte"
    if spec.scaling == "delayed":
        return f"{tensor} has a delayed scale per expert, whose history only the ranks of that expert have"
    if spec.has_tensor_amax:
        return f"the current scale of {tensor} needs the amax of all tokens of an expert before the cast"
    if spec.tensor_scale is not None:
        return f"{tensor} has scales of outer blocks, and only those of blocks travel with a token"
    if spec.block is not None and spec.block[0] != 1:
        return f"{tensor} has blocks of {spec.granularity}, which span tokens"
    if spec.random:
        return f"{tensor} is rounded stochastically, by draws for a token's row in its expert"
    other: QuantSpec | None = getattr(recipe.wgrad, tensor)
    if other is not None and other.source == "fprop":
        return f"wgrad quantizes the codes of {tensor} again in any case; its source must be original"
    if other is None:
        return f"wgrad takes {tensor} in the compute dtype, which would be rounded before"
    return None


def check_fp8_dispatch(recipe: Recipe) -> None:
    """Reject --moe-fp8-dispatch for a recipe whose tokens cannot travel as codes.

    Raises:
        UserError: with the reason.
    """
    if recipe.phases:
        raise UserError(
            f"--moe-fp8-dispatch sends the same codes for a whole run, and recipe {recipe.name} has phases: leave one "
            "of the two out"
        )
    reasons = [why_not_dispatched(linear) for linear in recipe.linear_recipes]
    if (reason := reasons[0]) is not None and None not in reasons:
        raise UserError(
            "--moe-fp8-dispatch sends tokens to their experts as the codes that fprop takes, quantized one by one; in "
            f"recipe {recipe.name} {reason}: use fp8_blockwise, fp8_rowwise or mxfp8, or leave the flag out"
        )


def code_bytes(spec: QuantSpec, features: int) -> int:
    """Bytes of a token's codes on the wire: two 4-bit codes a byte, else one."""
    return features // 2 if FORMATS[spec.format].bits == 4 else features


def scales_of_token(spec: QuantSpec, features: int) -> int:
    """Number of a token's scales, one per row or per block of a row."""
    return 1 if spec.block is None else -(-features // spec.block[1])


def dispatched_bytes(spec: QuantSpec, features: int) -> int:
    """Bytes of a token on the wire: its codes, and its scales as fp32, or as one byte if coded or powers of two."""
    in_fp32 = spec.scale_format == "fp32" and not spec.power_of_two_scale
    return code_bytes(spec, features) + scales_of_token(spec, features) * (4 if in_fp32 else 1)
