"""Describes a recipe's GEMMs in every linear layer of a model as text, for ``--explain-recipe``."""

import math
from collections.abc import Sequence
from fractions import Fraction

from megatron_lowprec.linear.backends.table import Choice, Emulate, choose, choose_without_gpu
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.coverage import LinearSite, TensorRanks, ranks_of
from megatron_lowprec.recipe.layer_match import Progress, numbering_notes
from megatron_lowprec.recipe.recipe import Phase, Recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, HadamardSpec, QuantSpec

_CONTRACTED = {"fprop": "input features", "dgrad": "output features", "wgrad": "tokens"}


def describe_operand(quant: QuantSpec | None) -> str:
    """One operand's numerics as short text."""
    if quant is None:
        return "compute dtype"
    parts = [quant.format.upper(), f"granularity {quant.granularity}", f"{quant.scale_format} scale {quant.scale_rule}"]
    if quant.amax_floor:
        parts.append(f"amax at least {quant.amax_floor:g}")
    if quant.scale.rounding == "stochastic":
        parts.append("scales rounded stochastically")
    parts += describe_levels(quant)
    if quant.scaling == "delayed":
        often = ", an entry a microbatch" if quant.history_update == "microbatch" else ""
        parts.append(f"delayed: {quant.history_rule} of {quant.history}{often}, margin {quant.margin}")
    parts.append(
        quant.rounding.replace("_", " ") + (f", {quant.random_bits} bits" if quant.rounding == "stochastic" else "")
    )
    if quant.headroom != 1.0:
        parts.append(f"headroom {quant.headroom:g}")
    if quant.source == "fprop":
        parts.append("from what fprop used")
    return ", ".join(parts)


def describe_levels(quant: QuantSpec) -> list[str]:
    """What coded scales have beyond format, rule and rounding, and the scale above them, as short texts."""
    scale, parts = quant.scale, []
    if scale.block_target is not None:
        parts.append(f"amax of a block to {scale.block_target:g}")
    if scale.four_over_six is not None:
        parts.append(f"four over six by {scale.four_over_six}")
    if scale.zero_code != "zero":
        parts.append("1 for 0" if scale.zero_code == "one" else "elements 0 under 0")
    if quant.correction is not None:
        parts.append(f"corrected in each transformed group ({quant.correction})")
    if quant.tensor_scale is not None:
        above = "tensor scale" if quant.outer_block is None else f"scale of {quant.tensor_scale.granularity}"
        parts.append(f"fp32 {above} to {quant.tensor_scale.target:g}")
    return parts


def describe_gemm(name: str, gemm: GemmSpec, backend: Choice, emulate_accumulator: bool = False) -> list[str]:
    """Lines for one GEMM: its execution, its transform, and a line per operand.

    Args:
        name: fprop, dgrad or wgrad.
        backend: that runs it.
        emulate_accumulator: an emulated GEMM accumulates as fast as its spec allows.
    """
    if not gemm.quantized:
        return [f"{name}  not quantized"]
    transform = "no transform" if gemm.hadamard is None else describe_transform(gemm.hadamard)
    first, second = GEMM_OPERANDS[name]
    alpha = 1.0
    for quant in (getattr(gemm, first), getattr(gemm, second)):
        alpha /= quant.headroom if quant is not None else 1.0
    ratio = Fraction(alpha).limit_denominator(1000)
    scaled = f", accumulator x {ratio if float(ratio) == alpha else f'{alpha:.6g}'}" if alpha != 1.0 else ""
    fast = gemm.fast_accumulation and (backend.multiplies_codes or emulate_accumulator)
    accumulation = "fast" if fast else "fp32"
    runs = f"{backend.describe()}{backend.verification}, contracts {_CONTRACTED[name]}"
    lines = [f"{name}  {runs}, {transform}, {accumulation} accumulation{scaled}"]
    return lines + [f"         {operand:<11} {describe_operand(getattr(gemm, operand))}" for operand in (first, second)]


def describe_transform(transform: HadamardSpec) -> str:
    """One GEMM's Hadamard transform."""
    rounded = ", rounded to the tensor's dtype" if transform.output == "operand" else ""
    return f"Hadamard {transform.block} ({transform.signs} signs) on both operands{rounded}"


def describe_training_state(recipe: Recipe) -> list[str]:
    """Lines about optimizer, gradient reduction and saved activations, if they are not Megatron-core's."""
    lines = []
    if recipe.optimizer.quantized:
        kept = ", ".join(f"{name} {form.upper()}" for name, form in recipe.optimizer.formats.items())
        rounding = recipe.optimizer.rounding.replace("_", " ")
        has_scale = set(recipe.optimizer.formats.values()) - {"fp32", "bf16"}
        scaled = "one power-of-two scale a tensor, " if has_scale else ""
        lines.append(
            f"optimizer: {kept}, {scaled}{rounding} rounding, updates in fp32; norm gains and biases keep an fp32 state"
        )
    if recipe.gradients.quantized:
        spec, form = recipe.gradients, recipe.gradients.format.upper()
        sums = "partial sums in fp32" if spec.sum == "fp32" else f"partial sums rounded to {form}"
        mu = ", an automatic factor before" if spec.mu == "automatic" else ""
        lines.append(f"gradients: exchanged by data-parallel ranks in {form}, {sums}{mu}")
        if spec.stored:
            added = "fp32 until the last microbatch" if spec.accumulation == "fp32" else f"{form} after each microbatch"
            lines.append(f"gradients: stored in {form}, one power-of-two scale a tensor; {added}")
    lines += [
        f"activations: {name.replace('_', ' ')} saved in {form.upper()}, blocks of 1x128 with power-of-two scales"
        for name, form in recipe.activations.formats.items()
        if form != "none"
    ]
    if recipe.fp8_weights:
        lines.append("weights of quantized layers: FP8 codes, no copy in the compute dtype")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 5] -> "layers 1-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"layer{'s' if len(numbers) > 1 else ''} {named}"


