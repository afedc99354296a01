"""A checkpoint of another model, tokenizer or optimizer is refused by the option that differs."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.checkpoint.resume import Saved, check_model, check_optimizer
from megatron_lowprec.training.config.options import Config
from tests.refusal import refused
from tests.training.checkpoint.conftest import COMMON, newest
from tests.training.checkpoint.forms import change
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses

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


def test_a_vocabulary_that_does_not_divide_is_told_of_a_way_out() -> None:
    saved = Saved(Path("there"), {"options": asdict(Config()), "padded_vocab_size": 203})
    check_model(saved, Config(), 203)
    with pytest.raises(UserError, match=r"203 rows, not divisible by --tensor-model-parallel-size 2: write it again"):
        check_model(saved, Config(tensor_model_parallel_size=2), 204)
    with pytest.raises(UserError, match=r"another model: padded vocabulary 256 \(checkpoint: 203\)"):
        check_model(saved, Config(), 256)


def test_only_learned_positions_fix_their_number() -> None:
    for kind in ("rope", "learned_absolute"):
        then = Config(position_embedding_type=kind, max_position_embeddings=32)
        saved = Saved(Path("there"), {"options": asdict(then), "padded_vocab_size": 256})
        longer = Config(position_embedding_type=kind, max_position_embeddings=64)
        if kind == "rope":
            check_model(saved, longer, 256)
            continue
        with pytest.raises(UserError, match=r"--max-position-embeddings 64 \(checkpoint: 32\)"):
            check_model(saved, longer, 256)


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
        match=rf"size {before}, and this run has {now}:.*-model-parallel-size {advice} --load \S+ --no-load-optim",
    ):
        check_optimizer(saved, config)
