"""Only what may be compared is compared."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from megatron_lowprec.report.archives.packing import write_archive
from megatron_lowprec.report.claims import CLAIMS, load_claims
from megatron_lowprec.report.groups import Group, differing_options, group_runs
from megatron_lowprec.report.runs import Run, find_runs
from megatron_lowprec.report.statistics import Fit
from megatron_lowprec.report.tables import quality, resolution
from megatron_lowprec.report.verdict import Held, judge_all
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.schedule import plan
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
    options |= {"async_save": True, "keep_last": 2, "max_skipped_steps": 3, "no_self_test": True}
    found, lost = groups(write_run(tmp_path / "a"), write_run(tmp_path / "b", "mxfp4", 2, options=options))
    assert (len(found), lost) == (1, [])
    assert found[0].labels == ("bf16", "mxfp4")
    assert not found[0].apart


def record_gemms(folder: Path, how: str) -> Path:
    """The same run, with how its GEMMs ran in run.json."""
    path = folder / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"gemms": dict.fromkeys(record["gemms"], how)}))
    return folder


def test_a_native_run_and_its_emulation_are_compared(tmp_path: Path) -> None:
    """The pair of arXiv 2506.08027: one recipe and seed, told apart by what computed the products."""
    ways = {
        "a": "blackwell_mx on sm100, unverified hardware, checked at start",
        "b": "emulated on sm100 (blackwell_mx: --native off)",
        "c": "emulated (blackwell_mx on sm100: failed its check)",
        "d": "hopper_fp8 on sm100",
    }
    runs = [record_gemms(write_run(tmp_path / name, "mxfp8", final=3.7), how) for name, how in ways.items()]
    (found,), _ = groups(write_run(tmp_path / "bf16", options={"native": "require"}), *runs)
    assert found.labels == ("bf16", "mxfp8_native", "mxfp8")
    assert [len(found.of(label)) for label in found.labels] == [1, 1, 3]
    assert found.find("mxfp8") == "mxfp8"
    assert found.unpaired("mxfp8_native", "mxfp8") is None


def test_the_claim_of_the_native_pair_is_decided_by_its_runs(tmp_path: Path) -> None:
    """At 2B parameters and 20 tokens each, from runs that a sweep labels; and not by runs of one kind."""
    options = {"global_batch_size": 100_000}
    claims = load_claims(CLAIMS)
    only = replace(claims, claims=(claims.named("mxfp8_native"),))
    finals = {"bf16": 3.7, "mxfp8": 3.71}
    sweep = write_sweep(tmp_path / "sweep", finals, options=options, parameters=2 * 10**9)
    (verdict,) = judge_all(only, groups(sweep)[0])
    assert "no run of mxfp8_native" in str(verdict)
    for seed in (1, 2, 3):
        run = write_run(tmp_path / f"n{seed}", "mxfp8", seed, 3.71, options=options, parameters=2 * 10**9)
        record_gemms(run, "blackwell_mx on sm100")
    (verdict,) = judge_all(only, groups(sweep, *sorted(tmp_path.glob("n*")))[0])
    (finding,) = verdict.findings
    assert (finding.test.left, finding.test.right) == ("mxfp8_native", "mxfp8")
    assert finding.held is not Held.MISSING


def record_schedule(folder: Path, **changes: Any) -> Path:
    """Add the block ``schedule`` to a run's config.yaml: that of its options, with changes."""
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text())
    config = Config(**content["options"])
    samples = content["options"]["train_iters"] * content["options"]["global_batch_size"]
    content["schedule"] = asdict(plan(config, content["options"]["global_batch_size"], samples)[0]) | changes
    path.write_text(yaml.safe_dump(content))
    return folder


