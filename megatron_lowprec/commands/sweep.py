"""A sweep's command line with notes on the shipped claims that its jobs cannot decide."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_lowprec.report.claims import CLAIMS, load_claims
from megatron_lowprec.report.planning.before_start import undecided
from megatron_lowprec.sweep import cli
from megatron_lowprec.sweep.jobs import Job


def main(arguments: Sequence[str] | None = None, program: str = "sweep.py") -> int:
    """Exit code, as of ``cli.main``."""
    return cli.main(sys.argv[1:] if arguments is None else arguments, notes, program)


def notes(jobs: Sequence[Job]) -> list[str]:
    """Shipped claims that these jobs cannot decide."""
    return undecided(jobs, load_claims(CLAIMS))
