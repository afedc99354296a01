"""Many runs of the driver in one launch of torchrun: ``torchrun many_runs.py CASES.json``.

CASES.json holds a list of command lines. Starting processes and importing torch takes longer than a small run; so tests
that need two ranks put their runs into one launch and look at the folders afterwards. A run's UserError goes to
``errors.json``, by number.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.distributed import startup
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    import torch.distributed as dist


_PATIENCE = timedelta(seconds=PATIENCE)


class Meetings:
    """Where the ranks of a launch meet, each run's place another: torchrun's store would still hold the addresses of
    the run before. That one tells the ranks where.
    """

    def __init__(self, rank: int) -> None:
        import torch.distributed as dist

        self._rank, self._host = rank, os.environ["MASTER_ADDR"]
        self._shared = dist.TCPStore(self._host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=_PATIENCE)
        self._stores: list[dist.TCPStore] = []
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

    def arrange(self, name: str) -> None:
        """Before the run of that name, which all ranks then begin; frees what the run before has left in cycles."""
        gc.collect()
        if self._rank == 0:
            # Open from now to the end of the launch. A port that was merely found free may be another process's when
            # the run gets to it, and rank 0 may leave a run while others still ask its store. The run's own store, in
            # this process and at this port, is the same one.
            self._stores.append(self._open())
            self._shared.set(f"port {name}", str(self._stores[-1].port))
        os.environ["MASTER_PORT"] = self._shared.get(f"port {name}").decode()

    def _open(self) -> dist.TCPStore:
        import torch.distributed as dist

        return dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def main(cases: Path) -> None:
    ranks = startup.prepare_environment()
    from megatron_lowprec.training.run import run

    meetings = Meetings(ranks.rank)
    errors: dict[int, str] = {}
    for number, arguments in enumerate(json.loads(cases.read_text())):
        if ranks.rank == 0:
            print(f"--- {number}: {' '.join(arguments)}", flush=True)
        meetings.arrange(str(number))
        try:
            run(arguments, ranks)
        except UserError as error:
            # of this rank; another one may be in a collective now, and wait for it
            print(f"rank {ranks.rank}, run {number}: {error}", file=sys.stderr, flush=True)
            errors[number] = str(error)
            startup.finalize()
    if ranks.rank == 0:
        Path("errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
