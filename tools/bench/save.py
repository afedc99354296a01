"""Time of a checkpoint's save with and without sums of its bytes, from one process on a CPU.

    python -m tools.bench.save --mib 1024 --rounds 5 --folder runs

A round saves the same tensors under each variant, in turn, as the driver does: Megatron-core's writer processes, a sync
of each file, the checkpoint's own files and its new name. ``torch`` is torch's CRC-32 of each tensor, which nothing
compares; ``none`` has no sums; ``files`` is the driver's, of each file.
"""

from __future__ import annotations

import io
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_lowprec.errors import Parser, run_tool
from megatron_lowprec.text_tables import plain_table
from tools.bench.machine import header, header_lines

TENSORS = 64
VARIANTS = ("torch", "none", "files")


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Context in which a save has these sums."""
    from megatron_lowprec.training.checkpoint import checksums

    if name == "files":
        with checksums.summing():
            yield
        return
    torch.serialization.set_crc32_options(name == "torch")
    with mock.patch.object(checksums, "write"):
        yield
    torch.serialization.set_crc32_options(True)


def state_of(mib: int) -> dict[str, Any]:
    """Random fp32 tensors of that size together."""
    from megatron.core.dist_checkpointing import ShardedTensor

    values = mib * 2**20 // 4 // TENSORS
    return {
        name: ShardedTensor.from_rank_offsets(name, torch.randn(values))
        for name in (f"tensor.{number}" for number in range(TENSORS))
    }


def seconds_of(state: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Seconds of one save: on the clock, and of the processor in all processes."""
    from megatron.core import dist_checkpointing

    from megatron_lowprec.training.checkpoint import storage

    begin, used = time.perf_counter(), _processor()
    partial = storage.stage(str(folder), 1)
    dist_checkpointing.save(dict(state), str(partial))
    storage.publish(partial, str(folder), 1)
    took = time.perf_counter() - begin, _processor() - used
    shutil.rmtree(folder)
    return took


def _processor() -> float:
    """Seconds of the processor in this process and the forked ones that have ended."""
    return sum(os.times()[:4])


def measure(mib: int, rounds: int, folder: Path) -> list[str]:
    """Lines of the table."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_lowprec.mcore import cpu_compat
    from megatron_lowprec.training.checkpoint.write_results import WriteResults

    cpu_compat.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    filesystem_async._results_queue = WriteResults()
    state = state_of(mib)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 1):  # the first one warms up
        for name in VARIANTS:
            with variant(name):
                found = seconds_of(state, folder)
            took[name] += [found] if number else []
    dist.destroy_process_group()
    speeds = ", ".join(f"{name} {2**28 / seconds / 1e9:.1f} GB/s" for name, seconds in _crc_seconds().items())
    rows = []
    for name in VARIANTS:
        clock, processor = ([each[at] for each in took[name]] for at in (0, 1))
        ratios = [a[1] / b[1] for a, b in zip(took[name], took["torch"], strict=True)]
        texts = [f"{value:.2f}" for value in (statistics.median(clock), min(clock), max(clock))]
        rows.append([name, *texts, f"{statistics.median(processor):.2f}", f"{statistics.median(ratios):.2f}"])
    columns = ["sums", "median s", "min s", "max s", "processor s", "processor /torch"]
    return [*plain_table(columns, rows, ["sums"]), f"CRC-32 of one process, by processor time: {speeds}"]


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return len(content)


def _crc_seconds() -> dict[str, float]:
    """Processor seconds for the CRC-32 of 2**28 bytes, by torch as it writes a tensor, and by zlib."""
    tensor = torch.randn(2**26)
    content = tensor.numpy().data.cast("B")
    work = {"torch": lambda: torch.save(tensor, io.BufferedWriter(_Nowhere())), "zlib": lambda: zlib.crc32(content)}
    found = {}
    for name, run in work.items():
        took = []
        for _ in range(5):
            begin = time.process_time()
            run()
            took.append(time.process_time() - begin)
        found[name] = min(took)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a UserError."""
    parser = Parser(prog="python -m tools.bench.save", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the tensors (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="file system to write to")
    args = parser.parse_args(argv)

    def run() -> None:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            lines = measure(args.mib, args.rounds, Path(scratch, "save"))
        words = sys.argv[1:] if argv is None else argv
        about = header(torch.device("cpu"), words) | {"command": " ".join(["python -m tools.bench.save", *words])}
        print(*header_lines(about), *lines, sep="\n")

    return run_tool("python -m tools.bench.save", run)


if __name__ == "__main__":
    sys.exit(main())
