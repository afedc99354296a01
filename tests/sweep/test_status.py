"""What is read from the folders of jobs."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from megatron_lowprec.sweep import status
from megatron_lowprec.sweep.job_record import Lock
from tests.sweep.conftest import Fake, WriteSweep

BF16, MXFP4 = "gpt_tiny-bf16-s1", "gpt_tiny-mxfp4-s1"


def write_rows(run: Path, count: int, more: str = "") -> None:
    rows = [
        {"iteration": i, "lm loss": float(i), "iteration-time": 100.0 if i == count else 0.5, "batch-size": 4}
        for i in range(1, count + 1)
    ]
    rows.insert(2, {"iteration": 2, "lm loss validation": 7.5})
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + more)


def test_progress_is_of_the_last_rows(tmp_path: Path) -> None:
    assert status.read_progress(tmp_path) == status.Progress()
    write_rows(tmp_path, 20, '{"iteration": 21, "lm lo')
    found = status.read_progress(tmp_path)
    assert (found.iteration, found.loss, found.validation) == (20, 15.5, 7.5)
    assert (found.step_seconds, found.step_samples) == (0.5, 4), "the median: one slow step is no speed"


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    write_rows(tmp_path, 5000)
    assert status.read_progress(tmp_path).iteration == 5000


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"[" * 50_000, b'{"iteration": "x"}', b'{"iteration": 5, "lm loss": "1"}']
)
def test_a_damaged_row_is_dropped_with_a_note(tmp_path: Path, line: bytes) -> None:
    write_rows(tmp_path, 20)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line + b'\n{"iteration": 21, "lm loss": 15.5}\n')
    found = status.read_progress(tmp_path)
    assert found.iteration == 21
    assert found.dropped is not None
    assert "dropped, as no row of such a file: line " in found.dropped
    row = status.Row("job", "running", found, 21, None, 0.0, None)
    assert status.notes([row]) == [found.dropped]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1:00"), (45, "45 s"), (125, "2:05"), (3725, "1:02:05")]
)
def test_durations(seconds: float, text: str) -> None:
    assert status.duration(seconds) == text


@pytest.mark.slow
def test_states_while_others_run(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    fake.behave(bf16="fail")
    path = write_sweep(seeds=[1, 2, 3])
    fake.run(path, "--only", "bf16-s1", "--only", "s2", "--only", "mxfp4-s3")
    # a job that is running, here in this very process
    assert Lock(fake.out, "gpt_tiny-bf16-s2").acquire() is None
    # one whose process died without a word
    record = {**fake.record("gpt_tiny-mxfp4-s3"), "state": "running"}
    (fake.out / "gpt_tiny-mxfp4-s3" / "cell.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert fake.run(path, "--status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["job", "state", "iteration", "loss", "validation", "tokens/s", "took", "left"]
    assert {line.split()[0]: line.split()[1] for line in lines[1:-1]} == {
        BF16: "failed",
        MXFP4: "waiting",
        "gpt_tiny-bf16-s2": "running",
        "gpt_tiny-mxfp4-s2": "done",
        "gpt_tiny-bf16-s3": "waiting",
        "gpt_tiny-mxfp4-s3": "interrupted",
    }
    assert lines[-1].startswith("1 done, 1 running, 1 failed, 1 interrupted, 2 waiting")
    assert fake.run(path, "--status", "--only", "s1") == 0
    lines_of_s1 = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines_of_s1[1:-1]] == [BF16, MXFP4]
    assert lines_of_s1[-1].startswith("1 failed, 1 waiting")
    assert fake.run(path, "--status", "--job", "1") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]] == [MXFP4]
    assert fake.run(path, "--status", "--only", "s9") == 2
    assert "--only s9 matches no job" in capsys.readouterr().err
    running = next(line.split() for line in lines if "running" in line)
    assert running[2:5] == ["2/4", "5.0000", "2,560"], "4 samples of 32 tokens in 50 ms"


@pytest.mark.slow
def test_speed_and_time_left(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.behave(bf16="fail")
    fake.run(write_sweep(recipes=["bf16"]), "--set", "train-iters=10")
    row = status.row(fake.out, BF16)
    assert row.tokens_per_second == pytest.approx(4 * 32 / 0.05)
    assert row.left == pytest.approx(8 * 0.05)


@pytest.mark.slow
def test_the_terminal_s_table_has_every_job(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.run(write_sweep())
    shown = io.StringIO()
    Console(file=shown, width=120).print(status.table(status.rows(fake.out), "2 done"))
    assert [line.split()[:3] for line in shown.getvalue().splitlines()[1:3]] == [
        [BF16, "done", "4/4"],
        [MXFP4, "done", "4/4"],
    ]


@pytest.mark.slow
def test_a_terminal_gets_a_live_table(fake: Fake, write_sweep: WriteSweep) -> None:
    """On a pseudo-terminal: the table is drawn while jobs run, and lines that stay above it."""
    pid, terminal = os.forkpty()
    if pid == 0:
        os.environ.update(PYTHONPATH=str(Path(__file__).parents[2]), TERM="xterm", COLUMNS="120", LINES="30")
        command = [*fake.program(), write_sweep(), "--out", str(fake.out)]
        os.execv(command[0], command)
    printed = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # its other end is closed
            break
        if not part:
            break
        printed += part
    _, code = os.waitpid(pid, 0)
    text = printed.decode()
    assert os.waitstatus_to_exitcode(code) == 0, text
    assert "waiting" in text
    assert "2 done" in text
    assert f"{BF16}: started" in text
    assert "\x1b[" in text
