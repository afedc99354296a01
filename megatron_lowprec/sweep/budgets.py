"""Models and lengths of the runs that a sweep file has, at each of its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from megatron_lowprec.sweep.jobs import expand
from megatron_lowprec.sweep.spec import Sweep, read, size_names
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.fields import require
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.data.tokenizer import build_tokenizer, padded_vocab_size
from megatron_lowprec.training.models.sizes import num_parameters


@dataclass(frozen=True)
class Budget:
    """Runs of one model and variant at one size of a sweep file."""

    size: str | None  # None if the file has no sizes
    model: str  # label
    parameters: int  # with embeddings
    tokens: int  # of a run
    runs_per_seed: int  # one of each recipe
    only: str | None  # pattern of the runs' names; None if the size has no others
    needs: tuple[str, ...]  # options that must be given in addition to the file


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
            tokens=job.train_iters * require(config.global_batch_size) * job.seq_length,
            runs_per_seed=len(sweep.recipes),
            only=f"{job.model}-*{f'-{job.variant}-s*' if job.variant else ''}" if len(jobs) > 1 else None,
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
