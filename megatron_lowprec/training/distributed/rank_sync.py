"""What one rank finds wrong all ranks raise: none is left waiting in a collective for one that has given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_lowprec.errors import UserError

T = TypeVar("T")


# For a text to be tokenized. A rank that has died is noticed all the same: its connections are closed.
_PATIENCE = timedelta(days=7)


@contextmanager
def long_timeout_group() -> Iterator[dist.ProcessGroup | None]:
    """All ranks, over the hosts: one may wait in it for days, beside collectives that fail after
    --distributed-timeout-minutes. None for a single process. Every rank enters and leaves it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    yield group
    dist.barrier()  # no rank destroys it while another still reads from it
    dist.destroy_process_group(group)


def rank0_first(first: bool, work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """``work()`` on the ranks that are ``first``, then on the others; a UserError on one rank is raised on all.

    Args:
        group: of all ranks, as ``long_timeout_group`` makes it: the others wait as long as it does.
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
    """``work()`` on all ranks at once; a UserError on one is raised on all."""
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
    """``work()`` on rank 0; its result, or its OSError, on all."""
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
    """Each rank has looked for itself, at a file system that need not show all of them the same.

    Raises:
        UserError: on all ranks, where they differ.
    """
    values = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise UserError(f"{what} is {values[0]} for rank 0, but {other} for rank {rank}; is the folder shared?")


class AsyncAnyReduce:
    """Which of some flags any rank raises, known to all of them one call later; to a single process at once.

    The flags travel between the hosts, beside the training: no device is waited for, and no rank that is less than a
    whole call behind. Every rank makes one, and the same calls.

    Args:
        timeout: for a rank that never calls.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.get_world_size() > 1 else None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def __call__(self, here: Sequence[bool]) -> list[bool]:
        """This rank's flags now -> those that any rank raised in the call before; none in the first call."""
        if self._group is None:
            return list(here)
        before = self.finish()
        flags = torch.tensor(here, dtype=torch.int32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (flags, work)
        return before or [False] * len(here)

    def finish(self) -> list[bool]:
        """Take in what is under way, as the last call, so that no rank leaves while another still reads from it."""
        if self._pending is None:
            return []
        flags, work = self._pending
        self._pending = None
        work.wait()
        found: list[bool] = flags.bool().tolist()
        return found
