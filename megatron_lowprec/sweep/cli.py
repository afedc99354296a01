"""Command line of `megatron-lowprec sweep`."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.shipped import find
from megatron_lowprec.sweep import job_record, local, slurm, status
from megatron_lowprec.sweep.jobs import (
    MANIFEST,
    J,
    Job,
    check_data,
    command,
    evaluation,
    expand,
    read_manifest,
    selected,
    settings_of,
    write_manifest,
)
from megatron_lowprec.sweep.spec import RENAMED, Sweep, evaluation_flags, read, sbatch_options, seeds_of
from megatron_lowprec.sweep.view import View
from megatron_lowprec.training.config.paths import check_folder

PROGRAM = ("-m", "megatron_lowprec", "sweep")
"""Arguments of Python that start this command line."""
TO_BE_CONTINUED = 75
"""Exit code of an interrupted sweep: sysexits' EX_TEMPFAIL, "try again"."""


Notes = Callable[[Sequence[Job]], Sequence[str]]
Check = Callable[[Sequence[str]], None]


def main(
    argv: Sequence[str],
    notes: Notes = lambda jobs: (),
    program: str = "sweep.py",
    check_evaluation: Check = lambda words: None,
) -> int:
    """Run the command; ``notes`` are lines on the chosen jobs, printed to stderr before one starts.

    ``check_evaluation`` raises a UserError for words that megatron-lowprec eval would refuse.

    Exit code 0; 1 if a job failed, or is left to another process; 2 for a user's error; 75 if interrupted by a signal,
    or if --start-within left jobs out.
    """
    parser = _parser(program)
    args = parser.parse_args(argv)
    if args.sweep is None:
        taken = f" --data-path took {' '.join(args.data_path)}; put the file before it" if args.data_path else ""
        parser.error(f"no sweep file is given;{taken or ' name one, such as configs/sweeps/paper_table2.yaml'}")
    return run_tool(program, lambda: _main(args, notes, check_evaluation))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Run recipes x models x overrides x seeds; docs/guide/sweeps.md has the whole of it.",
        allow_abbrev=False,
    )
    # optional only for argparse: main has the better error
    parser.add_argument("sweep", nargs="?", help="a file such as configs/sweeps/paper_table2.yaml")
    parser.add_argument("--size", help="one of the file's sizes; default the first")
    parser.add_argument("--out", help="folder of the sweep; default runs/sweeps/NAME-SIZE, or NAME")
    jobs = parser.add_argument_group("jobs")
    jobs.add_argument("--seeds", metavar="SEEDS", help="instead of the file's, such as 1234-1241 or 1,5-8")
    jobs.add_argument("--data-path", nargs="+", help="as --set data-path=")
    jobs.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of all jobs; null takes one away"
    )
    jobs.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="jobs by a glob, or a part, of their names"
    )
    jobs.add_argument("--job", type=int, metavar="N", help="the one job of this number, from 0")
    jobs.add_argument(
        "--evaluate", metavar="FLAGS", help="instead of the file's: flags of megatron-lowprec eval, to score each job"
    )
    jobs.add_argument("--rerun", action="store_true", help="start jobs anew, whose options have changed since")
    jobs.add_argument("--max-failures", type=int, metavar="N", help="start no more jobs after so many have failed")
    jobs.add_argument(
        "--start-within", type=float, default=math.inf, metavar="SECONDS", help="start no job later than this"
    )
    where = parser.add_argument_group("where they run")
    where.add_argument("--gpus", help="such as 0,1: only these of the machine's GPUs")
    for name in RENAMED:
        where.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="instead of the file's resources")
    where.add_argument("--slurm", action="store_true", help="submit a job array, one task a job")
    where.add_argument("--slurm-dry-run", action="store_true", help="print its script and stop")
    where.add_argument(
        "--sbatch", action="append", default=[], metavar="KEY=VALUE", help="an option of sbatch, such as partition=gpu"
    )
    look = parser.add_argument_group("looking")
    look.add_argument("--dry-run", action="store_true", help="a line a job: name, recipe, model, seed, command")
    look.add_argument("--status", action="store_true", help="a table of the sweep's jobs")
    return parser


