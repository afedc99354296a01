"""Conversion of a plain PyTorch model: its linear layers follow a recipe, in place. No Megatron.

The layers keep their identity: parameters, hooks, tied weights and references stay. Only the class of a module changes,
and its GEMMs are added.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.kernels.dispatch import arch_of
from megatron_lowprec.linear.backends.hopper_fp8.why_not import slower_than_bf16
from megatron_lowprec.linear.backends.protocol import COMPUTE_DTYPES
from megatron_lowprec.linear.backends.table import Choice, choose
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.linear.experts.hugging_face_experts import ExpertWeight, expert_weights
from megatron_lowprec.linear.layer_histories import LayerGroup
from megatron_lowprec.linear.layer_state import StatefulLayer, added_keys, combined, drop_unused_state
from megatron_lowprec.linear.linear_id import added_by_peft, brief, is_adapter, paths_of_modules, without_adapters
from megatron_lowprec.linear.lowprec_linear import LowPrecConv1D, LowPrecLayer, LowPrecLinear
from megatron_lowprec.recipe.coverage import LinearSite, check_globs, check_no_phases, check_rules, indivisible
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.parsing import RecipeLike, as_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import LinearRecipe

M = TypeVar("M", bound=nn.Module)
Filter = Callable[[str, nn.Module], bool]

_HEADS, _ROUTERS = ("lm_head", "embed_out"), ("gate", "router")
_AS_LINEAR = {("torch.nn.modules.linear", "Linear"), ("torchtitan.models.common.linear", "Linear")}  # forward passes
# by name: importing the wrappers takes longer than the conversion
_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel(model)",
    "FullyShardedDataParallel": "FullyShardedDataParallel(model)",
    "OptimizedModule": "torch.compile(model)",
}

logger = logging.getLogger("megatron_lowprec")


class Exclusion(NamedTuple):
    """Reason for leaving a layer as it is; ``requested`` by the caller, the recipe or a default of ``convert``."""

    reason: str
    requested: bool


class _Layer(NamedTuple):
    """A linear layer by its path, and its position in a stack of blocks: ``stack.<number - 1>.name``, or number 0."""

    path: str
    module: Any
    in_features: int
    out_features: int
    stack: str
    number: int
    num_layers: int
    name: str
    paths: tuple[str, ...]  # of a shared module, the first of which names it in draws, rules and messages
    plain_paths: tuple[str, ...]  # as ``name``, without the wrappers of adapters

    @property
    def place(self) -> Layer:
        """The place for which a recipe answers."""
        return Layer(self.number, self.name, self.num_layers, self.plain_paths[0])

    @property
    def aliases(self) -> list[Layer]:
        """The place under each path of the module, for the globs of ``keep_bf16``."""
        return [self.place._replace(module=path) for path in self.plain_paths]


@dataclass(frozen=True)
class Conversion:
    """Linear layers that a conversion changes, and those that stay; ``str`` gives the lines of the log.

    Attributes:
        recipe: the recipe.
        converted: path of each layer that follows it -> its place.
        excluded: path of each other linear layer -> the reason.
        execution: lines that name native and emulated GEMMs.
    """

    recipe: Recipe
    converted: Mapping[str, Layer]
    excluded: Mapping[str, Exclusion]
    execution: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"recipe {self.recipe.name}: {len(self.converted)} linear layers: {brief(list(self.converted))}"]
        return "\n".join([*lines, *self.execution, *self.lines_of_excluded(True), *self.lines_of_excluded(False)])

    def lines_of_excluded(self, requested: bool) -> list[str]:
        """A line for each reason, with its layers."""
        found: dict[str, list[str]] = {}
        for path, exclusion in self.excluded.items():
            if exclusion.requested == requested:
                found.setdefault(exclusion.reason, []).append(path)
        return [f"not converted: {brief(paths)} ({reason})" for reason, paths in found.items()]


def convert(
    model: M,
    recipe: RecipeLike,
    *,
    filter: Filter | None = None,
    keep_bf16: Sequence[str] = (),
    skip_slower: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    data_parallel_rank: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> M:
    """Let the linear layers of a model follow a recipe, in place, and return the model.

    Converts each ``torch.nn.Linear``, each ``Conv1D`` of transformers and each 3-D weight of its experts, but for the
    output head, routers, and layers that the recipe or an argument keeps. Parameters remain the same objects. The
    summary is logged at level INFO by the logger ``megatron_lowprec``; layers that stay for another reason than the
    caller's or the recipe's are also a warning. Call it after ``init_process_group``, before
    parallelize_module, torch.compile, DistributedDataParallel and fully_shard.

    Args:
        model: any module; each rank converts its own copy.
        recipe: a Recipe, the name of one, or the path of a YAML file. Its rules count the blocks of the
            model's outermost list of modules from 1 and match ``layers.<number>.<path within the block>``.
        filter: ``filter(path, module)``, whether to convert a layer, or a weight of the experts in a module; replaces
            the default, which leaves the output head (``lm_head``, ``get_output_embeddings()``, a weight tied to an
            embedding) and routers. It must accept every path of a shared module.
        keep_bf16: globs of paths of further layers to leave in the compute dtype, such as ``model.layers.0.*``. A
            module with several paths stays if one of them is named, or by default if one is a head or a router.
        skip_slower: leave layers that were measured to be slower in FP8 than in bf16; only if all of their GEMMs are
            native on ``device`` in ``dtype``.
        device, dtype: where and in which dtype the GEMMs will run, if not those of the weights.
        seed: of the random draws, which depend on paths below ``model``: give another to each of several models, or
            parts of one, that are converted by themselves.
        data_parallel_rank: enters the key of random draws; by default the rank in ``group``, of those that hold shards
            of one weight that of their mesh; 0 in one process.
        group: data-parallel ranks, which hold the same layers, for the amaxes of delayed scaling; None for all ranks.
            A stage of a pipeline needs its own: the first pass waits for the amaxes of all, which other stages lack.

    Raises:
        UserError: a recipe that sets optimizer state or gradient reduction; a model without layers to convert,
            converted before or wrapped; a glob without a match; ``first_layers`` or ``last_layers`` without exactly
            one list of blocks; ``history_update=microbatch`` on several ranks.
    """
    recipe = _checked_recipe(model, recipe)
    options: dict[str, Any] = {"filter": filter, "keep_bf16": keep_bf16, "skip_slower": skip_slower}
    conversion = plan(model, recipe, **options, device=device, dtype=dtype)
    if not conversion.converted:
        reasons = conversion.lines_of_excluded(False) + conversion.lines_of_excluded(True)
        raise UserError(f"recipe {recipe.name} converts no layer: {'; '.join(reasons) or 'the model has no nn.Linear'}")
    layers = LayerGroup(group, rank=data_parallel_rank)
    layers.check_common_step(recipe.delayed_operands().values())
    modules = {layer.path: layer for layer in _linears(model)}
    for path in conversion.converted:
        layer = modules[path]
        module = layer.module
        if isinstance(module, ExpertWeight):
            module = module.converted()
        else:
            kind = LowPrecLinear if isinstance(module, nn.Linear) else LowPrecConv1D
            module.__class__ = kind if type(module) is nn.Linear else combined(kind, type(module))
            assert isinstance(module, LowPrecLayer)
        module.bind(conversion.recipe, layer.place, seed, layers)
    model.register_load_state_dict_pre_hook(drop_unused_state)
    logger.info("%s", conversion)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        for line in conversion.lines_of_excluded(requested=False):
            warnings.warn(f"convert to {recipe.name}: {line}", stacklevel=2)
    return model


def plan(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    filter: Filter | None = None,
    keep_bf16: Sequence[str] = (),
    skip_slower: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Conversion:
    """The conversion that ``convert`` would make; changes nothing. Arguments and errors as in ``convert``."""
    recipe = _checked_recipe(model, recipe)
    _check_model(model)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UserError(f"convert was given {type_of(dtype)} as dtype: give a torch.dtype such as torch.bfloat16")
    layers = list(_linears(model))
    used = _used_recipe(recipe, keep_bf16, layers)
    heads = _output_heads(model)
    converted, excluded = dict[str, Layer](), dict[str, Exclusion]()
    gemms: dict[tuple[Choice, str], set[str]] = {}
    for layer in layers:
        weight: torch.Tensor = layer.module.weight
        arch, gemm_dtype = _arch(weight.device if device is None else device), dtype or weight.dtype
        kind = str(gemm_dtype).removeprefix("torch.")
        linear = used.at(layer.place)
        kept = any(recipe.at(each).quantized and not used.at(each).quantized for each in layer.aliases)
        why = _requested(recipe, layer, kept or not linear.quantized, filter, heads) or _unsupported(
            model, layer, gemm_dtype
        )
        if why is None:
            why = _unsuitable(linear, layer, arch if skip_slower and gemm_dtype == torch.bfloat16 else "cpu")
        if why is not None:
            excluded[layer.path] = why
            continue
        converted[layer.path] = layer.place
        target = Target(arch, layer.in_features, layer.out_features, kind)
        for name, gemm in linear.gemms.items():
            if gemm.quantized:
                gemms.setdefault((choose(name, gemm, target), arch), set()).add(name)
    execution = tuple(
        backend.header([name for name in recipe.gemms if name in names], arch)
        for (backend, arch), names in gemms.items()
    )
    return Conversion(used, converted, excluded, execution)


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with the keys of the unconverted model, which loads this and not the state of recipes."""
    if any(getattr(module, "holds_codes", False) for module in model.modules()):
        raise UserError("plain_state_dict found codes in place of weights: call dequantize_frozen_weights(model) first")
    added = added_keys(model)
    return {key: value for key, value in model.state_dict().items() if key not in added}


