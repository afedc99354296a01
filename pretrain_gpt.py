"""Pretrain a GPT under a low-precision recipe: arguments -> configuration -> recipe -> train(). What torchrun starts.

torchrun --nproc-per-node 2 pretrain_gpt.py --recipe mxfp4_rht_sr
python pretrain_gpt.py --list-recipes
"""

from __future__ import annotations

import os
import sys
import time
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
        if ranks.rank == 0:
            print(f"pretrain_gpt.py: error: {error}", file=sys.stderr, flush=True)
        else:
            # torchrun ends the others at the first failure, which must not be before rank 0 has spoken.
            time.sleep(20 if ranks.world_size > 1 else 0)
        return 2
    except BrokenPipeError:  # `--explain-recipe | head`: whoever read has what they wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code:
        # At once: an interpreter that shuts down under a process group which others still wait in may abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
