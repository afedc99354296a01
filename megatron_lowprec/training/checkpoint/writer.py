"""Writes a run's checkpoints, asynchronously with --async-save.

A checkpoint is written to a temporary folder, which is renamed when complete (``storage.publish``). Whenever a process
dies, a run resumes from the checkpoint before. Checkpoints in --save that are not the run's past, for it was sent back
or is another run, get other names: a later start would take them for its own if the newest is damaged or the tracker
lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.mcore.releases import ASYNC_SAVE
from megatron_lowprec.training.checkpoint import checksums, storage
from megatron_lowprec.training.checkpoint.checkpoint import RunProgress, state_to_save
from megatron_lowprec.training.checkpoint.resume import CONFIG, Saved
from megatron_lowprec.training.checkpoint.write_results import WriteResults
from megatron_lowprec.training.config.paths import free_names, same_folder
from megatron_lowprec.training.distributed import subprocesses
from megatron_lowprec.training.distributed.rank_sync import on_first_rank
from megatron_lowprec.training.distributed.watchdog import is_lost_connection
from megatron_lowprec.training.model import Trainer
from megatron_lowprec.training.options.output_options import CheckpointOptions


@dataclass(frozen=True)
class Origin:
    """Where a run stands in its --save folder.

    Attributes:
        iteration: of the checkpoint there that it began from, or wrote last; -1 if it began elsewhere.
        continued: whether that one and those before it are its past; else it took weights alone.
    """

    iteration: int = -1
    continued: bool = False


ELSEWHERE = Origin()


def origin_of(found: Saved | None, config: CheckpointOptions) -> Origin:
    """The origin of a start that begins from this checkpoint."""
    if found is None or not same_folder(config.load, config.save):
        return ELSEWHERE
    return Origin(found.progress["iteration"], continued=not config.finetune)


def publish_own(partial: Path, folder: str, iteration: int, origin: Origin) -> tuple[Path, list[Path]]:
    """As ``storage.publish``; returns as well the new names of checkpoints that are not this run's past.

    These are not renamed before the disk has all of the new one. If the process dies, the same command begins from
    ``origin`` again, or continues from the new checkpoint: the tracker names ``origin`` before any name changes, and a
    checkpoint that gave its weights alone goes last.
    """
    storage.seal(partial)
    present, begun = storage.whole(folder), origin.iteration
    others = [path for number, path in present.items() if not (origin.continued and number <= begun)]
    names = dict(zip(others, free_names(others), strict=True))
    source = None if origin.continued else present.get(begun)
    if others and begun in present:
        storage.track(folder, begun)
    for path, name in names.items():
        if path != source:
            path.rename(name)
    final = storage.place(partial, folder, iteration, None if source is None else names[source])
    if source is not None and source != final:
        source.rename(names[source])
    return final, list(names.values())


class CheckpointWriter:
    """Every rank makes the same calls; if a checkpoint cannot be written, each raises a UserError on every rank.

    Args:
        config: folder, whether asynchronous, number of checkpoints to keep.
        saved: content of each ``config.yaml`` besides the progress.
        say: called with lines for the log.
        origin: where the run begins.
    """

    def __init__(
        self,
        config: CheckpointOptions,
        saved: dict[str, Any],
        say: Callable[[str], None],
        origin: Origin = ELSEWHERE,
    ) -> None:
        self._config, self._saved, self._say, self._origin = config, saved, say, origin
        self._queue = AsyncCallsQueue()
        self._writing: Path | None = None

    def save(self, trainer: Trainer, progress: RunProgress) -> None:
        """Write a checkpoint. With --async-save it is valid once ``poll`` or ``finish`` has reported it."""
        assert self._config.save is not None
        folder, iteration = self._config.save, progress.iteration
        content = yaml.safe_dump({**self._saved, "progress": asdict(progress)}, sort_keys=False)
        self.finish()
        with self._failing_in_a_line(None):
            partial = on_first_rank(lambda: storage.stage(folder, iteration))
        with self._failing_in_a_line(partial), subprocesses.helpers(), checksums.summing():
            if filesystem_async._results_queue is None:
                bind("write_results", _results_queue=WriteResults())
            state = state_to_save(trainer, with_optimizer=not self._config.no_save_optim)
            request = dist_checkpointing.save(state, str(partial), validate_access_integrity=True, **ASYNC_SAVE)
            request.add_finalize_fn(lambda: self._publish(partial, folder, iteration, content))
            if not self._config.async_save:
                request.execute_sync()
                return
            self._queue.schedule_async_request(request)
            self._writing = partial

    def poll(self) -> None:
        """Publish a checkpoint that all ranks have written by now; call it between steps."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Wait for a pending checkpoint."""
        self._finalize(blocking=True)

    def _finalize(self, blocking: bool) -> None:
        if self._writing is None:
            return
        with self._failing_in_a_line(self._writing):
            self._queue.maybe_finalize_async_calls(blocking)
        if not self._queue.get_num_unfinalized_calls():
            self._writing = None

    def _publish(self, partial: Path, folder: str, iteration: int, content: str) -> None:
        def publish() -> tuple[Path, int, list[Path]]:
            (partial / CONFIG).write_text(content, encoding="utf-8")
            final, others = publish_own(partial, folder, iteration, self._origin)
            keep = self._config.keep_last
            return final, len(storage.prune(folder, iteration, keep)) if keep is not None else 0, others

        final, removed, others = on_first_rank(publish)
        self._origin = Origin(iteration, continued=True)
        if others:
            self._say(f"checkpoints that this run does not continue are set aside: {', '.join(map(str, others))}")
        self._say(f"saved {final}" + (f", removed {removed} older" if removed else ""))

    @contextmanager
    def _failing_in_a_line(self, partial: Path | None) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, OSError, RuntimeError) as error:
            if is_lost_connection(error):
                raise
            # torch's archive writer names positions in a file, not the full disk
            free = shutil.disk_usage(str(self._config.save)).free / 2**20
            if dist.get_rank() == 0 and partial is not None:
                # Free the disk space for the next attempt and other uses.
                shutil.rmtree(partial, ignore_errors=True)
            present, newest = storage.whole(str(self._config.save)), storage.tracked(str(self._config.save))
            newest = newest if newest in present else max(present, default=None)
            stays = f"iteration {newest} stays the newest checkpoint" if newest is not None else "there is none yet"
            raise UserError(
                f"--save {self._config.save}: a checkpoint could not be written: {_cause(error)}; its disk has "
                f"{free:,.0f} MiB free; {stays}; "
                "make room or mend the disk, and start the run again"
            ) from None


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        failures = [failure[0] for failure in error.failures.values()]
        if not failures:
            return "another rank failed"
        error = failures[0]
    return " ".join(str(error).split())[:300] or type(error).__name__
