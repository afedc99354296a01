"""The memory plan as a user meets it: what --memory-plan prints, and runs that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.memory import report
from megatron_lowprec.training.memory.plan import plan
from tests.training.conftest import Drive
from tests.training.helpers import argv
from tests.training.memory.memory_worker import VOCABULARY
from tests.training.memory.plans import shipped, small


def test_a_layer_s_parts_are_named(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(SHIPPED / "configs/models/gpt_345m.yaml")
    drive(["--config", config, "--memory-plan", "--micro-batch-size", "16", "--global-batch-size", "16"])
    printed = capsys.readouterr().out
    assert "one of 1 GPUs" in printed
    # with 0.13 GiB of buffers of CUDA graphs and the 0.56 of a layer's backward pass
    assert "33.94" in next(line for line in printed.splitlines() if "peak" in line)
    assert "input of linear_fc2" in printed
    assert printed.splitlines()[-1].startswith("a GPU of 38 GiB holds it")
    assert not Path("runs").exists()


def test_a_plan_gives_up_graphs_as_a_run_does(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(SHIPPED / "configs/models/gpt_345m.yaml")
    flags = ["--config", config, "--mock-data", "--micro-batch-size", "16", "--global-batch-size", "16"]
    for gib, asked, eager in ((36, "auto", True), (36, "local", False), (40, "auto", False)):
        monkeypatch.setattr(report, "this_gpu", lambda local_rank, gib=gib: report.Device("GPU", gib * 2**30))
        drive([*flags, "--memory-plan", "--cuda-graph-impl", asked])
        printed = capsys.readouterr().out
        assert ("CUDA graphs: off, memory is close to the GPU's" in printed) == eager
        assert ("buffers of CUDA graphs" in printed) != eager


def test_a_layout_is_planned_without_its_gpus_or_data(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data-path", "nowhere_text_document", "--memory-plan"]
    drive(["--config", str(SHIPPED / "configs/models/gpt_6.7b_released.yaml"), *flags])
    assert "one of 8 GPUs" in capsys.readouterr().out
    drive(["--config", str(SHIPPED / "configs/models/gpt_125m.yaml"), *flags, "--memory-plan-gpus", "16"])
    said = capsys.readouterr().out
    assert "one of 16 GPUs" in said
    assert "parallelism: tensor 1, pipeline 1" in said
    with pytest.raises(UserError, match="10 processes are not divisible"):
        drive(["--config", str(SHIPPED / "configs/models/gpt_6.7b.yaml"), *flags, "--memory-plan-gpus", "10"])


def test_gathers_are_planned_with_the_memory(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(SHIPPED / "configs/models/gpt_6.7b.yaml")
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--recipe", "fp8_delayed", "--no-save-memory"]
    found = []
    for flags in ([], ["--fp8-sequence-parallel-gather"]):
        drive(["--config", config, *layout, *flags, "--memory-plan", "--memory-plan-gpus", "2"])
        lines = capsys.readouterr().out.splitlines()
        sizes = [(line[2:58].rstrip(), *line.split()[-2:]) for line in lines if line.endswith((" GiB", " MiB"))]
        found.append({name: float(size) * (1 if unit == "GiB" else 2**-10) for name, size, unit in sizes})
    plain, codes = found
    for name in plain:
        if "gathered" in name:
            assert codes[name] == pytest.approx(plain[name] / 2, abs=1e-3), name
        if "reduce-scattered" in name:
            assert codes[name] == plain[name], name
    # a layer saves its input as codes
    for name in ("input of linear_qkv", "input of the MLP"):
        assert codes[name] == pytest.approx(plain[name] / 2, abs=1e-3), name
    assert sum("gathered" in name for name in plain) == 3


def test_what_does_not_fit_is_refused() -> None:
    found = shipped("gpt_345m", micro_batch_size=16, global_batch_size=16)
    with pytest.raises(UserError) as error:
        report.check(found, report.Device("a GPU of 32 GiB", 32 * 2**30))
    message = str(error.value)
    for words in ("33.3 GiB", "activations 24.", "logits 3.1", "--micro-batch-size", "--no-memory-check"):
        assert words in message
    assert "--no-cache-weights" not in message, "nothing is cached"
    (line,) = report.check(found, report.Device("H200", 140 * 2**30))
    assert line == "memory: 33.3 GiB planned of 140.0 on a GPU"
    (line,) = report.check(found, report.Device("small", 34 * 2**30))
    assert "close" in line


def test_what_caches_weights_is_told_of_the_option() -> None:
    found = shipped("gpt_345m", recipe="fp8_delayed", micro_batch_size=16, global_batch_size=32)
    with pytest.raises(UserError, match=r"has 16\.0: add --no-cache-weights, lower --micro-batch-size"):
        report.check(found, report.Device("a GPU of 16 GiB", 16 * 2**30))


def test_the_driver_refuses_before_anything_starts(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(report, "this_gpu", lambda local_rank: report.Device("a tiny GPU", 2**20))
    with pytest.raises(UserError, match="but a tiny GPU has"):
        drive(argv(save="out"))
    assert not torch.distributed.is_initialized()
    assert not Path("out").exists()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    drive(argv(save="out", no_memory_check=True, no_save=True))


@pytest.mark.parametrize(
    ("base", "phases", "words"),
    [
        ("bf16", "[]", "recipe {}, microbatches"),
        (
            "bf16",
            "[{from_step: 1}, {from_step: 2, gemms: fp8_current}]",
            "recipe {}, phase 2 of 2, where it is",
        ),
        ("fp8_current", "[{from_step: 1, gemms: bf16}]", "recipe {}, before phase 1 of 1, where it is largest,"),
    ],
)
def test_a_plan_names_the_phase_that_it_is_of(base: str, phases: str, words: str) -> None:
    config, recipe = small(bf16=True), load_recipe(base, [f"phases={phases}"])
    found = plan(config, recipe, VOCABULARY, 1)
    assert found.peak == max(plan(config, stage, VOCABULARY, 1).peak for stage in recipe.stages)
    assert words.format(recipe.name) in report.table(found, config, recipe, None)[0]
