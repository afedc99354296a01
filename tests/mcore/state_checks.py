"""Checks of ``worker.py``: histories in checkpoints, numbers of experts, and what the header says of layers."""

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_lowprec import get_recipe
from megatron_lowprec.kernels.philox.reference import ShardSlice
from tests.mcore.parallel_layers import FFN, back, block_of, check, config_of, run_block


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
