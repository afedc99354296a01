"""FP4 block formats of published recipes, as quantizations of both operands of a product."""

from dataclasses import replace

from megatron_lowprec.lab.dot_products import Scheme
from megatron_lowprec.recipe.quant_spec import HadamardSpec, QuantSpec, ScaleSpec, TensorScaleSpec

_NVFP4 = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(448.0 * 6.0))
_FOUR_OVER_SIX = QuantSpec(
    "e2m1", scale=ScaleSpec("1x16", "e4m3", "base", four_over_six="mse"), tensor_scale=TensorScaleSpec(256.0 * 6.0)
)
_QUARTET2 = replace(_FOUR_OVER_SIX, scale=replace(_FOUR_OVER_SIX.scale, rule="divided", zero_code="one"))
_EDEN_TARGET = 6.0 / (17 / 16 * 0.93)
_EDEN = QuantSpec(
    "e2m1",
    scale=ScaleSpec("1x16", "e4m3", "divided", rounding="stochastic", block_target=_EDEN_TARGET, zero_code="one"),
    tensor_scale=TensorScaleSpec(255.99 * _EDEN_TARGET),
    correction="eden",
)
_UE5M3 = replace(_NVFP4, scale=ScaleSpec("1x16", "ue5m3", "product", zero_code="one"))
_UFP4 = QuantSpec("e1m2", "1x16")
_TETRAJET = QuantSpec("e2m1", "1x32", "e8m0", "round_up")
_TETRAJET2 = replace(_NVFP4, tensor_scale=TensorScaleSpec(448.0 * 6.0, granularity="1x128"))


def _drawn(spec: QuantSpec, random_bits: int = 16) -> QuantSpec:
    return replace(spec, rounding="stochastic", random_bits=random_bits)


NVFP4, NVFP4_SR = Scheme(_NVFP4), Scheme(_drawn(_NVFP4))
FP4_SCHEMES: dict[str, Scheme] = {
    "NVFP4": NVFP4,
    "NVFP4, 16x16": Scheme(replace(_NVFP4, scale=replace(_NVFP4.scale, granularity="16x16"))),
    "four over six": Scheme(_FOUR_OVER_SIX),
    "Quartet II, fprop": Scheme(_QUARTET2),
    "UE5M3": Scheme(_UE5M3),
    "UFP4": Scheme(_UFP4, hadamard=HadamardSpec(16, signs="nvfp4")),
    "TetraJet": Scheme(_TETRAJET),
    "TetraJet-v2's scales": Scheme(_TETRAJET2),
    "NVFP4, SR": NVFP4_SR,
    "four over six, SR": Scheme(_drawn(_FOUR_OVER_SIX)),
    "MS-EDEN": Scheme(_EDEN, hadamard=HadamardSpec(128)),
    "UE5M3, SR": Scheme(_drawn(_UE5M3)),
    "UFP4, SR": Scheme(_drawn(_UFP4), hadamard=HadamardSpec(16, signs="nvfp4")),
    "TetraJet, SR": Scheme(_drawn(_TETRAJET)),
    "TetraJet-v2's scales, SR": Scheme(_drawn(_TETRAJET2), hadamard=HadamardSpec(128)),
}
"""arXiv 2509.25149, 2512.02010, 2601.22813, 2509.17791, 2606.20381, 2502.20853, 2510.27527; nearest ones first."""
