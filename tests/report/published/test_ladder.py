"""Gaps of a ladder of known losses, the shipped file, and refusals with their line."""

from pathlib import Path

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.report.published.ladder import BASELINE, gap_ladder, read_ladder
from megatron_lowprec.shipped import SHIPPED
from tests.refusal import refused

LADDER = SHIPPED / "data/quartet2-runs.csv"
HEAD = "group,N,D,final_loss,scheme\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ladder.csv"
    path.write_text(text)
    return path


def test_gaps_are_to_the_bf16_run_of_the_same_size_and_tokens(tmp_path: Path) -> None:
    rows = "x,10,400,3.25,a\nbaseline,10,200,3.5,\nbaseline,10,400,3.0,\nx,10,200,3.6,a\nx,10,200,3.9,b\n"
    runs = read_ladder(write(tmp_path, HEAD + rows))
    assert [run.gap for run in runs] == pytest.approx([0.25, 0, 0, 0.1, 0.4])
    assert gap_ladder(runs, 10, group="x", scheme="a") == [(20.0, pytest.approx(0.1)), (40.0, pytest.approx(0.25))]
    assert [at for at, _ in gap_ladder(runs, 10)] == [20.0, 20.0, 40.0]
    assert gap_ladder(runs, 10, scheme="") == []
    assert gap_ladder(runs, 20) == []


def test_the_shipped_ladder_is_complete() -> None:
    runs = read_ladder(LADDER)
    assert len(runs) == 574
    assert {run.gap for run in runs if run.group == BASELINE} == {0.0}
    assert len({run.parameters for run in runs}) == 4
    first = runs[0]
    assert (first.parameters, first.tokens, first.loss) == (30_482_560, 749_993_984, 3.422644853591919)
    for run in runs:
        assert run.tokens_per_parameter > 20
    steps = gap_ladder(runs, 30_482_560, group="nvidia")
    assert steps == sorted(steps)
    assert len(steps) > 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("group,N,D\nbaseline,1,1\n", "no column final_loss; a ladder needs group, N, D, final_loss"),
        (HEAD + "baseline,10,x,3.0,\n", "line 2: N, D and final_loss must be numbers"),
        (HEAD + "baseline,10,20\n", "line 2: N, D and final_loss must be numbers"),
        (HEAD + "baseline,10,20,nan,\n", "line 2: N and D must be above 0 and final_loss finite"),
        (HEAD + "baseline,10,20,3,\nbaseline,10,20,3,\n", "line 3: a second baseline of N 10 and D 20"),
        (HEAD + "baseline,10,20,3,\nx,10,40,3,\n", "line 3: no baseline of N 10 and D 40, so no gap"),
    ],
)
def test_a_damaged_ladder_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with refused(words):
        read_ladder(write(tmp_path, text))


def test_a_missing_ladder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_ladder(tmp_path / "nothing.csv")
