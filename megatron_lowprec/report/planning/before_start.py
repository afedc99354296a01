"""Claims that a sweep cannot decide, told before it starts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megatron_lowprec.report.claims import Claim, Claims, Test
from megatron_lowprec.report.groups import find_label
from megatron_lowprec.report.planning.required_runs import extended
from megatron_lowprec.sweep.jobs import Job
from megatron_lowprec.sweep.slurm import indices
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.models.sizes import num_non_embedding_parameters

_FEWEST_SEEDS = 2  # one has no spread


def undecided(jobs: Sequence[Job], claims: Claims) -> list[str]:
    """A line for each model and reason for which claims on the jobs' recipes stay open, whatever the losses are."""
    lines = []
    for place in dict.fromkeys((job.model, job.variant) for job in jobs):
        group = [job for job in jobs if (job.model, job.variant) == place]
        tested = [claim for claim in claims.claims if claim.tests and all(_sides(test, group) for test in claim.tests)]
        ratio = _tokens_per_parameter(group[0])
        short = [claim for claim in tested if ratio < claims.enough_tokens(claim)]
        name = ", ".join(word for word in place if word)
        if short:
            enough = max(map(claims.enough_tokens, short))
            lines.append(
                f"{name}: {ratio:.3g} tokens per parameter without embeddings. A report of these runs has gaps and "
                f"intervals, but no verdict on what needs {enough:.3g}: the claims {_ids(short)}"
            )
        few = [claim for claim in tested if min(len(_seeds(test, group)) for test in claim.tests) < _FEWEST_SEEDS]
        if few and claims.prior_noise.validation_loss is None:
            seeds = extended({job.seed for job in group}, _FEWEST_SEEDS)
            lines.append(
                f"{name}: with one seed of a recipe the spread over seeds is unknown, so these runs cannot decide "
                f"{_ids(few)}; give at least {shlex.join(['--seeds', indices(seeds)])}"
            )
    return lines


def _sides(test: Test, jobs: Sequence[Job]) -> tuple[str, str] | None:
    """Labels of a test's two recipes; None if the jobs lack one."""
    recipes = [(job.label, job.resolved["recipe"]) for job in jobs]
    left, right = (find_label(side, recipes) for side in (test.left, test.right))
    return None if left is None or right is None else (left, right)


def _seeds(test: Test, jobs: Sequence[Job]) -> set[int]:
    """Seeds that both recipes of a test have."""
    left, right = ({job.seed for job in jobs if job.label == label} for label in _sides(test, jobs) or ())
    return left & right


def _tokens_per_parameter(job: Job) -> float:
    config = resolve_run(resolve_model(parse(job.arguments)[0]), job.processes, gpus=True)
    return config.steps.samples * job.seq_length / num_non_embedding_parameters(config)


def _ids(claims: Sequence[Claim]) -> str:
    return ", ".join(claim.id for claim in claims)
