"""Readers of the files of runs and sweeps, and of archives of them."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path

from tools.fuzz.run import FuzzedReader, copy, write


def of_runs(made: Path) -> list[FuzzedReader]:
    names = ("config.yaml", "metrics.jsonl", "quantization.jsonl", "run.json")

    def make_sweep() -> None:
        for job in ("a-bf16-s1", "a-mxfp8-s2"):
            for name in names:
                copy(made / "run" / name, f"sweep/{job}/{name}")
            from dataclasses import asdict

            from megatron_lowprec.sweep.job_record import Record, now

            record = Record(job, "done", 0, 1, 3.0, now(), now(), 4, 4, 32, "0", {"recipe": {}}, ["x"])
            write({f"sweep/{job}/cell.json": json.dumps(asdict(record))})
            own = {
                "recipe": "bf16",
                "trained_under": "bf16",
                "data": {"a.jsonl": {"loss": 4.5}},
                "wikitext": {"loss": 5},
            }
            write({f"sweep/{job}/evaluation.json": json.dumps({"evaluations": [own]})})
        cells = [
            {
                "id": job,
                "label": job[2:-3],
                "recipe": job[2:-3],
                "model": "a",
                "variant": None,
                "seed": seed,
                "run": job,
            }
            for seed, job in enumerate(("a-bf16-s1", "a-mxfp8-s2"), 1)
        ]
        write({"sweep/sweep.json": json.dumps({"name": "s", "size": None, "cells": cells}, indent=1)})

    def report() -> None:
        from megatron_lowprec.report import tables
        from megatron_lowprec.report.groups import group_runs
        from megatron_lowprec.report.operands import find_snapshots
        from megatron_lowprec.report.runs import find_runs

        runs, notes = find_runs(["sweep"], 0.5)
        print(*notes, *(f"{run.place} {run.label} {run.why}" for run in runs), sep="\n")
        groups, more = group_runs(runs, "bf16")
        print(*more, sep="\n")
        for group in groups:
            find_snapshots(group)
            print(tables.growing_norms(group), [tables.device(run) for run in runs])

    def status() -> None:
        from megatron_lowprec.sweep import status as of_jobs

        found = of_jobs.rows(Path("sweep"))
        print(*of_jobs.lines(found), *of_jobs.notes(found), sep="\n")
        of_jobs.table(found, of_jobs.summary(found))

    def plots() -> None:
        from tools import plot_loss, plot_quantization

        run = Path("sweep/a-bf16-s1")
        config = plot_loss._config(run)
        plot_loss._summary(run, config, plot_loss.read_curve(run / "metrics.jsonl", print), [], None, Path("x.png"))
        rows = plot_quantization._rows(run / "quantization.jsonl", "snr")
        print(*plot_quantization.summary(rows, "snr"), sep="\n")

    def resume() -> None:
        from megatron_lowprec.training.monitoring.log import _drop_rows_after

        for name in ("metrics.jsonl", "quantization.jsonl"):
            before = Path("sweep/a-bf16-s1", name).read_bytes()
            try:
                _drop_rows_after(Path("sweep/a-bf16-s1", name), 2, 2, print)
            finally:
                Path("sweep/a-bf16-s1", name).write_bytes(before)

    def make_archive() -> None:
        from megatron_lowprec.report.archives.packing import write_archive
        from megatron_lowprec.report.runs import find_runs

        make_sweep()
        write_archive(Path("runs.safetensors.xz"), find_runs(["sweep"], 0.5)[0], print)

    def archive() -> None:
        from megatron_lowprec.report.archives.sources import unpack

        shutil.rmtree("unpacked", ignore_errors=True)
        unpack(Path("runs.safetensors.xz"), Path("unpacked"))
        if any(not path.resolve().is_relative_to(Path("unpacked").resolve()) for path in Path("unpacked").rglob("*")):
            raise AssertionError("outside")

    def make_content() -> None:
        make_archive()
        write({"runs.safetensors": lzma.decompress(Path("runs.safetensors.xz").read_bytes())})

    def content() -> None:
        write({"runs.safetensors.xz": lzma.compress(Path("runs.safetensors").read_bytes(), preset=0)})
        archive()

    def make_lock() -> None:
        from megatron_lowprec.training.distributed.process_lock import ProcessLock

        ProcessLock(Path("run.lock")).acquire()

    def lock() -> None:
        from megatron_lowprec.training.distributed.process_lock import holder

        holder(Path("run.lock"))

    jobs = tuple(f"sweep/a-bf16-s1/{name}" for name in (*names, "cell.json", "evaluation.json"))
    return [
        FuzzedReader("report", (*jobs, "sweep/sweep.json"), make_sweep, report),
        FuzzedReader("status of a sweep", (jobs[1], jobs[4], "sweep/sweep.json"), make_sweep, status),
        FuzzedReader("plots of a run", jobs[:3], make_sweep, plots),
        FuzzedReader("metrics at a resume", jobs[1:3], make_sweep, resume),
        FuzzedReader("archive", ("runs.safetensors.xz",), make_archive, archive),
        FuzzedReader("archive, its content", ("runs.safetensors",), make_content, content),
        FuzzedReader("lock of a run", ("run.lock",), make_lock, lock),
    ]
