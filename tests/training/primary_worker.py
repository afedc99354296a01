"""Runs of the driver that look at their FP8 weights after each step: ``torchrun primary_worker.py CASES.json``.

CASES.json holds name -> command line. Each look asserts, on every rank, that the codes and scales are the reference
quantizer's of the fp32 main weights, gathered over all ranks. Rank 0 writes ``NAME.json``: a digest of all whole
weights at each look, which no layout may change where the main weights are the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.quantize.reference import block_amax, encode, fp32_encode_scale, quantize_operand
from megatron_lowprec.training.distributed import startup
from tests.training.many_runs import Meetings

Digests = list[dict[str, str]]


def joined(shard: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim)


def whole_main_weight(weight: Any, part: Any) -> torch.Tensor:
    """fp32, this rank's tensor-parallel part of it."""
    total = torch.zeros(weight.numel(), device=weight.device)
    if weight in part.model_param_gbuf_map and weight.main_param is not None:
        place = part._get_model_param_range_map(weight)["param"]
        total[place.start : place.end] = weight.main_param
    dist.all_reduce(total, group=part.data_parallel_group)
    return total.view(weight.shape)


def look(optimizer: Any, chunks: Any, own_scales: bool) -> dict[str, str]:
    """The digest of every FP8 weight by name, after the check against the reference."""
    from megatron.core import parallel_state as mpu

    from megatron_lowprec.mcore.optim.fp8_param_gather import sharded_weights

    names = {weight: name for chunk in chunks for name, weight in chunk.named_parameters()}
    group, digests = mpu.get_tensor_model_parallel_group(), {}
    for part in optimizer.chained_optimizers:
        for weight, _, _ in sharded_weights(part):
            assert weight.dtype == torch.bfloat16
            assert weight.source is None
            assert weight.codes.untyped_storage().data_ptr() in {b.param_data.data_ptr() for b in part.buffers}
            main, fmt, block = whole_main_weight(weight, part), FORMATS[weight.spec.format], weight.spec.block
            amax = main.abs().amax().view(1) if block is None else block_amax(main, block)
            scale = None  # the reference's own, of each block
            if weight.spec.scaling == "delayed":
                history, slot = weight.scaled.history
                scale = fp32_encode_scale(history.in_effect[slot : slot + 1], fmt, weight.spec.scale_rule)
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
            elif block is None:
                if not own_scales:
                    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
                scale = fp32_encode_scale(amax, fmt, weight.spec.scale_rule)
            elements, decode_scale = quantize_operand(
                main,
                fmt,
                block or tuple(main.shape),
                scale_format="fp32",
                scale_rule=weight.spec.scale_rule,
                encode_scale=None if scale is None else scale.view(1, 1),
            )
            assert torch.equal(weight.codes, encode(elements, fmt)), names[weight]
            assert torch.equal(weight.decode_scale, decode_scale.view_as(weight.decode_scale)), names[weight]
            assert torch.equal(weight.main_amax, amax), names[weight]
            codes = joined(weight.codes, weight.partition_dim, group)
            scales = weight.decode_scale if block is None else joined(weight.decode_scale, weight.partition_dim, group)
            digest = hashlib.sha256(codes.cpu().numpy().tobytes() + scales.cpu().numpy().tobytes())
            digests[names[weight]] = digest.hexdigest()[:16]
    return digests


@contextmanager
def looking(own_scales: bool = False) -> Iterator[Digests]:
    """While it is entered, runs of the driver look after they settled and after each step."""
    from megatron_lowprec.mcore.optim import recipe_optimizer
    from megatron_lowprec.training import calibrate, loop, model
    from megatron_lowprec.training.checkpoint import checkpoint

    found: Digests = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (recipe_optimizer, checkpoint, calibrate):

            def finalize(optimizer: Any, chunks: Any, inner: Any = module.finalize) -> None:
                inner(optimizer, chunks)
                found.append(look(optimizer, chunks, own_scales))

            monkeypatch.setattr(module, "finalize", finalize)

        def train_step(trainer: Any, *rest: Any, inner: Any = loop.train_step) -> Any:
            result = inner(trainer, *rest)
            with model.gathered(trainer):
                found.append(look(trainer.optimizer, trainer.chunks, own_scales))
            return result

        monkeypatch.setattr(loop, "train_step", train_step)
        yield found


def main(cases: Path) -> None:
    ranks = startup.prepare_environment()
    from megatron_lowprec.training.run import run

    meetings = Meetings(ranks.rank)
    for name, arguments in json.loads(cases.read_text()).items():
        if ranks.rank == 0:
            print(f"--- {name}: {' '.join(arguments)}", flush=True)
        meetings.arrange(name)
        with looking(own_scales="--no-amax-reduce" in arguments) as digests:
            run(arguments, ranks)
        if ranks.rank == 0:
            Path(f"{name}.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
