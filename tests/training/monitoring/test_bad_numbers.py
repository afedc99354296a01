"""Steps whose loss or gradient is not finite: skipped without a trace, traced to their source, and then given up."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.lowprec_linear import LinearGemms
from megatron_lowprec.mcore.layers.norm import Norm
from megatron_lowprec.report.groups import group_runs
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.training import loop
from megatron_lowprec.training.monitoring import bad_numbers
from tests.refusal import refused
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows

# Two microbatches a step; dropout is on.
COMMON: dict[str, Any] = {"save": "out", "recipe": "fp8_delayed", "num_layers": 3, "train_iters": 5}


def spoiling(
    monkeypatch: pytest.MonkeyPatch,
    gemm: str,
    where: Callable[[Any, Any], bool],
    value: float = math.nan,
    operand: int | None = None,
) -> None:
    """Make one entry of a GEMM's product, or of one of its operands, not finite, where ``where(place, moment)``."""
    method = "forward" if gemm == "fprop" else gemm
    compute = getattr(LinearGemms, method)

    def spoiled(self: LinearGemms, first: Any, second: torch.Tensor, *rest: Any, **options: Any) -> Any:
        made = where(self.linear_id, rest[0]) and getattr(self.recipe, gemm).quantized
        if made and operand is not None:
            (first if operand == 0 else second).detach().view(-1)[7] = value
        product = compute(self, first, second, *rest, **options)
        if made and operand is None:
            (product[0] if gemm == "fprop" else product).view(-1)[7] = value
        return product

    monkeypatch.setattr(LinearGemms, method, spoiled)


def at(layer: int, name: str, step: int, microbatch: int) -> Callable[[Any, Any], bool]:
    return lambda place, rng_step: (place.layer, place.name) == (layer, name) and tuple(rng_step) == (step, microbatch)