def _main(args: argparse.Namespace, notes: Notes, check_evaluation: Check) -> int:
    if args.max_failures is not None and args.max_failures < 1:
        raise UserError(f"--max-failures {args.max_failures} starts no job; give at least 1, or leave it out")
    if math.isnan(args.start_within):
        raise UserError("--start-within nan is no time; give seconds, or leave it out")
    sweep = _with_flags(read(args.sweep, args.size), args)
    folder = f"{sweep.name}-{sweep.size}" if sweep.size else sweep.name
    out = Path(args.out or Path("runs") / "sweeps" / folder).absolute()
    if args.status:
        return _status(sweep, out, args)
    if sweep.evaluate:
        try:
            check_evaluation(sweep.evaluate)
        except UserError as error:
            named = f"{args.sweep}: evaluate" if args.evaluate is None else "--evaluate"
            raise UserError(f"{named}: {error}") from None
    check_folder(out, "--out")
    on_slurm = args.slurm or args.slurm_dry_run
    if args.sbatch and not on_slurm:
        raise UserError(f"--sbatch {' '.join(args.sbatch)} is for --slurm only; add --slurm, or leave --sbatch out")
    not_there = ("gpus", "jobs_per_gpu", "max_failures", "start_within")
    here = [name for name in not_there if getattr(args, name) not in (None, math.inf)]
    if here and on_slurm:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in here)
        raise UserError(f"--slurm has no use for {names}, as Slurm starts the jobs and places them; leave it out")
    if on_slurm and args.dry_run:
        args.slurm_dry_run, args.dry_run = True, False
    gpus = [] if on_slurm or (args.dry_run and sweep.resources.gpus_per_job) else _gpus(args.gpus)
    processes = local.processes_of(sweep.resources, gpus)
    if on_slurm and slurm.gpus(sweep):
        processes = sweep.resources.gpus_per_job or 1
    settings = settings_of(args.set) | ({} if args.data_path is None else {"data_path": args.data_path})
    jobs = expand(sweep, settings, processes)
    chosen = [_numbered(jobs, args.job, out)] if args.job is not None else selected(jobs, args.only)
    for note in notes(chosen) if args.job is None else ():
        print(f"note: {note}", file=sys.stderr, flush=True)
    if args.dry_run:
        for job in chosen:
            words = local.launch(command(job, out / job.id), processes)
            print(job.id, job.label, job.model, job.seed, shlex.join(words), sep="\t")
        return 0
    local.check(out, chosen, args.rerun)
    records = {job.id: job_record.read(out / job.id) for job in chosen}
    done = {name for name, record in records.items() if record is not None and record.state == "done"}
    done = {job.id for job in chosen if job.id in done and evaluation(job, out / job.id) is None}
    todo = [job for job in chosen if args.rerun or job.id not in done]
    if args.slurm_dry_run:
        print(slurm.script(sweep, jobs, todo or chosen, out, Path.cwd(), _passed_on(args, out)), end="")
        return 0
    if not on_slurm:  # Slurm nodes may have other disks
        check_data(todo)
    where = [] if on_slurm else local.places(sweep.resources, gpus, len(os.sched_getaffinity(0)))
    if args.job is None or not (out / MANIFEST).exists():
        write_manifest(out, sweep, jobs)
    if args.slurm:
        return _submit(sweep, jobs, todo, out, args)
    return _run(args, sweep, chosen, todo, where, out)


def _with_flags(sweep: Sweep, args: argparse.Namespace) -> Sweep:
    """The sweep with seeds, resources and sbatch options from the command line."""
    given = {name: getattr(args, name) for name in RENAMED if getattr(args, name) is not None}
    if args.job is not None or args.slurm or args.slurm_dry_run:
        given["jobs_per_gpu"] = 1
    if args.job is not None:  # it has all of the task's cores
        given["jobs_at_once"] = 1
    pairs = {key: value for key, equals, value in (text.partition("=") for text in args.sbatch) if equals}
    if len(pairs) < len(args.sbatch):
        raise UserError(f"--sbatch {' '.join(args.sbatch)}: write each as KEY=VALUE, such as partition=gpu, once")
    return replace(
        sweep,
        seeds=sweep.seeds if args.seeds is None else seeds_of(args.seeds),
        evaluate=sweep.evaluate if args.evaluate is None else evaluation_flags("--evaluate", args.evaluate),
        resources=replace(sweep.resources, **given),
        slurm={**sweep.slurm, **sbatch_options("--sbatch", pairs)},
    )


def _gpus(names: str | None) -> list[str]:
    found = local.visible_gpus()
    if names is None:
        return found
    wanted = names.replace(" ", "").split(",")
    missing = [name for name in wanted if name not in found]
    if missing:
        raise UserError(f"--gpus {names}: there is no GPU {', '.join(missing)} here; torch sees {found or 'none'}")
    return wanted


def _at(jobs: Sequence[J], number: int) -> J:
    if not 0 <= number < len(jobs):
        raise UserError(f"--job {number}: the sweep has {len(jobs)} jobs, 0 to {len(jobs) - 1}")
    return jobs[number]


