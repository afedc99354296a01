"""Checks of converted models under ``parallelize_module``; ``convert_worker.py`` runs them on two processes."""

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from megatron_lowprec import UserError, convert
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.backends.hopper_fp8.dense import HopperFp8Gemms
from megatron_lowprec.linear.backends.protocol import GemmBackend, gemm_operands
from megatron_lowprec.linear.linear_id import DIMS
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.linear.layers import NAMES, of_layers
from tests.linear.tiny_models import TinyModel, build, tokens_of
from tests.linear.wrapping import DEVICE, all_ranks, check_in, own_group

COLUMN = ("q_proj", "k_proj", "v_proj", "mlp.gate_proj", "mlp.up_proj")
PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    **dict.fromkeys(("layers.*.input_norm", "layers.*.norm", "norm"), SequenceParallel()),
    **{f"layers.*.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in COLUMN},
    **{f"layers.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("o_proj", "mlp.down_proj")},
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}
"""Of ``TinyModel``, with sequence parallelism; the head's logits are for ``loss_parallel``."""

ROUNDING = 1e-13
"""Relative, of a loss in fp64 from up to 1e3 sums whose order differs; another code changes it by 1e-7 or more."""

CHECKS: dict[str, Callable[[], None]] = {}


def in_fp64(recipe: str, recompute: str = "", **options: Any) -> TinyModel:
    """A converted model whose products are summed in fp64, where the order over ranks hardly matters."""
    return convert(build(recompute=recompute), recipe, dtype=torch.float32, **options).double()


def of_one_process(recipe: str, **options: Any) -> TinyModel:
    return in_fp64(recipe, data_parallel_rank=0, group=own_group(), **options)


def losses_of(model: nn.Module, batches: list[list[int]]) -> list[float]:
    """Losses of steps, each with the gradients of some batches."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in batches:
        for batch in step:
            with loss_parallel():
                loss = model(tokens_of(batch))
                (loss / len(step)).backward()
            losses.append(total(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def total(loss: torch.Tensor) -> float:
    """A loss that may be a DTensor."""
    loss = loss.detach()
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def assert_close(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == len(expected)
    assert all(math.isclose(found, want, rel_tol=ROUNDING) for found, want in zip(losses, expected, strict=True)), (
        losses,
        expected,
    )


# ---- operands
def operands_of(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[tuple[str, str], tuple[Any, Any, Any]]:
    """Data, scale and tensor scale of each GEMM's operands in the second step of a layer."""
    found: dict[tuple[str, str], tuple[Any, Any, Any]] = {}

    def spy_on(backend: type[GemmBackend]) -> Callable[..., torch.Tensor]:
        product = backend.gemm

        def spy(self: GemmBackend, name: str, a: QuantizedTensor, b: QuantizedTensor, *rest: Any, **kwargs: Any) -> Any:
            first, second = GEMM_OPERANDS[name]
            data, scale, other, other_scale = gemm_operands(name, a, b)
            above = a.columnwise_tensor_scale if name == "wgrad" else a.rowwise_tensor_scale
            other_above = b.rowwise_tensor_scale if name == "fprop" else b.columnwise_tensor_scale
            found[name, first], found[name, second] = (data, scale, above), (other, other_scale, other_above)
            return product(self, name, a, b, *rest, **kwargs)

        return spy

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with pytest.MonkeyPatch.context() as patch:
        for backend in (EmulatedGemms, HopperFp8Gemms):
            patch.setattr(backend, "gemm", spy_on(backend))
        for _ in range(2):  # delayed scales of the second step are of recorded amaxes
            found.clear()
            taken = x.clone().requires_grad_()
            (layer(taken) * dy).sum().backward()
            optimizer.step()
    return found


def part_of(whole: torch.Tensor, dims: str, split: str) -> torch.Tensor:
    """This rank's part of an operand, or of its scales: one scale along a dimension is that of all ranks."""
    if split not in dims or whole.shape[dims.index(split)] == 1:
        return whole
    return whole.chunk(dist.get_world_size(), dims.index(split))[dist.get_rank()]


def shards_have_the_operands_of_one_process(recipe: str, split: str) -> None:
    """Elements, scales and scales of tensors of all three GEMMs: equal bits, with all amaxes and draws."""
    drawn = (torch.randn(48, 256, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    x, dy = (each.to(DEVICE, torch.bfloat16) for each in drawn)
    x[0, 3], dy[5, 250] = 9.0, 7.0  # the amaxes are one rank's
    torch.manual_seed(0)
    weight, bias = torch.randn(256, 256).bfloat16(), torch.randn(256).bfloat16()

    def built(**options: Any) -> nn.Module:
        layer = nn.Sequential(nn.Linear(256, 256, dtype=torch.bfloat16))
        layer[0].load_state_dict({"weight": weight, "bias": bias})
        return convert(layer.to(DEVICE), of_layers(recipe), skip_slower=False, **options)

    one = built(data_parallel_rank=0, group=own_group())
    # without arguments the data-parallel rank follows from the mesh
    sharded = parallelize_module(
        built(),
        all_ranks(),
        {
            "0": ColwiseParallel(output_layouts=Replicate())
            if split == "O"
            else RowwiseParallel(input_layouts=Replicate())
        },
    )
    expected, found = operands_of(one, x, dy), operands_of(sharded, x, dy)
    assert found.keys() == expected.keys() == DIMS.keys()
    for operand, dims in DIMS.items():
        for got, want in zip(found[operand], expected[operand], strict=True):
            assert (got is None) == (want is None), operand
            if want is not None:
                bits = [each.contiguous().view(torch.uint8) for each in (got, part_of(want, dims, split))]
                assert torch.equal(*bits), operand
    if one[0].linear_gemms.histories:
        for tensor, history in vars(one[0].amax).items():
            assert torch.equal(getattr(sharded[0].amax, tensor), history), tensor


# ---- models
def sequence_parallel_model(recipe: str, recompute: str = "") -> None:
    """Steps with sequence and loss parallelism: the losses of one process, but for the order of fp64 sums."""
    batches = [[step] for step in range(3)]
    expected = losses_of(of_one_process(recipe), batches)
    model = in_fp64(recipe, recompute)
    assert_close(losses_of(parallelize_module(model, all_ranks(), PLAN), batches), expected)


def prepared_modules() -> None:
    """``PrepareModuleInput`` gathers tokens once for two layers; ``PrepareModuleOutput`` splits them again."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    def built(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        options = {"dtype": torch.float32, "filter": lambda *_: True} | options
        return convert(Gated(), "fp8_current", **options).double()

    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1)).double()
    mesh, model = all_ranks(), built()
    columns = {name: ColwiseParallel(use_local_output=False) for name in ("gate", "up")}
    parallelize_module(model, mesh, {**columns, "down": RowwiseParallel(use_local_output=False)})
    tokens = {"input_layouts": (Shard(0),), "desired_input_layouts": (Replicate(),)}
    parallelize_module(model, mesh, PrepareModuleInput(**tokens))
    parallelize_module(model, mesh, PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)))
    y, own = built(data_parallel_rank=0, group=own_group())(x), x.chunk(2)[dist.get_rank()]
    torch.testing.assert_close(model(own), y.chunk(2)[dist.get_rank()], rtol=ROUNDING, atol=ROUNDING)


def state_survives_a_checkpoint(recipe: str) -> None:
    """By torch.distributed.checkpoint into another tensor-parallel model, losses keep their bits; into FSDP2, state."""
    folder = [mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model = parallelize_module(in_fp64(recipe), all_ranks(), PLAN)
    losses_of(model, [[0]])
    dcp.save(get_model_state_dict(model), checkpoint_id=Path(folder[0]))
    full = deepcopy(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    copied = deepcopy(model)
    expected = losses_of(model, [[2]])
    assert losses_of(copied, [[2]]) == expected

    def loaded(model: nn.Module) -> nn.Module:
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=Path(folder[0]))
        set_model_state_dict(model, state)
        return model

    other = convert(TinyModel(), recipe, dtype=torch.float32).double()
    assert losses_of(loaded(parallelize_module(other, all_ranks(), PLAN)), [[2]]) == expected
    sharded = loaded(fully_shard(convert(TinyModel(), recipe, dtype=torch.float32).double(), mesh=all_ranks()))
    again = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:  # the full state is rank 0's
        assert again.keys() == full.keys()
        assert [name for name in full if not torch.equal(again[name], full[name])] == []
        assert {"layers.0.q_proj.amax.weight", "layers.0.q_proj.draws"} <= full.keys()


def replicated_layer() -> None:
    """A replicated weight computes the whole layer on each rank."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    layers = []
    for replicated in (False, True):
        torch.manual_seed(0)
        layer = convert(nn.Sequential(nn.Linear(64, 64)), "mxfp4_rht_sr", data_parallel_rank=0, filter=lambda *_: True)
        given = x
        if replicated:
            layer = distribute_module(layer, all_ranks())
            given = distribute_tensor(x, all_ranks(), [Replicate()])
        layer(given).sum().backward()
        layers.append(layer[0].weight.grad)
    assert torch.equal(layers[0], layers[1].to_local())


def refusals() -> None:
    mesh, x = all_ranks(), torch.randn(16, 128)

    def sharded(style: Any, recipe: Any = "mxfp8", sizes: tuple[int, int] = (128, 128), **options: Any) -> nn.Module:
        model = convert(nn.Sequential(nn.Linear(*sizes)), recipe, filter=lambda *_: True, **options)
        return parallelize_module(model, mesh, {"0": style})

    whole = convert(nn.Sequential(nn.Linear(128, 128)), "mxfp8")
    replicated = distribute_module(convert(nn.Sequential(nn.Linear(128, 128)), "mxfp8"), mesh)
    odd = RowwiseParallel(input_layouts=Replicate())
    for model, given, why in (
        (
            sharded(odd, sizes=(96, 128)),
            x[:, :96],
            "over 2 tensor-parallel ranks, and under recipe mxfp8 fprop",
        ),
        (
            sharded(ColwiseParallel(), "fp8_current", (128, 33)),
            x,
            "do not divide its 33 features: keep the layer",
        ),
        (sharded(ColwiseParallel())[0].forward, x, "input is a plain tensor: let parallelize_module prepare it"),
        (whole, distribute_tensor(x, mesh, [Replicate()]), "its weight is a plain tensor: add the layer to the plan"),
        (replicated, distribute_tensor(x, mesh, [Shard(0)]), "has a replicated weight and an input placed as"),
    ):
        with pytest.raises(UserError, match=why):
            model(given)
    moving = load_recipe("fp8_delayed", [f"{gemm}.{operand}.history_update=microbatch" for gemm, operand in DIMS])
    model = sharded(ColwiseParallel(), moving, group=own_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).sum().backward()
    with pytest.raises(UserError, match="history_update=microbatch is not reduced"):
        optimizer.step()


for recipe in NAMES:
    if recipe != "bf16":
        for split in ("O", "I"):
            check_in(CHECKS, shards_have_the_operands_of_one_process, recipe, split)
for recipe in ("fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp4_rht_sr", "nvfp4_all"):
    check_in(CHECKS, sequence_parallel_model, recipe)
check_in(CHECKS, sequence_parallel_model, "fp8_mxfp4_rht_sr", "reentrant")
check_in(CHECKS, sequence_parallel_model, "fp8_delayed", "not reentrant")
check_in(CHECKS, prepared_modules)
check_in(CHECKS, state_survives_a_checkpoint, "fp8_mxfp4_rht_sr")
check_in(CHECKS, replicated_layer)
check_in(CHECKS, refusals)

KINDS = ("fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4_rht_sr", "nvfp4_all", "quartet2")
WEEKLY = {
    # recipes with the scales of others, and whole models whose layers others keep
    *(name for name in CHECKS if name.startswith("shards_") and name.split("-")[1] not in KINDS),
    *(name for name in CHECKS if name.startswith("sequence_parallel_model-")),  # one runs in matrix_checks.py
}

# whose operands are not padded; native, and by the MX kernel
ON_GPUS = [
    f"shards_have_the_operands_of_one_process-{recipe}-{split}"
    for recipe in ("fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8", "mxfp4_rht_sr", "quartet2")
    for split in ("O", "I")
]
