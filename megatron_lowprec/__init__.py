"""Published low-precision training recipes for Megatron-core, the same numerics on a CPU, on a GPU and on a cluster.

Importing this package changes nothing: it patches nothing, reads no environment and loads no kernels.
"""

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.registry import get_recipe, recipes, register_recipe
from megatron_lowprec.recipe.schema import GemmSpec, HadamardSpec, KeepBf16, QuantSpec, Recipe

__version__ = "0.2.0"

__all__ = [
    "GemmSpec",
    "HadamardSpec",
    "KeepBf16",
    "LowPrecLinear",
    "QuantSpec",
    "QuantizedTensor",
    "RandomStream",
    "Recipe",
    "UserError",
    "convert",
    "get_recipe",
    "layer_spec",
    "low_precision",
    "quantize",
    "recipes",
    "register_recipe",
]

_LATE = {  # what needs torch or Megatron is imported when it is asked for: --list-recipes stays instant
    "LowPrecLinear": "megatron_lowprec.linear.lowprec_linear",
    "layer_spec": "megatron_lowprec.mcore.layer_spec",
    "low_precision": "megatron_lowprec.mcore.layers.gpt_spec",
    "convert": "megatron_lowprec.linear.convert",
    "QuantizedTensor": "megatron_lowprec.quantization.tensor",
    "RandomStream": "megatron_lowprec.quantization.random_stream",
    "quantize": "megatron_lowprec.quantization.quantizer",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATE[name]), name)
