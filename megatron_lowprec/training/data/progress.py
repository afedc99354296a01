"""Terminal progress of a corpus preparation."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_lowprec.training.data.corpus_writer import Progress


@contextmanager
def progress_bar(log_interval: int) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on a terminal, else a line after every ``log_interval`` documents."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(log_interval)
        return
    text = TextColumn("{task.fields[documents]} documents, {task.fields[tokens]} tokens")
    with Bar(TaskProgressColumn(), BarColumn(), text, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("tokenizing", total=None, documents=0, tokens=0)

        def update(now: Progress) -> None:
            total = now.bytes_total or None
            bar.update(task, completed=now.bytes_read, total=total, documents=now.documents, tokens=now.tokens)

        yield update


def _lines(log_interval: int) -> Callable[[Progress], None]:
    start = time.perf_counter()
    due = log_interval

    def update(now: Progress) -> None:
        nonlocal due
        if now.documents < due:
            return
        due = now.documents - now.documents % max(log_interval, 1) + max(log_interval, 1)
        rate = now.tokens / (time.perf_counter() - start)
        done = f"{now.bytes_read / now.bytes_total:4.0%} " if now.bytes_total else ""
        print(f"{done}{now.documents} documents, {now.tokens} tokens, {rate:.0f} tokens/s", file=sys.stderr)

    return update
