"""Megatron-core's process groups in a world of one process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_lowprec.mcore import cpu_compat
from tests.freeing import free_models


@contextmanager
def one_process() -> Iterator[None]:
    """Where Megatron-core's layers can be built, on a CPU."""
    cpu_compat.install()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        free_models()
