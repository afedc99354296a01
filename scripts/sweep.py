"""Run a sweep: recipes x models x overrides x seeds, each job a run of pretrain_gpt.py.

python scripts/sweep.py configs/sweeps/paper_table2.yaml
python scripts/sweep.py configs/sweeps/paper_table2.yaml --size small --set train-data-path=my_corpus --slurm
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_lowprec.report.claims import CLAIMS, load_claims
from megatron_lowprec.report.planning.before_start import undecided
from megatron_lowprec.sweep.cli import main
from megatron_lowprec.sweep.jobs import Job


def notes(jobs: Sequence[Job]) -> list[str]:
    """Shipped claims that these jobs cannot decide."""
    return undecided(jobs, load_claims(CLAIMS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], notes))
