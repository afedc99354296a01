"""Checks of ``enable_fp8_all_gather``; ``convert_worker.py`` runs them on two processes."""

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import UserError, convert
from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.kernels.cast_fp8 import reference as cast_reference
from megatron_lowprec.linear.backends.hopper_fp8 import dense as hopper_dense
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.backends.resolved import LayerBackends
from megatron_lowprec.linear.fp8_all_gather import enable_fp8_all_gather
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.sharding.coded_shard import CodedShard
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.parsing import load_recipe
from tests.linear.layers import of_layers
from tests.linear.tiny_models import Gpt2Block, LlamaBlock, build, tokens_of
from tests.linear.wrapping import DEVICE, all_ranks, check_in, train, wrapped

CHECKS: dict[str, Callable[[], None]] = {}

OUT, IN = 384, 256  # 192 rows a rank cut blocks of 128
ENTRIES = 2 * OUT * IN

# what a pass gathers of two weights [384, 256] and [256, 384] on two ranks: codes, then scales, in bytes
BYTES = {
    "fp8_current": ENTRIES,
    "fp8_delayed": ENTRIES,
    "fp8_blockwise": ENTRIES,  # scales follow from amaxes that all ranks have
    "mxfp8": ENTRIES + ENTRIES // 32,
    "mxfp8_2d": ENTRIES + ENTRIES // 1024,
    "nvfp4_all": ENTRIES // 2 + ENTRIES // 256,
    "quartet2": ENTRIES // 2 + ENTRIES // 16,  # dgrad quantizes fprop's values again, by draws of each rank
    "fp8_rowwise": ENTRIES + 4 * (2 * max(192, 256) + 2 * max(128, 384)),  # a row's scale in fprop, a column's in dgrad
}
TWO_DIRECTIONS = ("mxfp8", "fp8_rowwise")
"""fprop and dgrad take different codes: in bf16 one set a pass; in fp32 both, fewer bytes than the weight."""

NATIVE = dict.fromkeys(("fprop", "dgrad", "wgrad"), "hopper_fp8")


def batches(steps: int, width: int = IN) -> list[torch.Tensor]:
    """Different ones on each rank."""
    seeds = (step + 100 * dist.get_rank() for step in range(steps))
    return [torch.randn(32, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE) for seed in seeds]


def sharded_mlp(
    recipe: str, codes: bool, dtype: torch.dtype | None, sizes: tuple[int, int] = (IN, OUT), **options: Any
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*sizes, bias=False), nn.GELU(), nn.Linear(*sizes[::-1], bias=False)).to(DEVICE)
    model = convert(model, of_layers(recipe), data_parallel_rank=0)
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype), "reshard_after_forward": True} | options
    fully_shard(model, mesh=all_ranks(), **options)
    if codes:
        enable_fp8_all_gather(model, dtype)
    return model