def test_a_resumed_run_that_kept_its_horizon_is_another_group(tmp_path: Path) -> None:
    """Its options are those of a run of full length; only the recorded schedule tells them apart."""
    full = record_schedule(write_run(tmp_path / "full"))
    extended = record_schedule(write_run(tmp_path / "extended", "mxfp8"), decay_samples=300 * 64)
    found, _ = groups(full, extended)
    assert [dict(group.apart) for group in found] == [
        {"schedule.decay_samples": 400 * 64},
        {"schedule.decay_samples": 300 * 64},
    ]
    assert differing_options(*found) == ["schedule.decay_samples 25600 and 19200"]


def test_a_recorded_horizon_beyond_the_run_is_no_full_decay(tmp_path: Path) -> None:
    """Runs of one schedule are one group, but what they show at half of its decay is not what a claim is about."""
    runs = [record_schedule(write_run(tmp_path / name, name), decay_samples=800 * 64) for name in ("bf16", "mxfp8")]
    (group,), _ = groups(*runs)
    reason = group.unpaired("mxfp8", "bf16")
    assert reason is not None
    assert "the learning rate decays over 51,200 samples, the run has 25,600" in reason


def test_a_run_without_a_recorded_schedule_has_that_of_its_options(tmp_path: Path) -> None:
    options = {"lr_warmup_fraction": 0.1, "lr_decay_style": "cosine", "min_lr": 1e-4}
    runs = [write_run(tmp_path / name, seed=seed, options=options) for seed, name in enumerate("ab")]
    record_schedule(runs[0])
    assert len(groups(*runs)[0]) == 1


def test_a_run_that_changed_an_option_on_resume_is_apart(tmp_path: Path) -> None:
    changed = write_run(tmp_path / "a")
    with (changed / "config.yaml").open("a") as config:
        config.write("earlier_options: [{until_iteration: 30, clip_grad: 0.5}]\n")
    found, _ = groups(changed, write_run(tmp_path / "b"))
    assert [dict(group.apart) for group in found] == [
        {"earlier options": "until_iteration 30 clip_grad 0.5"},
        {"earlier options": ""},
    ]


def test_runs_with_the_same_initial_weights_are_one_group(tmp_path: Path) -> None:
    """However they were named, and whether or not the run was interrupted since."""
    runs = [
        write_run(tmp_path / "a", options={"finetune": True, "load": "base"}),
        write_run(tmp_path / "b", "mxfp8", options={"finetune": False, "load": "b"}),
        write_run(tmp_path / "c", options={"pretrained_checkpoint": "base"}),
        write_run(tmp_path / "d", options={"pretrained_checkpoint": "base", "finetune": True, "load": "base"}),
        write_run(tmp_path / "e"),
    ]
    for run in runs[:2]:
        with (run / "config.yaml").open("a") as config:
            config.write("initial_weights: base/iter_0000004\n")
    found, _ = groups(*runs)
    assert [[run.cell for run in group.runs] for group in found] == [["a", "b"], ["c", "d"], ["e"]]
    weights = ["base/iter_0000004", "base", None]  # an earlier version recorded the folder
    assert [dict(group.apart) for group in found] == [{"initial weights": each} for each in weights]


@pytest.mark.parametrize(
    "options",
    [
        {"calibrate_amax": False},
        {"calibrate_amax": None},
        {"moe_layer_freq": "1"},
        {"same_noise_on_data_parallel": False},
        {"an_option_of_tomorrow": None},
    ],
    ids=str,
)
def test_an_option_at_its_default_is_as_if_missing(tmp_path: Path, options: dict[str, object]) -> None:
    found, _ = groups(write_run(tmp_path / "a"), write_run(tmp_path / "b", "mxfp8", options=options))
    assert len(found) == 1


def test_a_renamed_option_is_the_same_option(tmp_path: Path) -> None:
    old = write_run(tmp_path / "a", options={"same_noise_on_data_parallel": True})
    new = write_run(tmp_path / "b", options={"share_rng_across_dp": True})
    plain = write_run(tmp_path / "c")
    found, _ = groups(old, new, plain)
    assert [[run.cell for run in group.runs] for group in found] == [["a", "b"], ["c"]]
    assert [dict(group.apart) for group in found] == [{"share_rng_across_dp": True}, {"share_rng_across_dp": False}]


