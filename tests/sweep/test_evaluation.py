"""A sweep scores each job's last checkpoint, with the stand-ins for the driver and for megatron-lowprec eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.commands import sweep
from megatron_lowprec.errors import UserError
from megatron_lowprec.sweep import cli, jobs
from megatron_lowprec.sweep.spec import evaluation_flags, read
from tests.sweep.conftest import Fake, WriteSweep

BF16, MXFP4 = "gpt_tiny-bf16-s1", "gpt_tiny-mxfp4-s1"
FLAGS = "--recipe checkpoint 'a b' --wikitext"


@pytest.fixture
def scored(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A sweep whose evaluation is the stand-in."""
    monkeypatch.setattr(jobs, "EVALUATE", (str(Path(__file__).with_name("fake_evaluate.py")),))
    return fake


def evaluation(fake: Fake, job_id: str) -> dict[str, Any] | None:
    path = fake.out / job_id / "evaluation.json"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.slow
def test_each_finished_job_is_scored_once(
    scored: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    scored.behave(mxfp4="fail")
    path = write_sweep(evaluate=FLAGS)
    assert scored.run(path) == 1
    found = evaluation(scored, BF16)
    assert found is not None
    run = scored.out / BF16
    assert found["argv"] == [
        *("--load", str(run), "--out", str(run / "evaluation.json")),
        *("--recipe", "checkpoint", "a b", "--wikitext"),
    ]
    assert evaluation(scored, MXFP4) is None, "a failed job has no last checkpoint"
    assert f"{BF16}: scoring" in capsys.readouterr().out
    scored.behave()
    (run / "evaluation.json").write_text("{}")
    assert scored.run(path) == 0
    assert evaluation(scored, BF16) == {}, "not scored again"
    assert evaluation(scored, MXFP4) is not None
    assert not list((scored.out / "locks").glob("[!.]*"))


@pytest.mark.slow
def test_a_failed_evaluation_is_repeated_without_its_training(
    scored: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(recipes=["bf16"])
    assert scored.run(path, "--evaluate=--recipe fail") == 1
    printed = capsys.readouterr().out
    assert f"{BF16}: failed with exit code 2" in printed
    assert "    no such recipe" in printed
    assert scored.run(path) == 0, "without flags nothing is scored"
    assert evaluation(scored, BF16) is None
    assert scored.run(path, f"--evaluate={FLAGS}") == 0
    assert evaluation(scored, BF16) is not None
    assert len(scored.calls(BF16)) == 1
    assert scored.record(BF16)["state"] == "done"


@pytest.mark.slow
def test_scores_are_written_after_the_time_of_the_last_start(scored: Fake, write_sweep: WriteSweep) -> None:
    path = write_sweep()
    assert scored.run(path, "--only", "mxfp4") == 0
    late = ("--start-within", "0", f"--evaluate={FLAGS}")
    assert scored.run(path, *late) == 75, "bf16 is left out"
    assert evaluation(scored, MXFP4) is not None
    assert (len(scored.calls(BF16)), len(scored.calls(MXFP4))) == (0, 1)


@pytest.mark.slow
def test_other_flags_score_a_job_anew(scored: Fake, write_sweep: WriteSweep) -> None:
    path, result = write_sweep(recipes=["bf16"]), scored.out / BF16 / "evaluation.json"
    other = "--evaluate=--recipe bf16 --wikitext"
    assert scored.run(path, f"--evaluate={FLAGS}") == 0
    first = evaluation(scored, BF16)
    assert first is not None
    assert first["flags"] == ["--recipe", "checkpoint", "a b", "--wikitext"]
    result.write_text(json.dumps({**first, "kept": True}))
    assert scored.run(path, f"--evaluate={FLAGS}") == 0
    assert evaluation(scored, BF16) == {**first, "kept": True}, "the same flags: not scored again"
    assert scored.run(path, other) == 0
    found = evaluation(scored, BF16)
    assert found is not None
    assert found["argv"][-3:] == found["flags"] == ["--recipe", "bf16", "--wikitext"]
    assert json.loads((result.parent / "evaluation.1.json").read_text()) == {**first, "kept": True}
    assert scored.run(path, "--evaluate=--recipe fail") == 1
    assert evaluation(scored, BF16) == found, "scores outlive a failed evaluation"
    result.write_text('{"argv": [')
    assert scored.run(path, other) == 0
    assert evaluation(scored, BF16) == found, "half a file is no scores"
    assert len(scored.calls(BF16)) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--nosuch --wikitext", "unrecognized arguments: --nosuch"),
        ("--wikitext --stride x", "argument --stride: invalid int value: 'x'"),
        ("--recipe bf16", "nothing to score"),
        ("--data-path a.jsonl --part test", "--part test is a part of --split"),
        ("--help", "--help scores nothing"),
    ],
)
def test_flags_that_eval_refuses_start_nothing(
    scored: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    arguments = ("--out", str(scored.out))
    assert sweep.main([write_sweep(), *arguments, f"--evaluate={flags}"]) == 2
    printed = capsys.readouterr().err
    assert "error: --evaluate: " in printed
    assert words in printed
    path = write_sweep(evaluate=flags)
    assert sweep.main([path, *arguments]) == 2
    assert f"{path}: evaluate: " in capsys.readouterr().err
    assert not scored.out.exists()


def test_files_of_eval_s_flags_may_be_elsewhere(scored: Fake, write_sweep: WriteSweep) -> None:
    flags = "--evaluate=--data-path $SCRATCH/a.jsonl ../b --wikitext there.raw --recipe my.yaml"
    assert sweep.main([write_sweep(), "--out", str(scored.out), "--dry-run", flags]) == 0


def test_flags_that_a_sweep_sets_are_refused(write_sweep: WriteSweep) -> None:
    assert read(write_sweep()).evaluate == ()
    assert read(write_sweep(evaluate="--wikitext", sizes={"a": {"evaluate": "--recipe bf16"}})).evaluate == (
        "--recipe",
        "bf16",
    )
    with pytest.raises(UserError, match="evaluate: --out is set by the sweep"):
        evaluation_flags("evaluate", "--wikitext --out=here.json")
    with pytest.raises(UserError, match="evaluate: --iteration is set by the sweep"):
        evaluation_flags("evaluate", "--wikitext --iter 3")
    with pytest.raises(UserError, match='evaluate: --wikitext " cannot be split into words: No closing quotation'):
        evaluation_flags("evaluate", '--wikitext "')
    with pytest.raises(UserError, match=r"evaluate is \['--wikitext'\]; write flags of megatron-lowprec eval"):
        read(write_sweep(evaluate=["--wikitext"]))


def test_a_run_without_checkpoint_cannot_be_scored(
    scored: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scored.run(write_sweep(evaluate=FLAGS), "--set", "no-save=true") == 2
    assert "leave no-save out, or give --evaluate= for no scores" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fp4_rivals", "stochastic_rounding", "late_growth"])
def test_studies_score_their_checkpoints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text('{"text": "a"}\n')
    arguments = [f"configs/sweeps/{name}.yaml", "--set", "train-data-path=text.jsonl", "--set", "no-save=true"]
    assert cli.main([*arguments, "--dry-run"]) == 2
    assert f"{name}: its jobs are scored by their checkpoints, and no-save writes none" in capsys.readouterr().err
    assert cli.main([*arguments, "--dry-run", "--evaluate="]) == 0
