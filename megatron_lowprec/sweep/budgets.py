"""Models and lengths of the runs that a sweep file has, at each of its sizes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatron_lowprec.recipe.parsing import load_recipe, recipe_to_dict
from megatron_lowprec.sweep.jobs import expand
from megatron_lowprec.sweep.spec import Sweep, read, size_names
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.data.tokenizer import build_tokenizer, padded_vocab_size
from megatron_lowprec.training.models.sizes import num_non_embedding_parameters, num_parameters


@dataclass(frozen=True)
class Budget:
    """Runs of one model and variant at one size of a sweep file."""

    size: str | None  # None if the file has no sizes
    model: str  # label
    parameters: int  # with embeddings
    non_embedding_parameters: int
    tokens: int  # of a run
    variant: str | None  # label; None if the size has no overrides
    recipes: tuple[tuple[str, dict[str, Any]], ...]  # labels, each with its recipe's fields; a run of each per seed
    alone: bool  # whether the size has no other runs
    needs: tuple[str, ...]  # options that must be given in addition to the file

    def only(self, labels: Collection[str]) -> list[str]:
        """Patterns of the runs' names under some of the recipes; none if these are all runs of the size."""
        ending = f"-{self.variant}-s[0-9]*" if self.variant else ""
        if len(labels) == len(self.recipes):
            return [] if self.alone else [f"{self.model}-*{ending}"]
        return [f"{self.model}-{label}{ending or '-s[0-9]*'}" for label in labels]


def budgets(path: str) -> list[Budget]:
    """Budgets of a sweep file, in the order of its sizes, models and variants.

    Raises:
        UserError: as ``read`` and ``expand``.
    """
    return [budget for size in size_names(path) for budget in _of_size(read(path, size))]


def _of_size(sweep: Sweep) -> list[Budget]:
    one = replace(sweep, recipes=sweep.recipes[:1], seeds=sweep.seeds[:1])
    data = {need: ["DATA"] for need in sweep.needs}  # not opened
    resources = sweep.resources
    recipes = tuple(
        (each.label, recipe_to_dict(load_recipe(each.recipe, each.recipe_override))) for each in sweep.recipes
    )
    found = []
    jobs = expand(one, data, resources.gpus_per_job or resources.processes_per_job)
    for job in jobs:
        config = resolve_run(resolve_model(parse(job.arguments)[0]), job.processes, gpus=True)
        tokenizer = (config.tokenizer_type, config.vocab_file, config.merge_file, config.tokenizer_model)
        vocabulary = padded_vocab_size(
            _vocab_size(*tokenizer, config.vocab_size),
            config.make_vocab_size_divisible_by,
            config.tensor_model_parallel_size,
        )
        budget = Budget(
            size=sweep.size,
            model=job.model,
            parameters=num_parameters(config, vocabulary),
            non_embedding_parameters=num_non_embedding_parameters(config),
            tokens=config.steps.samples * job.seq_length,
            variant=job.variant,
            recipes=recipes,
            alone=len(jobs) == 1,
            needs=sweep.needs,
        )
        found.append(budget)
    return found


@cache
def _vocab_size(
    kind: str, vocab_file: str | None, merge_file: str | None, model: str | None, vocab_size: int | None
) -> int:
    """Size of a tokenizer's vocabulary; reading one takes a third of a second, and most models share it."""
    return build_tokenizer(
        kind, vocab_file=vocab_file, merge_file=merge_file, tokenizer_model=model, vocab_size=vocab_size
    ).vocab_size
