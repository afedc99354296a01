"""Extra states of TransformerEngine: bytes in the checkpoint, a pickle for TransformerEngine."""

from __future__ import annotations

import io
import pickle
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.checkpoint import safe_load
from tests.training.checkpoint import foreign
from tests.training.checkpoint.damages import DAMAGES
from tests.training.checkpoint.foreign import MARKER, Foreign

RECIPES = "transformer_engine.common.recipe"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object that pickles as one of TransformerEngine's recipes, with an enumeration and a callable in it."""

    class Format(Enum):
        HYBRID = (448, 57344)

    class DelayedScaling:
        pass

    module = types.ModuleType(RECIPES)
    for one in (Format, DelayedScaling):
        one.__module__, one.__qualname__ = RECIPES, one.__name__
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, RECIPES, module)
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    made = DelayedScaling()
    made.__dict__ |= {"margin": 0, "fp8_format": Format.HYBRID, "amax_compute_algo": "max"}
    return made


def of_bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def extra_state(recipe: Any, **more: Any) -> torch.Tensor:
    """Bytes as TransformerEngine 2 makes them."""
    state = {
        "recipe": recipe,
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.arange(6.0).view(2, 3),
        "extra_fp8_variables": {"num_gemms": 1, "fp8_checkpoint": True, "fp8_max_fwd": 448.0},
    }
    return of_bytes(pickle.dumps(state | more))


def test_an_extra_state_of_transformer_engine_passes_as_it_is(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = extra_state(recipe)
    monkeypatch.delitem(sys.modules, RECIPES)  # nothing of TransformerEngine's is called
    checked = safe_load.checked_extra_state("layer", state)
    assert checked is not None
    assert torch.equal(checked, state)
    for empty in (torch.empty(0), torch.empty(0, dtype=torch.uint8)):
        assert safe_load.checked_extra_state("layer", empty).numel() == 0  # type: ignore[union-attr]
    assert safe_load.checked_extra_state("layer", None) is None


class NestedForeign:
    """A tensor's storage as it pickles: bytes that are unpickled once more."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return torch.storage._load_from_bytes, (foreign.saved(Foreign()),)


def test_an_extra_state_that_would_run_code_is_refused(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    dotted = b"\x80\x04\x8c" + bytes([len(RECIPES)]) + RECIPES.encode() + b"\x8c\x09os.system\x93."
    for content, name in (
        (pickle.dumps(Foreign()), r"posix\.mkdir"),
        (extra_state(recipe, scale_bwd=Foreign()).numpy().tobytes(), r"posix\.mkdir"),
        (extra_state(recipe, scale_bwd=NestedForeign()).numpy().tobytes(), r"posix\.mkdir"),
        (dotted, r"transformer_engine\.common\.recipe\.os\.system"),
    ):
        with pytest.raises(UserError, match=f"layer asks for {name} when it is unpickled"):
            safe_load.checked_extra_state("layer", of_bytes(content))
    assert not MARKER.exists()
    torch.load(io.BytesIO(foreign.saved(Foreign())), weights_only=False)  # torch's _load_from_bytes
    assert MARKER.exists(), "what is guarded against is real"


def test_an_extra_state_cannot_change_the_classes_that_it_is_checked_by() -> None:
    """BUILD with a state of two parts sets attributes of what is on the stack, and that may be a class."""
    setting = (
        f"c{RECIPES}\nFormat\n".encode(),  # the class
        b"(N}",  # a state without a dict, and attributes:
        b"V__setstate__\nctorch.storage\n_load_from_bytes\n",
        b"stb.",  # {name: value}, (None, attributes), BUILD
    )
    with pytest.raises(safe_load.Damaged, match="__setstate__ is set on a class"):
        safe_load.checked_extra_state("layer", of_bytes(b"".join(setting)))


@pytest.mark.parametrize("damage", ["cut short", "zeros"])
def test_a_damaged_extra_state_is_named(recipe: Any, damage: str) -> None:
    content = DAMAGES[damage](extra_state(recipe).numpy().tobytes())
    assert content is not None
    with pytest.raises(safe_load.Damaged, match="layer cannot be read"):
        safe_load.checked_extra_state("layer", of_bytes(content))


def test_an_extra_state_of_transformer_engine_1_is_refused() -> None:
    with pytest.raises(UserError, match="layer is a BytesIO, as TransformerEngine 1 wrote it: not loaded"):
        safe_load.checked_extra_state("layer", io.BytesIO(foreign.saved({"scale_fwd": torch.ones(3)})))
