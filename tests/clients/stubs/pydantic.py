"""Stands in for pydantic, with which Megatron-LM defines classes for reinforcement learning."""

from typing import Any


class BaseModel:
    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _decorator(*args: Any, **_: Any) -> Any:
    return args[0] if args and callable(args[0]) else lambda function: function


def Field(*_: Any, **__: Any) -> Any:  # noqa: N802
    return None


PrivateAttr = Field
ConfigDict = dict
validator = field_validator = model_validator = _decorator