def around_iterations(monkeypatch: pytest.MonkeyPatch, read: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """What ``read(trainer)`` gives before and after each iteration of runs to come."""
    iterate, found = loop._train_iteration, list[tuple[Any, Any]]()

    def recorded(run: Any, *rest: Any) -> Any:
        before = read(run.trainer)
        row = iterate(run, *rest)
        found.append((before, read(run.trainer)))
        return row

    monkeypatch.setattr(loop, "_train_iteration", recorded)
    return found


def test_the_factor_of_gradients_follows_steps_that_update_alone(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiling(monkeypatch, "fprop", at(2, "mlp.linear_fc1", step=1, microbatch=1))
    factors = around_iterations(monkeypatch, lambda trainer: float(trainer.gradient_factor.mu))
    changes = {"recipe": "fp8_lm", "recipe_override": "gradients.mu=automatic"}
    drive(argv(**COMMON | changes | {"train_iters": 3, "calibrate_amax": True}))
    (first, after), (second, skipped), (third, last) = factors
    assert first == 1.0  # passes that fill histories are no steps
    assert first < after == second == skipped == third < last  # nor is one that looks for a bad number


def test_balancing_biases_follow_steps_that_update_alone(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiling(monkeypatch, "fprop", at(2, "self_attention.linear_proj", step=1, microbatch=1))

    def bias(trainer: Any) -> list[float]:
        (router,) = [m for m in trainer.chunks[0].modules() if getattr(m, "expert_bias", None) is not None]
        return router.expert_bias.tolist()

    biases = around_iterations(monkeypatch, bias)
    experts = {"num_experts": 4, "moe_layer_freq": "[0,0,1]", "moe_router_score_function": "sigmoid"}
    biased = {"moe_router_enable_expert_bias": True, "train_iters": 3, "calibrate_amax": True}
    drive(argv(**COMMON | {"recipe": "fp8_delayed"} | experts | biased))
    (first, after), (second, skipped), (third, last) = biases
    assert first == [0.0] * 4  # passes that fill histories are no steps
    assert first != after == second == skipped == third != last  # nor is one that looks for a bad number


@pytest.mark.parametrize(("gemm", "value"), [("fprop", math.inf), ("dgrad", math.nan), ("wgrad", -math.inf)])
def test_the_gemm_that_a_bad_number_comes_from_is_named(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gemm: str, value: float
) -> None:
    spoiling(monkeypatch, gemm, at(2, "mlp.linear_fc1", step=2, microbatch=1), value)
    drive(argv(**COMMON))
    printed = capsys.readouterr().out
    assert "iteration 3 skipped" in printed
    kind = "1 NaN and 0 Inf" if math.isnan(value) else "0 NaN and 1 Inf"
    what = f"layers.2.mlp.linear_fc1, {gemm}, product of finite operands: {kind}"
    assert f"first of it that is not finite: {what}" in printed
    assert "on rank 0 in microbatch 1" in printed
    row = rows(Path("out"))
    assert [r["skipped iterations"] for r in row] == [0, 0, 1, 1, 1]
    # Weights, moments, histories and random state are what they were: one batch is missing, and nothing else.
    assert all(math.isfinite(r["grad-norm"]) for r in row[3:])


@pytest.mark.parametrize("recipe", ["fp8_lm_o1", "fp8_lm_o3"])
def test_a_bad_gradient_that_is_stored_in_fp8_is_named(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    spoiling(monkeypatch, "wgrad", at(2, "mlp.linear_fc1", step=1, microbatch=1), math.nan)
    drive(argv(**COMMON | {"recipe": recipe, "bf16": True, "train_iters": 3}))
    assert "layers.2.mlp.linear_fc1, wgrad, product of finite operands" in capsys.readouterr().out
    assert [row["skipped iterations"] for row in rows(Path("out"))] == [0, 1, 1]


def test_gradients_that_only_their_reduction_spoils_are_named(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    step = loop.train_step

    def recorded(trainer: Any, *rest: Any) -> Any:
        result = step(trainer, *rest)
        weights = dict(trainer.chunks[0].named_parameters())
        name = next(name for name in weights if name.endswith("layers.1.mlp.linear_fc1.weight"))
        found.append(bad_numbers._reduced_gradients(trainer, 1.0).text)
        weights[name].stored_gradient.codes._decode_scale.fill_(math.nan)
        found.append(bad_numbers._reduced_gradients(trainer, 1.0).text)
        return result

    monkeypatch.setattr(loop, "train_step", recorded)
    drive(argv(**COMMON | {"recipe": "fp8_lm_o2", "train_iters": 1}))
    assert "nothing, when the step was run again" in found[0]
    assert "gradient of" in found[1]
    assert "on rank 0, once reduced: its parts are finite" in found[1]


def test_non_finite_values_outside_gemms_are_named_by_module(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    norm = Norm.__new__

    def inf_behind_the_norm(*args: Any, **options: Any) -> Any:
        made = norm(*args, **options)
        made.register_forward_hook(lambda module, inputs, output: output * math.inf if armed else None)
        return made

    armed: list[int] = []
    step = loop.train_step

    def arm(*args: Any) -> Any:
        armed[:] = [1] if args[3] == 2 else []
        return step(*args)

    monkeypatch.setattr(Norm, "__new__", staticmethod(inf_behind_the_norm))
    monkeypatch.setattr(loop, "train_step", arm)
    drive(argv(**COMMON))
    assert "first of it that is not finite: layers.1.input_layernorm, output" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "what", "size"),
    [("mlp.linear_fc2.weight", "operand weight", "16,384"), ("self_attention.linear_qkv.bias", "bias", "192")],
)
def test_a_bad_weight_is_named(
    drive: Drive,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    what: str,
    size: str,
) -> None:
    step = loop.train_step

    def spoil(trainer: Any, *args: Any) -> Any:
        if args[2] == 1:
            layer = [module for module in trainer.chunks[0].modules() if isinstance(module, TransformerLayer)][2]
            layer.get_parameter(name).data.view(-1)[5] = math.nan
        return step(trainer, *args)

    monkeypatch.setattr(loop, "train_step", spoil)
    with pytest.raises(UserError, match="2 iterations in a row were skipped"):
        drive(argv(**COMMON, max_skipped_steps=2))
    printed = capsys.readouterr().out
    found = f"layers.3.{name.rpartition('.')[0]}, fprop, {what}: 1 NaN and 0 Inf among {size} values"
    assert f"{found}, on rank 0 in microbatch 0" in printed
    assert "iteration 2 skipped (loss nan, gradient norm nan)" in printed


def test_a_skipped_step_leaves_no_trace(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the run that was resumed after it, and the histories are those of a run that knows no such step."""
    spoiling(monkeypatch, "dgrad", at(2, "mlp.linear_fc1", step=2, microbatch=0))
    common = COMMON | {"save_interval": 3, "lr_decay_iters": 10}
    drive(argv(**common))
    shutil.copytree("out/iter_0000003", "half/iter_0000003")
    Path("half/latest_checkpointed_iteration.txt").write_text("3\n")
    drive(argv(**common | {"save": "half"}))
    assert losses(Path("half")) == losses(Path("out"))[3:]
    # Looking for the source draws the same dropout and puts the random state back.
    with monkeypatch.context() as patch:
        patch.setattr(loop, "diagnose", lambda *args: bad_numbers.Diagnosis("not diagnosed"))
        drive(argv(**common | {"save": "blind"}))
    assert losses(Path("blind")) == losses(Path("out"))


def test_too_many_in_a_row_stop_with_a_checkpoint_and_a_report(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        spoiling(patch, "wgrad", lambda place, rng_step: place.name == "mlp.linear_fc2" and rng_step.step in (1, 3, 4))
        with refused(match=r"2 iterations in a row were skipped.*out/bad_numbers\.md"):
            drive(argv(**COMMON | {"train_iters": 9}, max_skipped_steps=2))
    report = Path("out/bad_numbers.md").read_text()
    assert "Stopped at iteration 5: 2 iterations in a row were skipped" in report
    assert "iteration 4 skipped" in report
    assert "iteration 2 skipped" not in report
    # Backward comes from behind: layer 3 is the first of the three.
    assert "layers.3.mlp.linear_fc2, wgrad" in report
    assert "holds weights and moments as they were before the first of these" in report
    assert "--rerun-in-bf16 layers.3.mlp.linear_fc2.wgrad" in report
    assert Path("out/latest_checkpointed_iteration.txt").read_text() == "5\n"
    assert not Path("out/requeue").exists()
    # The weights are the last good ones: the run goes on once the cause is gone.
    drive(argv(**COMMON | {"train_iters": 6}))
    assert math.isfinite(rows(Path("out"))[-1]["grad-norm"])


@pytest.mark.parametrize(("recipe", "advised"), [("bf16", None), ("mxfp4", "layers.N.mlp.linear_fc1.dgrad")])
def test_only_a_quantized_gemm_is_advised_to_run_in_bf16(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, recipe: str, advised: str | None
) -> None:
    """The other is refused: mxfp4's forward pass is in bf16."""
    compute = LinearGemms.forward

    def spoiled(self: LinearGemms, *arguments: Any, **options: Any) -> Any:
        product = compute(self, *arguments, **options)
        product[0].view(-1)[7] = math.nan
        return product

    monkeypatch.setattr(LinearGemms, "forward", spoiled)
    with refused(match=r"1 iterations in a row were skipped"):
        drive(argv(**COMMON | {"recipe": recipe}, max_skipped_steps=1, no_self_test=True))
    report = Path("out/bad_numbers.md").read_text()
    assert "layers.1.self_attention.linear_qkv, fprop, product of finite operands" in report
    assert re.findall("--rerun-in-bf16 (.*)", report) == ([] if advised is None else [advised])
    assert ("The recipe quantizes none: look at data" in report) == (advised is None)


def test_a_run_that_ends_with_skipped_iterations_has_failed(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """So has a start that finds it like that: a sweep that tries again must not call it done."""
    with monkeypatch.context() as patch:
        spoiling(patch, "wgrad", lambda place, rng_step: place.name == "mlp.linear_fc2" and rng_step.step >= 3)
        with refused(match=r"the last 2 iterations were skipped.*out/bad_numbers\.md says"):
            drive(argv(**COMMON, eval_iters=1))
    assert "layers.3.mlp.linear_fc2, wgrad" in Path("out/bad_numbers.md").read_text()
    assert not Path("out/requeue").exists()
    with pytest.raises(UserError, match="the last 2 iterations were skipped"):
        drive(argv(**COMMON, eval_iters=1))
    assert "layers.3.mlp.linear_fc2, wgrad" in Path("out/bad_numbers.md").read_text(), "of the start that skipped them"
    assert not [row for row in rows(Path("out")) if "lm loss validation" in row]
    drive(argv(**COMMON | {"train_iters": 6}))
    assert losses(Path("out"))[-1] != losses(Path("out"))[-2]


@pytest.mark.parametrize("bf16", [None, True], ids=["fp32", "bf16"])
def test_skipped_iterations_are_counted_over_starts(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, bf16: bool | None
) -> None:
    """A job of short parts that is requeued for ever would never come to --max-skipped-steps.

    Its checkpoints hold the moments of an optimizer that has made no update.
    """
    spoiling(monkeypatch, "wgrad", lambda place, rng_step: place.name == "mlp.linear_fc2")
    options = COMMON | {"bf16": bf16, "max_skipped_steps": 3, "exit_interval": 1}
    for _ in range(2):
        drive(argv(**options))
    with pytest.raises(UserError, match="3 iterations in a row were skipped"):
        drive(argv(**options))
    assert "layers.3.mlp.linear_fc2, wgrad" in Path("out/bad_numbers.md").read_text(), "of this start"


@pytest.mark.parametrize("ending", ["last iteration", "exit interval", "SIGTERM", "no save"])
def test_a_run_that_ends_with_weights_that_are_not_finite_has_failed(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """However it ends. A requeued one would come to the same weights again and again."""
    step = loop.train_step

    def spoiling_weights(trainer: Any, *rest: Any) -> Any:
        result = step(trainer, *rest)
        if rest[2] == 2:
            if ending == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            with torch.no_grad():
                next(trainer.chunks[0].parameters()).view(-1)[3] = math.inf
        return result

    monkeypatch.setattr(loop, "train_step", spoiling_weights)
    options = {"exit interval": {"exit_interval": 3}, "SIGTERM": {}}.get(ending, {"train_iters": 3})
    with pytest.raises(UserError, match="after iteration 3 the weights are not finite"):
        drive(argv(**COMMON | options, eval_iters=1, no_save=ending == "no save" or None))
    report = Path("out/bad_numbers.md").read_text()
    assert "Stopped at iteration 3: after iteration 3 the weights are not finite" in report
    assert "No iteration of this start was skipped" in report
    assert not Path("out/requeue").exists()
    assert not Path("out/iter_0000003").exists()
    assert not [row for row in rows(Path("out")) if "lm loss test" in row]
    assert ("no checkpoint of iteration 3" in capsys.readouterr().out) == (ending != "no save")


def test_a_gemm_rerun_in_bf16_isolates_the_cause(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The fault is in the quantized product of one GEMM of one layer.
    spoiling(monkeypatch, "dgrad", lambda place, rng_step: (place.layer, place.name) == (2, "mlp.linear_fc1"))
    for rerun, skipped in (("layers.2.mlp.linear_fc1.dgrad", 0), ("layers.3.*.dgrad", 2), ("*.linear_fc1.?grad", 0)):
        with pytest.raises(UserError, match="the last 2 iterations") if skipped else nullcontext():
            drive(argv(**COMMON | {"train_iters": 2, "rerun_in_bf16": rerun, "no_save": True}))
        assert rows(Path("out"))[-1]["skipped iterations"] == skipped
    assert "--rerun-in-bf16, on this stage: layers.1.mlp.linear_fc1.dgrad, layers.1" in capsys.readouterr().out
    drive(argv(**COMMON | {"rerun_in_bf16": "layers.2.mlp.linear_fc1.dgrad", "explain_recipe": True}))
    explained = capsys.readouterr().out
    assert "layer 2: mlp.linear_fc1 [64 -> 256]\n  fprop  emulated" in explained
    assert "dgrad  not quantized" in explained


@pytest.mark.parametrize(
    ("recipe", "glob", "words"),
    [
        ("fp8_delayed", "layers.2.mlp.linear_fc3.dgrad", "did you mean layers.2.mlp.linear_fc2.dgrad"),
        ("fp8_delayed", "x", "of that name; one is layers.1"),
        ("fp8_rowwise_gw_hp", "layers.2.mlp.linear_fc1.wgrad", "fp8_rowwise_gw_hp quantizes no GEMM of that name"),
        ("fp8_current_bf16_ends", "layers.1.*", "fp8_current_bf16_ends quantizes no GEMM"),
        ("bf16", "*", "bf16 quantizes no GEMM"),
    ],
)
def test_a_gemm_that_is_not_quantized_cannot_be_rerun(drive: Drive, recipe: str, glob: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        drive(argv(**COMMON | {"recipe": recipe, "rerun_in_bf16": glob}))


def test_the_checkpoint_of_a_rerun_is_the_recipe_s(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    common = COMMON | {"lr_decay_iters": 10}
    drive(argv(**common | {"train_iters": 2}))
    drive(argv(**common | {"train_iters": 4}, rerun_in_bf16="layers.2.*"))
    assert "options: --rerun-in-bf16 ['layers.2.*'] (checkpoint: [])" in capsys.readouterr().out
    drive(argv(**common))
    assert len(losses(Path("out"))) == 5
    # The options of its last start are those of a pure run.
    drive(argv(**common | {"save": "pure"}))
    rerun, pure = find_runs(["out", "pure"], 0.5)[0]
    assert rerun.earlier_options == (
        {"until_iteration": 2, "rerun_in_bf16": []},
        {"until_iteration": 4, "rerun_in_bf16": ["layers.2.*"]},
    )
    assert pure.earlier_options == ()
    assert len(group_runs([rerun, pure], "bf16")[0]) == 2
