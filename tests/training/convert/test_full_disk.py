"""Conversions on a full disk: one line, and no file that stands in the way of the next attempt."""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path

import pytest

from megatron_lowprec.commands import export_hf, import_hf
from megatron_lowprec.training.distributed import startup
from tests.training.conftest import Drive
from tests.training.convert.models import GPT, arguments
from tests.training.helpers import largest_file


def test_a_full_disk_is_one_line_and_leaves_nothing(
    drive: Drive, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    drive(arguments(GPT, save="run", train_iters=1))
    folder = "a 'model' é"
    capsys.readouterr()
    os.mkdir("mine")
    for out in ("new", "mine"):
        with largest_file(100_000):
            assert export_hf.main(["--load", "run", "--out", out]) == 2
        error = capsys.readouterr().err
        assert error == f"export_hf.py: error: --out {out}: File too large; make room, or name another folder\n"
        assert os.listdir(out) == []
        assert export_hf.main(["--load", "run", "--out", out]) == 0
        assert {"config.json", "model.safetensors"} <= set(os.listdir(out))
        assert not [name for name in os.listdir(out) if Path(out, name).is_dir()]
        capsys.readouterr()

    for size in (100_000, 1_000):
        with largest_file(size):
            assert import_hf.main(["--load", "new", "--save", folder]) == 2
        startup.finalize()
        error = capsys.readouterr().err
        assert error.startswith(f"import_hf.py: error: --save {folder}: ")
        assert error.endswith("; make room, or name another folder\n")
        assert error.count("\n") == 1
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert not list(Path(folder).glob("iter_*"))

    assert import_hf.main(["--load", "new", "--save", folder]) == 0
    (hint,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("train with: "))
    words = hint.removeprefix("train with: ").partition(", with")[0]
    assert shlex.split(words) == ["--config", f"{folder}/model.yaml", "--load", folder, "--finetune"]
