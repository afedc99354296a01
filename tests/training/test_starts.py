"""However a run was started, each tool takes its checkpoints: one table of starts times one of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.commands import evaluate, export_hf, inspect_checkpoint
from megatron_lowprec.commands import report_page as report
from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.report.curve import Status
from megatron_lowprec.report.groups import group_runs
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.checkpoint import loader, resume
from megatron_lowprec.training.checkpoint.checkpoint import RunProgress
from megatron_lowprec.training.checkpoint.resume import Saved
from megatron_lowprec.training.config import accumulation_options
from megatron_lowprec.training.config.arguments import flag, parse
from megatron_lowprec.training.config.options import GROUPS, Config, options_in
from megatron_lowprec.training.config.paths import run_paths
from megatron_lowprec.training.config.resolve import resolve_model, resolve_recipe, resolve_run
from megatron_lowprec.training.convert.hf_config import to_hf_config
from megatron_lowprec.training.data.tokenizer import tokenizer_of
from megatron_lowprec.training.distributed.startup import Ranks
from megatron_lowprec.training.models.architectures import architecture_of
from megatron_lowprec.training.options.declaration import Part
from megatron_lowprec.training.run_plan import RunPlan, plan_run
from tests.training.conftest import Drive, driving
from tests.training.helpers import argv, losses
from tests.weekly import also_weekly

BPE = SHIPPED / "data/tiny_bpe"
MODEL: dict[str, Any] = {
    "tokenizer_type": "GPT2BPETokenizer",
    "vocab_file": BPE / "vocab.json",
    "merge_file": BPE / "merges.txt",
    "vocab_size": None,
    "train_iters": 2,
    "eval_iters": 1,
    "lr_decay_iters": 10,
    "data_cache_path": "cache",
}
BASE = {**MODEL, "train_iters": 3, "save_interval": 1}  # a run that others begin from
TEXT: dict[str, Any] = {"mock_data": None, "train_data_path": ["text.jsonl"], "valid_data_path": ["text.jsonl"]}
CHAT: dict[str, Any] = {"mock_data": None, "train_data_path": ["chat.jsonl"], "valid_data_path": ["chat.jsonl"]}
CHAT |= {"sft": True, "seq_length": 64}
WIDE = {"hidden_size": 128, "bf16": True}
TINY_CONFIGS = ("gpt_tiny", "gpt_tiny_llama", "moe_tiny", "deepseek_tiny")


def shipped(name: str) -> dict[str, Any]:
    """A shipped configuration, on random tokens, two samples an iteration."""
    changes: dict[str, Any] = {key.replace("-", "_"): None for key in argv_names()}
    sizes = {"train_iters": 2, "global_batch_size": 2, "micro_batch_size": 1, "eval_iters": 1}
    return changes | sizes | {"config": SHIPPED / f"configs/models/{name}.yaml", "mock_data": True}


def argv_names() -> list[str]:
    return [word.removeprefix("--") for word in argv() if word.startswith("--")]


# The command lines of a run, in order; the last start ends at its --train-iters.
STARTS: dict[str, list[dict[str, Any]]] = {
    "fresh": [MODEL],
    "text": [MODEL | TEXT],
    "finetune": [MODEL | {"load": "base", "finetune": True}],
    "finetune, ckpt-step": [MODEL | {"load": "base", "finetune": True, "ckpt_step": 2}],
    "pretrained": [MODEL | {"pretrained_checkpoint": "base"}],
    "pretrained, ckpt-step": [MODEL | {"pretrained_checkpoint": "base", "ckpt_step": 2}],
    "sft": [MODEL | CHAT],
    "sft, pretrained": [MODEL | CHAT | {"pretrained_checkpoint": "long"}],
    "resumed": [MODEL | {"exit_interval": 1}, MODEL],
    "finetune, resumed": [MODEL | {"load": "base", "finetune": True} | more for more in ({"exit_interval": 1}, {})],
    "load": [MODEL | {"load": "base", "train_iters": 4}],
    "load, ckpt-step": [MODEL | {"load": "base", "ckpt_step": 2, "train_iters": 4}],
    "load, no-load-optim": [MODEL | {"load": "base", "no_load_optim": True, "no_load_rng": True, "train_iters": 4}],
    "capture": [MODEL | {"capture_step": [2], "capture_layers": ["*.linear_fc1"]}],
    "snapshots": [
        MODEL | {"recipe": "mxfp8", "log_quantization_interval": 1, "log_quantization_also": ["fp8_current"]}
    ],
    "ramp": [MODEL | {"train_iters": None, "lr_decay_iters": None, "train_samples": 8, "rampup_batch_size": [2, 2, 4]}],
    "second blend": [MODEL | TEXT | {"data_phase_switch": 0.5, "data_phase_path": ["text.jsonl"]}],
    "one GEMM in bf16": [MODEL | {"recipe": "fp8_delayed", "rerun_in_bf16": ["layers.1.*"]}],
    "FP8 weights": [
        MODEL | WIDE | {"recipe": "fp8_current", "fp8_param_gather": True} | {"use_distributed_optimizer": True}
    ],
    "FP8-LM": [MODEL | WIDE | {"recipe": "fp8_lm"}],
    "asynchronous, profiled": [MODEL | {"async_save": True, "keep_last": 1, "profile": True, "profile_step_start": 1}],
    **{name: [shipped(name)] for name in TINY_CONFIGS},
}
EACH_TIME = ("fresh", "finetune", "sft", "resumed", "ramp", "second blend", "one GEMM in bf16", "FP8 weights", "FP8-LM")
NOT_EXPORTED = {"moe_tiny": "is not mixtral's", "deepseek_tiny": "--moe-router-topk 2 is not deepseek_v3's"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The folder of a start's run, trained when it is first asked for, in the current folder."""
    folder = tmp_path_factory.mktemp("starts")
    with driving(folder) as drive:
        Path("text.jsonl").write_text("".join(json.dumps({"text": "one and two " * 20}) + "\n" for _ in range(40)))
        said = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
        Path("chat.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 8)
        drive(argv(**BASE, save="base"))

        def trained(name: str) -> str:
            if not Path(name).exists():
                if name == "sft, pretrained":
                    drive(argv(**BASE, save="long", seq_length=64))
                for options in STARTS[name]:
                    drive(argv(**options, save=name))
            return name

        yield trained


@pytest.fixture
def drive(runs: Callable[[str], str]) -> Drive:
    """For ``resume``, in the folder of ``runs``; its name marks the tests as slow."""
    from megatron_lowprec.training.distributed import startup
    from megatron_lowprec.training.run import run

    return lambda arguments: run(arguments, startup.prepare_environment())


def last(name: str) -> dict[str, Any]:
    return STARTS[name][-1]


def iterations(folder: str) -> int:
    return int(resume.find_checkpoint(Config(load=folder))[0].progress["iteration"])  # type: ignore[union-attr]


def inspected(folder: str) -> None:
    assert inspect_checkpoint.main([folder]) == 0


def evaluated(folder: str) -> None:
    assert evaluate.main(["--load", folder, "--data-path", "text.jsonl", "--max-tokens", "300", "--out", "e.json"]) == 0
    found = json.loads(Path("e.json").read_text())
    assert found["iteration"] == iterations(folder)
    assert 0 < found["data"]["text.jsonl"]["loss"] < 10


def exported(folder: str) -> None:
    code = export_hf.main(["--load", folder, "--out", f"{folder} exported"])
    assert code == (2 if folder in NOT_EXPORTED else 0)


def reported(folder: str) -> None:
    (run,) = find_runs([folder], 0.5)[0]
    assert run.status is Status.FINISHED, run.why
    assert len(group_runs([run], "bf16")[0]) == 1


TOOLS = {"inspect": inspected, "evaluate": evaluated, "export": exported, "report": reported}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", also_weekly(STARTS, EACH_TIME))
def test_every_tool_takes_every_start(
    runs: Callable[[str], str], drive: Drive, capsys: pytest.CaptureFixture[str], name: str, tool: str
) -> None:
    folder = runs(name)
    capsys.readouterr()
    TOOLS[tool](folder)
    if tool == "export" and name in NOT_EXPORTED:
        assert NOT_EXPORTED[name] in capsys.readouterr().err


@pytest.mark.parametrize("name", also_weekly(STARTS, EACH_TIME))
def test_every_start_goes_on(runs: Callable[[str], str], drive: Drive, name: str) -> None:
    """The same command with one iteration more."""
    folder = runs(name)
    before, trained = iterations(folder), len(losses(Path(folder)))
    length = {"train_samples": 16} if last(name).get("train_samples") else {"train_iters": before + 1}
    drive(argv(**last(name) | length, save=folder))
    assert iterations(folder) == before + (2 if "train_samples" in length else 1)
    assert len(losses(Path(folder))) == trained + iterations(folder) - before


# Shipped configurations, most of them too large to train here: everything but tensors.

CONFIGS = sorted(path.stem for path in (SHIPPED / "configs" / "models").glob("*.yaml"))
NO_HUGGING_FACE = {"moe_tiny", "deepseek_tiny", "deepseek_16b", "moe_16b_mxfp8", "gpt_8b_mxfp8", "gpt_843m_mxfp8"}
NO_HUGGING_FACE |= {"gpt_2b_mxfp8"}


def planned(name: str, *flags: str) -> RunPlan:
    """A start's plan on eight processes."""
    config, given, notes = parse(["--config", str(SHIPPED / f"configs/models/{name}.yaml"), "--save", "out", *flags])
    recipe = load_recipe(config.recipe, [])
    config, more = resolve_recipe(resolve_model(config), recipe, given)
    config, _ = resume.source(resolve_run(config, 8, gpus=False))
    config, paths = run_paths(config, config.recipe)
    return plan_run(config, paths, given, notes + more, recipe, Ranks(0, 8, 0, 8))


def saved_at_7(content: dict[str, Any]) -> Saved:
    """The checkpoint of a start with this content, in its folder."""
    content = {**content, "progress": asdict(RunProgress(iteration=7, consumed_samples=7 * 64))}
    folder = Path("out/iter_0000007")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return Saved(folder, yaml.safe_load((folder / "config.yaml").read_text()))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_configuration_is_taken_by_the_tools(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = planned(name)
    saved = saved_at_7(plan.content)
    # inspect
    assert saved.recipe == plan.recipe
    # evaluate, and export: the model, on one process
    opened = loader.reopen(saved, 1, gpus=False)
    assert opened.recipe == plan.recipe
    of_model = options_in(Part.SHAPE, Part.FUNCTION, groups=architecture_of(plan.config).options)
    names = [*of_model, "hidden_size", "seq_length", "num_layers", "bf16"]
    assert [getattr(opened.config, option) for option in names] == [getattr(plan.config, option) for option in names]
    tokenizer = tokenizer_of(opened.config)
    if name in NO_HUGGING_FACE:
        with pytest.raises(UserError, match="to Hugging Face: --"):
            to_hf_config(opened.config, tokenizer.vocab_size, tokenizer.eod, "bfloat16")
    else:
        assert to_hf_config(opened.config, tokenizer.vocab_size, tokenizer.eod, "bfloat16")["model_type"]
    # resume: the same command changes nothing
    monkeypatch.setattr(resume.safe_load, "examine", lambda folder: None)
    again = planned(name)
    assert again.found is not None
    assert again.found.folder == Path("out/iter_0000007")
    assert again.continues
    assert "earlier_options" not in again.content
    assert [note for note in again.later_notes if note.startswith(("options", "schedule", "data", "recipe"))] == []
    # report: both starts are of one group
    for number, start in enumerate((plan, again)):
        run = tmp_path / f"run{number}"
        run.mkdir()
        (run / "config.yaml").write_text(yaml.safe_dump(start.content))
        row = {"iteration": 7, "consumed samples": 7 * 64, "lm loss": 3.0, "lm loss validation": 3.0}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = find_runs([str(tmp_path / "run0"), str(tmp_path / "run1")], 0.5)[0]
    assert len(group_runs(found, "bf16")[0]) == 1


@pytest.mark.parametrize("option", ["fp8_param_gather", "fp8_accumulate_wgrad"])
@pytest.mark.parametrize(
    ("stored", "note"), [(True, "is on, as from 1e9 parameters on"), (False, ": off, as in the checkpoint's run")]
)
def test_a_large_run_that_resumes_says_once_what_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, stored: bool, note: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accumulation_options, "_arch_here", lambda: "sm90")
    start = planned("gpt_1.3b", "--recipe", "fp8_current").content
    assert start["options"][option]
    saved_at_7({**start, "options": {**start["options"], option: stored}})
    monkeypatch.setattr(resume.safe_load, "examine", lambda folder: None)
    again = planned("gpt_1.3b", "--recipe", "fp8_current")
    assert getattr(again.config, option) is stored
    (said,) = (line for line in (*again.notes, *again.later_notes) if flag(option) in line)
    assert note in said
    assert "earlier_options" not in again.content


def other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    return [*value, "*"] if isinstance(value, list) else value + type(value)(1)


def test_options_of_a_run_are_no_part_of_its_model() -> None:
    """Whatever they are, and whichever come: those of the model are listed, with the groups that models declare."""
    kept = set(loader._KEPT)
    of_models = [group for group in GROUPS if group.__name__ == "ModelOptions" or ".models." in group.__module__]
    assert {option.name for group in of_models for option in fields(group)} <= kept
    config = Config()
    for option in fields(Config):
        changed = replace(config, **{option.name: other(getattr(config, option.name))})
        assert (loader.plain(changed) == loader.plain(config)) == (option.name not in kept - {"moe_fp8_dispatch"})


def test_the_report_of_different_starts(runs: Callable[[str], str], drive: Drive) -> None:
    assert report.main([*map(runs, ("finetune, resumed", "snapshots")), "--out", "report"]) == 0
