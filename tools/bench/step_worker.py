"""One process of ``step``: a run built as by ``megatron_lowprec.training.run``, without data files, log or checkpoint.

Takes one argument, JSON with config, recipe, micro_batch, warm_up, iterations and result (the file to write).
"""

import json
import math
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from megatron_lowprec.training import startup


def main(asked: dict[str, Any]) -> None:
    """Build, iterate, write the result."""
    ranks = startup.prepare_environment()

    import torch

    from megatron_lowprec.recipe.load import load_recipe
    from megatron_lowprec.training import schedule as schedules
    from megatron_lowprec.training.arguments import parse
    from megatron_lowprec.training.resolve import resolve_model, resolve_run, total_samples
    from megatron_lowprec.training.tokenizer import build_tokenizer, padded_vocab_size

    on_gpu = torch.cuda.is_available()
    batch, steps = asked["micro_batch"], asked["warm_up"] + asked["iterations"]
    flags = ["--config", asked["config"], "--recipe", asked["recipe"], "--mock-data", "--micro-batch-size", str(batch)]
    flags += ["--global-batch-size", str(batch), "--train-iters", str(max(1000, steps))]
    config, _, _ = parse(flags)
    config = resolve_run(resolve_model(config), ranks.world_size, gpus=on_gpu)
    recipe = load_recipe(config.recipe, config.recipe_set)
    schedule, _ = schedules.plan(config, total_samples(config))
    tokenizer = build_tokenizer(
        config.tokenizer_type,
        vocab_file=config.vocab_file,
        merge_file=config.merge_file,
        tokenizer_model=config.tokenizer_model,
        vocab_size=config.vocab_size,
    )
    vocabulary = padded_vocab_size(
        tokenizer.vocab_size, config.make_vocab_size_divisible_by, config.tensor_model_parallel_size
    )
    device = startup.initialize(config, ranks)

    from megatron.core.num_microbatches_calculator import update_num_microbatches

    from megatron_lowprec.training import data, model
    from megatron_lowprec.training.step import train_step

    split = data.build(config, tokenizer, ranks.rank, ranks.local_rank)["train"]
    assert split is not None
    trainer = model.build(config, recipe, schedule, vocabulary)
    batches = [data.Batches(split, 0, config, device) for _ in trainer.chunks]
    milliseconds, losses = [], []
    for iteration in range(steps):
        if iteration == asked["warm_up"] and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        _synchronize(on_gpu)
        started = time.perf_counter()
        update_num_microbatches(iteration * batch)
        result = train_step(trainer, batches, config, iteration, device)
        trainer.scheduler.step(increment=batch)
        _synchronize(on_gpu)
        milliseconds.append((time.perf_counter() - started) * 1e3)
        losses.append(result.loss)
        if not result.updated or not math.isfinite(result.loss):
            sys.exit(f"step {iteration}: loss {result.loss}, updated: {result.updated}")
    timed = milliseconds[asked["warm_up"] :]
    fifths = quantiles(timed, n=5, method="inclusive") if len(timed) > 1 else timed * 4
    found = {
        "ms": median(timed),
        "low": fifths[0],
        "high": fifths[3],
        "first_seconds": milliseconds[0] / 1e3,
        "milliseconds": milliseconds,
        "losses": losses,
        "micro_batch": batch,
        "sequence": config.seq_length,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0,
        "runtime": trainer.runtime.header(),
    }
    Path(asked["result"]).write_text(json.dumps(found), encoding="utf-8")
    startup.finalize()


def _synchronize(on_gpu: bool) -> None:
    if on_gpu:
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
