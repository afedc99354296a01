"""Setup of a process before it computes: environment, warnings, threads, process groups, seeds.

Call ``prepare_environment`` before importing torch and megatron, which read some of its settings at import.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.distributed.visible_gpus import has_gpus
from megatron_lowprec.training.options.training_options import TrainingOptions

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch.distributed import Store

    from megatron_lowprec.training.config.options import Config

# Beginnings of upstream warnings that are irrelevant to this run.
_KNOWN_WARNINGS = (
    r"Fused .* not available",
    r"The fused .* kernel is not available",
    r"Unable to import torch_memory_saver",
    r"full scope is deprecated",
    r"MimoModelConfig is experimental",
    # Megatron-core's distributed optimizer in fp32 reads the gradients of views.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # Megatron-core's own use of torch's distributed checkpoint.
    r"`load_state_dict` is deprecated and will be removed",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    # From 0.19 on, of the state that ranks share.
    r"The argument order of load has been changed",
    r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to load",
    # Deprecated names of torch 2.13 that Megatron-core 0.16.1 calls.
    r".*reduce_scatter_tensor",
    r".*all_gather_into_tensor",
    r".*_all_gather_base",
    r".*_reduce_scatter_base",
    # Megatron-core's barriers. They follow other collectives, and run on the GPU of these.
    r"barrier\(\): using the device under current context",
)


# Likewise, of what newer releases of Megatron-core log; by the module.
_KNOWN_RECORDS = {
    "models.gpt.gpt_model": "GPTModel IS DEPRECATED",  # a hybrid model is to replace it
    "distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    "dist_checkpointing.strategies.common": "load_common is deprecated",  # of checkpoints of earlier releases
    "dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
}


_LAST_PORT = 65535
_PATIENCE = 10.0  # seconds without a word of waiting for other ranks
HEAD_START = 20.0
"""Seconds by which rank 0 may show an error before another rank does."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank among all, and its start time (``time.monotonic``)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    started: float = field(default_factory=time.monotonic)


def prepare_environment() -> Ranks:
    """Set environment variables and warning filters; plain ``python`` becomes a world of one process.

    Raises:
        UserError: a variable of the launcher or OMP_NUM_THREADS that is no such number; a release of Megatron-core that
            is not supported.
    """
    import megatron_lowprec.mcore  # noqa: F401 - checks the release and filters warnings, without Megatron-core

    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    # Megatron-core's communication overlap relies on in-order execution of kernels in one queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for message in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for module, message in _KNOWN_RECORDS.items():
        logging.getLogger(f"megatron.core.{module}").addFilter(partial(_is_other, message))
    world_size = _number("WORLD_SIZE", None, 1)
    local_world_size = max(1, _number("LOCAL_WORLD_SIZE", 0, 0))
    ranks = Ranks(_number("RANK", 0, 0), world_size, _number("LOCAL_RANK", 0, 0), local_world_size)
    if ranks.rank >= world_size:
        raise UserError(f"RANK={ranks.rank} and WORLD_SIZE={world_size}: ranks count from 0; start with torchrun")
    _number("MASTER_PORT", 0, 0, _LAST_PORT)
    if ranks.world_size == 1:
        # NCCL allocates buffers for every channel of a communicator, also of one rank, which has no peer to use them
        # (NVIDIA/nccl issue 2363): one channel saves 1.1 GiB (docs/results/memory.md).
        os.environ.setdefault("NCCL_MAX_NCHANNELS", "1")
    # torchrun sets 1 for several processes if the variable is unset; otherwise 1 is the user's choice.
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen is None or (chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ and ranks.local_world_size > 1):
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size))
    _number("OMP_NUM_THREADS", None, 1)
    # A thread without work spins for milliseconds: where others need its core, a step of gpt_tiny takes seven times as
    # long. So many rounds take microseconds, and cost 7% of a step on free cores.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    return ranks


