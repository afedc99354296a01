"""What a start finds in --save and makes of it: checkpoints of this run, damaged ones, of another recipe, of none."""

from __future__ import annotations

import json
import resource
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training import loop
from megatron_lowprec.training.checkpoint import checkpoint, safe_load, storage, writer
from megatron_lowprec.training.checkpoint.resume import Saved, check_model, check_optimizer
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.model import torch_optimizers
from tests.refusal import refused
from tests.training.checkpoint.forms import change, common_as_file, common_as_object
from tests.training.conftest import Drive, driving
from tests.training.helpers import argv, largest_file, losses, rows

COMMON: dict[str, Any] = {"save": "out", "train_iters": 6, "save_interval": 2, "lr_decay_iters": 10}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of iterations 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    with driving(folder) as call:
        call(argv(**COMMON))
    return folder / "out"


@pytest.fixture
def interrupted(whole: Path, tmp_path: Path) -> Path:
    """The same run as it lay there after iteration 5, its newest checkpoint that of iteration 4."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    shutil.rmtree(out / "iter_0000006")
    (out / storage.TRACKER).write_text("4\n")
    metrics = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(metrics[:5]))
    return out


def newest(out: Path) -> Path:
    return out / "iter_0000004"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0b11
    path.write_bytes(content)


def test_train_samples_hold_when_the_batch_changes(interrupted: Path, drive: Drive) -> None:
    """16 of 40 samples are behind at iteration 4: three batches of 8 are left."""
    options = {**COMMON, "train_iters": None, "train_samples": 40, "lr_decay_iters": None}
    drive(argv(**options, global_batch_size=8))
    assert [(row["iteration"], row["consumed samples"]) for row in rows(interrupted)][4:] == [(5, 24), (6, 32), (7, 40)]


# What happened to the folder, whether the run then goes back to iteration 2, and what it says about it.
ACCIDENTS: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "nothing": (lambda out: None, 4, "holds a checkpoint: continuing from it"),
    "corrupt latest": (lambda out: (out / storage.TRACKER).write_bytes(b"\x00\xff4"), 4, "missing or damaged"),
    "empty latest": (lambda out: (out / storage.TRACKER).write_text(""), 4, "missing or damaged"),
    "no latest": (lambda out: (out / storage.TRACKER).unlink(), 4, "missing or damaged"),
    "latest of another": (lambda out: (out / storage.TRACKER).write_text("900\n"), 4, "iter_0000900 cannot be loaded"),
    "truncated shard": (lambda out: truncate(newest(out) / "__0_0.distcp"), 2, "__0_0.distcp is cut short"),
    "missing shard": (lambda out: (newest(out) / "__0_0.distcp").unlink(), 2, "__0_0.distcp is missing"),
    "truncated metadata": (lambda out: truncate(newest(out) / ".metadata"), 2, ".metadata cannot be read"),
    "truncated common": (lambda out: truncate(common_as_file(newest(out))), 2, "common.pt cannot be read"),
    "no config": (lambda out: (newest(out) / "config.yaml").unlink(), 2, "config.yaml is missing"),
    "two flipped bits": (
        lambda out: flip(newest(out) / "__0_0.distcp", 5000),
        2,
        "__0_0.distcp: other bytes",
    ),
    "a flipped bit of config": (
        lambda out: flip(newest(out) / "config.yaml", -3),
        2,
        "iter_0000004 cannot be loaded: config",
    ),
    "no checksums": (lambda out: (newest(out) / "checksums.json").unlink(), 4, "saved without checksums"),
    "damaged checksums": (lambda out: truncate(newest(out) / "checksums.json"), 2, "checksums.json cannot be read"),
    "empty folder": (lambda out: (shutil.rmtree(newest(out)), newest(out).mkdir()), 2, "config.yaml is missing"),
    "being replaced": (lambda out: newest(out).rename(out / "iter_0000004.old"), 4, "continuing from it"),
}


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_a_start_goes_on_from_the_newest_whole_checkpoint(
    drive: Drive, interrupted: Path, whole: Path, capsys: pytest.CaptureFixture[str], accident: str
) -> None:
    happen, iteration, words = ACCIDENTS[accident]
    happen(interrupted)
    drive(argv(**COMMON))
    printed = capsys.readouterr().out
    assert printed.count(words) == 1
    assert f"at iteration {iteration}" in printed
    assert losses(interrupted) == losses(whole)
    assert storage.tracked(str(interrupted)) == 6
    assert not list(interrupted.glob("*.old"))


@pytest.mark.parametrize("form", [common_as_file, common_as_object])
def test_checkpoints_of_other_releases_resume(
    drive: Drive, interrupted: Path, whole: Path, form: Callable[[Path], Path]
) -> None:
    """Whether what all ranks share is a file, as before Megatron-core 0.19, or an object."""
    form(newest(interrupted))
    drive(argv(**COMMON))
    assert losses(interrupted) == losses(whole)


def test_without_a_complete_checkpoint_the_run_is_refused(drive: Drive, interrupted: Path) -> None:
    for folder in storage.whole(str(interrupted)).values():
        truncate(common_as_file(folder))
    with pytest.raises(UserError, match=r"no checkpoint there is whole: iter_0000004 .*; iter_0000002 "):
        drive(argv(**COMMON))


def test_an_older_checkpoint_can_be_chosen(drive: Drive, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = COMMON | {"save": "new", "load": str(whole)}
    drive(argv(**common, ckpt_step=2))
    assert "at iteration 2" in capsys.readouterr().out
    assert losses(Path("new")) == losses(whole)[2:]
    with pytest.raises(UserError, match=r"no checkpoint of iteration 3; there are 6, 4, 2"):
        drive(argv(**common, ckpt_step=3))
    with pytest.raises(UserError, match="--ckpt-step 2 does nothing without --load or --pretrained-checkpoint"):
        drive(argv(**common | {"load": None, "save": "newer"}, ckpt_step=2))


def test_an_older_checkpoint_is_chosen_for_the_first_start_alone(
    drive: Drive, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"save": "new", "pretrained_checkpoint": str(whole), "ckpt_step": 4, "train_iters": 2}
    drive(argv(**common, exit_interval=1))
    assert "iter_0000004" in capsys.readouterr().out
    drive(argv(**common))
    assert "at iteration 1" in capsys.readouterr().out


def test_another_run_s_damaged_checkpoint_is_refused(drive: Drive, interrupted: Path) -> None:
    truncate(newest(interrupted) / "__0_0.distcp")
    with pytest.raises(UserError, match=r"iter_0000004 cannot be loaded: __0_0\.distcp is cut short"):
        drive(argv(**COMMON | {"save": "new", "load": "out"}))


@pytest.mark.parametrize("exists", [False, True], ids=["absent", "empty"])
def test_a_save_folder_without_a_checkpoint_starts_a_run(drive: Drive, tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "out").mkdir()
    drive(argv(save="out", train_iters=1))
    assert [row["iteration"] for row in rows(Path("out"))] == [1]


def test_no_save_leaves_checkpoints_and_their_metrics_alone(drive: Drive, interrupted: Path) -> None:
    before = rows(interrupted)
    with pytest.raises(UserError, match="name another folder with --save"):
        drive(argv(**COMMON | {"train_iters": 1, "no_save": True}))
    assert rows(interrupted) == before


def test_no_save_reads_no_checkpoints(drive: Drive) -> None:
    drive(argv(**COMMON | {"save": None, "train_iters": 2}))
    drive(argv(**COMMON | {"save": None, "train_iters": 1, "no_save": True}))
    assert [[row["iteration"] for row in rows(folder)] for folder in sorted(Path("runs").iterdir())] == [[1], [1, 2]]


def test_a_pretrained_checkpoint_is_where_a_run_begins_once(drive: Drive, whole: Path) -> None:
    common = {"save": "new", "pretrained_checkpoint": str(whole), "train_iters": 2}
    drive(argv(**common, exit_interval=1))
    drive(argv(**common))
    assert [row["iteration"] for row in rows(Path("new"))] == [1, 2]
    # Trained weights, and a schedule and counts of its own.
    assert rows(Path("new"))[0]["lm loss"] < rows(whole)[0]["lm loss"]
    assert rows(Path("new"))[0]["consumed samples"] == 4


def test_the_seed_is_the_checkpoint_s_unless_one_is_given(
    drive: Drive, interrupted: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = newest(interrupted) / "config.yaml"
    content = yaml.safe_load(path.read_text())
    assert content["options"]["seed"] == 1234
    drive(argv(**COMMON | {"save": "new", "load": "out", "seed": 7, "no_save": True}))
    assert "seed: 7, checkpoint 1234" in capsys.readouterr().out
    assert losses(Path("new"))[0] != losses(whole)[4]
    content["options"]["seed"] = 7
    change(newest(interrupted), "config.yaml", yaml.safe_dump(content).encode())
    drive(argv(**COMMON | {"save": "same", "load": "out", "no_save": True}))
    assert "seed: the checkpoint's 7" in capsys.readouterr().out
    assert losses(Path("same")) == losses(Path("new"))


def test_other_data_has_a_warning(drive: Drive, interrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(**COMMON | {"seq_length": 16, "max_position_embeddings": 32}))
    assert "data: --seq-length differ" in capsys.readouterr().out


def test_the_padding_of_the_vocabulary_is_the_checkpoint_s(drive: Drive, interrupted: Path, whole: Path) -> None:
    # As a larger tensor-parallel size would ask for.
    drive(argv(**COMMON | {"make_vocab_size_divisible_by": 512}))
    assert losses(interrupted) == losses(whole)


ROPE = {"position_embedding_type": "rope"}
# Options of a model, and one that makes another model of the same tensors.
OTHER_FUNCTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"squared_relu": True}),
    ({}, {"norm_epsilon": 1e-6}),
    (ROPE, {"rotary_base": 500_000}),
    (ROPE, {"rotary_percent": 0.5}),
    ({"num_experts": 4}, {"moe_router_topk": 1}),
]


@pytest.mark.parametrize("finetune", [False, True], ids=["continued", "finetune"])
@pytest.mark.parametrize(("model", "change"), OTHER_FUNCTIONS, ids=lambda options: "".join(options))
def test_another_function_of_the_same_tensors_is_refused_by_name(
    model: dict[str, Any], change: dict[str, Any], finetune: bool
) -> None:
    then, now = Config(**model), Config(**model, **change, finetune=finetune)
    options = {name: value for name, value in asdict(then).items() if value is not None}
    ((name, value),) = change.items()
    flag, before = "--" + name.replace("_", "-"), options[name]
    with pytest.raises(UserError, match=rf"another model: {flag} {value} \(checkpoint: {before}\); give"):
        check_model(Saved(Path("there"), {"options": options, "padded_vocab_size": 256}), now, 256)
    # A version before the option did not record it.
    del options[name]
    check_model(Saved(Path("there"), {"options": options, "padded_vocab_size": 256}), now, 256)


def test_options_of_a_part_that_the_model_has_not_may_differ() -> None:
    saved = Saved(Path("there"), {"options": asdict(Config()), "padded_vocab_size": 256})
    check_model(saved, Config(rotary_base=500_000, rotary_percent=0.5, moe_router_topk=1), 256)


def test_a_start_checks_what_the_model_computes(drive: Drive, interrupted: Path) -> None:
    for how in ({}, {"load": "out", "save": "new", "finetune": True}, {"save": "new", "pretrained_checkpoint": "out"}):
        with pytest.raises(UserError, match=r"another model: --norm-epsilon 1e-06 \(checkpoint: 1e-05\)"):
            drive(argv(**COMMON | how, norm_epsilon=1e-6))


@pytest.fixture
def vocabulary(tmp_path: Path) -> dict[str, Any]:
    """Options of a small byte-pair vocabulary, in files of its own."""
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    for path in files.values():
        shutil.copyfile(SHIPPED / "data/tiny_bpe" / path.name, path)
    return {"tokenizer_type": "GPT2BPETokenizer", "vocab_size": None, **files}


def test_another_tokenizer_is_refused_by_name(drive: Drive, vocabulary: dict[str, Any], tmp_path: Path) -> None:
    common = {**COMMON, "train_iters": 1, "save_interval": None, **vocabulary}
    drive(argv(**common))
    shutil.move(tmp_path / "vocab.json", tmp_path / "elsewhere.json")
    moved = {**common, "vocab_file": tmp_path / "elsewhere.json", "train_iters": 2}
    drive(argv(**moved))
    # As many ids, and two of them exchanged.
    ids = json.loads((tmp_path / "elsewhere.json").read_text())
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tmp_path / "elsewhere.json").write_text(json.dumps(ids))
    known = yaml.safe_load(Path("out/iter_0000002/config.yaml").read_text())["tokenizer"]
    words = (
        rf"GPT2BPETokenizer of 512 ids, fingerprint {known['fingerprint']}, and the tokenizer here is GPT2BPE.*ids, "
    )
    for how in ({}, {"load": "out", "save": "new", "finetune": True}, {"save": "new", "pretrained_checkpoint": "out"}):
        with refused(match=words):
            drive(argv(**moved | how | {"train_iters": 3}))
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": 511, "vocab_file": None, "merge_file": None}
    with pytest.raises(UserError, match="and the tokenizer here is NullTokenizer of 512 ids"):
        drive(argv(**moved | null | {"train_iters": 3}))
    without_fingerprint(Path("out/iter_0000002"))
    drive(argv(**moved | {"train_iters": 3}))
    assert len(losses(Path("out"))) == 3


def without_fingerprint(folder: Path) -> None:
    """A checkpoint as versions before wrote it."""
    content = yaml.safe_load((folder / "config.yaml").read_text())
    del content["tokenizer"]
    change(folder, "config.yaml", yaml.safe_dump(content).encode())


@pytest.mark.parametrize("damaged", ["GPT2BPETokenizer", {"type": "GPT2BPETokenizer"}])
def test_a_damaged_fingerprint_is_damage(drive: Drive, interrupted: Path, damaged: Any) -> None:
    path = newest(interrupted) / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "tokenizer": damaged}))
    with pytest.raises(UserError, match=r"config\.yaml is missing or not this driver's"):
        drive(argv(**COMMON | {"save": "new", "load": "out"}))


@pytest.mark.parametrize(
    "change", [{"use_distributed_optimizer": True}, {"bf16": True}], ids=lambda change: next(iter(change))
)
def test_another_optimizer_s_state_is_refused_by_name(drive: Drive, interrupted: Path, change: dict[str, Any]) -> None:
    flag = next(iter(change)).replace("_", "-")
    with pytest.raises(UserError, match=f"another optimizer's state: --{flag} True .checkpoint: False."):
        drive(argv(**COMMON | change))
    drive(argv(**COMMON | change | {"load": "out", "save": "new", "no_load_optim": True, "no_save": True}))
    assert len(losses(Path("new"))) == 2


def test_only_the_last_are_kept(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(**COMMON, keep_last=2))
    assert list(storage.whole("out")) == [6, 4]
    assert "saved out/iter_0000006, removed 1 older" in capsys.readouterr().out


@pytest.mark.parametrize(
    "layout", [{}, {"use_distributed_optimizer": True, "bf16": True}], ids=["plain", "distributed"]
)
def test_an_asynchronous_save_has_the_state_of_its_request(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    common = COMMON | layout | {"recipe": "fp8_delayed"}
    drive(argv(**common | {"save": "sync"}))
    with monkeypatch.context() as patch:
        # Published as late as can be: weights and moments have changed by then.
        patch.setattr(writer.CheckpointWriter, "poll", lambda self: None)
        drive(argv(**common | {"save": "out", "async_save": True}))
    assert losses(Path("out")) == losses(Path("sync"))
    for iteration in (2, 4):
        rest = f"rest{iteration}"
        shutil.copytree(storage.iteration_folder("out", iteration), storage.iteration_folder(rest, iteration))
        (Path(rest) / storage.TRACKER).write_text(f"{iteration}\n")
        drive(argv(**common | {"save": rest}))
        assert losses(Path(rest)) == losses(Path("sync"))[iteration:]
    assert "saved out/iter_0000006" in capsys.readouterr().out


def test_training_goes_on_while_a_checkpoint_is_written(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[tuple[int, int | None]] = []
    step = loop.train_step

    def watching(*args: Any) -> Any:
        published.append((args[3], storage.tracked("out")))
        return step(*args)

    polls = iter([False, False, False, True, True, True])
    poll = writer.CheckpointWriter.poll
    monkeypatch.setattr(writer.CheckpointWriter, "poll", lambda self: poll(self) if next(polls) else None)
    monkeypatch.setattr(loop, "train_step", watching)
    drive(argv(**COMMON | {"save_interval": 1, "train_iters": 3}, async_save=True))
    # Steps completed, and the checkpoint that a start would have found: the one before is finished before the next.
    assert published == [(0, None), (1, None), (2, 1)]
    assert storage.tracked("out") == 3


@pytest.mark.parametrize("size", [300_000, 1_000], ids=["shards", "all files"])
@pytest.mark.parametrize("asynchronously", [False, True], ids=["sync", "async"])
def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, whole: Path, size: int, asynchronously: bool
) -> None:
    save = writer.CheckpointWriter.save

    def full(self: Any, trainer: Any, progress: Any) -> None:
        self.finish()  # of the checkpoint before
        with largest_file(size if progress.iteration == 4 else resource.RLIM_INFINITY):
            save(self, trainer, progress)

    options = COMMON | {"async_save": asynchronously or None}
    with monkeypatch.context() as patch:
        patch.setattr(writer.CheckpointWriter, "save", full)
        with refused(match=r"could not be written: .*its disk has [0-9,]+ MiB free; iteration 2 stays the newest"):
            drive(argv(**options))
    assert not list(Path("out").glob("*.partial.*")), "it takes the room that the next attempt needs"
    drive(argv(**options))
    assert losses(Path("out")) == losses(whole)


def test_delayed_scaling_is_calibrated_for_a_checkpoint_without_histories(
    drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    # A mean over 1,024 tokens: at scale 1 E5M2 rounds most of its gradients to zero, and the norm is 8% off.
    sizes = {"hidden_size": 128, "seq_length": 512, "bf16": True, "hidden_dropout": 0, "attention_dropout": 0}
    common = COMMON | sizes | {"train_iters": 5, "save_interval": None}
    drive(argv(**common | {"save": "plain", "train_iters": 4}))
    drive(argv(**common | {"save": "exact", "load": "plain"}))
    capsys.readouterr()
    drive(argv(**common | {"save": "new", "load": "plain", "recipe": "fp8_delayed"}))
    printed = capsys.readouterr().out
    assert "24 amax histories are not in it as this recipe keeps them; they begin anew" in printed
    assert "histories filled by 3 passes over the next batch" in printed
    exact, new = (rows(Path(name))[0] for name in ("exact", "new"))
    assert new["lm loss"] == pytest.approx(exact["lm loss"], rel=1e-3)
    assert new["grad-norm"] == pytest.approx(exact["grad-norm"], rel=0.03)
    # Histories that begin anew follow no earlier batch.
    drive(argv(**common | {"save": "larger", "load": "plain", "recipe": "fp8_delayed", "global_batch_size": 8}))
    assert "amax histories of gradients times" not in capsys.readouterr().out
    # The other way round the histories have no use, and this is said.
    drive(argv(**common | {"save": "back", "load": "new", "train_iters": 6, "recipe": "bf16"}))
    assert "amax histories of grad_output, input, weight are dropped" in capsys.readouterr().out


@pytest.mark.parametrize("distributed", [None, True])
def test_options_of_the_optimizer_win_over_the_checkpoint(
    drive: Drive, distributed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"lr_decay_style": "constant", "use_distributed_optimizer": distributed, "save_interval": 2}
    drive(argv(save="out", train_iters=2, lr=7e-4, **common))
    groups: list[dict[str, Any]] = []
    load = checkpoint.load

    def recorded(found: Any, trainer: Any, *args: Any) -> Any:
        result = load(found, trainer, *args)
        groups.extend(group for inner in torch_optimizers(trainer.optimizer) for group in inner.param_groups)
        return result

    monkeypatch.setattr(checkpoint, "load", recorded)
    drive(argv(save="changed", load="out", train_iters=3, lr=5e-4, adam_beta2=0.95, **common))
    drive(argv(save="kept", load="out", train_iters=3, lr=5e-4, use_checkpoint_opt_param_scheduler=True, **common))
    rates = [rows(Path(name))[0]["learning-rate"] for name in ("changed", "kept")]
    assert rates == [5e-4, 7e-4]
    assert {group["betas"] for group in groups[: len(groups) // 2]} == {(0.9, 0.95)}


def test_histories_of_gradients_follow_the_batch_of_a_rank(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A gradient is a mean over its rank's tokens: four times as many make each a quarter as large.
    common = {"recipe": "fp8_delayed", "lr_decay_iters": 100}
    drive(argv(save="out", train_iters=4, global_batch_size=4, **common))
    load, runtimes, loaded = checkpoint.load, [], []

    def recorded(found: Any, trainer: Any, *args: Any) -> Any:
        result = load(found, trainer, *args)
        runtimes.append(trainer.runtime)
        loaded.append(in_effect(trainer.runtime))
        return result

    def in_effect(runtime: Any) -> dict[str, list[float]]:
        states = [(name, h.state(slot)) for layer in runtime.layers for name, (h, slot) in layer.histories.items()]
        return {wanted: [state[0].item() for name, state in states if name == wanted] for wanted, _ in states}

    monkeypatch.setattr(checkpoint, "load", recorded)
    for batch in (4, 16):
        drive(argv(save=f"on {batch}", load="out", train_iters=5, global_batch_size=batch, **common))
    assert capsys.readouterr().out.count("amax histories of gradients times 0.25") == 1
    same, larger = loaded
    assert larger["input"] == same["input"]
    assert larger["weight"] == same["weight"]
    assert larger["grad_output"] == [amax / 4 for amax in same["grad_output"]]
    # And so they are, by the gradients of the next step: 2 is halfway, in logarithms, to the 4 of a wrong factor.
    for (history, slot), expected in zip(
        [layer.histories["grad_output"] for layer in runtimes[1].layers], larger["grad_output"], strict=True
    ):
        assert 1 / 2 < history.window[0, slot].item() / expected < 2


@pytest.mark.parametrize("fill", [True, None])
def test_calibrate_amax_fills_the_histories_of_a_new_run(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fill: bool | None
) -> None:
    iterate, in_effect = loop._train_iteration, list[float]()

    def recorded(run: Any, *rest: Any) -> Any:
        if run.progress.iteration == 0:
            layers = run.trainer.runtime.layers
            in_effect.extend(h.in_effect[slot].item() for one in layers for h, slot in one.histories.values())
        return iterate(run, *rest)

    monkeypatch.setattr(loop, "_train_iteration", recorded)
    drive(argv(save="out", recipe="fp8_delayed", train_iters=2, calibrate_amax=fill))
    assert ("histories filled by 3 passes" in capsys.readouterr().out) is bool(fill)
    assert [amax > 0 for amax in in_effect] == [bool(fill)] * (2 * 4 * 3)
    drive(argv(save="plain", train_iters=1, calibrate_amax=fill))
    assert ("nothing to fill, recipe bf16 has no delayed scaling" in capsys.readouterr().out) is bool(fill)


def test_calibration_leaves_no_trace_but_the_histories(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    # Dropout is on. A run under bf16 that calibrates all the same is the run that does not.
    drive(argv(**COMMON))
    shutil.rmtree("out/iter_0000006")
    Path("out", storage.TRACKER).write_text("2\n")
    load = checkpoint.load

    def uncalibrated(*args: Any) -> Any:
        return replace(load(*args), uncalibrated=True)

    monkeypatch.setattr(checkpoint, "load", uncalibrated)
    whole = losses(Path("out"))
    drive(argv(**COMMON))
    assert losses(Path("out")) == whole


@pytest.mark.parametrize(("before", "now", "refused"), [(1, 2, True), (4, 1, True), (2, 4, False), (1, 1, False)])
def test_the_optimizer_of_experts_stays_on_its_side(before: int, now: int, refused: bool) -> None:
    options = {"optimizer": "adam", "bf16": False, "use_distributed_optimizer": False}
    saved = Saved(Path("there"), {"options": options, "layout": {"expert": before}})
    check_optimizer(saved, Config(expert_model_parallel_size=now))  # a dense model
    config = Config(num_experts=4, expert_model_parallel_size=now)
    if not refused:
        check_optimizer(saved, config)
        return
    advice = "1, or" if before == 1 else f"{before}, or any from 2, or"
    with pytest.raises(
        UserError,
        match=rf"size {before}, and this run has {now}:.*; give --expert-model-parallel-size {advice} --no-load-optim",
    ):
        check_optimizer(saved, config)


def test_a_checkpoint_without_optimizer_state_holds_weights(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    options = COMMON | {"save_interval": None, "exit_interval": 2, "no_save_optim": True}
    drive(argv(**options))
    stored = safe_load.examine(Path("out/iter_0000002")).state_dict_metadata
    assert any("embedding" in key for key in stored)
    assert not [key for key in stored if "optimizer" in key]
    with pytest.raises(UserError, match=r"iter_0000002 was saved with --no-save-optim: add --no-load-optim"):
        drive(argv(**options))
    capsys.readouterr()
    drive(argv(**options, no_load_optim=True))
    assert "at iteration 2" in capsys.readouterr().out
    assert len(losses(Path("out"))) == 4
    assert not [row for row in rows(Path("out")) if row.get("skipped iterations")]


def test_a_checkpoint_of_an_earlier_commit_goes_on(drive: Drive) -> None:
    """Its recipe has flat fields of scales, its layers have amax histories; the losses were recorded there."""
    with tarfile.open(Path(__file__).with_name("of_c962186.tar.xz")) as tar:
        tar.extractall(filter="data")
    sizes = {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1, "vocab_size": 63, "bf16": True}
    drive(argv(**sizes, save="stored", train_iters=4, save_interval=2, lr_decay_iters=4, global_batch_size=2))
    found = [row["lm loss"] for row in rows(Path("stored")) if "lm loss" in row]
    assert found == pytest.approx([4.882648, 4.885889, 4.846995, 4.839111], rel=1e-5)
    stored = yaml.safe_load(Path("stored/config.yaml").read_text())["recipe"]
    assert (stored["dgrad"]["grad_output"]["scale"]["rule"], stored["keep_bf16"]["last_layers"]) == ("floor", 1)
