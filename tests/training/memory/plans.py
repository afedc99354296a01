"""What tests of the memory plan share: plans of shipped models on GPUs, and the options of a small model."""

from __future__ import annotations

from typing import Any

from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.memory.plan import MemoryPlan, plan
from tests.training.helpers import argv
from tests.training.memory.memory_worker import SIZES

GPT2_VOCABULARY = 50304


def shipped(name: str, gpus: int = 1, **changes: Any) -> MemoryPlan:
    flags = []
    for flag, value in changes.items():
        flags += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
    config, _, _ = parse(["--config", str(SHIPPED / f"configs/models/{name}.yaml"), "--mock-data", *flags])
    config = resolve_run(resolve_model(config), gpus, gpus=True)
    return plan(config, load_recipe(config.recipe), GPT2_VOCABULARY, gpus)


def small(gpus: int = 1, **changes: Any) -> Config:
    return resolve_run(resolve_model(parse(argv(**{**SIZES, **changes}))[0]), gpus, gpus=False)
