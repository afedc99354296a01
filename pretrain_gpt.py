"""Pretrain a GPT under a low-precision recipe: arguments -> configuration -> recipe -> train(). What torchrun starts.

torchrun --nproc-per-node 2 pretrain_gpt.py --recipe mxfp4_rht_sr
python pretrain_gpt.py --list-recipes
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import startup


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, or 2 for what a user can mend, said in one line by one process."""
    ranks = startup.prepare_environment()
    try:
        from megatron_lowprec.training.run import run

        run(argv, ranks)
    except UserError as error:
        return startup.fail("pretrain_gpt.py", error, ranks)
    except BrokenPipeError:  # `--explain-recipe | head`: whoever read has what they wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    startup.leave(main(sys.argv[1:]))