# ---- checks
def _checked_recipe(model: object, recipe: object) -> Recipe:
    """The recipe, after the types of both arguments."""
    if not isinstance(model, nn.Module) or not isinstance(recipe, (Recipe, str, os.PathLike)):
        raise UserError(
            f"convert was given {type_of(model)} as model and {type_of(recipe)} as recipe: give a "
            'torch.nn.Module first, then a Recipe, its name or a YAML file, as in convert(model, "mxfp8")'
        )
    recipe = as_recipe(recipe)
    parts = [name for name in ("optimizer", "gradients", "activations") if getattr(recipe, name).quantized]
    if recipe.fp8_weights:
        parts.append("fp8_weights")
    if parts:
        raise UserError(
            f"recipe {recipe.name} also sets {' and '.join(parts)}, but convert changes only linear layers: "
            f"train it with pretrain_gpt.py, or pass dataclasses.replace(recipe, optimizer=OptimizerSpec(), "
            f"gradients=GradientSpec(), activations=ActivationSpec(), fp8_weights=False)"
        )
    return recipe


def _check_model(model: nn.Module) -> None:
    for path, module in model.named_modules():
        where = path or "the model"
        if isinstance(module, StatefulLayer):
            raise UserError(f"{where} is {type_of(module)} already: convert a model once, or build it anew")
        wrapper = next((_WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise UserError(f"{where} is wrapped: convert first, then call {wrapper}")
    for path, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise UserError(f"{path} is a DTensor: convert first, then call parallelize_module and fully_shard")


def _used_recipe(recipe: Recipe, keep_bf16: Sequence[str], layers: Sequence[_Layer]) -> Recipe:
    """The recipe with a rule for ``keep_bf16``, whose rules all match layers of this model."""
    if isinstance(keep_bf16, str):
        raise UserError(f"keep_bf16 takes a list of globs, got the string {keep_bf16!r}: use [{keep_bf16!r}]")
    check_no_phases(recipe, "convert")
    places = [layer.place for layer in layers]
    stacks = {layer.stack: layer.num_layers for layer in layers if layer.number}
    check_globs(
        "keep_bf16", Recipe("", "").in_bf16(modules=keep_bf16), [each for one in layers for each in one.aliases]
    )
    check_rules(recipe, places, max(stacks.values()) if len(stacks) == 1 else None)
    if len(stacks) != 1 and any(rule.first or rule.counts_from_end for rule in recipe.all_rules):
        found = f"lists of blocks {', '.join(stacks)}" if stacks else "no list of blocks"
        raise UserError(
            f"recipe {recipe.name} has a rule for the first or the last layers, but the model has {found}: leave it "
            "out and name the layers by keep_bf16=[...]"
        )
    return recipe.in_bf16(modules=keep_bf16)


def _arch(device: torch.device | str) -> str:
    try:
        return arch_of(torch.device(device))
    except (AssertionError, RuntimeError, TypeError):  # no device, or a GPU where there is none
        raise UserError(f"convert found no device {device!r}: give one of torch's, such as 'cpu' or 'cuda'") from None


# ---- linear layers of a model
def _linears(model: nn.Module) -> Iterator[_Layer]:
    """Every ``nn.Linear``, subclasses included, ``Conv1D`` of transformers and 3-D weight, shared ones once."""
    sizes: tuple[int, int]
    module: Any
    added, of_module = added_by_peft(model), paths_of_modules(model)
    for path, module in (*model.named_modules(), *expert_weights(model)):
        if isinstance(module, nn.Linear):
            sizes = module.in_features, module.out_features
        elif (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D"):
            sizes = module.nx, module.nf
        elif isinstance(module, ExpertWeight):
            sizes = module.sizes
        else:
            continue
        stack, number, num_layers, name = _position(model, path)
        owner, parameter = (module.owner, f".{module.name}") if isinstance(module, ExpertWeight) else (module, "")
        paths = tuple((each + parameter).removeprefix(".") for each in of_module[id(owner)])
        plain_paths = tuple(without_adapters(each, added) for each in paths)
        name = without_adapters(name, added)
        yield _Layer(path, module, *sizes, stack, number, num_layers, name, paths, plain_paths)


def _position(model: nn.Module, path: str) -> tuple[str, int, int, str]:
    """Stack, layer number, number of layers and name within the layer, from the outermost list of modules."""
    module, parts = model, path.split(".")
    for depth, part in enumerate(parts):
        if part.isdigit() and isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            # a pipeline stage's ModuleDict keeps the numbers of the whole model
            last = max(int(name) for name, _ in module.named_children() if name.isdigit())
            name = ".".join(parts[depth + 1 :]) or "linear"
            return ".".join(parts[:depth]) or "the model", int(part) + 1, last + 1, name
        module = getattr(module, part) if part else module
    return "", 0, 0, path or "linear"


def _output_heads(model: nn.Module) -> set[int]:
    """``id`` of the modules that compute logits, as far as the model tells."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = set()
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in embeddings:
            heads.add(id(module))
        get = getattr(module, "get_output_embeddings", None)
        if callable(get):
            try:
                heads.add(id(get()))
            except (AttributeError, NotImplementedError):  # a model of transformers without a head
                continue
    return heads


# ---- reasons
def _unsupported(model: nn.Module, layer: _Layer, dtype: torch.dtype) -> Exclusion | None:
    """Reason if the layer's own forward would not run, is not that of a linear layer, or has another dtype."""
    kind, parent = type(layer.module), model.get_submodule(layer.path.rpartition(".")[0])
    if isinstance(layer.module, nn.Linear) and (kind.__module__, kind.__qualname__) not in _AS_LINEAR:
        return Exclusion(f"its class {kind.__module__}.{kind.__qualname__} is not torch.nn.Linear itself", False)
    if isinstance(layer.module, ExpertWeight) and (why := layer.module.why_not()) is not None:
        return Exclusion(why, False)
    if "forward" in vars(layer.module):
        return Exclusion("its forward is replaced on the module", False)
    if isinstance(parent, nn.TransformerEncoderLayer):
        # torch's fused inference path reads the weights of linear1 and linear2
        return Exclusion("nn.TransformerEncoderLayer evaluates without its layers' forward", False)
    if dtype not in COMPUTE_DTYPES:
        return Exclusion(
            f"its GEMMs are in {str(dtype).removeprefix('torch.')}, and recipes are for bfloat16 and float32", False
        )
    return None


def _requested(recipe: Recipe, layer: _Layer, kept: bool, filter: Filter | None, heads: set[int]) -> Exclusion | None:
    """Reason if the caller, the recipe or a default leaves the layer; ``kept`` by the recipe with ``keep_bf16``."""
    names = {path.split(".")[-1] for path in layer.plain_paths}
    if filter is not None:
        module = layer.module.owner if isinstance(layer.module, ExpertWeight) else layer.module
        if not all(filter(path, module) for path in layer.paths):
            return Exclusion("by filter", True)
    elif any(map(is_adapter, layer.paths)):
        return Exclusion("adapter", True)
    elif id(layer.module) in heads or not names.isdisjoint(_HEADS):
        return Exclusion("output head", True)
    elif not names.isdisjoint(_ROUTERS):
        return Exclusion("router", True)
    if not kept or not recipe.quantized:
        return None
    by_rules = not recipe.at(layer.place).quantized
    return Exclusion(f"by the rules of recipe {recipe.name}" if by_rules else "by keep_bf16", True)


def _unsuitable(recipe: LinearRecipe, layer: _Layer, arch: str) -> Exclusion | None:
    """Reason if the recipe's blocks do not divide the sizes, or FP8 was measured to be slower.

    A layer with partial blocks could only be emulated, and a head of an odd size is one.
    """
    sizes = layer.in_features, layer.out_features
    found = indivisible(recipe, LinearSite(layer.number, layer.name, *sizes, "column"), partial_blocks=False)
    if found is not None:
        return Exclusion(" ".join(found), False)
    if not isinstance(layer.module, ExpertWeight) and slower_than_bf16(recipe, Target(arch, *sizes)):
        return Exclusion(f"slower in FP8 than in bf16 on {arch} with weights of its size", False)
    return None
