"""Recipes: what they were built with. TransformerEngine's drop arguments that they do not know."""

import os
from enum import Enum
from typing import Any


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Recipe:
    known: tuple[str, ...] = ("fp8_format",)

    def __init__(self, **arguments: Any) -> None:
        self.arguments = {name: value for name, value in arguments.items() if name in self.known}

    def described(self) -> dict[str, Any]:
        plain = {name: v.value if isinstance(v, Format) else v for name, v in self.arguments.items()}
        return {"recipe": type(self).__name__.removeprefix("TE"), **plain}


class DelayedScaling(Recipe):
    known = ("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "override_linear_precision")


class Float8CurrentScaling(Recipe):
    # read when the class is made, as TransformerEngine does
    power_of_two = os.getenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0") == "1"

    def described(self) -> dict[str, Any]:
        return {**super().described(), "power_of_two": self.power_of_two}


class Float8BlockScaling(Recipe):
    power_of_two = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "1"

    def described(self) -> dict[str, Any]:
        return {**super().described(), "power_of_two": self.power_of_two}


class MXFP8BlockScaling(Recipe):
    pass


class NVFP4BlockScaling(Recipe):
    pass


class CustomRecipe(Recipe):
    pass
