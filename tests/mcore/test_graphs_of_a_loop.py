"""CUDA graphs of a loop without calls, by recordings that run again: the losses and gradients of eager layers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lowprec import UserError, get_recipe
from tests.mcore.spec_loop import LAYERS, MICROBATCHES, RECIPES, SEED, Loop, gpt, tracked
from tests.training.rerun_recorder import RerunRecorder, rerun_under_spec

pytestmark = pytest.mark.usefixtures("world")

GRAPHS: dict[str, Any] = {"cuda_graph_impl": "local"}
STEPS = 3  # the second captures, the third only replays


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[RerunRecorder]:
    return rerun_under_spec(monkeypatch)


class ParallelLoop(Loop):
    """With Megatron-core's data parallelism around the model, which accumulates gradients in ``main_grad``."""

    def __init__(self, model: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        super().__init__(model)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(model.config, ddp, model)
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.norms: list[float] = []

    def run(self, **options: Any) -> None:
        self.model.zero_grad_buffer()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.optimizer, "step", self._update)
            super().run(**options)

    def _update(self) -> None:
        self.model.finish_grad_sync()
        for weight in self.weights:
            weight.grad = weight.main_grad
        type(self.optimizer).step(self.optimizer)
        self.norms.append(float(sum(weight.main_grad.double().square().sum() for weight in self.weights)))


def trained(recipe: str, frozen: tuple[str, ...] = (), **options: Any) -> ParallelLoop:
    model = tracked(recipe, **options)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    loop = ParallelLoop(model)
    for _ in range(STEPS):
        loop.run(evaluate=True)
    return loop


@pytest.mark.parametrize(
    ("recipe", "frozen"),
    [
        *((recipe, ()) for recipe in ("bf16", *RECIPES)),
        ("fp8_delayed", ("embedding", "decoder.layers.0")),
        ("fp8_delayed", ("decoder.layers.1",)),
    ],
)
def test_losses_and_gradients_are_those_of_eager_layers(
    recorders: list[RerunRecorder], recipe: str, frozen: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    eager, graphs = trained(recipe, frozen), trained(recipe, frozen, **GRAPHS)
    assert (graphs.losses, graphs.norms) == (eager.losses, eager.norms)
    assert len(set(graphs.norms)) == STEPS
    (recorder,) = recorders
    passes = 2 * LAYERS - ("embedding" in frozen)  # the frozen trunk has no backward pass
    assert len(recorder.replayed) == passes * MICROBATCHES * (STEPS - 1)
    assert f"CUDA graphs: {LAYERS} layers captured, {2 * LAYERS * MICROBATCHES} graphs" in capsys.readouterr().out


def test_a_second_forward_pass_before_the_backward_pass_is_refused(recorders: list[RerunRecorder]) -> None:
    loop = trained("mxfp8", **GRAPHS)
    with pytest.raises(UserError, match="hold the activations of one microbatch, and the next began"):
        (loop.loss(0) + loop.loss(1)).backward()


def test_weights_without_main_gradients_are_refused(recorders: list[RerunRecorder]) -> None:
    with pytest.raises(UserError, match=r"write gradients into the main_grad of weights, .*; wrap the model in it, or"):
        Loop(tracked("mxfp8", **GRAPHS)).run()


def test_a_second_model_is_refused(recorders: list[RerunRecorder]) -> None:
    from megatron_lowprec.mcore.layer_spec import layer_spec

    spec = layer_spec(get_recipe("mxfp8"), seed=SEED)
    first, _ = ParallelLoop(gpt(spec, **GRAPHS)), gpt(spec, **GRAPHS)
    with pytest.raises(UserError, match="hold the layers of one model, and this process has 2"):
        first.run()
