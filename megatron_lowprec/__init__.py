"""Published low-precision training recipes for Megatron-core, the same numerics on a CPU, on a GPU and on a cluster.

Importing this package changes nothing: it patches nothing, reads no environment and loads no kernels.
"""

from typing import TYPE_CHECKING

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.activation_spec import ActivationSpec
from megatron_lowprec.recipe.layer_match import Layer, Progress
from megatron_lowprec.recipe.parsing import RecipeLike, load_recipe
from megatron_lowprec.recipe.quant_spec import QuantSpec, ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.recipe import BF16, GradientSpec, KeepBf16, OptimizerSpec, Phase, Recipe, Rule
from megatron_lowprec.recipe.registry import get_recipe, recipes, register_recipe
from megatron_lowprec.recipe.schema import GemmSpec, HadamardSpec, HistorySpec

if TYPE_CHECKING:
    from megatron_lowprec.linear.convert import convert
    from megatron_lowprec.linear.lowprec_linear import LowPrecLinear
    from megatron_lowprec.mcore.layer_spec import layer_spec
    from megatron_lowprec.mcore.layers.gpt_spec import low_precision
    from megatron_lowprec.mcore.runtime import bind_recipe
    from megatron_lowprec.quantization.quantizer import quantize
    from megatron_lowprec.quantization.random_stream import RandomStream
    from megatron_lowprec.quantization.tensor import QuantizedTensor

__version__ = "0.2.0"

__all__ = [
    "BF16",
    "ActivationSpec",
    "GemmSpec",
    "GradientSpec",
    "HadamardSpec",
    "HistorySpec",
    "KeepBf16",
    "Layer",
    "LowPrecLinear",
    "OptimizerSpec",
    "Phase",
    "Progress",
    "QuantSpec",
    "QuantizedTensor",
    "RandomStream",
    "Recipe",
    "RecipeLike",
    "Rule",
    "ScaleSpec",
    "TensorScaleSpec",
    "UserError",
    "bind_recipe",
    "convert",
    "get_recipe",
    "layer_spec",
    "load_recipe",
    "low_precision",
    "quantize",
    "recipes",
    "register_recipe",
]

_LATE = {  # what needs torch or Megatron is imported when it is asked for: --list-recipes stays instant
    "LowPrecLinear": "megatron_lowprec.linear.lowprec_linear",
    "QuantizedTensor": "megatron_lowprec.quantization.tensor",
    "RandomStream": "megatron_lowprec.quantization.random_stream",
    "bind_recipe": "megatron_lowprec.mcore.runtime",
    "convert": "megatron_lowprec.linear.convert",
    "layer_spec": "megatron_lowprec.mcore.layer_spec",
    "low_precision": "megatron_lowprec.mcore.layers.gpt_spec",
    "quantize": "megatron_lowprec.quantization.quantizer",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker would take any name for one of this module's

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_LATE[name]), name)
