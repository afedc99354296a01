"""Linear layers that a recipe quantizes, and checks of their sizes: pure functions of the config."""

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.layer_match import Layer, LayerMatch, site_path
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, LinearRecipe, QuantSpec

VALUES_PER_DRAW = 8
"""Entries along the contracted dimension per call of the random stream: shards must begin at a multiple.

Equals ``kernels.philox.reference.VALUES_PER_CALL``, which this package may not import; a test compares them.
"""

ACTIVATION_BLOCK = 128
"""Entries of a token that share the scale of a saved activation: ``kernels.packed_cast.reference.BLOCK``, as above."""


@dataclass(frozen=True)
class LinearSite:
    """A linear layer of the model, by its position and its unsharded sizes.

    ``layer_number`` is global and 1-based, as Megatron-core's ``TransformerLayer.layer_number``; ``split`` is the
    tensor-parallel dimension: ``"column"`` shards the output features, ``"row"`` the input features. The output of a
    ``gated`` layer has two halves, each sharded separately.
    """

    layer_number: int
    name: str
    in_features: int
    out_features: int
    split: Literal["column", "row"]
    gated: bool = False

    @property
    def path(self) -> str:
        """Path matched by the globs of rules."""
        return site_path(self.layer_number, self.name)

    def layer(self, num_layers: int) -> Layer:
        """The place for which a recipe answers."""
        return Layer(self.layer_number, self.name, num_layers)

    def sizes_on_rank(self, tensor_ranks: int) -> tuple[int, int]:
        """Input and output features of the layer on each of its tensor-parallel ranks."""
        if self.split == "column":
            return self.in_features, self.out_features // tensor_ranks
        return self.in_features // tensor_ranks, self.out_features


TensorRanks = int | Callable[[LinearSite], int]
"""Ranks that shard every linear layer, or those of each: experts that are spread over ranks are whole."""


def unmatched_globs(recipe: Recipe, layers: Sequence[Layer]) -> list[tuple[str, str]]:
    """(glob, nearest path) of each glob of a rule that matches no GEMM: most likely typing errors."""
    found = []
    for field, path in (("layers", "path"), ("modules", "module_path")):
        for glob in dict.fromkeys(glob for rule in recipe.rules_of_all_phases for glob in getattr(rule, field) or ()):
            as_module = _reaches(LayerMatch(modules=(glob,)), layers)
            if layers and not (as_module if field == "modules" else _reaches(LayerMatch(layers=(glob,)), layers)):
                paths = [getattr(layer, path) for layer in layers]
                near = (difflib.get_close_matches(glob, paths, n=1) or paths)[0]
                found.append((glob, near + "; give a glob of module paths as modules" * as_module))
    return found


def _reaches(match: LayerMatch, layers: Sequence[Layer]) -> bool:
    return any(match.matches(layer, gemm) for layer in layers for gemm in GEMM_OPERANDS)


def check_globs(what: str, recipe: Recipe, layers: Sequence[Layer]) -> None:
    """Reject ``unmatched_globs``; UserError, which begins with ``what``."""
    for glob, near in unmatched_globs(recipe, layers):
        raise UserError(f"{what} has {glob!r}, which matches no linear layer; layers are named like {near}")


def check_rules(recipe: Recipe, layers: Sequence[Layer], num_layers: int | None) -> None:
    """Reject a rule that matches no layer of the model: a glob, a count above ``num_layers``, or the two together.

    A rule whose counts are all 0 passes. Of an unknown number of layers only globs are checked.

    Raises:
        UserError: with the nearest path.
    """
    check_globs(f"a rule of recipe {recipe.name}", recipe, layers)
    if num_layers is None:
        return
    for rule in recipe.rules_of_all_phases:
        short = rule in recipe.keep_bf16.rules
        for name, count in (("first", rule.first), ("last", rule.last)):
            if (count or 0) > num_layers:
                place = f"keep_bf16.{name}_layers" if short else f"a rule {rule} of recipe {recipe.name}: {name}"
                raise UserError(f"{place} is {count}, but the model has {num_layers} layers; lower it")
        if layers and not rule.empty and not _reaches(rule, layers):
            why = f"none that its globs name is among those that it counts, of {num_layers}: change one of the two"
            raise UserError(f"a rule {rule} of recipe {recipe.name} matches no linear layer; {why}")


