"""Runs training from the command line; cheap checks that can fail come before expensive setup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.backends.table import DEVICES, emulated_rows
from megatron_lowprec.recipe.coverage import (
    check_activations,
    check_gemm_globs,
    check_primary_weights,
    check_sizes,
    keeps_all,
)
from megatron_lowprec.recipe.explain import phase_in_force
from megatron_lowprec.recipe.layer_match import Progress
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.checkpoint.changes import other_recipe
from megatron_lowprec.training.checkpoint.save_lock import SaveLock
from megatron_lowprec.training.config import te_checks
from megatron_lowprec.training.config.accumulation_options import resolve_accumulation
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.memory_options import memory_notes
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.paths import keep_older_run, run_paths, same_folder
from megatron_lowprec.training.config.phase_options import check_phase_iters, with_steps
from megatron_lowprec.training.config.resolve import (
    check_packages,
    describe_layout,
    resolve_model,
    resolve_recipe,
    resolve_run,
)
from megatron_lowprec.training.distributed.interrupt import (
    Interrupted,
    PeerLost,
    Signals,
    Stop,
    StopReasons,
    ask_requeue,
    clear_requeue,
    follows_a_failure,
)
from megatron_lowprec.training.distributed.startup import Ranks, connect, finalize, lay_out, versions
from megatron_lowprec.training.distributed.visible_gpus import has_gpus
from megatron_lowprec.training.memory import report as memory_report
from megatron_lowprec.training.memory.plan import GIB
from megatron_lowprec.training.models.common.rank_sizes import sequence_ranks
from megatron_lowprec.training.models.sizes import linear_sites, num_parameters, tensor_ranks
from megatron_lowprec.training.monitoring.counterfactuals import check_counterfactuals
from megatron_lowprec.training.monitoring.operand_files import capture_line, check_capture
from megatron_lowprec.training.options.recipe_options import RecipeOptions
from megatron_lowprec.training.run_plan import RunPlan, plan_run

if TYPE_CHECKING:
    import torch

    from megatron_lowprec.mcore.graphs.layer_graphs import LayerGraphs
    from megatron_lowprec.training.checkpoint.checkpoint import RunProgress
    from megatron_lowprec.training.data.batches import Data
    from megatron_lowprec.training.model import Trainer

_MANY_EPOCHS = 10  # beyond, a run is more likely to lack a --data-path than to want them


def run(argv: Sequence[str], ranks: Ranks) -> None:
    """Train, or print the requested information.

    Raises:
        UserError: errors that a user can fix; raised before the process group starts wherever possible.
    """
    config, given, notes = parse(argv)
    if config.list_recipes:
        _print_once(ranks, _recipe_table())
        return
    if config.sequence_parallel and config.tensor_model_parallel_size == 1:
        notes = [*notes, "--sequence-parallel does nothing at --tensor-model-parallel-size 1"]
    config = resolve_model(config)
    if (
        config.moe_router_load_balancing_type == "sinkhorn"
        and sequence_ranks(config) * config.context_parallel_size > 1
    ):
        notes = [
            *notes,
            "--moe-router-load-balancing-type sinkhorn: each rank of a sequence balances its own tokens, which go to "
            "other experts than in one process",
        ]
    config, recipe, more = _recipe(config, given)
    notes = notes + more
    sites, layers, sharing = linear_sites(config), config.shape.num_layers, tensor_ranks(config)
    check_sizes(recipe, sites, layers, sharing)
    check_activations(recipe, sites, sharing)
    check_phase_iters(config, recipe)
    check_gemm_globs(recipe, config.rerun_in_bf16, sites, layers)
    check_capture(config)
    check_counterfactuals(config, sites, layers, sharing)
    if keeps_all(recipe, sites, layers):
        notes.append(f"recipe {recipe.name} quantizes nothing in this model: its rules leave all layers out")
    if (config.fp8_param_gather or recipe.fp8_weights) and config.transformer_impl == "local":
        check_primary_weights(recipe)
    config, more = resolve_recipe(config, recipe, given)
    notes = notes + more
    _check_device(config, config.memory_plan)
    if config.explain_recipe:
        _, adds = resolve_accumulation(config, recipe, ranks.world_size, config.device)
        _print_once(ranks, *notes, *memory_notes(config, recipe, given), *adds, _explanation(config, recipe))
        return
    if config.memory_plan:
        from megatron_lowprec.kernels.dispatch import arch_here

        gpu = memory_report.this_gpu(ranks.local_rank) if config.device in (None, arch_here()) else None
        planned = memory_report.planned(config, recipe, ranks.world_size, gpu)
        _print_once(ranks, *notes, *memory_notes(config, recipe, given), *planned)
        return
    _train(config, given, notes, recipe, ranks)


def _check_device(config: RecipeOptions, memory_plan: bool) -> None:
    if config.device is None:
        return
    if not (config.explain_recipe or memory_plan):
        raise UserError(
            f"--device {config.device} was asked of a run, which takes the GPUs of its machine: leave it out, or add "
            "--explain-recipe or --memory-plan"
        )
    if config.device not in DEVICES:
        raise UserError(f"--device {config.device} is not known: give one of {', '.join(DEVICES)}")
    if memory_plan and config.device == "cpu":
        raise UserError("--device cpu was asked of --memory-plan, which counts a GPU's memory: give a GPU such as sm90")


def _recipe(config: Config, given: frozenset[str]) -> tuple[Config, Recipe, list[str]]:
    """The recipe that was asked for, or else that of the checkpoint which the run continues from, whose name --recipe
    then has; a note if so.
    """
    if "recipe" not in given and (config.load or config.save):
        from megatron_lowprec.training.checkpoint.resume import recipe_to_continue

        found = recipe_to_continue(config)
        if found is not None:
            recipe, stored = found
            changed = " with --recipe-override" if recipe.name != stored else ""
            return replace(config, recipe=stored), recipe, [f"recipe: the checkpoint's {stored}{changed}"]
    return config, load_recipe(config.recipe, config.recipe_override), []


def _print_once(ranks: Ranks, *lines: str) -> None:
    if ranks.rank == 0:
        print(*lines, sep="\n", flush=True)


def _recipe_table() -> str:
    from megatron_lowprec.recipe.registry import list_table

    return list_table()


def _explanation(config: Config, recipe: Recipe) -> str:
    from megatron_lowprec.kernels.dispatch import arch_here
    from megatron_lowprec.recipe.explain import explain

    if config.transformer_impl == "transformer_engine":
        means = te_checks.check(config, recipe)
        return f"recipe {recipe.name}: {recipe.summary}\nby TransformerEngine, in every linear layer: {means}"
    return explain(
        with_steps(recipe, config),
        linear_sites(config),
        config.shape.num_layers,
        config.device or arch_here(),
        config.rerun_in_bf16,
        config.emulate_accumulator,
        tensor_ranks=tensor_ranks(config),
        dtype="bfloat16" if config.bf16 else "float32",
        emulate=emulated_rows(config.emulate, config.native),
        train_iters=config.train_iters,
        requires_native=config.native == "require",
    )


def _train(config: Config, given: frozenset[str], notes: list[str], recipe: Recipe, ranks: Ranks) -> None:
    from megatron_lowprec.training.checkpoint.resume import source

    config = resolve_run(config, ranks.world_size, gpus=has_gpus())
    check_packages(config)
    te_checks.prepare(config, recipe)
    config, more = source(config)
    notes = notes + more
    config, paths = run_paths(config, recipe.name)
    if same_folder(config.load, config.save):  # by default, where --load names that folder
        config, more = source(config)
        notes = notes + more
    signals = Signals()
    first = ranks.rank == 0
    with signals.listening(config.exit_signal_handler), SaveLock(paths.checkpoints if first else None) as lock:
        try:
            if first and lock.other() is None:
                clear_requeue(config.save)
            stop = _work(plan_run(config, paths, given, notes, recipe, ranks), ranks, signals, lock)
        except BaseException as error:
            if signals.received is None:
                raise
            if not signals.deferred:
                # Convert whatever exception the signal has become on its way up here.
                if follows_a_failure(signals.received, ranks.local_world_size):
                    raise PeerLost(signals.received) from None
                ask_requeue(config.save, None, signals.received)
                raise Interrupted(signals.received) from None
            from megatron_lowprec.training.distributed.watchdog import is_lost_connection

            if is_lost_connection(error):
                raise PeerLost(str(error)) from None
            raise
    if stop is not None and stop.error is not None:
        raise UserError(stop.error)


def _work(plan: RunPlan, ranks: Ranks, signals: Signals, lock: SaveLock) -> Stop | None:
    """Set up process groups and train inside of them; returns why the training ended early, or None."""
    device = connect(plan.config, ranks)
    from megatron_lowprec.training.distributed.rank_sync import same_as_on_rank_0, same_on_all_ranks
    from megatron_lowprec.training.distributed.watchdog import PeerWatch

    same_on_all_ranks("the checkpoint to continue from", str(plan.found.folder) if plan.found is not None else "none")
    same_as_on_rank_0(plan.shared)
    lay_out(plan.config)
    with PeerWatch(ranks.rank):
        stop = _train_on_ranks(plan, device, ranks, signals, lock)
    finalize()
    return stop


def _train_on_ranks(plan: RunPlan, device: torch.device, ranks: Ranks, signals: Signals, lock: SaveLock) -> Stop | None:
    """Build what trains, load what the run continues from, say what it is, and train."""
    from megatron_lowprec.training import loop, model
    from megatron_lowprec.training.checkpoint.writer import CheckpointWriter, origin_of
    from megatron_lowprec.training.data import batches
    from megatron_lowprec.training.distributed.rank_sync import run_on_all_ranks
    from megatron_lowprec.training.monitoring.log import RunLog
    from megatron_lowprec.training.monitoring.run_metadata import RunRecord

    run_on_all_ranks(lock.acquire)
    config, paths, content = plan.config, plan.paths, plan.content
    splits = batches.build(config, plan.tokenizer, ranks.rank, ranks.local_rank)
    trainer = model.build(config, plan.recipe, plan.schedule, content["padded_vocab_size"])
    _check_numerics(plan, trainer, device)
    progress, uncalibrated, loaded_notes = _load(plan, trainer, device)
    notes = [*plan.later_notes, *loaded_notes]
    first = ranks.rank == 0
    if first:
        notes += keep_older_run(paths, config)
    run_on_all_ranks(lock.acquire)  # moving an older run's folder has moved the file with it
    layers = model.implementation(config, trainer)
    facts = {
        "recipe": plan.recipe.name,
        "gemms": trainer.runtime.gemms(),
        "layers": layers,
        "device": _device_name(str(device)),
        "processes": ranks.world_size,
        "versions": dict(versions()),
        "parameters": num_parameters(config, content["padded_vocab_size"]),
        "tokens": plan.samples * config.shape.seq_length,
    }
    record = RunRecord(paths.record, first, facts, continues=plan.continues)
    if plan.recipe.phases:
        last = Progress(progress.last_step, config.train_iters)
        record.enter_phase(phase_in_force(plan.recipe, last), trainer.runtime.gemms())
    # Without an evaluation nothing replaces the last one's rows.
    evaluated = progress.evaluated if config.eval_iters else progress.iteration
    with RunLog(
        config, paths, config.steps.iterations, first, progress.iteration, content, evaluated, record.run_id
    ) as log:
        if first:
            paths.config.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        log.say(*plan.notes, *_header(plan, layers, str(device), splits, ranks.world_size))
        about_data = [note for split in splits.values() if split is not None for note in split.notes]
        log.say(*trainer.runtime.header(), *about_data, *notes)
        # From here on there is training state to save.
        signals.defer()
        stops = StopReasons(config, config.distributed_timeout_minutes, signals, ranks.started)
        writer = CheckpointWriter(config, content, log.say, origin_of(plan.found, config))
        if trainer.graphs is not None:
            trainer.graphs.say = log.say
        run = loop.Run(
            config, paths, device, trainer, splits, progress, log, stops, writer, record, content, uncalibrated
        )
        try:
            stop = loop.train(run)
        finally:
            if trainer.graphs is not None:
                trainer.graphs.drop()
        stops.finish()
        peak = None
        if device.type == "cuda":
            peak, reserved = _peak_memory(device, trainer.graphs)
            log.say(f"memory: {peak / GIB:.1f} GiB allocated at most on a GPU, {reserved / GIB:.1f} reserved by torch")
        record.end(progress.iteration, peak)
        log.close(failed=stop is not None and stop.error is not None)
    return stop


def _check_numerics(plan: RunPlan, trainer: Trainer, device: torch.device) -> None:
    """Compare this GPU's products and draws with the reference's; raises a rank's UserError on all."""
    from megatron_lowprec.mcore.runtime import RecipeRuntime
    from megatron_lowprec.training.distributed.rank_sync import run_on_all_ranks
    from megatron_lowprec.training.monitoring.native_check import prepare
    from megatron_lowprec.training.monitoring.self_test import self_test

    config, runtime = plan.config, trainer.runtime
    if isinstance(runtime, RecipeRuntime):
        run_on_all_ranks(lambda: prepare(config.native, runtime.backends))
    if not config.no_self_test and config.transformer_impl == "local":
        run_on_all_ranks(lambda: self_test(plan.recipe, trainer.config.params_dtype, device))


