"""Declares options that the package does not have, in one place each, and asks every reader of declarations for them.

Prints nothing; an assertion fails. It runs in a process of its own, because the readers load once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lowprec import UserError, load_recipe
from megatron_lowprec.training.options import optimizer_options, training_options
from megatron_lowprec.training.options.declaration import Part, arg


@dataclass(frozen=True)
class OptimizerOptions(optimizer_options.OptimizerOptions):
    """optimizer and schedule"""

    added_rate: float = arg(0.5, "the rate of a test", Part.UPDATE, least=0, needs="bf16", was="old_rate", draws=True)
    added_width: int | None = arg(None, "a width of a test", Part.SHAPE, one_of="width")
    added_share: int | None = arg(None, "the same as a share", Part.SHAPE, one_of="width")


@dataclass(frozen=True)
class TrainingOptions(training_options.TrainingOptions):
    """training"""

    added_speed: int = arg(1, "a speed of a test")
    added_place: str | None = arg(None, "a place of a test", Part.OUTPUT, sweep="--out")


optimizer_options.OptimizerOptions = OptimizerOptions  # type: ignore[misc]
training_options.TrainingOptions = TrainingOptions  # type: ignore[misc]

from megatron_lowprec.report import groups  # noqa: E402
from megatron_lowprec.sweep import jobs, spec  # noqa: E402
from megatron_lowprec.training.checkpoint import changes, resume  # noqa: E402
from megatron_lowprec.training.config.arguments import build_parser, parse, read_yaml  # noqa: E402
from megatron_lowprec.training.config.options import Config  # noqa: E402
from megatron_lowprec.training.config.resolve import resolve_model  # noqa: E402
from megatron_lowprec.training.schedule import plan  # noqa: E402
from tools.tables import of_recipes  # noqa: E402

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 32, "bf16": True}
CONFIG = Config(**SIZES, global_batch_size=4, lr=1e-3, micro_batch_size=4, train_iters=2, mock_data=True)  # type: ignore[arg-type]


replace: Any = dataclasses.replace  # its fields are not the type checker's


def refusal(action: Any, *arguments: Any) -> str:
    try:
        action(*arguments)
    except UserError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def parser_help_and_yaml() -> None:
    text = build_parser().format_help()
    assert "--added-rate" in text
    assert "the rate of a test" in text
    assert "--old-rate" not in text
    parsed, given, _ = parse(["--added-rate", "0.25"])
    config: Any = parsed
    assert config.added_rate == 0.25
    assert "added_rate" in given
    assert "unknown flag --old-rate" in refusal(parse, ["--old-rate", "0.25"])
    notes: list[str] = []
    Path("run.yaml").write_text("old-rate: 0.125\n")
    assert read_yaml("run.yaml", notes) == {"added_rate": 0.125}
    assert any("old-rate is now" in note for note in notes), notes
    Path("run.yaml").write_text("added-rate: 0.125\nadded-width: 3\n")
    assert read_yaml("run.yaml") == {"added_rate": 0.125, "added_width": 3}
    Path("run.yaml").write_text("added-rate: fast\n")
    assert "added-rate: wants a number" in refusal(read_yaml, "run.yaml")
    both = refusal(parse, ["--added-width", "3", "--added-share", "2"])
    assert "--added-share" in both
    assert "--added-width" in both
    assert "exclude each other" in both


def resolution() -> None:
    assert resolve_model(replace(CONFIG, added_rate=0.75))
    assert "--added-rate -1.0: wants at least 0" in refusal(resolve_model, replace(CONFIG, added_rate=-1.0))
    assert "does nothing without --bf16" in refusal(resolve_model, replace(CONFIG, added_rate=0.75, bf16=False))


def resumes() -> None:
    schedule = plan(CONFIG, 4, 8)[0]
    options = {name: value for name, value in asdict(CONFIG).items() if value is not None}
    content = {"options": options, "schedule": schedule.to_dict(), "progress": {"iteration": 1}, "padded_vocab_size": 8}
    saved = resume.Saved(Path("there"), content)
    faster = replace(CONFIG, added_rate=0.75, added_speed=2, added_place="here")
    assert changes.earlier_options(saved, faster, schedule) == [{"until_iteration": 1, "added_rate": 0.5}]
    assert "--added-rate 0.75 (checkpoint: 0.5)" in " ".join(changes.option_notes(saved, faster))
    resume.check_model(saved, faster, 8)
    wider = refusal(resume.check_model, saved, replace(CONFIG, added_width=3), 8)
    assert "--added-width 3 (checkpoint: None)" in wider


def sweeps_and_reports() -> None:
    assert jobs.settings_of(["added-rate=0.75"]) == {"added_rate": 0.75}
    assert "belongs to --out" in refusal(spec.options_of, "options", {"added-place": "here"})
    other = replace(CONFIG, added_rate=0.75, added_speed=2, added_place="here")
    mine, changed = (jobs._resolved(config, load_recipe("bf16"), 1)["options"] for config in (CONFIG, other))
    assert changed == {**mine, "added_rate": 0.75, "added_speed": 2}
    assert {"added_speed", "added_place"} < groups._IGNORED
    assert "added_rate" not in groups._IGNORED
    assert "added_rate" in groups._INITIALIZATION


def docs() -> None:
    rows = {row[0]: row for row in of_recipes._options(Path("page.md"), "OptimizerOptions")}
    assert rows["`--added-rate`"][1:3] == ("`0.5`", "the rate of a test; at least 0")
    assert rows["`--added-width`"][3].startswith("refused")


for check in (parser_help_and_yaml, resolution, resumes, sweeps_and_reports, docs):
    check()
