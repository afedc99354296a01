"""scripts/study.sh: lanes of sweeps, side by side and one after the other, with what is packed of them."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import shlex
import subprocess
import tarfile
from pathlib import Path
from string import Template

import pytest

from megatron_lowprec.commands import sweep as cli
from tests.environment import ROOT, python_path
from tests.waiting import wait_for

SCRIPT = ROOT / "scripts/study.sh"
LANES = ROOT / "scripts/studies"
# Instead of training: a job that notes its sweep's arguments, and a checkpoint, which is not packed.
PYTHON = """#!/bin/bash
while [ "$1" != --out ]; do shift; done
mkdir -p "$2/job/iter_0000001" && echo '{"iteration": 7}' >"$2/job/metrics.jsonl" && touch "$2/job/iter_0000001/weights"
"""
COPIES = """#!/bin/bash
shift 4
while [ "$1" != --output-prefix ]; do texts+=("$1") && shift; done
for suffix in bin idx; do cat "${texts[@]}" >"$2_text_document.$suffix"; done
"""


def study(*words: str | Path, path: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **python_path(), "PATH": path, **more}
    return subprocess.run(["bash", str(SCRIPT), *map(str, words)], env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_lanes_run_are_waited_for_and_packed(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    # On a machine with GPUs no daemon of CUDA MPS is started; none runs, and one with -d notes the GPUs that it sees.
    mps = f"#!/bin/bash\n[ $# = 1 ] && echo ${{CUDA_VISIBLE_DEVICES-all}} >{tmp_path / 'mps'}\n"
    for name, text in (("python", PYTHON), ("nvidia-cuda-mps-control", mps)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    (tmp_path / "one").write_text("# a comment\nfirst sweep.yaml --only 'a b'\nsecond sweep.yaml\n")
    (tmp_path / "two").write_text("third sweep.yaml\n")
    out = tmp_path / "out"
    started = study("start", out, "600", tmp_path / "one", tmp_path / "two", path=path, CUDA_VISIBLE_DEVICES="1")
    assert started.returncode == 0
    assert (tmp_path / "mps").read_text() == "all\n"
    waited = study("wait", out, "300", tmp_path / "study.tar.xz", path=path)
    assert '"iteration": 7' in waited.stdout
    assert "0 lanes run\n" in waited.stdout
    log = (out / "one.log").read_text().splitlines()
    sweeps = ["+ scripts/sweep.py sweep.yaml --only a b", "+ scripts/sweep.py sweep.yaml"]
    assert [line.partition(",")[0] for line in log] == [*sweeps, *(f"{line} --start-within 0" for line in sweeps)]
    with tarfile.open(tmp_path / "study.tar.xz") as tar:
        names = {member.name for member in tar.getmembers() if member.isfile()}
    assert names == {
        *(f"./{name}/job/metrics.jsonl" for name in ("first", "second", "third")),
        "./one.log",
        "./two.log",
    }


def test_a_wait_that_is_cut_has_packed(tmp_path: Path) -> None:
    (tmp_path / "out" / "folder" / "job").mkdir(parents=True)
    (tmp_path / "out" / "folder" / "job" / "metrics.jsonl").write_text('{"iteration": 7}\n')
    (tmp_path / "out" / "lane.pid").write_text(str(os.getpid()))
    packed = tmp_path / "study.tar.xz"
    env = {**os.environ, "EVERY": "1"}
    with subprocess.Popen(["bash", str(SCRIPT), "wait", str(tmp_path / "out"), "300", str(packed)], env=env) as waiting:
        try:
            wait_for(packed.exists, "a pack of the runs")
            assert waiting.poll() is None
        finally:
            waiting.kill()
    with tarfile.open(packed) as tar:
        assert "./folder/job/metrics.jsonl" in tar.getnames()


def test_a_large_pack_is_in_parts(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_bytes(random.Random(1).randbytes(40_000))
    packed = tmp_path / "study.tar.xz"
    packed.with_name("study.tar.xz.07").write_bytes(b"of an earlier call")
    assert study("pack", tmp_path / "out", packed, path=os.environ["PATH"], LIMIT="15k").returncode == 0
    parts = sorted(tmp_path.glob("study.tar.xz*"))
    assert [part.name for part in parts] == [f"study.tar.xz.0{number}" for number in range(3)]
    assert max(part.stat().st_size for part in parts) <= 15 * 1024
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
        member = tar.extractfile("./metrics.jsonl")
        assert member is not None
        assert member.read() == (tmp_path / "out" / "metrics.jsonl").read_bytes()


def jobs_of(lane: Path, flags: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Jobs of the lane's sweeps with these flags in SWEEP: name, recipe, model, seed and command of each."""
    values = {"DATA": "both", "WIKIPEDIA": "wikipedia", "SCORES": "--recipe bf16 --wikitext", "SWEEP": flags}
    rows = []
    for line in lane.read_text().splitlines():
        if line.startswith("#"):
            continue
        words = [re.sub(r"^\$\{\w+:-(\w+)\}$", r"\1", word) for word in shlex.split(line)]
        given = [values[word[1:]] if word[1:] in values else Template(word).substitute(values) for word in words]
        assert cli.main([*given[1:-1], *given[-1].split(), "--dry-run"]) == 0, given
        rows += [row.split("\t") for row in capsys.readouterr().out.splitlines()]
    return rows


