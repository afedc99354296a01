"""The driver, or with "evaluate" in front tools/evaluate.py, with a CPU let through to ``--transformer-impl
transformer_engine``: for runs with the stand-in of it.

``te_driver.py runs CASES.json`` makes several runs, [name -> command line, environment of the last], with their output
in NAME.out and NAME.log, and the error of one that is refused in NAME.error.
"""

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pretrain_gpt
from megatron_lowprec.commands import evaluate
from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config import resolve
from megatron_lowprec.training.distributed import startup


def runs(cases: Path) -> None:
    from tests.training.conftest import driving

    lines, of_last = json.loads(cases.read_text())
    with driving(Path.cwd()) as call:
        for number, (name, arguments) in enumerate(lines.items(), 1):
            os.environ |= {"TE_STAND_IN_LOG": f"{name}.log"} | (of_last if number == len(lines) else {})
            with Path(f"{name}.out").open("w") as out, redirect_stdout(out):
                try:
                    call(arguments)
                except UserError as error:
                    Path(f"{name}.error").write_text(str(error))


if __name__ == "__main__":
    check = resolve._check_implementation
    resolve._check_implementation = lambda config, gpus: check(config, gpus=True)
    if sys.argv[1] == "runs":
        runs(Path(sys.argv[2]))
        startup.leave(0)
    elif sys.argv[1] == "evaluate":
        startup.leave(evaluate.main(sys.argv[2:]))
    else:
        startup.leave(pretrain_gpt.main(sys.argv[1:]))
