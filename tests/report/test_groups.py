"""Only what may be compared is compared."""

from pathlib import Path

import pytest

from megatron_lowprec.report.groups import Group, group_runs
from megatron_lowprec.report.runs import Run, find_runs
from megatron_lowprec.report.statistics import Fit
from megatron_lowprec.report.tables import quality
from tests.report.synthetic import add_cells, cell, write_run, write_sweep


def groups(*paths: Path) -> tuple[list[Group], list[Run]]:
    return group_runs(find_runs([str(path) for path in paths], 0.5)[0], "bf16")


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 12},
        {"train_iters": 800},
        {"lr": 3e-4},
        {"train_data_path": ["other_document"]},
        {"eval_iters": 50},
        {"global_batch_size": 32},
        {"an_option_of_tomorrow": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_model_data_or_budget_is_another_group(tmp_path: Path, options: dict[str, object]) -> None:
    found, _ = groups(write_run(tmp_path / "a"), write_run(tmp_path / "b", options=options))
    assert len(found) == 2
    assert len({group.name for group in found}) == 2
    assert list(found[1].apart) == list(options)
    assert list(found[1].apart.values()) == list(options.values())


def test_seed_recipe_layout_and_names_are_not(tmp_path: Path) -> None:
    options = {"micro_batch_size": 4, "tensor_model_parallel_size": 2, "save": "x", "emulate": True, "log_interval": 7}
    found, lost = groups(write_run(tmp_path / "a"), write_run(tmp_path / "b", "mxfp4", 2, options=options))
    assert (len(found), lost) == (1, [])
    assert found[0].labels == ("bf16", "mxfp4")
    assert not found[0].apart


def test_the_reference_comes_first(tmp_path: Path) -> None:
    found, _ = groups(write_run(tmp_path / "a", "mxfp8"), write_run(tmp_path / "b", "bf16"))
    assert found[0].labels == ("bf16", "mxfp8")


def test_a_cell_without_a_folder_counts_where_its_sweep_is(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7}, seeds=1)
    add_cells(sweep, "synthetic", [cell("mxfp4", 1), cell("mxfp4", 2, model="gpt_125m")])
    (group,), lost = groups(sweep)
    assert [run.label for run in group.runs] == ["bf16", "mxfp4"]
    assert [run.model for run in lost] == ["gpt_125m"]


def test_a_recipe_is_found_by_label_name_or_numerics(tmp_path: Path) -> None:
    overrides = ("dgrad.hadamard.block=32", "wgrad.hadamard.block=32")
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7}, seeds=1)
    write_run(sweep / "g32", "mxfp4_rht_sr", overrides=overrides)
    write_run(sweep / "g64", "mxfp4_rht_sr")
    more = [cell("rht32_sr", 1, run="g32"), cell("rht64_sr", 1, run="g64")]
    add_cells(sweep, "synthetic", more)
    (group,), _ = groups(sweep)
    assert group.find("rht32_sr") == "rht32_sr"
    assert group.find("mxfp4_rht_sr") == "rht64_sr"
    assert group.find("mxfp4_rht_sr dgrad.hadamard.block=32 wgrad.hadamard.block=32") == "rht32_sr"
    assert group.find("mxfp4_rht_sr dgrad.hadamard.block=64 wgrad.hadamard.block=64") == "rht64_sr"
    assert group.find("mxfp4_rht_sr dgrad.hadamard.block=256") is None
    assert group.find("mxfp8") is None
    assert group.find("no_such_recipe") is None


def test_a_repeated_seed_counts_once_and_is_told(tmp_path: Path) -> None:
    (group,), _ = groups(
        write_run(tmp_path / "a", final=3.70), write_run(tmp_path / "b", final=3.72), write_run(tmp_path / "c", seed=2)
    )
    assert group.final_losses() == {("bf16", 1): pytest.approx(3.71), ("bf16", 2): pytest.approx(3.7)}
    assert group.repeated() == ["bf16, seed 1"]
    table = quality(group, Fit(group.final_losses(), 0.95), 0.95)
    assert dict(zip(table.columns, table.rows[0], strict=True))["seeds\nfinished"] == "2 of 2"


def test_early_losses_count_runs_that_came_so_far(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "a", noise=0.0),
        write_run(tmp_path / "b", "mxfp4", early=0.5, noise=0.0, ends_at=100),
        write_run(tmp_path / "c", "mxfp8", ends_at=70),
    ]
    (group,), _ = groups(*paths)
    early = group.training_losses(0.05, 0.2)
    assert set(early) == {("bf16", 1), ("mxfp4", 1)}
    assert early["mxfp4", 1] > early["bf16", 1] + 0.1
    assert set(group.final_losses()) == {("bf16", 1)}