def _number(name: str, default: int | None, least: int, most: int | None = None) -> int:
    """An environment variable as a whole number; UserError for another value, or if it is not set without a default."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    number = int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 10 else None
    if number is None or number < least or (most is not None and number > most):
        found = "is not set" if text is None else f"is {text!r}"
        limit = "" if most is None else f" and at most {most}"
        raise UserError(f"the environment variable {name} {found}; set a whole number of at least {least}{limit}")
    return number


def _is_other(message: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(message)


def initialize(config: Config, ranks: Ranks) -> torch.device:
    """Device, process groups, random seeds and microbatches; the same on CPU (gloo) and GPU (NCCL)."""
    device = connect(config, ranks)
    lay_out(config)
    return device


def connect(config: Config, ranks: Ranks) -> torch.device:
    """The first part of ``initialize``: device and the process group of all ranks."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from megatron_lowprec.mcore import cpu_compat

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if config.deterministic_mode:
        _choose_deterministic_algorithms()
    device = _device(ranks)
    if device.type == "cpu":
        # Megatron-core compiles its small fusions, which takes minutes on a CPU and gains nothing. Read as its modules
        # are imported, which then spares a second: the compiler is not.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if device.type == "cuda":
        # Run backward in the calling thread: a process has one GPU, and Python in autograd's own thread takes twice
        # the time, which leaves the GPU idle where layers are small.
        torch.autograd.set_multithreading_enabled(False)
    cpu_compat.install()
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    # Without device_id NCCL opens a communicator when a group is first used, as in Megatron-LM; with it, one for every
    # group of Megatron-core at once: 4.9 GiB more for a process of two (docs/results/memory.md).
    dist.init_process_group(
        config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo"),
        timeout=timeout,
        store=_rendezvous(ranks, timeout),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    return device


def _rendezvous(ranks: Ranks, timeout: timedelta) -> Store:
    """The store by which the ranks find each other.

    Another thread waits for it, so that this one handles signals: no handler runs inside of torch's call.

    Raises:
        UserError: the environment does not say where, or they do not meet there.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if ranks.world_size == 1:
        return dist.HashStore()  # needs no port, which another run might occupy
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT", None, 1, _LAST_PORT)
    if not host:
        raise UserError("the environment variable MASTER_ADDR is not set; set rank 0's host, or start with torchrun")
    found: list[Store | Exception] = []

    def meet() -> None:
        try:
            store, *_ = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            found.append(dist.PrefixStore("default_pg", store))  # as init_process_group does
        except Exception as error:  # noqa: BLE001 - raised again below
            found.append(error)

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if thread.is_alive():
        if ranks.local_rank == 0:
            print(f"rank {ranks.rank} waits for {ranks.world_size} ranks at {host}:{port}", file=sys.stderr, flush=True)
        thread.join()
    if isinstance(found[0], dist.DistError):
        first = str(found[0]).partition("\n")[0]
        raise UserError(
            f"rank {ranks.rank} did not meet the other {ranks.world_size - 1} at {host}:{port} ({first}); check "
            "MASTER_ADDR and MASTER_PORT, and that all ranks start"
        )
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def lay_out(config: Config) -> None:
    """Megatron-core's process groups, random seeds and microbatches, inside the process group of all ranks."""
    from megatron.core import parallel_state as mpu

    from megatron_lowprec.mcore.releases import init_microbatches
    from megatron_lowprec.training.config.resolve import virtual_stages
    from megatron_lowprec.training.rampup import ramp_sizes

    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_stages(config),
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=1 if config.expert_model_parallel_size > 1 else None,
        distributed_timeout_minutes=config.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    seed(config)
    ramp, batch = config.rampup_batch_size, config.steps.global_batch_size
    init_microbatches(
        batch, config.steps.micro_batch_size, mpu.get_data_parallel_world_size(), ramp, ramp_sizes(ramp, batch)
    )


# Megatron-LM's list: with these NCCL reduces in a fixed order; "^NVLS" excludes the one that does not.
_DETERMINISTIC_NCCL = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")


def _choose_deterministic_algorithms() -> None:
    """Select what Megatron's --deterministic-mode only checks; call it before CUDA is initialized."""
    import torch

    algorithm = os.environ.setdefault("NCCL_ALGO", "Ring")
    if algorithm not in _DETERMINISTIC_NCCL:
        raise UserError(
            f"--deterministic-mode with NCCL_ALGO={algorithm}: unset it, or choose one of "
            f"{', '.join(_DETERMINISTIC_NCCL)}"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(True)
    # Of the attention kernels, flash and plain math have a deterministic backward.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def _device(ranks: Ranks) -> torch.device:
    import torch

    if not has_gpus():
        return torch.device("cpu")
    if ranks.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{ranks.local_world_size} processes were started on a machine with {torch.cuda.device_count()} GPUs; "
            f"use --nproc-per-node {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


def seed(config: TrainingOptions) -> None:
    """Seed as Megatron-LM: pipeline stages differ, data-parallel ranks do not, tensor-parallel ranks by the tracker."""
    import random

    import numpy as np
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    base = config.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(base)
    np.random.seed(base)  # noqa: NPY002 - Megatron-core uses this generator
    torch.manual_seed(base)
    # Reset the tracker: an earlier run of this process may have had the other kind. Both kinds draw the same bits.
    tensor_parallel.model_parallel_cuda_manual_seed(
        base, use_cudagraphable_rng=config.cuda_graph_impl == "local", force_reset_rng=True
    )


def finalize() -> None:
    """Undo ``initialize``."""
    import torch.distributed as dist

    from megatron_lowprec.training.distributed.rank_sync import barrier

    if dist.is_initialized():
        barrier()
        _forget_layout()
        dist.destroy_process_group()  # all groups


def take_down_layout() -> None:
    """Undo ``lay_out``, for another layout; the process group of all ranks stays.

    Megatron-core only drops its references: NCCL holds gigabytes for the groups of a few layouts.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    groups = [group for group in mpu._global_process_group_list or () if group is not None]
    _forget_layout()
    for group in groups:
        dist.destroy_process_group(group)


def _forget_layout() -> None:
    from megatron.core import parallel_state as mpu
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

    destroy_num_microbatches_calculator()
    mpu.destroy_model_parallel()


def fail(program: str, error: UserError, ranks: Ranks | None = None) -> int:
    """Print an error that a user can fix, on one process; returns the exit code.

    Without ``ranks``, as where they cannot be read, RANK decides if it is a number.
    """
    told = os.environ.get("RANK", "")
    rank = ranks.rank if ranks is not None else int(told) if told.isdecimal() else 0
    if rank == 0:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    else:
        # torchrun ends the others at the first failure: give rank 0 time to print first.
        time.sleep(HEAD_START)
        print(f"{program}: error: rank {rank} alone: {error}", file=sys.stderr, flush=True)
    return 2


def leave(code: int) -> None:
    """Exit with ``code``; without interpreter shutdown after a failure."""
    if code:
        # Interpreter shutdown may abort while other ranks still wait in a process group.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def versions() -> Mapping[str, str]:
    """Versions of the libraries in use, for the header."""
    import importlib.metadata

    import torch

    found = {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "megatron-core": importlib.metadata.version("megatron-core"),
    }
    # If installed, Megatron-core uses some of its kernels under this project's layers as well.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformer-engine"] = importlib.metadata.version("transformer-engine")
    return found