def test_options_that_separate_models_are_in_their_labels(tmp_path: Path) -> None:
    tiny = {"config": "configs/models/gpt_tiny.yaml", "num_layers": 2}
    found, _ = groups(
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", options={"lr": 3e-4}),
        write_run(tmp_path / "c", options=tiny),
    )
    assert set(found[0].apart) == {"num_layers", "lr"}
    assert found[0].of_model == {"num_layers"}


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


def test_a_repeated_seed_counts_once_and_is_named(tmp_path: Path) -> None:
    (group,), _ = groups(
        write_run(tmp_path / "a", final=3.70), write_run(tmp_path / "b", final=3.72), write_run(tmp_path / "c", seed=2)
    )
    assert group.final_losses() == {("bf16", 1): pytest.approx(3.71), ("bf16", 2): pytest.approx(3.7)}
    assert group.repeated() == ["bf16, seed 1 (a and b)"]
    table = quality(group, Fit(group.final_losses(), 0.95), 0.95)
    assert dict(zip(table.columns, table.rows[0], strict=True))["seeds\nfinished"] == "2 of 2"


@pytest.mark.parametrize("finals", [[3.7, 3.72], [3.7, 3.7]], ids=["one seed", "copies"])
def test_a_repeated_seed_is_named_without_a_standard_deviation(tmp_path: Path, finals: list[float]) -> None:
    runs = [write_run(tmp_path / name, final=final) for name, final in zip("ab", finals)]
    if finals[0] == finals[1]:
        runs.append(write_run(tmp_path / "c", seed=2, final=finals[0]))
    (group,), _ = groups(*runs)
    fit = Fit(group.final_losses(), 0.95)
    assert not fit.known
    told = "A seed that a recipe ran more than once counts once, as the mean: bf16, seed 1 (a and b)."
    assert resolution(group, fit, 0.95)[-1] == told


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


def test_folders_of_archives_compare_by_name(tmp_path: Path) -> None:
    """Each archive numbers them anew, here behind the folder of a recipe; two of one archive stay different."""

    def packed(name: str, *runs: tuple[str, str]) -> Path:
        folders = []
        for recipe, corpora in runs:
            options = {"train_data_path": [f"{tmp_path}/{corpora}/wiki"]}
            folders.append(write_run(tmp_path / f"{name}-{recipe}-{corpora}", recipe, options=options))
        if name == "new":
            record = folders[0] / "cell.json"
            record.write_text(json.dumps({"exit_code": 0, "command": ["/opt/recipes/own.yaml"]}))
        write_archive(tmp_path / f"{name}.safetensors.xz", find_runs(list(map(str, folders)), 0.5)[0], print)
        return tmp_path / f"{name}.safetensors.xz"

    def found(*archives: Path) -> list[Group]:
        with TemporaryDirectory() as scratch:
            return group_runs(find_runs(list(map(str, archives)), 0.5, Path(scratch))[0], "bf16")[0]

    (group,) = found(packed("old", ("bf16", "a")), packed("new", ("mxfp4", "b")))
    assert group.labels == ("bf16", "mxfp4")
    # of equal numbers in both, none of which names what it names in the other
    one, two = packed("one", ("bf16", "a"), ("mxfp4", "b")), packed("two", ("bf16", "b"), ("mxfp4", "z"))
    assert len(found(one)) == 2
    apart = found(one, two)
    assert len(apart) == 4
    assert {group.apart["archive"] for group in apart} == {str(one), str(two)}


def test_a_job_that_has_finished_elsewhere_is_not_waited_for(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7}, seeds=2)
    add_cells(sweep, "synthetic", [cell("bf16", 3), cell("bf16", 4)])
    (group,), _ = groups(sweep, write_run(tmp_path / "bf16-s3", "bf16", 3))
    (row,) = quality(group, None, 0.95).rows
    assert "3 of 4, 1 not started" in row
