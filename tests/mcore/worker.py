"""Checks of the Megatron-core layers on two processes; ``test_layers_distributed.py`` starts it once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lowprec import get_recipe, recipes
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear.backends.emulated import dense as emulated
from megatron_lowprec.linear.layer_tensors import GradOutput
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.checks import run_checks

SEED = 99
SEQUENCE, BATCH, HIDDEN, FFN, HEADS = 64, 2, 256, 512, 4  # per rank, all sizes are multiples of 128 but the heads
CHECKS: dict[str, Callable[[], None]] = {}


def check(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = "-".join([function.__name__, *map(str, arguments)])
        CHECKS[name] = lambda: function(*arguments)
        return function

    return register


def for_each(*cases: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        for case in cases:
            check(*case)(function)
        return function

    return register


def config_of(dtype: torch.dtype = torch.float32, sequence_parallel: bool = False, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        **more,
    )


def whole(shard: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(shard) for _ in range(2)]
    dist.all_gather(parts, shard.contiguous())
    return torch.cat(parts, dim)


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- recipe bf16 is stock Megatron-core
def build_linear(kind: str, ours: bool, config: Any, skip_bias_add: bool) -> torch.nn.Module:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear, LowPrecRowParallelLinear

    model_parallel_cuda_manual_seed(5)
    options = {"config": config, "init_method": torch.nn.init.normal_, "bias": True, "skip_bias_add": skip_bias_add}
    if kind == "column":
        cls: type = LowPrecColumnParallelLinear if ours else ColumnParallelLinear
        return cls(HIDDEN, FFN, gather_output=False, **options)
    cls = LowPrecRowParallelLinear if ours else RowParallelLinear
    return cls(FFN, HIDDEN, input_is_parallel=True, **options)


def bind_alone(layer: Any, kind: str, recipe: str) -> None:
    """What bind_recipe does for a layer inside a transformer layer."""
    layer.linear_gemms = LinearGemms(
        get_recipe(recipe), LinearId(1, "alone", split="O" if kind == "column" else "I"), SEED, AmaxHistory
    )
    layer.accumulates_in_fp32 = False


@for_each(
    *(
        (kind, dtype, sp, skip)
        for kind in ("column", "row")
        for dtype in ("float32", "bfloat16")
        for sp in (False, True)
        for skip in (False, True)
    )
)
def stock(kind: str, dtype_name: str, sequence_parallel: bool, skip_bias_add: bool) -> None:
    """Outputs, input gradients, weight and bias gradients: the same bits."""
    dtype, rank = getattr(torch, dtype_name), dist.get_rank()
    config = config_of(dtype, sequence_parallel)
    tokens = SEQUENCE // 2 if sequence_parallel and kind == "column" else SEQUENCE
    features = HIDDEN if kind == "column" else FFN // 2
    # what ranks hold differs where it is cut
    seed = rank if sequence_parallel or kind == "row" else 0
    found = []
    for ours in (False, True):
        layer = build_linear(kind, ours, config, skip_bias_add)
        if ours:
            bind_alone(layer, kind, "bf16")
        x = seeded(tokens, BATCH, features, dtype=dtype, seed=seed).requires_grad_()
        y, bias = layer(x)
        assert (bias is not None) == skip_bias_add
        same_on_ranks = kind == "row" and not sequence_parallel
        y.backward(seeded(*y.shape, dtype=dtype, seed=17 + (0 if same_on_ranks else rank)))
        # with skip_bias_add the bias is the caller's to add, and has no gradient from here
        found.append((y.detach(), x.grad, layer.weight.detach(), layer.weight.grad, layer.bias.grad))
    for name, stocks, mine in zip(("y", "dx", "w", "dw", "db"), *found):
        assert (stocks is None) == (mine is None), name
        assert stocks is None or torch.equal(stocks, mine), name
    assert found[0][3].abs().max() > 0


# ---- quantized recipes: the shards are those of the whole
def block_of(recipe: Any, config: Any, seed: int = SEED, **options: Any) -> tuple[Any, Any]:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    model_parallel_cuda_manual_seed(6)
    block = TransformerBlock(config, gpt_block_spec(config)).to(config.params_dtype)
    block.train()
    return block, bind_recipe([block], recipe, num_layers=2, seed=seed, **options)


def run_block(block: Any, config: Any, seed: int = 0) -> torch.Tensor:
    """Output of one microbatch; every rank holds the same tokens, or its half under sequence parallelism."""
    x = seeded(SEQUENCE, BATCH, HIDDEN, dtype=config.params_dtype, seed=seed)
    if config.sequence_parallel:
        x = x.chunk(2)[dist.get_rank()]
    return block(hidden_states=x.requires_grad_(), attention_mask=None)


def back(y: torch.Tensor, config: Any, seed: int = 1) -> None:
    dy = seeded(SEQUENCE, BATCH, HIDDEN, dtype=config.params_dtype, seed=seed)
    y.backward(dy.chunk(2)[dist.get_rank()] if config.sequence_parallel else dy)


class Recorder:
    """Keeps every GEMM's matrices, contracted dimension last, and quantized operands."""

    def __init__(self) -> None:
        self.calls: list[tuple[LinearId, str, torch.Tensor, torch.Tensor, RngStep, list[Any]]] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Recorder":
        self._record("forward", "fprop", lambda x, w: (x, w))
        self._record("dgrad", "dgrad", lambda dy, w: (_matrix(dy), w.t()))
        self._record("wgrad", "wgrad", lambda dy, x: (_matrix(dy).t(), x.t()))
        product = emulated.gemm

        def gemm(a: Any, b: Any, **options: Any) -> Any:
            alpha = torch.as_tensor(options["alpha"])  # the product of both tensor scales
            self.calls[-1][-1].extend(((a, options["a_scale"], alpha), (b, options["b_scale"], alpha)))
            return product(a, b, **options)

        self._patch.setattr(emulated, "gemm", gemm)
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.undo()

    def _record(
        self, method: str, gemm: str, matrices: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        compute = getattr(LinearGemms, method)

        def recorded(linear_gemms: Any, first: Any, second: Any, rng_step: Any, *args: Any, **options: Any) -> Any:
            a, b = matrices(first, second)
            self.calls.append((linear_gemms.linear_id, gemm, a.clone(), b.clone(), rng_step, []))
            return compute(linear_gemms, first, second, rng_step, *args, **options)

        self._patch.setattr(LinearGemms, method, recorded)


def _matrix(dy: torch.Tensor | GradOutput) -> torch.Tensor:
    return dy.matrix if isinstance(dy, GradOutput) else dy


def multiply(linear_gemms: LinearGemms, gemm: str, a: torch.Tensor, b: torch.Tensor, rng_step: RngStep) -> None:
    """One GEMM of matrices as ``Recorder`` keeps them."""
    if gemm == "fprop":
        linear_gemms.fprop(a, b, rng_step)
    elif gemm == "dgrad":
        linear_gemms.dgrad(a, b.t(), rng_step)
    else:
        linear_gemms.wgrad(a.t(), b.t(), rng_step)


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


# ---- recompute
@for_each(*((name, sp) for name in ("mxfp4_rht_sr", "mxfp4_rht", "fp8_mxfp4_rht_sr", "bf16") for sp in (False, True)))
def recompute(name: str, sequence_parallel: bool) -> None:
    """On or off, the same gradients, though another microbatch is under way when the forward is run again."""
    found = []
    for options in ({}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}):
        config = config_of(torch.bfloat16, sequence_parallel, **options)
        block, runtime = block_of(get_recipe(name), config)
        runtime.begin_step(3)
        outputs = []
        for microbatch in range(2):
            runtime.begin_microbatch(microbatch)
            outputs.append(run_block(block, config, seed=10 + microbatch))
        runtime.begin_microbatch(7)
        with Recorder() as recorder:
            for y in outputs:
                back(y, config)
        forwards = sum(gemm == "fprop" for _, gemm, *_ in recorder.calls)
        assert forwards == (2 * 8 if options else 0)  # it was really run again
        assert {rng_step for *_, rng_step, _ in recorder.calls} == {RngStep(3, 0), RngStep(3, 1)}
        from megatron_lowprec.mcore.rng_step import current_rng_step

        assert current_rng_step() == RngStep(3, 7)  # and what the loop had set is back
        found.append([*(y.detach() for y in outputs), *(p.grad for p in block.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@check()
def microbatches_and_steps_draw_anew() -> None:
    config = config_of(torch.bfloat16)
    block, runtime = block_of(get_recipe("mxfp4_rht_sr"), config)
    found = []
    for step, microbatch in ((0, 0), (0, 0), (0, 1), (1, 0)):
        block.zero_grad()
        runtime.begin_step(step)
        runtime.begin_microbatch(microbatch)
        back(run_block(block, config), config)
        runtime.end_step()
        found.append(block.layers[0].mlp.linear_fc1.weight.grad.clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])
    assert not torch.equal(found[2], found[3])


# ---- accumulation, scales and state
@for_each(("mxfp4",), ("fp8_blockwise",), ("bf16",))  # without draws: both microbatches have the same gradients
def main_grad(name: str) -> None:
    """Weight gradients go into an fp32 main_grad in fp32, once, and not into .grad as well."""
    config = config_of(torch.bfloat16)
    block, runtime = block_of(get_recipe(name), config)
    linears = [m for m in block.modules() if hasattr(m, "linear_gemms")]
    assert len(linears) == 8
    for module in linears:
        module.weight.main_grad = torch.zeros(module.weight.shape)
        module.weight.grad_added_to_main_grad = False
    runtime.begin_step(0)
    back(run_block(block, config), config)
    assert all(module.weight.grad_added_to_main_grad for module in linears)
    once = [module.weight.main_grad.clone() for module in linears]
    assert all(not torch.equal(g, g.bfloat16().float()) for g in once)  # never rounded to bf16
    runtime.begin_microbatch(1)
    back(run_block(block, config), config)
    assert all(torch.equal(m.weight.main_grad, 2 * g) for m, g in zip(linears, once, strict=True))
    if name == "bf16":
        return  # a bf16 product with a bf16 result sums in an order of its own
    plain, other = block_of(get_recipe(name), config)
    other.begin_step(0)
    for module in plain.modules():
        if hasattr(module, "linear_gemms"):
            module.accumulates_in_fp32 = False
    back(run_block(plain, config), config)
    rounded = [m.weight.grad for m in plain.modules() if hasattr(m, "linear_gemms")]
    assert all(torch.equal(g.bfloat16(), r) for g, r in zip(once, rounded, strict=True))


@check()
def nan_on_one_rank_is_seen_by_all() -> None:
    from megatron_lowprec.comm.maximum import max_over

    mine = torch.tensor([[1.0 + dist.get_rank()], [torch.nan if dist.get_rank() else 3.0]])
    got = max_over(mine, dist.group.WORLD)
    assert got.tolist() == [[2.0], [torch.inf]]
    assert mine[0].item() == 1.0 + dist.get_rank()  # a new tensor


@check()
def delayed_state_is_in_the_sharded_state_dict() -> None:
    from megatron.core import parallel_state

    config = config_of()
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    block, runtime = block_of(get_recipe("fp8_delayed"), config)
    for step in range(2):
        runtime.begin_step(step)
        back(run_block(block, config, seed=step), config)
        runtime.end_step()
    fc1 = block.layers[1].mlp.linear_fc1
    state = fc1.sharded_state_dict(prefix="p.", metadata=metadata)
    history, slot = fc1.linear_gemms.histories["grad_output"]
    extra = state["p._extra_state"].data
    assert torch.equal(extra["grad_output"], history.state(slot))
    assert extra.keys() == {"input", "weight", "grad_output"}

    fresh, _ = block_of(get_recipe("fp8_delayed"), config)
    target = fresh.layers[1].mlp.linear_fc1
    target.load_state_dict({key[2:]: getattr(value, "data", value) for key, value in state.items()})
    for operand in ("input", "weight", "grad_output"):
        (old, old_slot), (new, new_slot) = fc1.linear_gemms.histories[operand], target.linear_gemms.histories[operand]
        assert torch.equal(old.state(old_slot), new.state(new_slot)), operand

    none, _ = block_of(get_recipe("mxfp8"), config)
    assert none.layers[1].mlp.linear_fc1.sharded_state_dict(metadata=metadata)["_extra_state"].data is None


@check()
def experts_have_their_numbers() -> None:
    config = config_of(num_moe_experts=4, moe_ffn_hidden_size=FFN, moe_router_topk=2, add_bias_linear=False)
    block, _ = block_of(get_recipe("mxfp4_rht_sr"), config)
    places = [m.linear_gemms.linear_id for m in block.modules() if hasattr(m, "linear_gemms")]
    experts = [p for p in places if p.name.startswith("mlp.")]
    assert {(p.layer, p.name, p.expert) for p in experts} == {
        (layer, f"mlp.experts.linear_fc{which}", expert) for layer in (1, 2) for which in (1, 2) for expert in range(4)
    }
    assert {p.expert for p in places if p.name.startswith("self_attention.")} == {-1}
    for place in experts:
        split = "O" if place.name.endswith("fc1") else "I"
        assert (place.split, place.spans) == (split, {split: ShardSlice(dist.get_rank() * FFN // 2)})


@check()
def header_names_what_is_kept() -> None:
    _, runtime = block_of(get_recipe("fp8_current_bf16_ends"), config_of())
    lines = "\n".join(runtime.header())
    assert "layers.1.self_attention.linear_qkv" in lines
    assert "layers.2.mlp.linear_fc2" in lines
    assert "emulated" not in lines  # two layers, both ends: nothing is left to emulate
    assert set(runtime.gemms().values()) == {"not quantized"}
    _, runtime = block_of(get_recipe("fp8_current"), config_of())
    assert any(line.startswith("fprop, dgrad, wgrad: emulated on cpu (hopper_fp8: no") for line in runtime.header()), (
        runtime.header()
    )
    assert "loss by torch and Megatron-core" in lines
    _, runtime = block_of(replace(get_recipe("mxfp4"), name="x"), config_of())
    assert any(line.startswith("dgrad, wgrad: emulated") for line in runtime.header())
    backend = "emulated on cpu (blackwell_mx: no MXFP4 GEMM on cpu)"
    assert runtime.gemms() == {"fprop": "not quantized", "dgrad": backend, "wgrad": backend}


@check()
def unbound_layers_say_so() -> None:
    layer = build_linear("column", True, config_of(), True)
    with pytest.raises(RuntimeError, match="bind_recipe"):
        layer(seeded(4, 1, HIDDEN))


def main() -> None:
    from megatron_lowprec.mcore.cpu_compat import install

    install()
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
