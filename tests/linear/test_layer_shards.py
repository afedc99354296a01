"""Shards of a layer, as tensor parallelism cuts it, hold the codes and scales of the whole."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lowprec import KeepBf16, Recipe, convert, get_recipe
from megatron_lowprec.kernels.cast_fp8 import reference as cast_reference
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear.backends import resolved
from megatron_lowprec.linear.backends.emulated import dense
from megatron_lowprec.linear.backends.hopper_fp8 import dense as hopper_dense
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, LinearId
from megatron_lowprec.linear.sharding.coded_shard import CodedShard
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from tests.linear.layers import LAYER, NAME, NAMES, SEED
from tests.linear.tensor_parallel_checks import KINDS
from tests.weekly import ALIKE, also_weekly


def operands_of(
    monkeypatch: pytest.MonkeyPatch,
    recipe: Recipe,
    place: LinearId,
    tensors: dict[str, torch.Tensor],
    reduce_amax: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor | None]]:
    """Data and scale of each GEMM's operands."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def gemm(a: torch.Tensor, b: torch.Tensor, *, a_scale: Any, b_scale: Any, **_: Any) -> torch.Tensor:
        found.extend(((a, a_scale), (b, b_scale)))
        return a

    with monkeypatch.context() as patch:
        patch.setattr(dense, "gemm", gemm)
        run = LinearGemms(recipe, place, SEED, AmaxHistory, reduce_amax)
        for history, slot in run.histories.values():
            history.in_effect[slot] = 3.0
        run.fprop(tensors["x"], tensors["w"], RngStep(2, 1))
        run.dgrad(tensors["dy"], tensors["w"], RngStep(2, 1))
        run.wgrad(tensors["dy"], tensors["x"], RngStep(2, 1))
    return dict(zip(DIMS, found, strict=True))


CASES = [
    (name, split, gated, ranks)
    for name in NAMES
    for split, gated in (("O", "plain"), ("I", "plain"), ("O", "gated"))
    for ranks in ("2", "4")
]