def check_no_phases(recipe: Recipe, where: str) -> None:
    """Raise UserError for a recipe with phases where no steps are counted."""
    if recipe.phases:
        raise UserError(
            f"recipe {recipe.name} has phases, and {where} does not know the step of the training: pass "
            "recipe.during(Progress(step, total)), or train with pretrain_gpt.py or bind_recipe"
        )


def keeps_all(recipe: Recipe, sites: Iterable[LinearSite], num_layers: int) -> bool:
    """Whether a recipe that quantizes leaves every linear layer of this model in the compute dtype."""
    layers = [site.layer(num_layers) for site in sites]
    return recipe.quantized and not any(now.at(layer).quantized for now in recipe.stages for layer in layers)


def cached_weights(recipe: LinearRecipe) -> list[str]:
    """The GEMMs whose quantized weight is equal in a step's microbatches."""
    found = [name for name, gemm in recipe.gemms.items() if gemm.weight is not None and not _changes_weight(gemm)]
    of_fprop = recipe.dgrad.weight is not None and recipe.dgrad.weight.source == "fprop"
    return [name for name in found if not (name == "dgrad" and of_fprop and _changes_weight(recipe.fprop))]


def _changes_weight(gemm: GemmSpec) -> bool:
    """Whether microbatches draw other numbers for its weight, or give it another scale."""
    drawn = gemm.hadamard is not None and gemm.hadamard.signs == "random"
    weight = gemm.weight
    moves = weight is not None and weight.scaling == "delayed" and weight.history_update == "microbatch"
    return drawn or moves or (weight is not None and weight.random)


def primary_weight_spec(recipe: LinearRecipe) -> QuantSpec | None:
    """Spec of a weight that a layer can store as FP8 codes only; None if it cannot.

    fprop and dgrad must use the same spec, and the same scales: one of the tensor, or those of square blocks, which the
    transpose shares. Otherwise dgrad would need the unquantized weight.
    """
    spec, gemms = recipe.fprop.weight, (recipe.fprop, recipe.dgrad)
    if spec is None or spec != recipe.dgrad.weight or any(gemm.hadamard is not None for gemm in gemms):
        return None
    plain = (spec.scale_format, spec.rounding, spec.headroom) == ("fp32", "nearest_even", 1.0)
    shared = spec.granularity in ("tensor", "128x128")
    return spec if plain and shared and spec.format in ("e4m3", "e5m2") else None


def check_primary_weights(recipe: Recipe) -> None:
    """Reject FP8 primary weights for a recipe without a common weight spec, or whose weights change in a phase.

    Raises:
        UserError: with the named recipe's own operands.
    """
    if recipe.phases:
        raise UserError(
            f"FP8 weights (fp8_weights, --fp8-param-gather) keep one format for a whole run, and recipe {recipe.name} "
            "has phases: leave one of the two out"
        )
    if all(primary_weight_spec(linear) is None for linear in recipe.linear_recipes):
        taken = (("fprop", recipe.fprop.weight), ("dgrad", recipe.dgrad.weight))
        found = ", ".join(f"{n} {f'{w.format} by {w.granularity}' if w else 'unquantized'}" for n, w in taken)
        raise UserError(
            "FP8 weights (fp8_weights, --fp8-param-gather) have fp32 scales by tensor or by 128x128, which fprop and "
            f"dgrad must then share; recipe {recipe.name} takes the weight in {found}: use the GEMMs of fp8_delayed, "
            "fp8_current or fp8_blockwise, or leave FP8 weights out"
        )


