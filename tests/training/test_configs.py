"""Every shipped configuration loads and validates, for one iteration as for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lowprec.recipe.load import load_recipe
from megatron_lowprec.recipe.registry import recipes
from megatron_lowprec.recipe.resolve import check_sizes
from megatron_lowprec.training.arguments import parse
from megatron_lowprec.training.resolve import resolve_model, resolve_run, total_samples
from megatron_lowprec.training.schedule import plan
from megatron_lowprec.training.shapes import linear_sites, num_parameters, sized
from tests.training.helpers import REPOSITORY

CONFIGS = sorted((REPOSITORY / "configs" / "models").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("length", [[], ["--train-iters", "1"]], ids=["whole", "one"])
def test_loads_and_validates(path: Path, length: list[str]) -> None:
    config, _, _ = parse(["--config", str(path), *length])
    config = resolve_run(resolve_model(config), world_size=8, gpus=True)
    schedule, _ = plan(config, total_samples(config))
    assert 0 <= schedule.warmup_samples < schedule.decay_samples


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_sizes_suit_every_recipe(path: Path) -> None:
    config = resolve_model(parse(["--config", str(path)])[0])
    for name in recipes():
        sites = linear_sites(config)
        check_sizes(load_recipe(name), sites, sized(config.num_layers), config.tensor_model_parallel_size)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt_25m", 51.5), ("gpt_125m", 124.5), ("gpt_345m", 355.9), ("gpt_1.3b", 1315.8), ("gpt_6.7b", 6666.0)],
)
def test_parameters_are_what_the_name_says(name: str, millions: float) -> None:
    config = resolve_model(parse(["--config", str(REPOSITORY / f"configs/models/{name}.yaml")])[0])
    assert num_parameters(config, 50304) / 1e6 == pytest.approx(millions, rel=1e-3)
