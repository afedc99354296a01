"""scripts/study.sh: lanes of sweeps, side by side and one after the other, with what is packed of them."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.environment import python_path

SCRIPT = Path(__file__).parents[2] / "scripts/study.sh"
# Instead of training: a job that notes its sweep's arguments, and a checkpoint, which is not packed.
PYTHON = """#!/bin/bash
while [ "$1" != --out ]; do shift; done
mkdir -p "$2/job/iter_0000001" && echo '{"iteration": 7}' >"$2/job/metrics.jsonl" && touch "$2/job/iter_0000001/weights"
"""


def study(*words: str | Path, path: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **python_path(), "PATH": path}
    return subprocess.run(["bash", str(SCRIPT), *map(str, words)], env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_lanes_run_are_waited_for_and_packed(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    # On a machine with GPUs no daemon of CUDA MPS is started.
    for name, text in (("python", PYTHON), ("nvidia-cuda-mps-control", "#!/bin/bash\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    (tmp_path / "one").write_text("# a comment\nfirst sweep.yaml --only 'a b'\nsecond sweep.yaml\n")
    (tmp_path / "two").write_text("third sweep.yaml\n")
    out = tmp_path / "out"
    assert study("start", out, "600", tmp_path / "one", tmp_path / "two", path=path).returncode == 0
    waited = study("wait", out, "300", path=path)
    assert '"iteration": 7' in waited.stdout
    assert waited.stdout.endswith("0 lanes run\n")
    log = (out / "one.log").read_text().splitlines()
    assert [line.partition(",")[0] for line in log] == [
        "+ scripts/sweep.py sweep.yaml --only a b",
        "+ scripts/sweep.py sweep.yaml",
    ]
    assert study("pack", out, tmp_path / "study.tar.xz", path=path).returncode == 0
    with tarfile.open(tmp_path / "study.tar.xz") as tar:
        names = {member.name for member in tar.getmembers() if member.isfile()}
    assert names == {
        *(f"./{name}/job/metrics.jsonl" for name in ("first", "second", "third")),
        "./one.log",
        "./two.log",
    }


def test_another_action_prints_how_it_is_used(tmp_path: Path) -> None:
    done = study("stop", tmp_path, path=os.environ["PATH"])
    assert done.returncode == 2
    assert "scripts/study.sh start OUT SECONDS LANE..." in done.stderr