def why_not_gathered(recipe: LinearRecipe, tensor: str) -> str | None:
    """Reason why ranks cannot gather "input" or "grad_output" as FP8 codes for both of its GEMMs; None if they can.

    A rank must be able to quantize its tokens alone, and the codes of one direction, transposed, must be those of the
    other.
    """
    by_row, by_column = (name for name, operands in GEMM_OPERANDS.items() if tensor in operands)
    spec, other = (getattr(recipe.gemms[name], tensor) for name in (by_row, by_column))
    for name, found in ((by_row, spec), (by_column, other)):
        if found is None or recipe.gemms[name].hadamard is not None:
            how = "in the compute dtype" if found is None else "after a Hadamard transform"
            return f"{name} takes {tensor} {how}"
    if "row" in (spec.granularity, other.granularity):
        return f"{tensor} has a scale per row, which in {by_column} spans the tokens of all ranks"
    if spec.block or other.block:
        blocks = (other if other.block else spec).granularity
        return f"{tensor} has blocks of {blocks}: {by_column} takes other codes than {by_row}, in blocks of tokens"
    if spec != other:
        return f"{by_row} and {by_column} quantize {tensor} differently"
    if spec.scaling != "delayed":
        return f"the current scale of {tensor} needs the amax over all ranks before the cast"
    if spec.random:
        return f"{tensor} is rounded stochastically, by draws for the positions of all tokens"
    return None if spec.format in ("e4m3", "e5m2") else f"{tensor} is {spec.format}, not FP8"


def check_fp8_gather(recipe: Recipe, pipeline_parallel: int = 1) -> None:
    """Reject --fp8-sequence-parallel-gather for a recipe whose codes cannot be gathered.

    Raises:
        UserError: with the reason.
    """
    for tensor in ("input", "grad_output"):
        reasons = [why_not_gathered(linear, tensor) for linear in recipe.linear_recipes]
        if (reason := reasons[0]) is not None and None not in reasons:
            raise UserError(
                "--fp8-sequence-parallel-gather moves the codes that GEMMs take, quantized by delayed scales before "
                f"the gather; in recipe {recipe.name} {reason}: use fp8_delayed or fp8_lm, or leave the flag out"
            )
    if pipeline_parallel > 1 and recipe.moves_within_steps:
        raise UserError(
            f"--fp8-sequence-parallel-gather saves codes for wgrad, and recipe {recipe.name} has history_update "
            "microbatch: in a pipeline the scale has changed by then; set history_update=step, or leave the flag out"
        )


def with_current_scales(recipe: LinearRecipe, tensors: Collection[str]) -> LinearRecipe:
    """The recipe with current scales in place of delayed ones for these tensors."""

    def changed(gemm: GemmSpec) -> GemmSpec:
        specs = {tensor: spec for tensor in tensors if (spec := getattr(gemm, tensor)) is not None}
        current: dict[str, Any] = {
            tensor: spec.with_current_scaling() for tensor, spec in specs.items() if spec.scaling == "delayed"
        }
        return replace(gemm, **current)

    gemms: dict[str, Any] = {name: changed(gemm) for name, gemm in recipe.gemms.items()}
    return replace(recipe, **gemms) if tensors else recipe