def _load(plan: RunPlan, trainer: Trainer, device: torch.device) -> tuple[RunProgress, bool, list[str]]:
    """Load the plan's checkpoint, if it has one.

    Returns:
        the run's progress, whether amax histories are to be filled before the first step, and notes.
    """
    from megatron_lowprec.training.checkpoint import checkpoint
    from megatron_lowprec.training.distributed.rank_sync import on_any_rank

    config, progress, notes = plan.config, checkpoint.RunProgress(), list[str]()
    uncalibrated = config.calibrate_amax and bool(plan.recipe.delayed_operands())
    if config.calibrate_amax and not uncalibrated:
        notes.append(f"--calibrate-amax: nothing to fill, recipe {plan.recipe.name} has no delayed scaling")
    if plan.found is not None:
        loaded = checkpoint.load(plan.found, trainer, config, plan.content["layout"])
        progress, uncalibrated = loaded.progress, loaded.uncalibrated
        begun = f"continuing from {plan.found.folder} at iteration {progress.iteration}"
        notes += [f"weights of {plan.found.folder}" if config.finetune else begun, *loaded.notes]
    # that of the last completed step, whose evaluation may be due; the loop enters the next step's
    trainer.enter_phase(progress.last_step)
    if progress.iteration > 0 and plan.found is not None and other_recipe(plan.found, plan.recipe) is not None:
        uncalibrated |= on_any_rank(trainer.fit_histories(), device)  # of layers that the recipe before left in bf16
    return progress, uncalibrated, notes


