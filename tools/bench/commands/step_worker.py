"""One process of ``step`` or ``scaling``: a run as in ``megatron_lowprec.training.run``, without data files, logs or
checkpoints.

Takes one argument, JSON with flags (of the driver), micro_batch (of each data-parallel rank), warm_up, iterations,
result (the file that rank 0 writes) and step_alone (measure only the steps).
"""

import json
import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.distributed.visible_gpus import has_gpus
from tools.bench.kernels import communication_of, idle_of, kernels_of, profiled


def main(asked: dict[str, Any]) -> None:
    """Build, iterate, write the result."""
    ranks = startup.prepare_environment()

    import torch

    from megatron_lowprec.recipe.parsing import load_recipe
    from megatron_lowprec.training import schedule as schedules
    from megatron_lowprec.training.config import te_checks
    from megatron_lowprec.training.config.accumulation_options import resolve_accumulation
    from megatron_lowprec.training.config.arguments import parse
    from megatron_lowprec.training.config.graph_options import resolve_cuda_graphs
    from megatron_lowprec.training.config.resolve import resolve_model, resolve_recipe, resolve_run
    from megatron_lowprec.training.data.tokenizer import padded_vocab_size, tokenizer_of
    from tools.bench.measure import Bench

    on_gpu = has_gpus()
    per_rank, steps = asked["micro_batch"], asked["warm_up"] + asked["iterations"]
    batch = per_rank * ranks.world_size
    length = ["--global-batch-size", str(batch), "--train-iters", str(max(1000, steps))]
    config, given, _ = parse([*asked["flags"], "--mock-data", "--micro-batch-size", str(per_rank), *length])
    recipe = load_recipe(config.recipe, config.recipe_override)
    config, _ = resolve_recipe(resolve_model(config), recipe, given)
    config = resolve_run(config, ranks.world_size, gpus=on_gpu)
    config, _ = resolve_accumulation(config, recipe, ranks.world_size)
    config, _ = resolve_cuda_graphs(config, recipe, ranks.world_size, gpus=on_gpu)
    te_checks.prepare(config, recipe)
    schedule, _ = schedules.plan(config, config.steps.global_batch_size, config.steps.samples)
    tokenizer = tokenizer_of(config)
    vocabulary = padded_vocab_size(
        tokenizer.vocab_size, config.make_vocab_size_divisible_by, config.tensor_model_parallel_size
    )
    device = startup.initialize(config, ranks)
    clock = Bench(device)

    from megatron.core.num_microbatches_calculator import update_num_microbatches

    from megatron_lowprec.training import model
    from megatron_lowprec.training.data import batches as data
    from megatron_lowprec.training.step import train_step

    split = data.build(config, tokenizer, ranks.rank, ranks.local_rank)["train"]
    assert split is not None
    trainer = model.build(config, recipe, schedule, vocabulary)
    batches = [data.Batches(split, 0, config, device) for _ in trainer.chunks]
    losses = []
    # A step waits for the device once, for its loss and norm. The time between two such waits is a step as the driver
    # runs it: the launches of the next step overlap the update of the last.
    marks = [time.perf_counter()]
    for iteration in range(steps):
        if iteration == asked["warm_up"] and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        update_num_microbatches(iteration * batch)
        result = train_step(trainer, batches, config, iteration)
        trainer.scheduler.step(increment=batch)
        marks.append(time.perf_counter())
        losses.append(result.loss)
        if not result.updated or not math.isfinite(result.loss):
            sys.exit(f"step {iteration}: loss {result.loss}, updated: {result.updated}")
    held = trainer.graphs.held_bytes if trainer.graphs is not None else 0
    peak = torch.cuda.max_memory_allocated() + held if on_gpu else 0
    reserved = torch.cuda.max_memory_reserved() if on_gpu else 0

    def step() -> None:
        train_step(trainer, batches, config, steps)

    kernels, idle, isolated_ms, update_ms, stock_update_ms = None, None, None, None, None
    communication = None
    if asked["step_alone"] and on_gpu and ranks.world_size > 1:
        communication = communication_of(profiled(step))
    if not asked["step_alone"]:
        isolated_ms = median(clock.wall_milliseconds(step, 5))
        if on_gpu:
            events = profiled(step)
            kernels, idle = kernels_of(events), idle_of(events)
        update_ms, stock_update_ms = _updates(trainer.optimizer, clock)
    milliseconds = [(end - start) * 1e3 for start, end in pairwise(marks)]
    timed = milliseconds[asked["warm_up"] :]
    fifths = quantiles(timed, n=5, method="inclusive") if len(timed) > 1 else timed * 4
    found = {
        "ms": median(timed),
        "low": fifths[0],
        "high": fifths[3],
        "first_seconds": milliseconds[0] / 1e3,
        "milliseconds": milliseconds,
        "losses": losses,
        "micro_batch": per_rank,
        "sequence": config.seq_length,
        "peak_gib": peak / 2**30,
        "reserved_gib": reserved / 2**30,
        "kernel_ms": sum(kernel["ms"] for kernel in kernels) if kernels else None,
        "kernels": kernels,
        "idle": idle,
        "communication": communication,
        "isolated_ms": isolated_ms,
        "update_ms": update_ms,
        "stock_update_ms": stock_update_ms,
        "runtime": trainer.runtime.header(),
        "layers": model.implementation(config, trainer),
    }
    if trainer.graphs is not None:
        trainer.graphs.drop()
    if ranks.rank == 0:
        Path(asked["result"]).write_text(json.dumps(found), encoding="utf-8")
    startup.finalize()


def _updates(optimizer: Any, clock: Any) -> tuple[float, float]:
    """Milliseconds of the driver's optimizer step, and of Megatron-core's."""
    from megatron_lowprec.mcore.optim.optimizer_step import optimizer_step

    ours = median(clock.wall_milliseconds(lambda: optimizer_step(optimizer), 5))
    for part in optimizer.chained_optimizers:
        vars(part).pop("_copy_main_params_to_model_params", None)
        vars(part.optimizer).pop("step", None)  # of the fused update
    return ours, median(clock.wall_milliseconds(optimizer.step, 5))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
