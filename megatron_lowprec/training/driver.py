"""One rank of a run: arguments -> configuration -> recipe -> train(). What torchrun starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_lowprec.errors import UserError, disk_is_full
from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.distributed.interrupt import Interrupted, PeerLost


def main(argv: Sequence[str], program: str = "pretrain_gpt.py") -> int:
    """Exit code: 0; 2 for what a user can mend, said in one line by one process; 130 for Ctrl-C; 1 for the rest."""
    try:
        ranks = startup.prepare_environment()
    except UserError as error:
        return startup.fail(program, error)
    try:
        from megatron_lowprec.training.run import run

        run(argv, ranks)
    except UserError as error:
        return startup.fail(program, error, ranks)
    except Interrupted as signal:
        if ranks.rank == 0:
            print(f"{program}: {signal} before the first step: nothing to save", file=sys.stderr, flush=True)
        return 1
    except BrokenPipeError:  # `--explain-recipe | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except PeerLost:
        print(f"{program}: rank {ranks.rank}: stopped, for another rank has ended", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        if ranks.rank == 0:
            print(f"{program}: stopped by Ctrl-C, nothing saved; SIGTERM saves first", file=sys.stderr, flush=True)
        return 130
    except Exception as error:  # noqa: BLE001 - shown in full there
        if (full := disk_is_full(error)) is not None:
            return startup.fail(program, full, ranks)
        from megatron_lowprec.training.distributed import watchdog

        watchdog.report(error, ranks.rank, ranks.world_size)
        return 1
    return 0


if __name__ == "__main__":
    startup.leave(main(sys.argv[1:]))
