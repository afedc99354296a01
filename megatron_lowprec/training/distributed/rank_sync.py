"""Raises one rank's error on all ranks, so that no rank waits in a collective for a rank that has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_lowprec.errors import UserError

T = TypeVar("T")


# Long enough to tokenize a text. A rank that dies is still noticed: its connections are closed.
_PATIENCE = timedelta(days=7)

_SHOWN, _WIDTH = 3, 60  # differing settings, and characters of each


def barrier() -> None:
    """Wait for all ranks. Under NCCL on this process's GPU: torch may take another one before any other collective."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


@contextmanager
def long_timeout_group() -> Iterator[dist.ProcessGroup | None]:
    """Gloo process group of all ranks in which a rank may wait for days, beside collectives that fail after
    --distributed-timeout-minutes. None for a single process. All ranks must enter and leave the context.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    yield group
    barrier()  # no rank may destroy it while another still reads from it
    dist.destroy_process_group(group)


def rank0_first(first: bool, work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run ``work()`` on the ranks that are ``first``, then on the others; raises a rank's UserError on all.

    Args:
        group: all ranks, as from ``long_timeout_group``, whose timeout limits the wait of the others.
    """
    result: T | None = None
    for turn in (True, False):
        message: str | None = None
        if first == turn:
            try:
                result = work()
            except UserError as error:
                message = str(error)
        _raise_on_all(message, group)
    assert result is not None
    return result


def run_on_all_ranks(work: Callable[[], None]) -> None:
    """Run ``work()`` on all ranks in parallel; raises a rank's UserError on all."""
    message: str | None = None
    try:
        work()
    except UserError as error:
        message = str(error)
    _raise_on_all(message, None)


def _raise_on_all(message: str | None, group: dist.ProcessGroup | None) -> None:
    messages: list[Any] = [message]
    if dist.is_initialized():
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message, group=group)
    for found in messages:
        if found is not None:
            raise UserError(found)


def on_first_rank(work: Callable[[], T]) -> T:
    """Run ``work()`` on rank 0; returns its result, or raises its OSError, on all."""
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = work()
        except OSError as error:
            result[1] = str(error)
    dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise OSError(result[1])
    done: T = result[0]
    return done


def same_on_all_ranks(what: str, value: str) -> None:
    """Check that all ranks read the same value; a file system may present different content to them.

    Raises:
        UserError: on all ranks, if the values differ.
    """

    def other(first: str) -> str:
        return f"{what} is {first} for rank 0, but {value} for rank {dist.get_rank()}; is the folder shared?"

    _compare_with_rank_0(value, other)


def same_as_on_rank_0(settings: Mapping[str, Any]) -> None:
    """Check that all ranks have rank 0's settings, by name.

    Raises:
        UserError: on all ranks, with settings that differ on the first rank with others.
    """

    def other(first: Mapping[str, Any]) -> str:
        names = [name for name in {**first, **settings} if first.get(name) != settings.get(name)]
        here, there = (
            ", ".join(f"{name} {str(each.get(name))[:_WIDTH]}" for name in names[:_SHOWN]) for each in (settings, first)
        )
        more = f" (and {len(names) - _SHOWN} more)" if len(names) > _SHOWN else ""
        return (
            f"rank {dist.get_rank()} has {here}{more}, where rank 0 has {there}; start all ranks with the same "
            "flags and the same files of --config and --recipe"
        )

    _compare_with_rank_0(settings, other)


def _compare_with_rank_0(mine: T, other: Callable[[T], str]) -> None:
    """Raise the UserError of the first rank with another value on all; ``other`` is its message, of rank 0's value."""
    sent = [mine]
    dist.broadcast_object_list(sent, src=0)
    _raise_on_all(None if mine == sent[0] else other(sent[0]), None)


def lines_of_ranks(lines: list[str]) -> list[str]:
    """Lines of all ranks, each once, in the order of the ranks; all ranks call it."""
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, lines)
    return list(dict.fromkeys(line for each in everyone for line in each))


def on_any_rank(here: bool, device: torch.device) -> bool:
    """Whether a flag is set on any rank; all ranks call it."""
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


class AsyncAnyReduce:
    """Logical OR of flags over all ranks, returned one call later; immediately for a single process.

    The flags are reduced between the hosts, in parallel to training: no call waits for a device, nor for a rank that is
    less than one call behind. Every rank creates one and makes the same calls.

    Args:
        timeout: for a rank that never calls.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.get_world_size() > 1 else None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def __call__(self, here: Sequence[bool]) -> list[bool]:
        """Reduce this rank's present flags; returns the result of the previous call, all False in the first."""
        if self._group is None:
            return list(here)
        before = self.finish()
        flags = torch.tensor(here, dtype=torch.int32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (flags, work)
        return before or [False] * len(here)

    def finish(self) -> list[bool]:
        """Complete the pending reduction, as the last call, so that no rank exits while another still reads from it."""
        if self._pending is None:
            return []
        flags, work = self._pending
        self._pending = None
        work.wait()
        found: list[bool] = flags.bool().tolist()
        return found