def _numbered(jobs: Sequence[Job], number: int, out: Path) -> Job:
    """The job of that number, after checking that it has not changed since the array was submitted."""
    job = _at(jobs, number)
    if (out / MANIFEST).exists():
        known = [entry["id"] for entry in read_manifest(out)["cells"]]
        if known[number : number + 1] != [job.id]:
            raise UserError(
                f"--job {number} is {job.id} now, but the sweep in {out} was begun with other jobs; its file has "
                "changed: submit it again"
            )
    return job


def _run(
    args: argparse.Namespace, sweep: Sweep, chosen: list[Job], todo: list[Job], where: list[local.Place], out: Path
) -> int:
    for name in {job.id for job in chosen} - {job.id for job in todo}:
        (out / name / local.REQUEUE).unlink(missing_ok=True)  # of scores that are not asked for any more
    view = View(out, [job.id for job in chosen], sweep.evaluate)
    at_size = f" at size {sweep.size}" if sweep.size else ""
    done = f", {len(chosen) - len(todo)} of them done before" if len(todo) < len(chosen) else ""
    at_a_time = f", {min(len(where), len(todo))} at a time" if todo else ""
    view.say(f"{sweep.name}{at_size}: {len(chosen)} jobs{done}{at_a_time}, in {out}")
    result = local.Runner(out, todo, view, args.rerun, args.max_failures, args.start_within).run(where)
    found = [status.row(out, job.id, sweep.evaluate) for job in chosen]
    if args.job is None and not view.on_terminal:
        print(*status.lines(found), sep="\n")
    print(*status.notes(found), f"{sweep.name}: {status.summary(found)}; in {out}", sep="\n", flush=True)
    if result.signal is not None and (result.left or result.ended["interrupted"]):
        print(f"stopped by {result.signal}; the same command goes on where it stopped")
        return TO_BE_CONTINUED
    if result.left and not result.too_many_failures and math.isfinite(args.start_within):
        print(f"{len(result.left)} jobs were not started within {args.start_within:g} s; the same command starts them")
        return TO_BE_CONTINUED
    stopped = [name for name in result.ended["interrupted"] if (out / name / local.REQUEUE).exists()]
    if stopped and not result.ended["failed"]:
        print(f"to be continued: {', '.join(stopped)}; the same command goes on where they stopped")
        return TO_BE_CONTINUED
    if result.ended["failed"]:
        print("the same command tries the failed jobs again, each from its last checkpoint")
    elsewhere = [row.id for row in found if row.id in result.held and row.state != "done"]
    if elsewhere:
        print(f"not finished: {', '.join(elsewhere)}; another process runs them: repeat the command after its end")
    return 1 if result.ended["failed"] or elsewhere else 0


def _submit(sweep: Sweep, jobs: Sequence[Job], todo: Sequence[Job], out: Path, args: argparse.Namespace) -> int:
    """Submit a Slurm array of the jobs that are neither done nor running."""
    free = [job for job in todo if job_record.holder(out, job.id) is None]
    if not free:
        print(f"{sweep.name}: nothing to submit; {status.summary(status.rows(out, sweep.evaluate))}")
        return 0
    array = slurm.submit(slurm.script(sweep, jobs, free, out, Path.cwd(), _passed_on(args, out)), out)
    print(f"job {array}: {len(free)} of {len(jobs)} jobs; logs in {out / slurm.LOGS}")
    print(f"how it stands: {shlex.join(['python', *_names(args, out), '--status'])}")
    return 0


def _names(args: argparse.Namespace, out: Path) -> list[str]:
    """Command of this program with the sweep, its size and folder."""
    return [
        *PROGRAM,
        str(find(args.sweep, "configs/sweeps").absolute()),
        *([f"--size={args.size}"] if args.size else []),
        "--out",
        str(out),
    ]


def _passed_on(args: argparse.Namespace, out: Path) -> list[str]:
    """Arguments of an array's task, besides its number."""
    words = [*_names(args, out), *(["--seeds", args.seeds] if args.seeds else [])]
    words += ["--data-path", *args.data_path] if args.data_path else []
    words += [f"--set={text}" for text in args.set]
    words += [] if args.evaluate is None else [f"--evaluate={args.evaluate}"]
    for name in ("gpus_per_job", "processes_per_job"):
        value = getattr(args, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return [*words, *(["--rerun"] if args.rerun else [])]


def _status(sweep: Sweep, out: Path, args: argparse.Namespace) -> int:
    every = status.rows(out, sweep.evaluate)
    found = [_at(every, args.job)] if args.job is not None else selected(every, args.only)
    caption = f"{status.summary(found)}; in {out}"
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(status.table(found, caption))
    else:
        print(*status.lines(found), caption, sep="\n")
    print(*(f"{note}\n" for note in status.notes(found)), sep="", end="")
    return 0
