"""A sweep's command line: notes on the shipped claims that its jobs cannot decide, and a check of eval's flags."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from megatron_lowprec.errors import UserError
from megatron_lowprec.report.claims import CLAIMS, load_claims
from megatron_lowprec.report.planning.before_start import undecided
from megatron_lowprec.sweep import cli
from megatron_lowprec.sweep.jobs import Job


def main(arguments: Sequence[str] | None = None, program: str = "sweep.py") -> int:
    """Exit code, as of ``cli.main``."""
    return cli.main(sys.argv[1:] if arguments is None else arguments, notes, program, check_evaluation)


def notes(jobs: Sequence[Job]) -> list[str]:
    """Shipped claims that these jobs cannot decide."""
    return undecided(jobs, load_claims(CLAIMS))


def check_evaluation(words: Sequence[str]) -> None:
    """Reject flags that megatron-lowprec eval would refuse after each job's training. Opens no file.

    Raises:
        UserError: as eval's.
    """
    from megatron_lowprec.commands import evaluate  # imports torch, which a sweep without scores does not need

    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            flags = evaluate.parse_arguments(["--load", "RUN", *words], "megatron-lowprec eval")
    except SystemExit as ended:
        raise UserError(said.getvalue().strip() if ended.code else "--help scores nothing; leave it out") from None
    evaluate.check_flags(flags)