def _peak_memory(device: torch.device, graphs: LayerGraphs | None) -> tuple[int, int]:
    """Peak bytes of tensors and graphs, and those torch reserved, on the fullest GPU of the run; a collective call."""
    import torch
    import torch.distributed as dist

    here = torch.cuda.max_memory_allocated() if graphs is None else graphs.peak_bytes()
    peaks = torch.tensor([here, torch.cuda.max_memory_reserved()], dtype=torch.int64, device=device)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    allocated, reserved = peaks.tolist()
    return allocated, reserved


def _header(plan: RunPlan, layers: str, device: str, splits: Data, world_size: int) -> list[str]:
    from megatron_lowprec.training.data.batches import SplitData

    config, vocabulary = plan.config, plan.content["padded_vocab_size"]
    tokens = {name: split.epoch_tokens for name, split in splits.items() if isinstance(split, SplitData)}
    whole = plan.samples * config.shape.seq_length
    switch = config.data_phase_switch_samples
    epochs = whole / tokens["train"] if switch is None else 0.0  # two blends have epochs of their own
    model = (
        f"{config.num_layers} layers, hidden {config.hidden_size}, {config.num_attention_heads} heads, sequence "
        f"{config.seq_length}, vocabulary {vocabulary} (padded), {num_parameters(config, vocabulary):,} parameters"
    )
    phase = [] if switch is None else [f"from sample {switch:,} on the second blend"]
    rows = [
        ("model", model),
        ("parallelism", describe_layout(plan.content["layout"])),
        ("recipe", plan.recipe.name),
        ("layers", layers),
        ("device", ", ".join([_device_name(device), *(f"{name} {version}" for name, version in versions().items())])),
        ("data", ", ".join([*(f"{name} {count:,} tokens an epoch" for name, count in tokens.items()), *phase])),
        (
            "run",
            f"{config.train_iters:,} iterations, {whole:,} tokens{f' = {epochs:.2f} epochs' if epochs else ''}, in "
            f"{plan.paths.run}",
        ),
    ]
    if epochs > _MANY_EPOCHS:
        rows.append(("warning", f"each text is seen {epochs:,.0f} times; --data-path PREFIX gives a larger corpus"))
    if plan.config.capture_step:
        completed = plan.found.progress["iteration"] if plan.found is not None else 0
        rows.append(("capture", capture_line(plan.config, plan.paths, world_size, completed)))
    return [f"{what + ':':<13}{text}" for what, text in rows]


def _device_name(device: str) -> str:
    import torch

    return (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"CPU, {torch.get_num_threads()} threads a process"
    )
