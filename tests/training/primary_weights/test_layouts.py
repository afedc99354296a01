"""FP8 primary weights have the same codes on any layout, and after a resume."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.training.helpers import losses, rows
from tests.training.primary_weights.cases import EACH_TIME, EXPERT_RECIPES, LAYOUTS, RECIPES, by_layer
from tests.training.primary_worker import Digests
from tests.weekly import also_weekly


def digests_of(launch: Path, name: str) -> Digests:
    found: Digests = json.loads((launch / f"{name}.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "interleaved"])
def test_the_same_main_weights_have_the_same_codes_on_any_layout(
    one: tuple[str, Path, Digests], launch: Path, layout: str
) -> None:
    recipe, _, digests = one
    mine = by_layer(digests_of(launch, f"{recipe} {layout}")[0])
    whole = by_layer(digests[0])
    assert len(whole) == 8
    assert len(mine) == (4 if layout == "pipeline" else 8)  # of the first stage
    assert mine.items() <= whole.items()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", also_weekly(RECIPES, EACH_TIME))
def test_every_layout_steps(launch: Path, recipe: str) -> None:
    for layout in LAYOUTS:
        digests = digests_of(launch, f"{recipe} {layout}")
        assert len(digests) == 1 + 4
        for before, after in pairwise(digests):
            assert all(before[name] != after[name] for name in before)
        assert len(losses(launch / f"{recipe} {layout}")) == 4
    assert digests_of(launch, f"{recipe} overlapped") == digests_of(launch, f"{recipe} data")
    assert losses(launch / f"{recipe} overlapped") == losses(launch / f"{recipe} data")


RESUMED = [f"{recipe} {layout}" for recipe in RECIPES for layout in ("data", "tensor", "overlapped")]
RESUMED_EACH_TIME = [name for name in RESUMED if name.startswith(EACH_TIME)]


@pytest.mark.slow
@pytest.mark.parametrize("name", also_weekly([*RESUMED, "gated tensor"], [*RESUMED_EACH_TIME, "gated tensor"]))
def test_resume_is_bit_equal(launch: Path, name: str) -> None:
    whole, rest = digests_of(launch, name), digests_of(launch, f"{name} rest")
    assert rest[1:] == whole[2:]  # once loaded, then its two steps
    assert losses(launch / f"{name} rest") == losses(launch / name)[2:]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", also_weekly(RECIPES, EACH_TIME))
def test_a_checkpoint_has_the_same_codes_on_another_layout(launch: Path, recipe: str) -> None:
    assert digests_of(launch, f"{recipe} data to tensor rest")[1] == digests_of(launch, f"{recipe} data")[2]


@pytest.mark.slow
def test_a_part_s_own_scale_is_honoured(launch: Path) -> None:
    own, shared = (digests_of(launch, name)[0] for name in ("own scales", "fp8_current tensor"))
    assert own.keys() == shared.keys()
    assert own != shared


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EXPERT_RECIPES)
def test_experts(launch: Path, recipe: str) -> None:
    first = digests_of(launch, f"{recipe} experts")[0]
    assert len(first) == 2 * (2 + 2 * 2)  # of each layer attention's, and both of two experts here
    assert all_finite(launch / f"{recipe} experts")


def all_finite(folder: Path) -> bool:
    return all(row["skipped iterations"] == 0 for row in rows(folder) if "lm loss" in row)