def phase_starts(recipe: Recipe, train_iters: int | None = None) -> list[tuple[int, str]]:
    """(number in the recipe, from 1; beginning as text, ``iteration 821, 82% of the run``) of each phase.

    In the order of their beginnings; phases at a fraction of an unknown number of steps are last.
    """

    def start(phase: Phase, begins: int | None) -> str:
        step = [] if begins is None else [f"iteration {begins + 1:,}"]
        of_run = [] if phase.from_fraction is None else [f"{phase.from_fraction * 100:g}% of the run"]
        never = train_iters is not None and begins is not None and begins >= train_iters
        return ", ".join(step + of_run + (["not in this run"] if never else []))

    found = [(phase.begins_if_known(train_iters), number, phase) for number, phase in enumerate(recipe.phases, 1)]
    found.sort(key=lambda each: math.inf if each[0] is None else each[0])
    return [(number, start(phase, begins)) for begins, number, phase in found]


def phase_in_force(recipe: Recipe, progress: Progress) -> int:
    """Number of the phase, from 1; 0 before the first."""
    now = recipe.during(progress)
    return next(number for number, stage in enumerate(recipe.stages) if stage is now)


def describe_phases(recipe: Recipe, progress: Progress) -> list[str]:
    """A line about the beginnings of the phases, and which is in force; none without phases."""
    if not recipe.phases:
        return []
    starts = [f"{number} from {start}" for number, start in phase_starts(recipe, progress.total)]
    in_force = phase_in_force(recipe, progress) or "none yet"
    return [f"phases of the recipe: {'; '.join(starts)}; in force: {in_force}"]


def explain(
    recipe: Recipe,
    sites: Sequence[LinearSite],
    num_layers: int,
    arch: str,
    rerun_in_bf16: Sequence[str] = (),
    emulate_accumulator: bool = False,
    *,
    tensor_ranks: TensorRanks = 1,
    dtype: str = "bfloat16",
    emulate: Emulate = False,
    train_iters: int | None = None,
    requires_native: bool = False,
) -> str:
    """Text for every linear layer: its three GEMMs, and each operand's format, scales, rounding and transform.

    Layers with the same GEMMs are shown once, under their names, sizes and the ranges of their numbers. On "cpu" a GEMM
    says which GPUs run it on a native backend. Each phase of the recipe has such a part; parts are in the order in
    which they begin.

    Args:
        sites: the model's linear layers, in order.
        num_layers: transformer layers over all pipeline stages.
        arch: "cpu", or a GPU's compute capability as "sm90", which selects the backends.
        rerun_in_bf16: globs of single GEMMs that run unquantized.
        emulate_accumulator: emulated GEMMs accumulate as fast as their specs allow.
        tensor_ranks: ranks that shard each layer, or those of each.
        dtype: of the model's weights.
        emulate: native backends to leave out (--emulate, --native off).
        train_iters: steps of the run, if known.
        requires_native: a run would not start with an emulated GEMM (--native require).

    Raises:
        UserError: as ``Recipe.check_phases``.
    """
    lines = [f"recipe {recipe.name}: {recipe.summary}", f"source {recipe.source}" if recipe.source else "", ""]

    def backend_of(name: str, gemm: GemmSpec, site: LinearSite) -> Choice:
        target = Target(arch, *site.sizes_on_rank(ranks_of(site, tensor_ranks)), dtype)
        if arch == "cpu" and emulate is not True:
            return choose_without_gpu(name, gemm, target)
        return choose(name, gemm, target, emulate)

    used = recipe.in_bf16(rerun_in_bf16)
    by_name = sorted(sites, key=lambda site: [s.name for s in sites].index(site.name))
    recipe.check_phases(train_iters)
    starts = True
    titles = [(0, ""), *((number, f"from {when}:") for number, when in phase_starts(recipe, train_iters))]
    for title, now in ((title, used.stages[number]) for number, title in titles):
        # lines of the GEMMs -> name and sizes of a layer -> its numbers
        layers_of: dict[tuple[str, ...], dict[tuple[str, int, int], list[int]]] = {}
        for site in by_name:
            gemms: list[str] = []
            linear = now.at(site.layer(num_layers))
            if linear.quantized:
                for name, gemm in linear.gemms.items():
                    backend = backend_of(name, gemm, site)
                    starts = starts and (backend.multiplies_codes or not gemm.quantized)
                    gemms += ["  " + line for line in describe_gemm(name, gemm, backend, emulate_accumulator)]
            heading = site.name, site.in_features, site.out_features
            layers_of.setdefault(tuple(gemms), {}).setdefault(heading, []).append(site.layer_number)
        lines += ["", title] if title else []
        for gemms_of, layers in layers_of.items():
            kept = "" if gemms_of else "  kept in the compute dtype"
            lines += [f"{_ranges(numbers)}: {name} [{i} -> {o}]{kept}" for (name, i, o), numbers in layers.items()]
            lines += gemms_of
    lines += ["", *numbering_notes(recipe.globs, [site.path for site in sites])]
    lines += describe_training_state(recipe)
    if requires_native and not starts:
        lines.append(f"--native require: a run would not start on {arch}, GEMMs are emulated")
    lines += ["never quantized: embeddings, norms, softmax, attention products, router, output layer"]
    return "\n".join(line for i, line in enumerate(lines) if line or i > 1)