def check_gemm_globs(recipe: Recipe, globs: Sequence[str], sites: Sequence[LinearSite], num_layers: int) -> None:
    """Reject a glob of --rerun-in-bf16 that matches no quantized GEMM.

    Raises:
        UserError: with the nearest name.
    """
    quantized = {
        f"{site.path}.{name}": (site.layer(num_layers), name)
        for site in sites
        for now in recipe.stages
        for name, gemm in now.at(site.layer(num_layers)).gemms.items()
        if gemm.quantized
    }
    for glob in globs:
        if not any(LayerMatch(layers=(glob,)).matches(*place) for place in quantized.values()):
            near = difflib.get_close_matches(glob, quantized, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; one is {next(iter(quantized))}" if quantized else ""
            raise UserError(f"--rerun-in-bf16 {glob}: recipe {recipe.name} quantizes no GEMM of that name{hint}")


def check_sizes(recipe: Recipe, sites: Sequence[LinearSite], num_layers: int, tensor_parallel: TensorRanks) -> None:
    """Reject sizes that a recipe's blocks do not divide, on each rank of a tensor-parallel group, in any phase.

    Tokens (the contracted dimension of wgrad) are padded internally and may be any number.

    Args:
        tensor_parallel: ranks that shard each layer, or those of each.

    Raises:
        UserError: names the first such layer, the GEMM, the size and the required multiple, and globs of all such
            layers; or as ``check_rules``.
    """
    if not recipe.quantized:
        return
    check_rules(recipe, [site.layer(num_layers) for site in sites], num_layers)
    for now in recipe.stages:
        runs = [(site, now.at(site.layer(num_layers))) for site in sites]
        _check_sites(recipe, [(site, linear) for site, linear in runs if linear.quantized], tensor_parallel)


def check_site(linear: LinearRecipe, site: LinearSite, tensor_parallel: int) -> None:
    """``check_sizes`` for what one layer runs."""
    _check_sites(linear, [(site, linear)], tensor_parallel)


def _check_sites(
    recipe: LinearRecipe, runs: Sequence[tuple[LinearSite, LinearRecipe]], tensor_parallel: TensorRanks
) -> None:
    sites = [site for site, _ in runs]
    found = [
        (site, why) for site, linear in runs if (why := indivisible(linear, site, ranks_of(site, tensor_parallel)))
    ]
    if not found:
        return
    first, (gemm_name, reason) = found[0]
    message = f"recipe {recipe.name}: {gemm_name} of {first.path} {reason}: change that size, or "
    affected = [site for site, _ in found]
    if len(affected) == len(sites) > 1:
        # keeping them all would quantize nothing
        raise UserError(f"{message}give another --recipe: this one's blocks fit none of the {len(sites)} layers")
    # the override replaces the list of the recipe
    kept = recipe.keep_bf16.names if isinstance(recipe, Recipe) else ()
    globs = ", ".join(f'"{glob}"' for glob in (*kept, *_globs(affected, sites)))
    layers = "the layer" if len(affected) == 1 else f"the {len(affected)} such layers"
    raise UserError(f"{message}keep {layers} in bf16 with --recipe-override 'keep_bf16.names=[{globs}]'")


def _globs(chosen: Sequence[LinearSite], sites: Sequence[LinearSite]) -> list[str]:
    """Globs that match the chosen sites and no others: one for a name whose sites are all chosen."""
    rest = [site.path for site in sites if site not in chosen]
    globs = []
    for site in chosen:
        glob = f"layers.*.{site.name}"
        is_own = any(fnmatchcase(path, glob) for path in rest) or [s.name for s in sites].count(site.name) == 1
        globs.append(site.path if is_own else glob)
    return list(dict.fromkeys(globs))


def indivisible(
    recipe: LinearRecipe, site: LinearSite, tensor_parallel: int = 1, partial_blocks: bool = True
) -> tuple[str, str] | None:
    """The first GEMM whose blocks do not divide a layer's sizes, and the block and the size; None if all do.

    A block of fp32 or coded scales may be partial at the end of a dimension that no ranks shard, as in DeepSeek-V3's
    files. Blocks of E8M0 scales are whole.

    Args:
        partial_blocks: False to ask for whole blocks everywhere.

    Raises:
        UserError: ``tensor_parallel`` does not divide the dimension that it shards.
    """
    sizes = _local_sizes(site, tensor_parallel)
    sharded = {"column": "output", "row": "input"}[site.split] if tensor_parallel > 1 else None
    for gemm_name, gemm in recipe.gemms.items():
        contracted = {"fprop": "input", "dgrad": "output", "wgrad": "tokens"}[gemm_name]
        wants: dict[tuple[str, int], str] = {}
        if gemm.hadamard is not None:
            wants[contracted, gemm.hadamard.block] = f"hadamard block {gemm.hadamard.block}"
        for operand in GEMM_OPERANDS[gemm_name]:
            quant = getattr(gemm, operand)
            if quant is not None and quant.random:
                draws = f"{operand} rounded stochastically, {VALUES_PER_DRAW} values a draw"
                wants[contracted, VALUES_PER_DRAW] = draws
            for rows, columns in () if quant is None else filter(None, (quant.block, quant.outer_block)):
                for dimension, multiple in ((_other(gemm_name, operand), rows), (contracted, columns)):
                    if not partial_blocks or quant.scale_format == "e8m0" or dimension == sharded:
                        wants[dimension, multiple] = f"{operand} block {rows}x{columns}"
        for (dimension, multiple), why in wants.items():
            if dimension != "tokens" and sizes[dimension] % multiple:
                a_rank = f" on each of {tensor_parallel} ranks" if tensor_parallel > 1 else ""
                return gemm_name, (
                    f"has {why}, but {sizes[dimension]} {dimension} features{a_rank} are no multiple of {multiple}"
                )
    return None


def check_activations(recipe: Recipe, sites: Sequence[LinearSite], tensor_parallel: TensorRanks) -> None:
    """Reject formats of saved activations that a model's layers do not support.

    Args:
        sites: linear layers of the model, or of one part of it.
        tensor_parallel: as in ``check_sizes``.

    Raises:
        UserError: SwiGLU's input is cached in a model without gated MLPs; or the width of an activation on a rank is
            no multiple of its blocks.
    """
    if recipe.activations.swiglu_input != "none":
        plain = next((s for s in sites if s.name.endswith(".linear_fc1") and not s.gated), None)
        if plain is not None:
            raise UserError(
                f"activations.swiglu_input={recipe.activations.swiglu_input} caches the input of SwiGLU, and "
                f"{plain.path} feeds another activation: add --swiglu, or set activations.swiglu_input=none"
            )
    behind = {"attention_output": ".linear_proj", "swiglu_input": ".linear_fc2"}
    for name, form in recipe.activations.formats.items():
        for site in sites if form != "none" else ():
            ranks = ranks_of(site, tensor_parallel)
            width = _local_sizes(site, ranks)["input"]
            if site.name.endswith(behind[name]) and width % ACTIVATION_BLOCK:
                a_rank = f" on each of {ranks} ranks" if ranks > 1 else ""
                raise UserError(
                    f"activations.{name}={form} has blocks of {ACTIVATION_BLOCK}, but {width} input features of "
                    f"{site.path}{a_rank} are no multiple of that: change that size, or set activations.{name}=none"
                )


def _other(gemm: str, operand: str) -> str:
    """The uncontracted dimension of an operand in its GEMM."""
    if operand == "weight":
        return {"fprop": "output", "dgrad": "input"}[gemm]
    return {"fprop": "tokens", "dgrad": "tokens", "wgrad": "input" if operand == "input" else "output"}[gemm]


def ranks_of(site: LinearSite, tensor_parallel: TensorRanks) -> int:
    """Ranks that shard a layer."""
    return tensor_parallel if isinstance(tensor_parallel, int) else tensor_parallel(site)


def _local_sizes(site: LinearSite, tensor_parallel: int) -> dict[str, int]:
    sizes = {"input": site.in_features, "output": site.out_features // 2 if site.gated else site.out_features}
    cut = "output" if site.split == "column" else "input"
    if sizes[cut] % tensor_parallel:
        raise UserError(
            f"{site.path} has {sizes[cut]} {cut} features, which --tensor-model-parallel-size {tensor_parallel} "
            "does not divide; choose one that does"
        )
    sizes[cut] //= tensor_parallel
    return sizes
