"""Checks of ``worker.py``: what each rank quantizes is its shard of the quantized whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lowprec import get_recipe, recipes
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.mcore.parallel_layers import SEED, back, block_of, check, config_of, for_each, run_block, whole
from tests.mcore.recorded_gemms import Recorder, multiply

# without sequence parallelism, one recipe of each kind of tile
KINDS = ("fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_blockwise", "mxfp4_rht_sr", "nvfp4_all")
# the layers here have no SwiGLU, and their run no end
PLAIN = tuple(n for n in recipes() if not (get_recipe(n).activations.quantized or get_recipe(n).phases))


@for_each(*((name, True) for name in PLAIN), *((name, False) for name in KINDS))
def shards(name: str, sequence_parallel: bool) -> None:
    """Through real transformer layers: every operand of every GEMM, and the amax in effect after a step."""
    config, recipe, rank = config_of(torch.bfloat16, sequence_parallel), get_recipe(name), dist.get_rank()
    block, runtime = block_of(recipe, config)
    twins: dict[tuple[int, str], LinearGemms] = {}  # the unsharded layers, on each rank by itself
    for step in range(2):
        runtime.begin_step(step)
        runtime.begin_microbatch(step + 3)
        with Recorder() as recorder:
            back(run_block(block, config), config)
        calls = recorder.calls
        assert len(calls) == 2 * 4 * 3
        assert {(place.layer, place.name) for place, *_ in calls} == {
            (layer, linear)
            for layer in (1, 2)
            for linear in (
                "self_attention.linear_qkv",
                "self_attention.linear_proj",
                "mlp.linear_fc1",
                "mlp.linear_fc2",
            )
        }
        for place, gemm, a, b, rng_step, operands in calls:
            assert rng_step == RngStep(step, step + 3)
            split = "O" if place.name.endswith(("qkv", "fc1")) else "I"
            assert place.split == split
            first, second = GEMM_OPERANDS[gemm]
            letters = [DIMS[gemm, operand] for operand in (first, second)]
            full = [whole(m, ds.index(split)) if split in ds else m for m, ds in zip((a, b), letters, strict=True)]
            # what is not cut must be alike on both ranks
            for matrix, ds in zip((a, b), letters, strict=True):
                if split not in ds:
                    other = matrix.clone().contiguous()
                    dist.broadcast(other, 0)
                    assert torch.equal(other, matrix), (place.name, gemm)
            alone, linear = LinearId(place.layer, place.name), recipe.at(Layer(place.layer, place.name, 2))
            twin = twins.setdefault((place.layer, place.name), LinearGemms(linear, alone, SEED, AmaxHistory))
            with Recorder() as unsharded:
                multiply(twin, gemm, *full, rng_step)
            for got, want, ds in zip(operands, unsharded.calls[0][-1], letters, strict=True):
                compare(got, want, ds.find(split), rank, f"{place.name} {gemm} {ds}")
        runtime.end_step()
        for place, *_ in calls:
            twin = twins[place.layer, place.name]
            module = module_of(block, place)
            for operand, (history, slot) in twin.histories.items():
                if step == 0 and history.in_effect[slot] == 0:
                    history.update()
                mine, its_slot = module.linear_gemms.histories[operand]
                if step == 0:
                    assert mine.in_effect[its_slot] == history.in_effect[slot], (place.name, operand)
                    assert mine.in_effect[its_slot] > 0


def module_of(block: Any, place: LinearId) -> Any:
    return block.layers[place.layer - 1].get_submodule(place.name)


def compare(got: Any, want: Any, dim: int, rank: int, where: str) -> None:
    (elements, scale, alpha), (got_elements, got_scale, got_alpha) = want, got
    assert torch.equal(got_alpha, alpha), where
    if dim >= 0:
        elements = elements.chunk(2, dim)[rank]
        if scale is not None and scale.shape[dim] > 1:
            scale = scale.chunk(2, dim)[rank]
    assert torch.equal(got_elements, elements), where
    assert (got_scale is None) == (scale is None), where
    assert scale is None or torch.equal(got_scale, scale), where


@for_each(("fp8_current", False), ("fp8_rowwise", True))
def own_scales(name: str, sequence_parallel: bool) -> None:
    """Without the amax reduction: scales are of each rank's own part, and there is no collective for them."""
    from megatron_lowprec.comm import maximum

    def no_collective(amax: torch.Tensor, *groups: Any) -> torch.Tensor:
        raise AssertionError("an amax was reduced")

    config, recipe = config_of(torch.bfloat16, sequence_parallel), get_recipe(name)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(maximum, "max_over", no_collective)
        block, runtime = block_of(recipe, config, reduce_amax=False)
        assert any("--no-amax-reduce" in line for line in runtime.header())
        runtime.begin_step(0)
        with Recorder() as recorder:
            back(run_block(block, config), config)
    differing = 0
    for place, gemm, a, b, rng_step, operands in recorder.calls:
        alone = LinearGemms(recipe, replace(place, split="", spans={}), SEED, AmaxHistory)
        with Recorder() as own:
            multiply(alone, gemm, a, b, rng_step)
        for got, want in zip(operands, own.calls[0][-1], strict=True):
            compare(got, want, -1, 0, f"{place.name} {gemm}")
            scale = got[1] if got[1] is not None else torch.zeros(1)
            differing += not torch.equal(*whole(scale.reshape(1, -1), 0)) if scale.numel() == 1 else 0
    assert differing or name == "fp8_rowwise"


@check()
def nan_on_one_rank_is_seen_by_all() -> None:
    from megatron_lowprec.comm.maximum import max_over

    mine = torch.tensor([[1.0 + dist.get_rank()], [torch.nan if dist.get_rank() else 3.0]])
    got = max_over(mine, dist.group.WORLD)
    assert got.tolist() == [[2.0], [torch.inf]]
    assert mine[0].item() == 1.0 + dist.get_rank()  # a new tensor
