"""The kernels of block amaxes and codes of shards against the reference. Run interpreted, and on a GPU."""

import math
from collections.abc import Iterator
from itertools import product

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.partial_cast import reference
from megatron_lowprec.kernels.partial_cast.reference import Shard
from tests.kernels.multi_tensor_cast_cases import tensors

# Shape and range of each shard of a launch. In the first all numbers are multiples of 16, so reads are vectors.
LAUNCHES = (
    (((256, 384), 0, 256 * 384), ((384, 256), 16 * 9, 256 * 300), ((128, 128), 128 * 64, 16), ((256, 128), 0, 0)),
    (((200, 130), 77, 130 * 129), ((256, 256), 256 * 128 - 3, 6), ((1, 300), 299, 1), ((140, 128), 128 * 130, 128)),
    (((300, 128), 0, 0), ((257, 129), 0, 257 * 129)),
    (((640, 128), 128 * 300, 128 * 100),),  # the grid has as many blocks as the shard meets
)
OFFSETS = (0, 16, 3)  # where values and codes begin in their memory
BLOCK = (128, 128)
SPECIAL = (math.nan, 0.0, 2.0**-9, 3.7, 1e38)  # encode scales of the first blocks


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.nan_to_num(-1.0), wanted.nan_to_num(-1.0))


def faults(device: str) -> Iterator[str]:
    """A line for each launch whose amaxes or codes differ, or that wrote beside its shards."""
    from megatron_lowprec.kernels.partial_cast import triton

    for launch, offset in product(LAUNCHES, OFFSETS):
        values = tensors(tuple(count for _, _, count in launch), offset, "cpu")
        for value in values[1:]:  # the special numbers of the first make amaxes of NaN
            value.nan_to_num_(1.0).clamp_(-3e4, 3e4)
        on_cpu = [Shard(value, start, shape) for value, (shape, start, _) in zip(values, launch, strict=True)]
        shards = [shard._replace(values=_moved(shard.values, offset, device)) for shard in on_cpu]
        amax = reference.partial_amax(on_cpu, BLOCK)
        if not same(triton.partial_amax(shards, BLOCK).cpu(), amax):
            yield f"amax of {launch} from {offset}"
        scale = 448.0 / amax.nan_to_num(1.0, posinf=1.0).clamp(min=1e-6)
        scale[: len(SPECIAL)] = torch.tensor(SPECIAL)
        for name in ("e4m3", "e5m2"):
            found, wanted = (
                [torch.full((len(value) + offset + 64,), 0x55, dtype=torch.uint8, device=where) for value in values]
                for where in (device, "cpu")
            )
            inner = [
                [code[offset : offset + len(value)] for code, value in zip(codes, values, strict=True)]
                for codes in (found, wanted)
            ]
            triton.partial_cast_(shards, scale.to(device), FORMATS[name], BLOCK, inner[0])
            reference.partial_cast_(on_cpu, scale, FORMATS[name], BLOCK, inner[1])
            for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
                nan_of_other_sign = ((theirs & 0x7F) == 0x7F) & (mine.cpu() == 0x7F)
                if not ((mine.cpu() == theirs) | nan_of_other_sign).all():
                    yield f"{name} of {launch[i]} from {offset}"


def _moved(values: torch.Tensor, offset: int, device: str) -> torch.Tensor:
    """The values on ``device``, ``offset`` entries behind the begin of their memory."""
    return torch.cat((values.new_zeros(offset), values)).to(device)[offset:]


def differences(device: str) -> tuple[int, list[str]]:
    """(cases, faults)"""
    return 3 * len(LAUNCHES) * len(OFFSETS), list(faults(device))
