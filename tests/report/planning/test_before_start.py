"""Claims that a sweep cannot decide are named before its first job starts."""

from pathlib import Path

import pytest
import yaml

from megatron_lowprec.commands import sweep
from megatron_lowprec.report.claims import CLAIMS, load_claims
from megatron_lowprec.report.planning.before_start import undecided
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.sweep.jobs import Job, expand
from megatron_lowprec.sweep.spec import read


def jobs(tmp_path: Path, seeds: list[int], iterations: int, recipes: tuple[str, ...] = ("bf16", "mxfp4")) -> list[Job]:
    """Of gpt_3m, which has 3.1M parameters without embeddings, in iterations of 32,768 tokens."""
    content = {
        "summary": "a test",
        "models": ["gpt_3m"],
        "options": {"train-iters": iterations, "train-data-path": ["a"], "global-batch-size": 32, "seq-length": 1024},
        "recipes": list(recipes),
        "seeds": seeds,
    }
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    return expand(read(str(path), None), {}, 1)


@pytest.mark.parametrize(
    ("seeds", "iterations", "reasons"),
    [
        ([5], 2200, ["cannot decide mxfp4_plain; give at least --seeds 5-6"]),
        ([5, 6], 2200, []),
        (
            [5, 6],
            1000,
            ["10.4 tokens per parameter without embeddings", "no verdict on what needs 20: the claims mxfp4_plain"],
        ),
        ([5], 1000, ["what needs 20: the claims mxfp4_plain", "cannot decide mxfp4_plain"]),
    ],
)
def test_claims_that_stay_open_whatever_the_losses_are_named(
    tmp_path: Path, seeds: list[int], iterations: int, reasons: list[str]
) -> None:
    lines = "\n".join(undecided(jobs(tmp_path, seeds, iterations), load_claims(CLAIMS)))
    assert bool(lines) == bool(reasons)
    for words in reasons:
        assert words in lines


def test_claims_on_other_recipes_are_not_named(tmp_path: Path) -> None:
    assert undecided(jobs(tmp_path, [5], 10, ("bf16", "fp8_rowwise")), load_claims(CLAIMS)) == []


def test_a_seed_that_only_one_recipe_has_decides_nothing(tmp_path: Path) -> None:
    both = jobs(tmp_path, [5, 6], 2200)
    (line,) = undecided([job for job in both if (job.label, job.seed) != ("mxfp4", 6)], load_claims(CLAIMS))
    assert "with one seed of a recipe" in line


def test_the_command_prints_undecided_claims_before_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(SHIPPED / "configs/sweeps/paper_table2.yaml"), "--seeds", "7", "--dry-run"]
    assert sweep.main(command) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 5  # of the jobs
    assert "note: gpt_tiny: with one seed of a recipe the spread over seeds is unknown" in said.err
