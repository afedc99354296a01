"""The update in few launches: against float64, against Megatron-core's own, and counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import fp8_utils, parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from megatron_lowprec.kernels.partial_cast.reference import Shard
from megatron_lowprec.mcore.optim import fp8_param_gather, fused_adamw, spec_optimizer
from megatron_lowprec.mcore.optim import optimizer_step as optimizer_step_module
from megatron_lowprec.mcore.optim.fp8_param_gather import quantize_main_weights
from megatron_lowprec.mcore.optim.fused_adamw import FusedAdamW
from megatron_lowprec.mcore.optim.optimizer_step import copy_weights_at_once, grad_norm, optimizer_step
from megatron_lowprec.mcore.pending_numbers import PendingNumbers
from megatron_lowprec.quantization import primary_weight
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.training import model, schedule
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.model import Trainer
from tests.environment import PLACE_IN_LAUNCH
from tests.training.helpers import argv
from tools.bench.step_worker import _updates

Build = Callable[..., Trainer]
KINDS: list[dict[str, Any]] = [
    {"bf16": True},
    {"bf16": True, "use_distributed_optimizer": True},
    {"bf16": True, "grad_reduce_in_bf16": True},
    {"use_distributed_optimizer": True},
    {},
    {"bf16": True, "num_experts": 2, "disable_bias_linear": True},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "fp32")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Trainers of a world of one process, as the driver makes them; gradients are random, some of them large."""
    for name in PLACE_IN_LAUNCH:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()

    def make(scale: float = 1.0, recipe: str = "bf16", **options: Any) -> Trainer:
        ranks = startup.prepare_environment()
        config, _, _ = parse(argv(**options))
        config = resolve_run(resolve_model(config), 1, gpus=False)
        if not dist.is_initialized():
            startup.initialize(config, ranks)
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        trainer = model.build(
            config,
            get_recipe(recipe),
            schedule.plan(config, config.steps.global_batch_size, config.steps.samples)[0],
            256,
        )
        generator = torch.Generator().manual_seed(3)
        for chunk in trainer.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                noise = torch.randn(buffer.grad_data.shape, generator=generator)
                buffer.grad_data.copy_(noise * scale * torch.exp2(4 * noise.roll(1)))
        return trainer

    yield make
    torch.set_num_threads(threads)
    if dist.is_initialized():
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for chunk in trainer.chunks for weight in chunk.parameters()]


def main_weights(trainer: Trainer) -> list[torch.Tensor]:
    return [getattr(weight, "main_param", weight) for chunk in trainer.chunks for weight in chunk.parameters()]


def main_grads(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.main_grad for chunk in trainer.chunks for weight in chunk.parameters()]


@kinds
def test_the_norm_is_that_of_all_gradients(build: Build, kind: dict[str, Any]) -> None:
    trainer = build(**kind)
    trainer.optimizer.prepare_grads()
    exact = math.sqrt(sum(float(grad.double().square().sum()) for grad in main_grads(trainer)))
    norm = grad_norm(trainer.optimizer)
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    assert float(norm) == pytest.approx(trainer.optimizer.get_grad_norm(), rel=1e-6)


