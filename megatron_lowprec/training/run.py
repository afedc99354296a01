"""From the command line to a trained model: set up in the order in which things can go wrong cheaply."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from megatron_lowprec.recipe.load import load_recipe
from megatron_lowprec.recipe.resolve import check_sizes
from megatron_lowprec.recipe.schema import Recipe
from megatron_lowprec.training import memory, memory_report, te_recipe
from megatron_lowprec.training import saved as saved_state
from megatron_lowprec.training import schedule as schedules
from megatron_lowprec.training.arguments import parse
from megatron_lowprec.training.config import Config
from megatron_lowprec.training.paths import RunPaths, keep_older_run, run_paths
from megatron_lowprec.training.resolve import data_parallel_size, resolve_model, resolve_run, total_samples
from megatron_lowprec.training.shapes import linear_sites, num_parameters, sized
from megatron_lowprec.training.startup import Ranks, finalize, initialize, versions


def run(argv: Sequence[str], ranks: Ranks) -> None:
    """Train, or print what was asked for.

    Raises:
        UserError: what a user can mend; before the process group starts wherever that is possible.
    """
    config, given, notes = parse(argv)
    if config.list_recipes:
        _print_once(ranks, _recipe_table())
        return
    config = resolve_model(config)
    recipe = load_recipe(config.recipe, config.recipe_set)
    check_sizes(recipe, linear_sites(config), sized(config.num_layers), config.tensor_model_parallel_size)
    if config.explain_recipe:
        _print_once(ranks, *notes, _explanation(config, recipe))
        return
    if config.memory_plan:
        _print_once(ranks, *notes, *memory_report.planned(config, recipe, ranks.world_size, _gpu(ranks)))
        return
    _train(config, given, notes, recipe, ranks)


def _print_once(ranks: Ranks, *lines: str) -> None:
    if ranks.rank == 0:
        print(*lines, sep="\n", flush=True)


def _recipe_table() -> str:
    from megatron_lowprec.recipe.registry import list_table

    return list_table()


def _explanation(config: Config, recipe: Recipe) -> str:
    import torch

    from megatron_lowprec.kernels.dispatch import arch_of
    from megatron_lowprec.recipe.explain import explain

    if config.transformer_impl == "transformer_engine":
        means = te_recipe.check(config, recipe)
        return f"recipe {recipe.name}: {recipe.summary}\nby TransformerEngine, in every linear layer: {means}"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return explain(recipe, linear_sites(config), sized(config.num_layers), arch_of(device))


def _train(config: Config, given: frozenset[str], notes: list[str], recipe: Recipe, ranks: Ranks) -> None:
    import torch

    from megatron_lowprec.kernels.dispatch import arch_of
    from megatron_lowprec.training.blend import check_paths, continued_phase
    from megatron_lowprec.training.tokenizer import padded_vocab_size, tokenizer_of

    config = resolve_run(config, ranks.world_size, gpus=torch.cuda.is_available())
    te_recipe.prepare(config, recipe)
    config, paths = run_paths(config, recipe.name)
    schedule, schedule_notes = schedules.plan(config, total_samples(config))
    tokenizer = tokenizer_of(config)
    check_paths(config, tokenizer)
    vocabulary = padded_vocab_size(
        tokenizer.vocab_size, config.make_vocab_size_divisible_by, config.tensor_model_parallel_size
    )
    gpu = _gpu(ranks)
    if gpu is not None and not config.no_memory_check:
        arch = arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        notes += memory_report.check(memory.plan(config, recipe, vocabulary, ranks.world_size, arch), gpu)
    found = saved_state.find_checkpoint(config)
    if found is not None:
        saved_state.check_shape(found, config, vocabulary)
        schedule_notes += [
            *saved_state.recipe_note(found, recipe),
            *saved_state.implementation_note(found, config),
        ]
        if not config.finetune:
            config, more = continued_phase(config, found.content["options"], given)
            schedule_notes += more
        if not (config.finetune or config.no_load_optim):
            schedule, more = schedules.continued(schedule, found.schedule, config, given)
            schedule_notes += more
    layout = {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
        "data": data_parallel_size(config, ranks.world_size),
    }
    content = saved_state.content(config, recipe, schedule, vocabulary, layout)

    device = initialize(config, ranks)
    from megatron_lowprec.training import checkpoint, data, loop, model
    from megatron_lowprec.training.log import RunLog

    splits = data.build(config, tokenizer, ranks.rank, ranks.local_rank)
    trainer = model.build(config, recipe, schedule, vocabulary)
    progress = checkpoint.Progress()
    if found is not None:
        progress, load_notes = checkpoint.load(found, trainer, config, layout)
        schedule_notes += [f"continuing from {found.folder} at iteration {progress.iteration}", *load_notes]
    if ranks.rank == 0:
        schedule_notes += keep_older_run(paths, config)
    log = RunLog(config, paths, ranks.rank == 0, progress.iteration, content)
    if ranks.rank == 0:
        paths.config.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    layers = model.implementation(config, trainer)
    log.say(*notes, *_header(config, recipe, layers, vocabulary, layout, str(device), splits, paths))
    log.say(*trainer.runtime.header(), *schedule_notes)
    loop.train(loop.Run(config, paths, device, trainer, splits, progress, log, content))
    if gpu is not None:
        log.say(f"memory: {torch.cuda.max_memory_allocated() / memory.GIB:.1f} GiB allocated at most on a GPU")
    log.close()
    finalize()


def _gpu(ranks: Ranks) -> memory_report.Device | None:
    """This process's GPU, where there is one for it."""
    import torch

    if not torch.cuda.is_available() or ranks.local_rank >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(ranks.local_rank)
    return memory_report.Device(found.name, found.total_memory)


def _header(
    config: Config,
    recipe: Recipe,
    layers: str,
    vocabulary: int,
    layout: dict[str, int],
    device: str,
    splits: object,
    paths: RunPaths,
) -> list[str]:
    from megatron_lowprec.training.data import SplitData

    assert isinstance(splits, dict)
    tokens = {name: split.epoch_tokens for name, split in splits.items() if isinstance(split, SplitData)}
    whole = total_samples(config) * sized(config.seq_length)
    model = (
        f"{config.num_layers} layers, hidden {config.hidden_size}, {config.num_attention_heads} heads, sequence "
        f"{config.seq_length}, vocabulary {vocabulary} (padded), {num_parameters(config, vocabulary):,} parameters"
    )
    switch = config.data_phase_switch_samples
    phase = [] if switch is None else [f"from sample {switch:,} on the second blend"]
    rows = [
        ("model", model),
        ("parallelism", ", ".join(f"{name} {size}" for name, size in layout.items())),
        ("recipe", recipe.name),
        ("layers", layers),
        ("device", ", ".join([_device_name(device), *(f"{name} {version}" for name, version in versions().items())])),
        ("data", ", ".join([*(f"{name} {count:,} tokens an epoch" for name, count in tokens.items()), *phase])),
        (
            "run",
            f"{config.train_iters:,} iterations, {whole:,} tokens = {whole / tokens['train']:.2f} epochs, "
            f"in {paths.run}",
        ),
    ]
    return [f"{what + ':':<13}{text}" for what, text in rows]


def _device_name(device: str) -> str:
    import torch

    return (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"CPU, {torch.get_num_threads()} threads a process"
    )