def gathered_by(run: Callable[[], list[float]]) -> tuple[list[float], list[int]]:
    """Losses, and the bytes of each all-gather."""
    sent: list[int] = []
    gather = DefaultAllGather.__call__

    def counting(self: Any, output_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(output_tensor.nbytes)
        return gather(self, output_tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultAllGather, "__call__", counting)
        return run(), sent


def codes_on_the_wire(recipe: str, dtype: torch.dtype | None) -> None:
    """Losses have the bits of a gather in the compute dtype; a forward and a backward pass gather ``BYTES`` each."""
    plain, sent = gathered_by(lambda: train(sharded_mlp(recipe, False, dtype), batches(4)))
    losses, of_codes = gathered_by(lambda: train(sharded_mlp(recipe, True, dtype), batches(4)))
    assert losses == plain
    assert len(set(losses)) == 4, "training changes no loss"
    assert set(sent) == {ENTRIES * (2 if dtype else 4)}
    both = 1 if dtype or recipe not in TWO_DIRECTIONS else 2
    if recipe == "fp8_rowwise" and both == 2:  # each direction has its own scales' size
        assert of_codes == [2 * ENTRIES + 4 * (2 * (192 + 256) + 2 * (128 + 384))] * 8
    else:
        assert of_codes == [both * BYTES[recipe]] * 8


def codes_on_the_wire_while_the_device_lags(recipe: str) -> None:
    """The same bits where FSDP2's stream, which quantizes, runs ahead of the passes: each keeps what it reads.

    Two recipes keep a tensor's scale beside the codes; the others keep none.
    """
    losses = []
    for codes in (False, True):
        model = sharded_mlp(recipe, codes, torch.bfloat16)
        for module in model.modules() if DEVICE == "cuda" else ():
            module.register_forward_pre_hook(lambda *_: torch.cuda._sleep(20_000_000))
        losses.append(train(model, batches(4)))
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4, "training changes no loss"


def squares_share_directions_but_for_sums() -> None:
    """Codes of square blocks are sent once, unless a choice sums errors, whose order is that of the direction."""
    for recipe, sent in (("nvfp4_all", ("fprop",)), ("nvfp4_four_over_six", ("fprop", "dgrad"))):
        weight: Any = sharded_mlp(recipe, False, torch.bfloat16)[0]
        shard = CodedShard("0", weight, torch.bfloat16)
        assert shard.directions == (sent, sent)
        assert shard.bytes == len(sent) * (OUT // 2 * IN // 2 + OUT // 2 * IN // 256)


def delayed_inputs_of_a_current_weight() -> None:
    """The first step compares the weight with that of other passes by its norm, which codes do not have."""
    changed = (
        f"{gemm}.weight.{field}" for gemm in ("fprop", "dgrad") for field in ("granularity=row", "scaling=current")
    )
    recipe, losses = load_recipe("fp8_delayed", list(changed)), []
    for codes in (False, True):
        torch.manual_seed(0)
        model = convert(nn.Sequential(nn.Linear(64, 64)), recipe, data_parallel_rank=0)
        fully_shard(model, mesh=all_ranks())
        if codes:
            enable_fp8_all_gather(model)
        losses.append(train(model, batches(3, 64)))
    assert losses[0] == losses[1]


def native_casts_send_the_same_bytes(recipe: str) -> None:
    """The casts of a GPU's backend, by their reference, and operands that are those of the whole weight."""
    weight = sharded_mlp(recipe, False, torch.bfloat16)[0]
    whole, shard = weight.weight.full_tensor().bfloat16(), CodedShard("0", weight, torch.bfloat16)
    amaxes = shard.amaxes(torch.linalg.vector_norm(shard.values(), torch.inf).float().view(1))
    shard.set_amaxes([], [max_over(amax, *groups) for amax, groups in amaxes])
    native = LinearGemms(weight.linear_gemms.recipe, LinearId(1, "0"), 0, AmaxHistory).backends.built("hopper_fp8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_dense, "load", lambda _: cast_reference)
        for backward, gemm in enumerate(("fprop", "dgrad")):
            sent = shard.pack(bool(backward))
            with pytest.MonkeyPatch.context() as on_gpus:
                on_gpus.setattr(LayerBackends, "resolve", lambda self, _: setattr(self, "resolved", self._of(NATIVE)))
                assert torch.equal(shard.pack(bool(backward)), sent)
            both = [torch.empty_like(sent) for _ in range(2)]
            dist.all_gather(both, sent)
            found = shard.receive(torch.cat(both), bool(backward), None).operand(gemm, native)
            rowwise = gemm == "fprop"
            want, _ = native.quantize("weight", whole, RngStep(0, 0), CastRequest(rowwise, not rowwise, False))
            for got, expected in zip(*((each.rowwise() if rowwise else each.columnwise()) for each in (found, want))):
                assert got is not None
                assert expected is not None
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def rows_that_ranks_cannot_halve() -> None:
    """FSDP2 pads 33 rows to 34."""
    for recipe in ("fp8_current", "fp8_delayed"):
        losses = []
        for codes in (False, True):
            model = sharded_mlp(recipe, codes, torch.bfloat16, (64, 33))
            found, sent = gathered_by(lambda model=model: train(model, batches(3, 64)))
            losses.append(found)
        assert losses[0] == losses[1]
        assert set(sent) == {2 * 17 * 64 + 64 * 33}


def weights_survive_a_checkpoint(recipe: str) -> None:
    """State is plain shards: it loads with codes gathered and without, and the losses go on with the same bits."""
    folder = [mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model = sharded_mlp(recipe, True, torch.bfloat16)
    train(model, batches(2))
    dcp.save(get_model_state_dict(model), checkpoint_id=Path(folder[0]))
    expected = train(model, batches(3))
    for codes in (True, False):
        other = sharded_mlp(recipe, codes, torch.bfloat16)
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=Path(folder[0]))
        set_model_state_dict(other, state)
        assert train(other, batches(3)) == expected


def accumulation_frozen_weights_and_evaluation(recipe: str) -> None:
    """Two microbatches a step, a frozen weight and a pass in evaluation: the losses of a bf16 gather."""
    losses: list[list[float]] = []
    for codes in (False, True):
        model: Any = sharded_mlp(recipe, codes, torch.bfloat16)
        model[2].weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([model[0].weight], lr=1e-2)
        losses.append([])
        for step in range(3):
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                x = batches(6)[2 * step + last]
                loss = (model(x).float() - x).square().mean()
                loss.backward()
                losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                losses[-1].append(model(x).float().sum().item())
            model.train()
    assert losses[0] == losses[1]


def one_direction_a_pass() -> None:
    """Where a gather brings the codes of one GEMM, it is refused to keep them for another."""
    why = r"dgrad of \S+ takes other codes of the weight than fprop, for which FSDP2 gathered it last: let it gather"
    model = sharded_mlp("mxfp8", True, torch.bfloat16, reshard_after_forward=False)
    loss = model(batches(1)[0]).sum()
    with pytest.raises(UserError, match=why):
        loss.backward()
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN)), "mxfp8")
    fully_shard(model, mesh=all_ranks(), mp_policy=MixedPrecisionPolicy(torch.bfloat16), reshard_after_forward=True)
    enable_fp8_all_gather(model, torch.bfloat16)
    loss = checkpoint(model, batches(1)[0].requires_grad_(), use_reentrant=False).sum()
    with pytest.raises(UserError, match="and activation recomputation, or leave enable_fp8_all_gather out"):
        loss.backward()


