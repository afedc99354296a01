"""Linear layers that a recipe quantizes, and checks of their sizes: pure functions of the config."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, QuantSpec, Recipe

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
        """Path matched by the globs of ``keep_bf16.names``."""
        return site_path(self.layer_number, self.name)

    def sizes_on_rank(self, tensor_ranks: int) -> tuple[int, int]:
        """Input and output features of the layer on each of its tensor-parallel ranks."""
        if self.split == "column":
            return self.in_features, self.out_features // tensor_ranks
        return self.in_features // tensor_ranks, self.out_features


TensorRanks = int | Callable[[LinearSite], int]
"""Ranks that shard every linear layer, or those of each: experts that are spread over ranks are whole."""


def site_path(layer_number: int, name: str, expert: int = -1) -> str:
    """``layers.3.mlp.linear_fc1``, with the expert's number if any."""
    path = f"layers.{layer_number}.{name}"
    return path if expert < 0 else f"{path} of expert {expert}"


def kept_in_bf16(recipe: Recipe, layer_number: int, name: str, num_layers: int) -> bool:
    """Whether the recipe leaves that linear layer in the compute dtype."""
    keep = recipe.keep_bf16
    if layer_number <= keep.first_layers or layer_number > num_layers - keep.last_layers:
        return True
    return any(matches(site_path(layer_number, name), glob) for glob in keep.names)


def matches(path: str, glob: str) -> bool:
    """Whether a glob matches a path that begins as ``site_path``.

    A glob may have Megatron's module names, which count layers from 0: ``decoder.layers.1`` is ``layers.2``.
    """
    return fnmatchcase(path, _counted_from_1(glob))


@cache
def _counted_from_1(glob: str) -> str:
    found = re.match(r"decoder\.layers\.(\d+|\*)(?=\.|$)", glob)
    if found is None:
        return glob
    number = found[1] if found[1] == "*" else int(found[1]) + 1
    return f"layers.{number}{glob[found.end() :]}"


def numbering_notes(globs: Iterable[str], paths: Sequence[str]) -> list[str]:
    """A line for each glob that matches a path here, and another layer among Megatron's module names."""
    notes: dict[str, str] = {}
    for glob in globs:
        for path in paths:
            _, number, name = path.split(".", 2)
            same, following = (f"decoder.layers.{n}.{name}" for n in (int(number) - 1, number))
            if matches(path, glob) and fnmatchcase(following, glob) and not fnmatchcase(same, glob):
                hint = f"for decoder.layers.{number} write decoder.layers.{number} or layers.{int(number) + 1}"
                why = "layers count from 1 here and from 0 in Megatron's module names"
                notes.setdefault(glob, f"{glob} matches {path}: {why}; {hint}")
    return list(notes.values())


def unmatched_names(recipe: Recipe, sites: Iterable[LinearSite]) -> list[str]:
    """Globs of ``keep_bf16.names`` that match no linear layer: most likely typing errors."""
    paths = [site.path for site in sites]
    return [glob for glob in recipe.keep_bf16.names if not any(matches(path, glob) for path in paths)]


def keeps_all(recipe: Recipe, sites: Iterable[LinearSite], num_layers: int) -> bool:
    """Whether a recipe that quantizes keeps every linear layer of this model in the compute dtype."""
    return recipe.quantized and all(kept_in_bf16(recipe, s.layer_number, s.name, num_layers) for s in sites)


def weight_serves_microbatches(gemm: GemmSpec) -> bool:
    """Whether all microbatches of a step use the same quantized weight, so that it can be cached."""
    drawn = gemm.hadamard is not None and gemm.hadamard.signs == "random"
    return gemm.weight is not None and not gemm.weight.random and not drawn


def primary_weight_spec(recipe: Recipe) -> QuantSpec | None:
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
    """Reject FP8 primary weights for a recipe without a common weight spec.

    Raises:
        UserError: with the named recipe's own operands.
    """
    if primary_weight_spec(recipe) is None:
        taken = {name: getattr(recipe, name).weight for name in ("fprop", "dgrad")}
        found = ", ".join(f"{n} {f'{w.format} by {w.granularity}' if w else 'unquantized'}" for n, w in taken.items())
        raise UserError(
            "FP8 weights (fp8_weights, --fp8-param-gather) have fp32 scales by tensor or by 128x128, which fprop and "
            f"dgrad must then share; recipe {recipe.name} takes the weight in {found}: use the GEMMs of fp8_delayed, "
            "fp8_current or fp8_blockwise, or leave FP8 weights out"
        )


def why_not_gathered(recipe: Recipe, tensor: str) -> str | None:
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
        reason = why_not_gathered(recipe, tensor)
        if reason is not None:
            raise UserError(
                "--fp8-sequence-parallel-gather moves the codes that GEMMs take, quantized by delayed scales before "
                f"the gather; in recipe {recipe.name} {reason}: use fp8_delayed or fp8_lm, or leave the flag out"
            )
    if pipeline_parallel > 1 and any(spec.update == "microbatch" for spec in recipe.delayed_operands().values()):
        raise UserError(
            f"--fp8-sequence-parallel-gather saves codes for wgrad, and recipe {recipe.name} has history_update "
            "microbatch: in a pipeline the scale has changed by then; set history_update=step, or leave the flag out"
        )


