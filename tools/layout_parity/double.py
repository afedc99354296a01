"""A model that computes in fp64, so that the order of sums has no effect on the losses.

Quantizers still see fp32. The sums of two layouts round to the same fp32 numbers, and so to the same codes, but for
one chance in some 10^8. In fp32, the order of a sum decides a code near a rounding boundary, and later layers amplify
the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

from megatron_lowprec.training import model


@contextmanager
def in_double() -> Iterator[None]:
    """Models built inside are fp64; the driver has no such option."""
    stock = model._gpt_chunks

    def chunks(config: Any, transformer: Any, *more: Any) -> list[torch.nn.Module]:
        transformer.params_dtype = transformer.pipeline_dtype = torch.float64
        return [chunk.double() for chunk in stock(config, transformer, *more)]

    # Megatron-core casts logits to fp32 first.
    keep = staticmethod(lambda logits: (logits, torch.max(logits, dim=-1)[0]))
    with (
        mock.patch.object(model, "_gpt_chunks", chunks),
        mock.patch.object(VocabParallelCrossEntropy, "calculate_logits_max", keep),
    ):
        yield
