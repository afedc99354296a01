"""Checkpoints of FP8 primary weights are those of a run without them, and begin every other use."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lowprec import QuantSpec, UserError, get_recipe
from megatron_lowprec.commands import evaluate, export_hf
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.training.convert.store import read_weights
from tests.training.conftest import Drive, driving
from tests.training.helpers import argv
from tests.training.monitoring.test_bad_numbers import at, spoiling
from tests.training.primary_weights.cases import COMMON, FLAG, RECIPES, by_layer, lm_losses
from tests.training.primary_worker import Digests, looking


def stored(folder: Path, marker: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint whose name holds ``marker``."""
    reader = FileSystemReader(str(folder))
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and marker in name
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_what_a_run_without_the_flag_writes(one: tuple[str, Path, Digests]) -> None:
    recipe, folder, _ = one
    with driving(folder) as call:
        call(argv(save="stored plain", **COMMON | RECIPES[recipe] | {"train_iters": 2}))
    primary, plain = (stored(folder / name / "iter_0000002", "") for name in ("out", "stored plain"))
    described = [{name: (t.shape, t.dtype) for name, t in found.items()} for found in (primary, plain)]
    assert described[0] == described[1]
    main = "optimizer.state.param."
    linears = [name for name in primary if name.startswith("decoder.layers.") and ".linear_" in name]
    weights = [name for name in linears if name.endswith(".weight") and ".amax." not in name]
    assert len(weights) == 4
    for name in weights:
        assert torch.equal(primary[name], primary[main + name].bfloat16()), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_flag_may_come_and_go(one: tuple[str, Path, Digests]) -> None:
    recipe, folder, digests = one
    half = folder / "half"
    shutil.copytree(folder / "out" / "iter_0000002", half / "iter_0000002")
    (half / "latest_checkpointed_iteration.txt").write_text("2\n")
    with driving(folder) as call:
        call(argv(save="without", load="half", save_interval=3, **COMMON, **RECIPES[recipe]))
    assert lm_losses(folder / "without") == pytest.approx(lm_losses(folder / "out")[2:], rel=1e-3)
    again = folder / "again"
    shutil.copytree(folder / "without" / "iter_0000003", again / "iter_0000003")
    (again / "latest_checkpointed_iteration.txt").write_text("3\n")
    with driving(folder) as call, looking() as found:
        call(argv(save="with", load="again", no_save=True, **COMMON, **FLAG, **RECIPES[recipe]))
    # looked at: a new model, what was loaded, and a step
    assert len(found) == 3
    assert lm_losses(folder / "with") == pytest.approx(lm_losses(folder / "without")[1:], rel=1e-3)
    # nothing is lost on the way: after a step that is skipped, codes are what they were
    with driving(folder) as call, pytest.MonkeyPatch.context() as monkeypatch:
        spoiling(monkeypatch, "wgrad", at(2, "mlp.linear_fc1", step=2, microbatch=0))
        with pytest.raises(UserError, match="the last iteration was skipped"):
            call(argv(save="through", load="half", **COMMON | RECIPES[recipe] | {"train_iters": 3}))
    with driving(folder) as call, looking() as found:
        call(argv(save="end", load="through", no_save=True, **COMMON, **FLAG, **RECIPES[recipe]))
    assert found[1] == digests[2]


def expected_digest(weight: torch.Tensor, spec: QuantSpec) -> str:
    """Of a whole weight under its own current scale."""
    made = Fp8Weight.of(weight, spec)
    return hashlib.sha256(made.codes.numpy().tobytes() + made.decode_scale.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.slow
def test_weights_alone_begin_a_fine_tuning(one: tuple[str, Path, Digests]) -> None:
    recipe, folder, _ = one
    with driving(folder) as call, looking() as found:
        options = COMMON | FLAG | RECIPES[recipe] | {"recipe": "fp8_current", "train_iters": 1}
        call(argv(save="tuned", load="out", finetune=True, no_save=True, **options))
    spec, weights = get_recipe("fp8_current").fprop.weight, read_weights(folder / "out" / "iter_0000004")
    assert spec is not None
    assert by_layer(found[1]) == {name: expected_digest(weights[name], spec) for name in by_layer(found[1])}


def test_histories_that_a_checkpoint_lacks_are_filled(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="bf16", **COMMON | {"train_iters": 2}))
    common = COMMON | {"load": "bf16", "recipe": "fp8_delayed", "no_save": True}
    drive(argv(save="plain", **common))
    with looking() as found:
        drive(argv(save="primary", **common, **FLAG))
    assert "histories filled by 3 passes" in capsys.readouterr().out
    # a new model, what was loaded, after each pass, and two steps
    assert len(found) == 1 + 1 + 3 + 2
    assert found[2] != found[1]  # at scale 1
    assert found[2] == found[3] == found[4]
    assert lm_losses(Path("primary")) == pytest.approx(lm_losses(Path("plain")), rel=1e-3)


@pytest.mark.slow
def test_it_is_evaluated_and_exported(one: tuple[str, Path, Digests], monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder, _ = one
    monkeypatch.chdir(folder)
    Path("text.jsonl").write_text(json.dumps({"text": " ".join(str(i * i % 251) for i in range(200))}) + "\n")
    with driving(folder):
        flags = ["--load", "out", "--data-path", "text.jsonl", "--split", "0,1,0", "--data-cache-path", "cache"]
        assert evaluate.main([*flags, "--out", "found.json"]) == 0
    (scored,) = json.loads(Path("found.json").read_text())["data"].values()
    assert 4 < scored["loss"] < 7
    assert export_hf.main(["--load", "out", "--out", "hf"]) == 0
    weights = read_weights(folder / "out" / "iter_0000004")
    exported = load_file("hf/model.safetensors")["transformer.h.1.mlp.c_fc.weight"]
    assert torch.equal(exported, weights["decoder.layers.1.mlp.linear_fc1.weight"].t())