def refusals() -> None:
    with pytest.raises(UserError, match="no converted layer"):
        enable_fp8_all_gather(wrapped("fsdp", build()))
    with pytest.raises(UserError, match=r"weight is not sharded: call fully_shard\(model\)"):
        enable_fp8_all_gather(convert(build(), "fp8_current"))
    for recipe, block, why in (
        ("fp8_mxfp4_rht_sr", LlamaBlock, "dgrad takes the weight after a Hadamard transform"),
        ("mxfp4_rht_sr", LlamaBlock, "fprop takes the weight in the compute dtype"),
        ("fp8_current", Gpt2Block, "stored transposed"),
    ):
        model = wrapped("fsdp", convert(build(block), recipe))
        with pytest.raises(UserError, match=f"can send no weight as codes under recipe {recipe}: {why}"):
            enable_fp8_all_gather(model)
    with pytest.raises(UserError, match="shards cut blocks: dgrad has weight block 1x32, but 48 output features"):
        sharded_mlp("mxfp8", True, torch.bfloat16, (96, 96))
    model = wrapped("fsdp", convert(build(), "fp8_current"))
    enable_fp8_all_gather(model, torch.bfloat16)
    with pytest.raises(UserError, match=r"has param_dtype torch\.bfloat16, but the MixedPrecisionPolicy of"):
        model(tokens_of(0))
    model = wrapped("fsdp, FP8 all-gather", convert(build(), "fp8_current"))
    model(tokens_of(0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(UserError, match="outside of a forward pass of the whole model"):
        model.layers[0](torch.zeros(1, 2, 128))


def others_stay_in_the_compute_dtype() -> None:
    """One weight is sent as codes, another, whose shards cut blocks, in bf16, with its reason in the log."""
    lines: list[str] = []
    handler, logger, sizes = logging.Handler(), logging.getLogger("megatron_lowprec"), (128, 96)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = sharded_mlp("mxfp8", True, torch.bfloat16, sizes)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    losses, sent = gathered_by(lambda: train(model, batches(2, 128)))
    assert losses == train(sharded_mlp("mxfp8", False, torch.bfloat16, sizes), batches(2, 128))
    assert set(sent) == {96 * 128 * 2 + 128 * 96 + 128 * 96 // 32}
    assert any("not gathered as codes, shards cut blocks" in line and line.endswith(": 0") for line in lines)


for recipe in BYTES:
    check_in(CHECKS, codes_on_the_wire, recipe, torch.bfloat16)
for recipe in TWO_DIRECTIONS:
    check_in(CHECKS, codes_on_the_wire, recipe, None)
LAGGING = ("fp8_blockwise", "mxfp8", "nvfp4_all", "quartet2")
for recipe in LAGGING:
    check_in(CHECKS, codes_on_the_wire_while_the_device_lags, recipe)
for recipe in ("fp8_rowwise", "fp8_rowwise_gw_hp"):
    check_in(CHECKS, native_casts_send_the_same_bytes, recipe)
for recipe in ("fp8_delayed", "mxfp8"):
    check_in(CHECKS, weights_survive_a_checkpoint, recipe)
check_in(CHECKS, accumulation_frozen_weights_and_evaluation, "mxfp8")
for function in (
    squares_share_directions_but_for_sums,
    delayed_inputs_of_a_current_weight,
    rows_that_ranks_cannot_halve,
    one_direction_a_pass,
    refusals,
    others_stay_in_the_compute_dtype,
):
    check_in(CHECKS, function)

ON_GPUS = [name for name in CHECKS if name.startswith(("codes_on_the_wire", "rows_that", "weights_", "accumulation_"))]
