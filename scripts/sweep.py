"""Run a sweep: recipes x models x overrides x seeds, each job a run of pretrain_gpt.py.

python scripts/sweep.py configs/sweeps/paper_table2.yaml
python scripts/sweep.py configs/sweeps/paper_table2.yaml --size small --set train-data-path=my_corpus --slurm
"""

from __future__ import annotations

import sys

from megatron_lowprec.sweep.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
