"""The driver, or with "evaluate" in front tools/evaluate.py, with a CPU let through to ``--transformer-impl
transformer_engine``: for runs with the stand-in of it.
"""

import sys

import pretrain_gpt
from megatron_lowprec.training.config import resolve
from megatron_lowprec.training.distributed import startup
from tools import evaluate

if __name__ == "__main__":
    check = resolve._check_implementation
    resolve._check_implementation = lambda config, gpus: check(config, gpus=True)
    if sys.argv[1] == "evaluate":
        startup.leave(evaluate.main(sys.argv[2:]))
    else:
        startup.leave(pretrain_gpt.main(sys.argv[1:]))
