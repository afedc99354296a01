"""Many runs of the driver in one launch of torchrun: ``torchrun many_runs.py CASES.json``.

CASES.json holds a list of command lines. Starting processes and importing torch takes longer than a small run; so tests
that need two ranks put their runs into one launch and look at the folders afterwards. A run's UserError goes to
``errors.json``, by number.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import startup


def main(cases: Path) -> None:
    ranks = startup.prepare_environment()
    import torch.distributed as dist

    from megatron_lowprec.training.run import run

    # Each run has a store of its own, for torchrun's would still hold the addresses of the run before; that one tells
    # the ranks where.
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    errors: dict[int, str] = {}
    for number, arguments in enumerate(json.loads(cases.read_text())):
        if ranks.rank == 0:
            print(f"--- {number}: {' '.join(arguments)}", flush=True)
            shared.set(f"port{number}", str(free_port()))
        os.environ["MASTER_PORT"] = shared.get(f"port{number}").decode()
        try:
            run(arguments, ranks)
        except UserError as error:
            errors[number] = str(error)
            startup.finalize()
    if ranks.rank == 0:
        Path("errors.json").write_text(json.dumps(errors))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main(Path(sys.argv[1]))