@pytest.mark.parametrize("lane", sorted(LANES.iterdir()), ids=lambda path: path.name)
def test_sweeps_of_a_study_expand(capsys: pytest.CaptureFixture[str], lane: Path) -> None:
    """Each line of a shipped lane is a folder and arguments of a sweep, whose jobs are scored or have checkpoints."""
    rows = jobs_of(lane, "--seeds 1234", capsys)
    assert {row[3] for row in rows} == {"1234"}
    assert all("--no-save" not in row[4] and "train-data-path" in row[4] for row in rows)


def cells_of_the_page() -> list[tuple[str, str, str]]:
    """Names of lanes, what they run, and the flags of sessions on some number of GPUs."""
    text = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*) \|$", text[text.index("### Studies") :], re.M)
    return [(lanes, runs, cell) for lanes, runs, *cells in (row.split(" | ") for row in rows) for cell in cells]


@pytest.mark.parametrize(("lanes", "runs", "cell"), cells_of_the_page())
def test_sessions_of_the_page_select_runs(capsys: pytest.CaptureFixture[str], lanes: str, runs: str, cell: str) -> None:
    """Each has some, and all sessions of a cell that names them together have the runs of its row."""
    option, sessions = "", []
    names = re.findall(r"`(\w+)`", lanes)
    for span in re.findall("`([^`]+)`", cell):
        if span in names:  # of which the cell says more in words
            continue
        option = span.partition(" ")[0] if span.startswith("--") else option
        sessions.append(span if span.startswith("--") else f"{option} {span}")
    for lane in names:
        assert (LANES / lane).is_file()
        found = [{row[0] for row in jobs_of(LANES / lane, flags, capsys)} for flags in sessions]
        assert all(found), (lane, sessions)
        total = re.search(r"(\d+) runs", runs)
        if total and found and not re.search("the same|each|so on", cell):
            assert len(set().union(*found)) == int(total[1])


def test_sessions_of_the_page_are_found() -> None:
    assert {lane for lanes, _, _ in cells_of_the_page() for lane in re.findall(r"`(\w+)`", lanes)} == {
        path.name for path in LANES.iterdir()
    }


@pytest.mark.parametrize("altered", [None, "docs-train-00.jsonl.xz", "both_text_document.bin"])
def test_a_corpus_of_other_bytes_is_refused(tmp_path: Path, altered: str | None) -> None:
    """With an interpreter that copies texts in place of ``preprocess``."""
    script, corpus, tokens = SCRIPT.with_name("prepare_corpus.sh"), tmp_path / "corpus", tmp_path / "tokens"
    corpus.mkdir()
    texts = {f"{name}-train-00.jsonl.xz": name.encode() for name in ("enwiki", "docs")}
    for name, text in texts.items():
        (corpus / name).write_bytes(text)
    (tmp_path / "python").write_text(COPIES)
    (tmp_path / "python").chmod(0o755)
    bins = {"wikipedia": b"enwiki", "both": b"enwikidocs"}
    written = {f"{name}_text_document.{suffix}": text for name, text in bins.items() for suffix in ("bin", "idx")}
    sums = {name: hashlib.sha256(text).hexdigest() for name, text in (texts | written).items()}
    if altered is not None:
        sums[altered] = hashlib.sha256(b"other").hexdigest()
    (tmp_path / "sums").write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SUMS": str(tmp_path / "sums")}
    done = subprocess.run([script, corpus, tokens], env=env, capture_output=True, text=True, check=False)
    if altered is None:
        assert done.returncode == 0, done.stderr
        assert f"DATA={tokens}/both_text_document WIKIPEDIA={tokens}/wikipedia_text_document" in done.stdout
    else:
        assert done.returncode != 0
        assert f"{altered}: FAILED" in done.stdout


def test_another_action_prints_how_it_is_used(tmp_path: Path) -> None:
    done = study("stop", tmp_path, path=os.environ["PATH"])
    assert done.returncode == 2
    assert "scripts/study.sh start OUT SECONDS LANE..." in done.stderr
