"""A run's setup that needs no other ranks: its checks fail before any process group starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.serialization import flattened
from megatron_lowprec.training import schedule as schedules
from megatron_lowprec.training.config.accumulation_options import resolve_accumulation
from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.graph_options import resolve_cuda_graphs
from megatron_lowprec.training.config.memory_options import memory_notes
from megatron_lowprec.training.config.options import OPTIONS, Config
from megatron_lowprec.training.config.paths import RunPaths
from megatron_lowprec.training.config.phase_options import continued_phases, with_steps
from megatron_lowprec.training.config.resolve import layout_of
from megatron_lowprec.training.distributed.startup import Ranks, versions
from megatron_lowprec.training.memory import report as memory_report
from megatron_lowprec.training.memory.plan import MemoryPlan
from megatron_lowprec.training.memory.plan import plan as plan_memory
from megatron_lowprec.training.options.declaration import Part
from megatron_lowprec.training.rampup import run_length

if TYPE_CHECKING:
    from megatron_lowprec.training.checkpoint.resume import Saved
    from megatron_lowprec.training.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class RunPlan:
    """A run's setup that needs no other ranks."""

    config: Config
    paths: RunPaths
    recipe: Recipe
    schedule: schedules.Schedule
    tokenizer: Tokenizer
    found: Saved | None
    # Whether an earlier start of this run wrote that checkpoint.
    continues: bool
    content: dict[str, Any]
    # Of the whole run, including the past of a continued run.
    samples: int
    # For the log, before and after the header.
    notes: list[str]
    later_notes: list[str]

    @property
    def shared(self) -> dict[str, Any]:
        """What all ranks have to agree on, by name. Files and folders may have other names on another node."""
        options = {
            flag(name): _without_names(name, value)
            for name, value in self.content["options"].items()
            if not (OPTIONS[name].by_rank or (OPTIONS[name].part is Part.OUTPUT and isinstance(value, str)))
        }
        return options | {f"the recipe's {name}": value for name, value in flattened(self.content["recipe"])}


def _without_names(name: str, value: Any) -> Any:
    """What is left of an option's value if a file may have any name."""
    from megatron_lowprec.training.data.blend import parse_blend

    if OPTIONS[name].path == "data":
        return f"of weights {', '.join(str(weight) for _, weight in parse_blend(value))}"
    return "of a file" if OPTIONS[name].path else value


def plan_run(
    config: Config, paths: RunPaths, given: frozenset[str], notes: list[str], recipe: Recipe, ranks: Ranks
) -> RunPlan:
    """Tokenizer, schedule, and the checkpoint to resume from, checked for consistency."""
    import torch

    from megatron_lowprec.kernels.dispatch import arch_here
    from megatron_lowprec.training.checkpoint import changes
    from megatron_lowprec.training.checkpoint import resume as saved_state
    from megatron_lowprec.training.data.blend import check_paths, check_phase, continued_phase
    from megatron_lowprec.training.data.tokenizer import padded_vocab_size, tokenizer_of

    tokenizer = tokenizer_of(config)
    check_paths(config, tokenizer)
    found, found_notes = saved_state.find_checkpoint(config)
    stored = None
    if found is not None and not config.finetune:
        config, more = saved_state.stored_weights(found, config, recipe, given)
        notes, stored = notes + more, found.content["options"].get("fp8_accumulate_wgrad", False)
    config, more = resolve_accumulation(config, recipe, ranks.world_size, stored=stored)
    notes = notes + memory_notes(config, recipe, given) + more
    vocabulary = padded_vocab_size(
        tokenizer.vocab_size, config.make_vocab_size_divisible_by, config.tensor_model_parallel_size
    )
    gpu, automatic = memory_report.this_gpu(ranks.local_rank), config.cuda_graph_impl == "auto"
    config, more = resolve_cuda_graphs(config, recipe, ranks.world_size, gpus=torch.cuda.is_available())
    notes = notes + more
    if gpu is not None and not config.no_memory_check:

        def plan_of(config: Config) -> MemoryPlan:
            return plan_memory(config, recipe, vocabulary, ranks.world_size, arch_here())

        needed = plan_of(config)
        if automatic:
            config, needed, more = memory_report.eager_if_close(config, needed, gpu, plan_of)
            notes = notes + more
        notes = notes + memory_report.check(needed, gpu)
    batch = config.steps.global_batch_size
    schedule, schedule_notes = schedules.plan(config, batch, config.steps.samples)
    later_notes = [*found_notes]
    _, samples = run_length(config.steps)
    past: dict[str, Any] = {}
    start = saved_state.start_of(asdict(config))
    if found is not None:
        saved_state.check_tokenizer(found, tokenizer)
        vocabulary = saved_state.same_padding(found, config, tokenizer.vocab_size, vocabulary)
        saved_state.check_model(found, config, vocabulary)
        later_notes += [*changes.recipe_note(found, recipe), *changes.implementation_note(found, config)]
        past["started_from"] = start or found.started_from
        past["initial_weights"] = str(found.folder) if config.finetune else found.content.get("initial_weights")
        if not config.finetune:
            config, more = saved_state.continued(found, config, given)
            later_notes += more
            config, more = continued_phase(config, found.content["options"], given, found.progress["consumed_samples"])
            later_notes += more
            past["earlier_recipes"] = changes.earlier_recipes(found, recipe)
            # Earlier iterations may have had another batch size.
            behind, alike = found.progress, samples
            iterations, samples = run_length(config.steps, behind["iteration"], behind["consumed_samples"])
            config = replace(config, train_iters=iterations)
            own = config.override_opt_param_scheduler or config.no_load_optim  # not the checkpoint's schedule
            if own and config.train_samples is None and samples != alike:
                schedule, schedule_notes = schedules.plan(config, batch, samples)
            config, more = continued_phases(config, recipe, found.content["options"], found.recipe, given)
            later_notes += [*more, *changes.option_notes(found, config)]
            saved_state.check_length(found, config)
        if not (config.finetune or config.no_load_optim):
            saved_state.check_optimizer(found, config)
            schedule, more = schedules.continued(schedule, found.schedule, config, found.content["options"], given)
            later_notes += more
        if not config.finetune:
            past["earlier_options"] = changes.earlier_options(found, config, schedule)
    check_phase(config, samples)
    later_notes += schedule_notes
    layout = layout_of(config, ranks.world_size)
    content = saved_state.content(config, recipe, schedule, vocabulary, layout, tokenizer)
    content |= {"versions": dict(versions()), **{name: value for name, value in past.items() if value}}
    continues = found is not None and not start
    used = with_steps(recipe, config)
    used.start(config.train_iters)
    return RunPlan(config, paths, used, schedule, tokenizer, found, continues, content, samples, notes, later_notes)