@kinds
@pytest.mark.parametrize("scale", [1e-5, 1.0], ids=["small", "clipped"])
def test_one_update_is_megatron_s(build: Build, kind: dict[str, Any], scale: float) -> None:
    trainer, stock = build(scale, lr_warmup_iters=0, **kind), build(scale, lr_warmup_iters=0, **kind)
    for part in stock.optimizer.chained_optimizers:
        vars(part).pop("_copy_main_params_to_model_params", None)
    before = weights(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(stock), strict=True))
    for _ in range(2):  # moments and step count are right, too
        updated, norm, zeros = optimizer_step(trainer.optimizer)
        stock_updated, stock_norm, _ = stock.optimizer.step()
        assert (updated, stock_updated, zeros) == (True, True, None)
        assert norm == pytest.approx(stock_norm, rel=1e-6)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    for mine, theirs in zip(main_weights(trainer), main_weights(stock), strict=True):
        # the two norms may differ in their last bit
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("distributed", [False, True])
def test_model_weights_are_the_main_weights_rounded(build: Build, distributed: bool) -> None:
    trainer = build(bf16=True, use_distributed_optimizer=distributed or None)
    optimizer_step(trainer.optimizer)
    for chunk in trainer.chunks:
        for weight in chunk.parameters():
            assert torch.equal(weight.detach().view(-1), weight.main_param.bfloat16().view(-1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(build: Build, bad: float) -> None:
    trainer = build(bf16=True)
    before = weights(trainer)
    updated, norm, _ = optimizer_step(trainer.optimizer, torch.tensor(bad))
    assert not updated
    assert norm is not None
    assert math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert optimizer_step(trainer.optimizer, torch.tensor(1.0))[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(build: Build, bad: float) -> None:
    trainer = build(bf16=True)
    before = weights(trainer)
    main_grads(trainer)[3].view(-1)[5] = bad
    updated, norm, _ = optimizer_step(trainer.optimizer)
    assert not updated
    assert norm is not None
    assert not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    inner = trainer.optimizer.chained_optimizers[0].optimizer
    assert not any(state for state in inner.state.values())


def fuse(trainer: Trainer) -> Trainer:
    """The update of a GPU, by the reference of its kernel."""
    for part in trainer.optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            part.fused_adamw = FusedAdamW(part)
    return trainer


@kinds
@pytest.mark.parametrize("scale", [1e-5, 1.0], ids=["small", "clipped"])
def test_the_fused_update_is_torch_s(build: Build, kind: dict[str, Any], scale: float) -> None:
    fused, plain = fuse(build(scale, lr_warmup_iters=0, **kind)), build(scale, lr_warmup_iters=0, **kind)
    grads = [grad.clone() for grad in main_grads(fused)]
    for _ in range(3):
        assert optimizer_step(fused.optimizer) == optimizer_step(plain.optimizer)
        for mine, theirs in zip(main_weights(fused), main_weights(plain), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
        for grad, start in zip(main_grads(plain), grads, strict=True):  # clipping has scaled it, the fused update not
            grad.copy_(start)
    assert all(torch.equal(a, b) for a, b in zip(grads, main_grads(fused), strict=True))
    for one, other in zip(fused.optimizer.chained_optimizers, plain.optimizer.chained_optimizers, strict=True):
        for mine, theirs in zip(states(one), states(other), strict=True):
            assert mine.keys() == theirs.keys()
            assert float(mine["step"]) == float(theirs["step"]) == 3
    if kind.get("bf16"):
        for chunk in fused.chunks:
            for weight in chunk.parameters():
                if hasattr(weight, "main_param"):
                    assert torch.equal(weight.detach().view(-1), weight.main_param.bfloat16().view(-1))


def states(part: Any) -> list[dict[str, torch.Tensor]]:
    return [part.optimizer.state[main] for group in part.optimizer.param_groups for main in group["params"]]


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_fused_update_of_what_is_not_finite_is_skipped(build: Build, bad: str) -> None:
    trainer = fuse(build(bf16=True, use_distributed_optimizer=True))
    assert optimizer_step(trainer.optimizer)[0]
    before = weights(trainer), [weight.clone() for weight in main_weights(trainer)]
    if bad == "gradient":
        main_grads(trainer)[3].view(-1)[5] = math.inf
    loss = torch.tensor(math.nan if bad == "loss" else 1.0)
    assert not optimizer_step(trainer.optimizer, loss)[0]
    after = weights(trainer), main_weights(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before[0] + before[1], after[0] + after[1], strict=True))
    main_grads(trainer)[3].zero_()
    assert optimizer_step(trainer.optimizer, torch.tensor(1.0))[0]
    (part,) = trainer.optimizer.chained_optimizers
    assert {float(state["step"]) for state in states(part)} == {2.0}
    assert not any(torch.equal(a, b) for a, b in zip(before[0], weights(trainer), strict=True))


def test_the_fused_update_reads_a_loaded_step_count(build: Build) -> None:
    """Bias corrections follow torch's state, replaced or written in place."""
    fused, plain = fuse(build(bf16=True, lr_warmup_iters=0)), build(bf16=True, lr_warmup_iters=0)
    optimizer_step(fused.optimizer)
    optimizer_step(plain.optimizer)
    for replaced in (False, True):
        for trainer in (fused, plain):
            for state in states(trainer.optimizer.chained_optimizers[0]):
                if replaced:
                    state["step"] = torch.tensor(40.0)
                else:
                    state["step"].fill_(20.0)
            optimizer_step(trainer.optimizer)
        for mine, theirs in zip(main_weights(fused), main_weights(plain), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)


def test_megatron_s_own_step_updates_by_the_fused_kernel(build: Build) -> None:
    fused, plain = fuse(build(bf16=True, lr_warmup_iters=0)), build(bf16=True, lr_warmup_iters=0)
    for _ in range(2):
        fused.optimizer.step()
        plain.optimizer.step()
    for mine, theirs in zip(main_weights(fused), main_weights(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@kinds
def test_megatron_lm_s_loop_has_the_driver_s_update(
    build: Build, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    """By ``step`` of the optimizer that it builds, with torch's hooks, which follow the steps."""
    for module in (spec_optimizer, optimizer_step_module):
        monkeypatch.setattr(module, "supports_fused_adamw", lambda part: True)
    fused, driver = build(lr_warmup_iters=0, **kind), fuse(build(lr_warmup_iters=0, **kind))
    spec_optimizer.fuse_update(fused.optimizer)
    stepped = list[Any]()
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    for _ in range(2):
        assert fused.optimizer.step() == optimizer_step(driver.optimizer)
    handle.remove()
    for mine, theirs in zip(weights(fused), weights(driver), strict=True):
        assert torch.equal(mine, theirs)
    for trainer in (fused, driver):
        inner = [part.optimizer for part in trainer.optimizer.chained_optimizers if not part.is_stub_optimizer]
        assert [stepped.count(optimizer) for optimizer in inner] == [2] * len(inner)


def test_the_benchmark_times_megatron_s_own_update(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, launched = fuse(build(bf16=True)), list[int]()
    update = fused_adamw.adam_update_

    class Clock:
        def wall_milliseconds(self, call: Callable[[], object], calls: int) -> list[float]:
            launched.append(0)
            call()
            return [1.0]

    def counted(*arguments: Any) -> None:
        launched[-1] += 1
        update(*arguments)

    monkeypatch.setattr(fused_adamw, "adam_update_", counted)
    _updates(trainer.optimizer, Clock())
    ours, own = launched
    assert ours > 0
    assert own == 0


def test_a_rank_without_shards_has_torch_s_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adamw, "have_triton", lambda: True)
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    inner.param_groups.clear()
    assert not fused_adamw.supports_fused_adamw(SimpleNamespace(optimizer=inner))


def test_zeros_are_counted_if_configured(build: Build) -> None:
    trainer = build(bf16=True, log_num_zeros_in_grad=True)
    main_grads(trainer)[0].zero_()
    assert optimizer_step(trainer.optimizer)[2] == main_grads(trainer)[0].numel()


# what Python calls and nothing runs for
VIEWS = ("view", "detach", "slice", "alias", "to", "empty", "split")


def launches(step: Callable[[], object]) -> tuple[int, int]:
    """(calls of torch's functions that compute, waits for a number) in ``step``, by Python."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    outermost = [e.name for e in profiled.events() if e.cpu_parent is None and e.name.startswith("aten::")]
    return sum(name.removeprefix("aten::") not in VIEWS for name in outermost), outermost.count("aten::item")


@pytest.mark.parametrize("distributed", [False, True])
def test_launches_do_not_grow_with_the_number_of_weights(build: Build, distributed: bool) -> None:
    """A layer has 12 weights; Megatron-core's own step is counted beside it."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for layers in (2, 6):
        trainer = build(bf16=True, use_distributed_optimizer=distributed or None, num_layers=layers)
        optimizer = trainer.optimizer
        optimizer_step(optimizer)  # makes Adam's state
        found["ours", layers] = launches(lambda optimizer=optimizer: optimizer_step(optimizer))  # type: ignore[misc]
        for part in optimizer.chained_optimizers:
            del part._copy_main_params_to_model_params
        found["stock", layers] = launches(optimizer.step)
    assert found["ours", 6] == found["ours", 2], found
    assert found["ours", 6][1] == 0
    computing, waiting = (found["stock", 6][i] - found["stock", 2][i] for i in range(2))
    assert computing >= 4 * 12, found
    assert waiting == 4 * 12, found


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_blockwise"])
def test_casts_of_fp8_weights_do_not_grow_with_their_number(
    build: Build, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Around cast and amaxes of blocks themselves, which references compute one by one and kernels at once."""
    casts: list[int] = []
    for name in ("multi_tensor_cast_", "partial_cast_"):
        monkeypatch.setattr(primary_weight, name, lambda values, *_: casts.append(len(values)))

    def partial_amax(shards: Sequence[Shard], block: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(sum(math.prod(shard.blocks(block)) for shard in shards))

    monkeypatch.setattr(fp8_param_gather, "partial_amax", partial_amax)
    found = []
    for layers in (2, 6):
        trainer = build(
            bf16=True,
            use_distributed_optimizer=True,
            fp8_param_gather=True,
            num_layers=layers,
            recipe=recipe,
            hidden_size=128,
        )
        (part,) = trainer.optimizer.chained_optimizers
        casts.clear()
        found.append(launches(lambda part=part: quantize_main_weights(part, ahead=True)))  # type: ignore[misc]
        assert casts == [4 * layers]
    assert found[0] == found[1]
    assert found[0][1] == 0


def scaled_state(trainer: Trainer) -> list[torch.Tensor]:
    """Weights, codes, scales and step counts under a quantized optimizer state."""
    (part,) = trainer.optimizer.chained_optimizers
    parts = [value.clone() for state in states(part) for value in state.values()]
    return weights(trainer) + parts + [torch.tensor(group.get("step", 0)) for group in part.optimizer.param_groups]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


FP8_LM = {"recipe": "fp8_lm", "use_distributed_optimizer": True, "lr_warmup_iters": 0}


def test_main_weights_follow_weights_that_were_loaded(build: Build) -> None:
    """By Megatron-core's own call behind a checkpoint without optimizer state, as in Megatron-LM."""
    trainer = build(**FP8_LM, bf16=True)
    for weight in weights(trainer):
        weight.mul_(2)
    trainer.optimizer.reload_model_params()
    (part,) = (part for part in trainer.optimizer.chained_optimizers if not part.is_stub_optimizer)
    shards = [shard for group in part.optimizer.param_groups for shard in group["params"]]
    assert any(bool(shard.any()) for shard in shards)
    for shard in shards:
        found = part.optimizer.get_unscaled_state(shard, "master_param")
        torch.testing.assert_close(found, shard.float(), rtol=1e-3, atol=1e-6)  # FP16


def test_a_quantized_state_is_updated_by_clipped_gradients(build: Build) -> None:
    """Its kernels clip, with the bits of gradients that were clipped before."""
    clipped, plain = build(clip_grad=0.5, **FP8_LM), build(clip_grad=0, **FP8_LM)
    starts = [grad.clone() for grad in main_grads(clipped)]
    for _ in range(2):
        updated, norm, _ = optimizer_step(clipped.optimizer)
        assert updated
        assert norm is not None
        assert norm > 0.5
        for grad in main_grads(plain):
            grad.mul_(0.5 / (norm + 1e-6))
        assert optimizer_step(plain.optimizer)[0]
        for grad, start in zip(main_grads(plain), starts, strict=True):
            grad.copy_(start)
    assert all(torch.equal(a, b) for a, b in zip(starts, main_grads(clipped), strict=True))
    pairs = zip(scaled_state(clipped), scaled_state(plain), strict=True)
    assert all(torch.equal(bits(a), bits(b)) for a, b in pairs)


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_quantized_state_skips_what_is_not_finite(build: Build, bad: str) -> None:
    trainer = build(**FP8_LM)
    assert optimizer_step(trainer.optimizer)[0]
    before = scaled_state(trainer)
    if bad == "gradient":
        main_grads(trainer)[3].view(-1)[5] = math.inf
    loss = torch.tensor(math.nan if bad == "loss" else 1.0)
    assert not optimizer_step(trainer.optimizer, loss)[0]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, scaled_state(trainer), strict=True))
    main_grads(trainer)[3].zero_()
    assert optimizer_step(trainer.optimizer, torch.tensor(1.0))[0]
    (part,) = trainer.optimizer.chained_optimizers
    assert {group["step"] for group in part.optimizer.param_groups} == {2}
    assert {float(state["step"]) for state in states(part)} == {2.0}


def test_a_quantized_update_is_launched_before_its_numbers_are_awaited(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = build(**FP8_LM), list[bool]()
    (part,) = trainer.optimizer.chained_optimizers
    wait = PendingNumbers.wait
    monkeypatch.setattr(PendingNumbers, "wait", lambda self: (seen.append(part.optimizer.launched), wait(self))[1])
    optimizer_step(trainer.optimizer)
    assert seen == [True]
    assert not part.optimizer.launched


def test_fp8_lm_moves_every_weight_of_a_model(build: Build) -> None:
    """Norm gains and biases as fp32 AdamW moves them, matrices within 2% on average; each with draws of its own."""
    runs = {}
    for recipe in ("bf16", "fp8_lm"):
        trainer = build(
            recipe=recipe, use_distributed_optimizer=True, lr=1e-4, clip_grad=0, weight_decay=0, lr_warmup_iters=0
        )
        before = weights(trainer)
        generator = torch.Generator().manual_seed(5)
        for grad in main_grads(trainer):  # of one sign
            grad.copy_(torch.exp(torch.randn(grad.shape, generator=generator)))
        for _ in range(30):
            assert optimizer_step(trainer.optimizer)[0]
        runs[recipe] = [after - start for after, start in zip(weights(trainer), before, strict=True)]
    assert len(runs["bf16"]) == 28
    for reference, moved in zip(runs["bf16"], runs["fp8_lm"], strict=True):
        assert float(reference.abs().min()) > 0
        if moved.dim() == 1:
            torch.testing.assert_close(moved, reference, rtol=1e-5, atol=1e-9)
        else:
            assert float(moved.mean()) == pytest.approx(float(reference.mean()), rel=0.02)
    (part,) = trainer.optimizer.chained_optimizers
    places = part.optimizer._places.values()
    keys = [place.stream.key for place in places if not place.keeps_fp32]
    assert len(set(keys)) == len(keys) == 10


def test_copying_at_once_leaves_other_optimizers_alone(build: Build) -> None:
    trainer = build()
    copy_weights_at_once(trainer.optimizer)
    assert "_copy_main_params_to_model_params" not in vars(trainer.optimizer.chained_optimizers[0])


def test_fp8_weights_of_another_library_are_left_to_megatron(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(bf16=True, use_distributed_optimizer=True)
    (part,) = trainer.optimizer.chained_optimizers
    del part._copy_main_params_to_model_params
    monkeypatch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", torch.nn.Parameter)
    copy_weights_at_once(trainer.optimizer)
    assert "_copy_main_params_to_model_params" not in vars(part)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Fp8Weight)
    copy_weights_at_once(trainer.optimizer)
    assert "_copy_main_params_to_model_params" in vars(part)
