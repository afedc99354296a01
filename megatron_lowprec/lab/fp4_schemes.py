"""FP4 block formats of published recipes, as quantizations of both operands of a product."""

from dataclasses import replace

from megatron_lowprec.lab.dot_products import Scheme
from megatron_lowprec.recipe import registry
from megatron_lowprec.recipe.quant_spec import QuantSpec, ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.schema import HadamardSpec

_UE5M3 = replace(registry.NVFP4, scale=ScaleSpec("1x16", "ue5m3", "product", zero_code="one"))
_UFP4 = QuantSpec("e1m2", "1x16")
_TETRAJET = QuantSpec("e2m1", "1x32", "e8m0", "round_up")
_TETRAJET2 = replace(registry.NVFP4, tensor_scale=TensorScaleSpec(448.0 * 6.0, granularity="1x128"))


def _drawn(spec: QuantSpec, random_bits: int = 16) -> QuantSpec:
    return replace(spec, rounding="stochastic", random_bits=random_bits)


NVFP4, NVFP4_SR = Scheme(registry.NVFP4), Scheme(_drawn(registry.NVFP4))
FP4_SCHEMES: dict[str, Scheme] = {
    "NVFP4": NVFP4,
    "NVFP4, 16x16": Scheme(registry.NVFP4_16X16),
    "four over six": Scheme(registry.NVFP4_4OVER6),
    "Quartet II, fprop": Scheme(registry.QUARTET2),
    "UE5M3": Scheme(_UE5M3),
    "UFP4": Scheme(_UFP4, hadamard=HadamardSpec(16, signs="nvfp4")),
    "TetraJet": Scheme(_TETRAJET),
    "TetraJet-v2's scales": Scheme(_TETRAJET2),
    "NVFP4, SR": NVFP4_SR,
    "four over six, SR": Scheme(_drawn(registry.NVFP4_4OVER6)),
    "MS-EDEN": Scheme(registry.QUARTET2_EDEN, hadamard=HadamardSpec(128)),
    "UE5M3, SR": Scheme(_drawn(_UE5M3)),
    "UFP4, SR": Scheme(_drawn(_UFP4), hadamard=HadamardSpec(16, signs="nvfp4")),
    "TetraJet, SR": Scheme(_drawn(_TETRAJET)),
    "TetraJet-v2's scales, SR": Scheme(_drawn(_TETRAJET2), hadamard=HadamardSpec(128)),
}
"""arXiv 2509.25149, 2512.02010, 2601.22813, 2509.17791, 2606.20381, 2502.20853, 2510.27527; nearest ones first."""
