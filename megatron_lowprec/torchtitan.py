"""Recipes for models of torchtitan: a converter of model configurations, and an override for its command line.

Needs torchtitan. Importing this module registers the override and changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import override
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.logging import logger

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.convert import plan
from megatron_lowprec.linear.layer_histories import LayerGroup
from megatron_lowprec.linear.lowprec_linear import LowPrecLinear
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.recipe import Recipe


class LowPrecTitanLinear(LowPrecLinear, Linear):
    """torchtitan's ``Linear`` whose three GEMMs follow a recipe; LoRA of torchtitan wraps it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Sizes of ``Linear``, and the arguments of ``LowPrecLayer.bind``."""

        _binding: tuple[Recipe, Layer, int, LayerGroup]

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.bind(*config._binding)


class LowPrecConverter(QuantizationConverter):
    """Replaces the configurations of linear layers that ``megatron_lowprec.convert`` would convert.

    A converter of ``model_registry(..., converters=[LowPrecConverter.Config(recipe="fp8_current")])``; it comes before
    torchtitan's ``LoRAConverter``, whose adapters stay in the compute dtype.

    Raises:
        UserError: as ``megatron_lowprec.convert``; in the first pass under pipeline parallelism, if the recipe has
            delayed scaling or random draws.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Arguments of ``megatron_lowprec.convert``; ``dtype`` is torchtitan's ``mixed_precision_param``."""

        recipe: str | Recipe
        keep_bf16: list[str] = field(default_factory=list)
        skip_slower: bool = True
        dtype: str = "bfloat16"
        seed: int = 0

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The same configuration, changed in place."""
        options = self.config
        with torch.device("meta"):
            model = model_config.build()
        conversion = plan(
            model,
            options.recipe,
            keep_bf16=options.keep_bf16,
            skip_slower=options.skip_slower,
            device="cuda" if torch.cuda.is_available() else "cpu",
            dtype=getattr(torch, options.dtype),
        )
        group = LayerGroup(whole=True)
        group.check_common_step(conversion.recipe.delayed_operands().values())
        places = conversion.converted
        found = [node for node in model_config.traverse(Linear.Config) if node[0] in places]
        if not found:
            reasons = conversion.lines_of_excluded(False) + conversion.lines_of_excluded(True)
            raise UserError(f"recipe {conversion.recipe.name} converts no layer: {'; '.join(reasons)}")
        if others := places.keys() - {path for path, *_ in found}:
            raise UserError(
                f"the model builds {', '.join(sorted(others))} without a Linear.Config of that name, which a "
                "converter could replace: leave them in the compute dtype by keep_bf16"
            )
        for path, layer, parent, name in found:
            binding = conversion.recipe, places[path], options.seed, group
            given = {each.name: getattr(layer, each.name) for each in fields(layer) if each.init}
            converted = LowPrecTitanLinear.Config(**given, _binding=binding)
            if isinstance(parent, list):
                parent[name] = converted
            else:
                setattr(parent, name, converted)
        logger.info("%s", conversion)
        return model_config


@override(target=BaseModel.Config, description="linear layers under a recipe of megatron_lowprec")
def lowprec(config: Any, **options: Any) -> Any:
    """The override ``megatron_lowprec.torchtitan.lowprec={"recipe": ...}`` with the fields of ``LowPrecConverter``."""
    return LowPrecConverter.Config(**options).build().convert(config)