def gemms_in_bf16(globs: Iterable[str], layer_number: int, name: str) -> frozenset[str]:
    """The GEMMs of that linear layer that match ``globs`` such as ``layers.3.mlp.linear_fc1.dgrad``."""
    return frozenset(
        gemm
        for gemm in GEMM_OPERANDS
        if any(matches(f"{site_path(layer_number, name)}.{gemm}", glob) for glob in globs)
    )


def without_gemms(recipe: Recipe, gemms: Iterable[str]) -> Recipe:
    """The recipe with these GEMMs in the compute dtype."""
    plain: dict[str, Any] = {gemm: GemmSpec() for gemm in gemms}
    return replace(recipe, **plain)


def with_current_scales(recipe: Recipe, tensors: Collection[str]) -> Recipe:
    """The recipe with current scales in place of delayed ones for these tensors."""

    def changed(gemm: GemmSpec) -> GemmSpec:
        specs = {tensor: spec for tensor in tensors if (spec := getattr(gemm, tensor)) is not None}
        current: dict[str, Any] = {
            tensor: replace(spec, scaling="current", margin=0)
            for tensor, spec in specs.items()
            if spec.scaling == "delayed"
        }
        return replace(gemm, **current)

    gemms: dict[str, Any] = {name: changed(gemm) for name, gemm in recipe.gemms.items()}
    return replace(recipe, **gemms) if tensors else recipe


def check_gemm_globs(recipe: Recipe, globs: Sequence[str], sites: Sequence[LinearSite], num_layers: int) -> None:
    """Reject a glob that matches no quantized GEMM.

    Raises:
        UserError: with the nearest name.
    """
    quantized = [
        f"{site.path}.{name}"
        for site in sites
        if not kept_in_bf16(recipe, site.layer_number, site.name, num_layers)
        for name, gemm in recipe.gemms.items()
        if gemm.quantized
    ]
    for glob in globs:
        if not any(matches(path, glob) for path in quantized):
            near = difflib.get_close_matches(glob, quantized, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"--rerun-in-bf16 {glob}: recipe {recipe.name} quantizes no GEMM of that name{hint}")


def check_sizes(recipe: Recipe, sites: Sequence[LinearSite], num_layers: int, tensor_parallel: TensorRanks) -> None:
    """Reject sizes that a recipe's blocks do not divide, on each rank of a tensor-parallel group.

    Tokens (the contracted dimension of wgrad) are padded internally and may be any number.

    Args:
        tensor_parallel: ranks that shard each layer, or those of each.

    Raises:
        UserError: names the first such layer, the GEMM, the size and the required multiple, and globs of all such
            layers; or a glob that matches nothing.
    """
    if not recipe.quantized:
        return
    for glob in unmatched_names(recipe, sites):
        raise UserError(
            f"keep_bf16.names has {glob!r}, which matches no linear layer; layers are named like {sites[0].path}"
        )
    for name in ("first_layers", "last_layers"):
        if (count := getattr(recipe.keep_bf16, name)) > num_layers:
            raise UserError(f"keep_bf16.{name} is {count}, but the model has {num_layers} layers; lower it")
    quantized = [site for site in sites if not kept_in_bf16(recipe, site.layer_number, site.name, num_layers)]
    _check_sites(recipe, quantized, tensor_parallel)


def check_site(recipe: Recipe, site: LinearSite, tensor_parallel: int) -> None:
    """``check_sizes`` for one layer that the recipe quantizes."""
    _check_sites(recipe, [site], tensor_parallel)


def _check_sites(recipe: Recipe, sites: Sequence[LinearSite], tensor_parallel: TensorRanks) -> None:
    found = [(site, why) for site in sites if (why := indivisible(recipe, site, ranks_of(site, tensor_parallel)))]
    if not found:
        return
    first, (gemm_name, reason) = found[0]
    message = f"recipe {recipe.name}: {gemm_name} of {first.path} {reason}: change that size, or "
    affected = [site for site, _ in found]
    if len(affected) == len(sites) > 1:
        # keeping them all would quantize nothing
        raise UserError(f"{message}give another --recipe: this one's blocks fit none of the {len(sites)} layers")
    # the override replaces the list of the recipe
    globs = ", ".join(f'"{glob}"' for glob in (*recipe.keep_bf16.names, *_globs(affected, sites)))
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
    recipe: Recipe, site: LinearSite, tensor_parallel: int = 1, partial_blocks: bool = True
) -> tuple[str, str] | None:
    """The first GEMM whose blocks do not divide a layer's sizes, and the block and the size; None if all do.

    A block of fp32 scales may be partial at the end of a dimension that no ranks shard, as in DeepSeek-V3's files.

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
                wants[contracted, VALUES_PER_DRAW] = (
                    f"{operand} rounded stochastically, {VALUES_PER_DRAW} values a draw"
                )
            if quant is not None and quant.block is not None:
                for dimension, multiple in zip((_other(gemm_name, operand), contracted), quant.block, strict=True):
                    whole = not partial_blocks or quant.scale_format == "e8m0" or dimension == sharded
                    if whole:
                        wants[dimension, multiple] = f"{operand} block {quant.granularity}"
        for (dimension, multiple), why in wants.items():
            if dimension != "tokens" and sizes[dimension] % multiple:
                a_rank = f" on each of {tensor_parallel} tensor-parallel ranks" if tensor_parallel > 1 else ""
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
                a_rank = f" on each of {ranks} tensor-parallel ranks" if ranks > 1 else ""
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
