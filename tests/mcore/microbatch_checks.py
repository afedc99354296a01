"""Checks of ``worker.py``: draws and gradients follow microbatches and steps, with and without recomputation."""

import torch

from megatron_lowprec import get_recipe
from megatron_lowprec.quantization.random_stream import RngStep
from tests.mcore.parallel_layers import back, block_of, check, config_of, for_each, run_block
from tests.mcore.recorded_gemms import Recorder


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
