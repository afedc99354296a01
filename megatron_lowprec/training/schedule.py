"""Learning rate and weight decay over a run, counted in samples as in Megatron's scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.options.optimizer_options import OptimizerOptions

_DEFAULT = vars(OptimizerOptions())


@dataclass(frozen=True)
class Schedule:
    """Parameters of the learning rate and the weight decay as functions of the consumed samples.

    ``weight_decay_incr_samples``: Megatron's wd_incr_steps, over which weight decay grows; None if it is constant.
    """

    max_lr: float
    min_lr: float
    init_lr: float
    warmup_samples: int
    decay_samples: int
    decay_style: str
    wsd_decay_samples: int | None
    wsd_decay_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str
    weight_decay_incr_samples: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Schedule:
        # In checkpoints without the field weight decay grew over the learning rate's horizon.
        growing = values["weight_decay_incr_style"] != "constant"
        values = {"weight_decay_incr_samples": values["decay_samples"] if growing else None} | values
        return Schedule(**{f.name: values[f.name] for f in fields(Schedule)})


def plan(options: OptimizerOptions, batch: int, total_samples: int) -> tuple[Schedule, list[str]]:
    """The schedule of the options, with a note if the warm-up had to be shortened.

    The horizon is --lr-decay-iters or --lr-decay-samples, by default the whole run. Weight decay grows over the whole
    run, as in Megatron-LM. A warm-up that does not fit is cut to half of the horizon.
    """
    assert options.lr is not None, "resolve() has not run"
    decay = options.lr_decay_samples or (options.lr_decay_iters or 0) * batch or total_samples
    if options.lr_warmup_fraction is not None:
        warmup = int(options.lr_warmup_fraction * decay)
    else:
        warmup = options.lr_warmup_samples or options.lr_warmup_iters * batch
    notes = []
    if warmup >= decay:
        shorter = decay // batch // 2 * batch
        notes.append(
            f"the warm-up of {warmup} samples does not fit into the schedule's {decay}: shortened to {shorter} samples"
        )
        warmup = shorter
    if options.weight_decay_incr_style != "constant" and None in (options.start_weight_decay, options.end_weight_decay):
        raise UserError(
            f"--weight-decay-incr-style {options.weight_decay_incr_style} needs both ends: "
            "give --start-weight-decay and --end-weight-decay"
        )
    if options.lr_warmup_init > options.lr:
        raise UserError(f"--lr-warmup-init {options.lr_warmup_init:g} is above --lr {options.lr:g}; lower it")
    start, end = options.start_weight_decay, options.end_weight_decay
    if start is not None and end is not None and start > end:
        raise UserError(
            f"--start-weight-decay {start:g} is above --end-weight-decay {end:g}, and weight decay can only grow: "
            "exchange them, or give --weight-decay-incr-style constant"
        )
    wsd = None
    if options.lr_decay_style == "WSD":
        if options.lr_wsd_decay_iters is None:
            raise UserError("--lr-decay-style WSD needs --lr-wsd-decay-iters, the length of its last phase")
        wsd, longest = options.lr_wsd_decay_iters * batch, decay - warmup
        if wsd > longest:
            notes.append(
                f"the last phase of WSD, {wsd} samples, does not fit between warm-up and the schedule's {decay}: "
                f"shortened to {longest}"
            )
            wsd = longest
    constant = options.weight_decay_incr_style == "constant"
    schedule = Schedule(
        max_lr=options.lr,
        min_lr=options.min_lr,
        init_lr=options.lr_warmup_init,
        warmup_samples=warmup,
        decay_samples=decay,
        decay_style=options.lr_decay_style,
        wsd_decay_samples=wsd,
        wsd_decay_style=options.lr_wsd_decay_style,
        start_weight_decay=options.weight_decay if constant else options.start_weight_decay or 0.0,
        end_weight_decay=options.weight_decay if constant else options.end_weight_decay or 0.0,
        weight_decay_incr_style=options.weight_decay_incr_style,
        weight_decay_incr_samples=None if constant else total_samples,
    )
    return schedule, notes


# The schedule's lengths, and the options that give them. A length in iterations is samples of the batch at that time.
_LENGTHS = {
    "warmup_samples": ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    "decay_samples": ("lr_decay_iters", "lr_decay_samples"),
    "wsd_decay_samples": ("lr_wsd_decay_iters",),
}


def continued(
    planned: Schedule, saved: Schedule, config: OptimizerOptions, options: Mapping[str, Any], given: Collection[str]
) -> tuple[Schedule, list[str]]:
    """The schedule of a run that resumes a checkpoint, with a note where the two differ.

    Options that were given and differ from the checkpoint's win. A length whose options do not keeps its samples: more
    iterations, or another batch size, must not change the part of the schedule that a run has already followed. The
    samples over which weight decay grows follow from the run's length and stay the checkpoint's.

    Args:
        options: the checkpoint's.
        given: names of this run's options that were given.
    """
    if planned == saved or config.override_opt_param_scheduler:
        return planned, []
    if config.use_checkpoint_opt_param_scheduler:
        return saved, ["schedule: the checkpoint's, as --use-checkpoint-opt-param-scheduler asks"]
    lengths: dict[str, Any] = {}
    for length, names in _LENGTHS.items():
        changed = any(name in given and getattr(config, name) != options.get(name, _DEFAULT[name]) for name in names)
        before, now = getattr(saved, length), getattr(planned, length)
        if not changed and None not in (before, now):
            lengths[length] = before
    chosen = replace(planned, **lengths)
    if "warmup_samples" not in lengths and config.lr_warmup_fraction is not None:
        chosen = replace(chosen, warmup_samples=int(config.lr_warmup_fraction * chosen.decay_samples))
    chosen = replace(chosen, warmup_samples=min(chosen.warmup_samples, chosen.decay_samples - 1))
    if chosen.wsd_decay_samples is not None:
        chosen = replace(chosen, wsd_decay_samples=min(chosen.wsd_decay_samples, chosen.decay_samples))
    growth = planned.weight_decay_incr_samples, saved.weight_decay_incr_samples
    if None not in growth:
        chosen = replace(chosen, weight_decay_incr_samples=saved.weight_decay_incr_samples)
    return chosen, _notes(planned, saved, chosen)


def _notes(planned: Schedule, saved: Schedule, chosen: Schedule) -> list[str]:
    notes = []
    if planned.decay_samples != saved.decay_samples:
        kept = chosen.decay_samples == saved.decay_samples
        whose = "the checkpoint's (give --lr-decay-iters to change it)" if kept else "these options'"
        notes.append(
            f"schedule: the horizon is {chosen.decay_samples} samples, {whose}; "
            f"options {planned.decay_samples}, checkpoint {saved.decay_samples}"
        )
    for length, what in (("warmup_samples", "the warm-up"), ("wsd_decay_samples", "WSD's last phase")):
        now, before = getattr(planned, length), getattr(saved, length)
        if now != before and getattr(chosen, length) == before:
            notes.append(
                f"schedule: {what} is {before} samples, the checkpoint's "
                f"(--override-opt-param-scheduler takes all from the options); options {now}"
            )
    growth = planned.weight_decay_incr_samples, saved.weight_decay_incr_samples
    if None not in growth and growth[0] != growth[1]:
        notes.append(
            f"schedule: weight decay grows over {growth[1]} samples, the checkpoint's "
            f"(--override-opt-param-scheduler takes all from the options); options {growth[0]}"
        )
    changed = [
        f"{f.name} {getattr(chosen, f.name)} (checkpoint: {getattr(saved, f.name)})"
        for f in fields(Schedule)
        if getattr(chosen, f.name) != getattr(saved, f.name)
    ]
    if changed:
        notes.append("schedule: these options change " + ", ".join(changed))
    return notes