@pytest.mark.parametrize(
    ("name", "split", "gated", "ranks"),
    # of the others two processes hold shards (tensor_parallel_checks.py), or the recipe has the operands of another
    also_weekly(
        CASES,
        [
            "-".join(case)
            for case in CASES
            if case[3] == "4" and case[0] not in ALIKE and (case[2] == "gated" or case[0] not in KINDS)
        ],
    ),
)
def test_shards_hold_the_codes_and_scales_of_the_whole(
    name: str, split: str, gated: str, ranks: str, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    check_shards(name, split, gated == "gated", int(ranks), monkeypatch, generator)


def check_shards(
    name: str, split: str, gated: bool, ranks: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    recipe, sizes = get_recipe(name), {"T": 70, "I": 512, "O": 1024 if gated else 512}
    dims = {"x": "TI", "w": "OI", "dy": "TO"}
    whole = {n: torch.randn([sizes[d] for d in ds], generator=generator).bfloat16() for n, ds in dims.items()}
    want = operands_of(monkeypatch, recipe, LinearId(LAYER, NAME), whole)
    part = sizes[split] // ranks
    half = sizes[split] // 2

    def indices(rank: int) -> torch.Tensor:
        """Which of the whole's indices a rank holds: a gated layer's two halves are cut each by itself."""
        if not gated:
            return torch.arange(part) + rank * part
        gate = torch.arange(part // 2) + rank * (part // 2)
        return torch.cat((gate, gate + half))

    def shard(rank: int) -> tuple[LinearId, dict[str, torch.Tensor]]:
        cut = {
            n: t.index_select(dims[n].index(split), indices(rank)) if split in dims[n] else t for n, t in whole.items()
        }
        span = ShardSlice(rank * part // 2, part // 2, half - part // 2) if gated else ShardSlice(rank * part)
        return LinearId(LAYER, NAME, spans={split: span}, split=split), cut

    # what each rank would send to the reduction, then the maximum over ranks
    reduced: list[torch.Tensor] = []
    for _ in range(2):  # an operand of source fprop depends on a reduced amax
        sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        for rank in range(ranks):
            known = iter(reduced)
            operands_of(
                monkeypatch,
                recipe,
                *shard(rank),
                lambda amax, log=sent[rank], known=known: (log.append(amax), next(known, amax))[1],
            )
        assert len({len(log) for log in sent}) == 1
        reduced = [torch.stack(amaxes).amax(0) for amaxes in zip(*sent, strict=True)]
    for rank in range(ranks):
        answers = iter(reduced)
        got = operands_of(monkeypatch, recipe, *shard(rank), lambda _, answers=answers: next(answers))
        for (gemm, operand), letters in DIMS.items():
            (mine, my_scale), (full, scale) = got[gemm, operand], want[gemm, operand]
            elements = full
            if split in letters:
                elements = elements.index_select(letters.index(split), indices(rank))
            assert torch.equal(mine, elements), (gemm, operand)
            assert (my_scale is None) == (scale is None)
            if my_scale is not None and scale is not None:
                if split in letters and scale.shape[letters.index(split)] > 1:
                    dim = letters.index(split)
                    tile = sizes[split] // scale.shape[dim]
                    scale = scale.index_select(dim, indices(rank)[::tile] // tile)
                assert torch.equal(my_scale, scale), (gemm, operand)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", "mxfp8"])
def test_amax_is_reduced_exactly_where_a_tile_reaches_over_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    whole = {
        "x": torch.randn(64, 128, generator=generator),
        "w": torch.randn(128, 128, generator=generator),
        "dy": torch.randn(64, 128, generator=generator),
    }
    calls: list[tuple[int, ...]] = []

    def count(amax: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(amax.shape))
        return amax

    expected = {
        # column parallel: w in fprop and dgrad, dy in dgrad and wgrad are cut; rows by their contracted dimension
        ("fp8_current", "O"): [(1, 1)] * 4,
        ("fp8_rowwise", "O"): [(64, 1), (128, 1)],  # dgrad contracts O
        ("fp8_current", "I"): [(1, 1)] * 4,
        ("fp8_rowwise", "I"): [(64, 1), (128, 1)],  # fprop contracts I
    }
    for split in ("O", "I"):
        calls.clear()
        operands_of(monkeypatch, get_recipe(name), LinearId(LAYER, NAME, split=split), whole, count)
        assert calls == expected.get((name, split), [])


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this process is the first; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("out_features", "fprop", "dgrad"),
    [
        # scales of 128x128 blocks have columns in multiples of 4, 1x128 codes have rows in multiples of 128
        (768, {}, {"scale_rule": "amax_pow2"}),
        (384, {"granularity": "1x128"}, {"granularity": "1x128", "source": "fprop"}),
    ],
)
def test_gathered_codes_are_operands_of_a_native_cast(
    out_features: int,
    fprop: dict[str, Any],
    dgrad: dict[str, Any],
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
) -> None:
    """Two ranks with equal shards give the codes and scales, and their layouts, that a cast of the whole gives."""
    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    monkeypatch.setattr(hopper_dense, "load", lambda _: cast_reference)
    recipe: Any = replace(get_recipe("fp8_blockwise"), name="own", keep_bf16=KeepBf16(), rules=())
    recipe = replace(
        recipe,
        fprop=replace(recipe.fprop, weight=replace(recipe.fprop.weight, **fprop)),
        dgrad=replace(recipe.dgrad, weight=replace(recipe.dgrad.weight, **dgrad)),
    )
    part = torch.randn(out_features // 2, 384, generator=generator).bfloat16()
    whole = torch.cat((part, part))
    linear: Any = nn.Linear(384, out_features, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(whole)
    model = convert(nn.Sequential(linear), recipe, skip_slower=False, data_parallel_rank=0)
    sharded: Any = fully_shard(model, mesh=mesh)
    layer = sharded[0]
    shard, backends = CodedShard("0", layer, torch.bfloat16), layer.linear_gemms.backends
    backends.resolve(whole)
    for backward, gemm in enumerate(("fprop", "dgrad")):
        backend = backends.resolved.gemms[gemm]
        sent = shard.pack(bool(backward))
        assert sent.numel() == shard.bytes
        got = shard.receive(torch.cat((sent, sent)), bool(backward), None).operand(gemm, backend)
        assert (got is None) == (gemm == "dgrad" and shard.requantizes)
        if got is None:
            continue
        assert backend.name == "hopper_fp8"
        request = CastRequest(not backward, bool(backward), update_amax=False)
        want, _ = backend.quantize("weight", whole, RngStep(0, 0), request)
        pairs = zip(*((each.columnwise if backward else each.rowwise)() for each in (got, want)), strict=True)
        for mine, cast in pairs:
            assert torch.equal(mine, cast)
            assert mine.stride() == cast.stride()


@pytest.mark.parametrize("grad", [True, False])
def test_kernels_get_no_result_of_a_running_collective(
    grad: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input, weight, bias and gradient of a layer on a mesh, and of one with a plain weight."""
    seen: list[list[Any]] = []
    for name in ("forward", "grad_output"):
        method = getattr(LinearGemms, name)

        def spy(self: LinearGemms, *args: Any, method: Any = method, **options: Any) -> Any:
            seen.append([each for each in args if isinstance(each, torch.Tensor)])
            return method(self, *args, **options)

        monkeypatch.setattr(LinearGemms, name, spy)

    def linear() -> Any:
        model = nn.Sequential(nn.Linear(128, 128)).bfloat16()
        return convert(model, "fp8_current", skip_slower=False, data_parallel_rank=0, filter=lambda *_: True)

    columns = parallelize_module(linear(), mesh, {"0": ColwiseParallel(input_layouts=Shard(0))})
    rows = parallelize_module(linear(), mesh, {"0": RowwiseParallel(output_layouts=Shard(0))})
    plain, gathered = linear(), linear()
    leaves: list[Any] = []
    for name, parameter in list(gathered[0].named_parameters()):
        leaves.append(nn.Parameter(DTensor.from_local(parameter.data.chunk(2)[0], mesh, [Shard(0)])))
        delattr(gathered[0], name)
        setattr(gathered[0], name, leaves[-1].redistribute(placements=[Replicate()], async_op=True))
    with torch.set_grad_enabled(grad):
        x = torch.randn(4, 128).bfloat16().requires_grad_(grad)
        y = DTensor.from_local(plain(rows(columns(plain(x)))), mesh, [Shard(0)])
        y = gathered(y.redistribute(placements=[Replicate()], async_op=True)).to_local()
    if grad:
        y.sum().backward()
        assert x.grad is not None
        assert all(parameter.grad is not None for parameter in leaves)
    assert len(seen) == (10 if grad else 5)
    assert all(type(each).__name__ != "AsyncCollectiveTensor" and each.data_ptr() for call in seen for each in call)
