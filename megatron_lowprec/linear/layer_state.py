"""State of a layer outside Megatron in its module: state dicts, copies, pickles and moves to a device.

The keys are ``amax.<tensor>`` of delayed scaling, fp32 [length + 1], and ``draws`` of recipes with random draws, int64.
"""

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.backends.traced import recipe_key
from megatron_lowprec.linear.compiled import identity_of
from megatron_lowprec.linear.layer_histories import LayerGroup, LayerHistories
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES, LinearId
from megatron_lowprec.quantization.amax_history import AMAX, empty_histories, load_histories, update_together
from megatron_lowprec.quantization.device_rng_step import capturing
from megatron_lowprec.quantization.forward_pass import PassCounter, is_training_pass
from megatron_lowprec.quantization.random_stream import RngStep, in_backward_pass
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import LinearRecipe

_DRAWS = "draws"
_KEY = re.compile(rf"(?:(?P<layer>.*)\.)?(?:(?P<amax>{AMAX})\.(?:{'|'.join(SIDES)})|{_DRAWS})")


class StatefulLayer(nn.Module):
    """Base of a layer that has the state of a recipe.

    A subclass has ``weight`` and calls ``bind`` once, or ``convert`` does.

    Attributes:
        recipe: the model's recipe, also of a layer that it keeps in the compute dtype.
        recipe_key: of the layer's own ``LinearRecipe``, for a compiled graph.
        histories, passes: the state.
        group: the layers whose steps end together; None without state.
        identity: of ``identity_of``, for a compiled graph; None without state.
        linear_gemms: the layer's GEMMs.
        rng_step: the RNG step of the last forward pass.
    """

    weight: nn.Parameter
    linear_gemms: LinearGemms

    def bind(self, recipe: Recipe, place: Layer, seed: int = 0, group: LayerGroup | None = None) -> None:
        """Give the layer its GEMMs, without amaxes and draws so far.

        Args:
            recipe: must divide the layer's sizes.
            place: for which the recipe is asked; its module's path is the name in the keys of random draws.
            seed: of the random draws.
            group: the layers of the model, whose steps end together; None for a layer of its own, in this process only.
        """
        self.recipe, linear = recipe, recipe.at(place)
        self.recipe_key = recipe_key(linear)
        self.histories, self.passes = LayerHistories(self.stored_weight.device), PassCounter()
        self.group: LayerGroup | None = None
        self.rng_step = RngStep(0, 0)
        self.identity: torch.Tensor | None = None
        rank = 0 if group is None else group.rank
        name = place.module or place.name or "linear"
        self.linear_gemms = self.gemms_of(linear, LinearId(place.number, name, data_parallel_rank=rank or 0), seed)
        self._one_rank = rank is None and linear.random
        if self.added_keys:
            self.group = LayerGroup(distributed=False) if group is None else group
            self.group.add(self)
            self.identity = identity_of(self)

    def gemms_of(self, recipe: LinearRecipe, linear_id: LinearId, seed: int) -> Any:
        """The layer's GEMMs under its own recipe."""
        return LinearGemms(recipe, linear_id, seed, self.histories.of)

    @property
    def stored_weight(self) -> torch.Tensor:
        """``weight``; of a parametrized one, which each read computes, the first tensor that it is computed from."""
        parametrized: Any = self._modules.get("parametrizations", ())
        if "weight" not in parametrized:
            return self.weight
        of_weight = parametrized["weight"]
        stored: torch.Tensor = of_weight.original if of_weight.is_tensor else of_weight.original0
        return stored

    # ---- passes
    def check_dtypes(self, x: torch.Tensor, dtype: torch.dtype) -> None:
        """Raise UserError if an input has another dtype than the weight."""
        if x.dtype != dtype:
            raise UserError(
                f"{self.linear_gemms.linear_id.name} with a weight of {dtype} got an input of {x.dtype}: convert one "
                "of them, or use torch.autocast"
            )

    def refuse_features(self, x: torch.Tensor, features: int) -> NoReturn:
        """Raise UserError: GEMMs would pad an input of too few features with zeros."""
        raise UserError(
            f"{self.linear_gemms.linear_id.name} with a weight of {features} input features got an input of shape "
            f"{tuple(x.shape)}: give it one whose last dimension is {features}"
        )

    def begin_pass(self, own_node: bool = False) -> LinearGemms:
        """Before a forward pass: bring the state up to date. Returns the GEMMs of the pass, at ``rng_step``.

        Args:
            own_node: autograd has made the node of the pass, as it has within compiled code.

        Raises:
            UserError: several ranks would draw alike, or a CUDA graph would repeat draws.
        """
        linear_gemms = self.linear_gemms
        if self.group is None:
            return linear_gemms
        if self._one_rank:
            _check_one_rank()
        training = is_training_pass(self.training)
        # a recomputation uses the scales of its first pass, even if optimizers step within the backward pass
        if in_backward_pass():
            self.group.follow_backward_pass()
        else:
            self.group.begin_pass(training)
            self.histories.begin_pass(self.stored_weight, training, self.group.captured)
        if linear_gemms.recipe.random:
            if capturing():
                raise UserError(
                    f"recipe {linear_gemms.recipe.name} draws by the number of a layer's passes, which replays of a "
                    f"CUDA graph would repeat: leave its layers out of the graph"
                )
            self.rng_step = RngStep(self.passes.number(training, own_node), 0)
        if not linear_gemms.histories:
            return linear_gemms
        current = self.current_tensors(training)
        if current:
            self.group.say_once(
                f"{linear_gemms.recipe.name} scales by current amaxes: a weight changed without a step of an optimizer "
                "that holds it, or runs in a checkpoint that is never recomputed. After other updates call "
                "megatron_lowprec.linear.lowprec_linear.end_step(model)"
                if self.histories.stale
                else f"{linear_gemms.recipe.name} scales by current amaxes: no step in training has recorded any yet"
            )
        return linear_gemms.unrecorded(current) if current or not training else linear_gemms

    def current_tensors(self, training: bool) -> frozenset[str]:
        """Tensors of delayed scaling that a pass scales by their current amax.

        These are all if the weight has changed without a step, and in evaluation those without a recorded amax.
        """
        recipe, histories = self.linear_gemms.recipe, self.linear_gemms.histories
        if self.histories.stale:
            return frozenset(histories)
        return frozenset() if training else empty_histories(recipe, histories, gradients=torch.is_grad_enabled())

    def end_step(self) -> None:
        """Update delayed scales after an optimizer step; of this layer and this rank only."""
        self.histories.end_step()
        update_together(self.histories)

    # ---- state dict
    @property
    def added_keys(self) -> tuple[str, ...]:
        """Keys of the state dict that the unconverted layer has not."""
        draws = (_DRAWS,) if self.linear_gemms.recipe.random else ()
        return (*(f"{AMAX}.{tensor}" for tensor in self.linear_gemms.histories), *draws)

    @property
    def amax(self) -> SimpleNamespace:
        """State of each amax history, fp32 [length + 1]; ``torch.distributed.checkpoint`` looks its keys up here."""
        self._catch_up()
        histories = self.linear_gemms.histories
        return SimpleNamespace(**{tensor: history.state(slot) for tensor, (history, slot) in histories.items()})

    @property
    def draws(self) -> torch.Tensor:
        """int64 scalar: forward passes in training so far, which number the draws; looked up as ``amax``."""
        return torch.tensor(self.passes.count)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = {_DRAWS: self.draws} | {f"{AMAX}.{tensor}": value for tensor, value in vars(self.amax).items()}
        destination.update({prefix + key: state[key] for key in self.added_keys})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        drop_unused_state(self, state_dict, prefix)
        load_histories(self.linear_gemms.histories, state_dict, prefix, args[-1])
        self.histories.loaded()
        self.passes.count = int(state_dict.pop(prefix + _DRAWS, self.passes.count))
        if self.group is not None:
            self.group.loaded = True
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ---- copies and moves
    def _catch_up(self) -> None:
        """Before the histories are read or copied."""
        if self.group is not None:
            self.group.catch_up(collective=False)
            self.histories.follow(self.stored_weight)

    def __getstate__(self) -> dict[str, Any]:
        self._catch_up()
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        recipe_key(self.linear_gemms.recipe)  # another process may have the layer's first
        if self.group is not None:
            self.group.add(self)
            self.identity = identity_of(self)
            self.histories.belong_to(self.stored_weight)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.histories.to(self.stored_weight.device)
        return self


def title(linear_gemms: Any) -> str:
    """Name and recipe of a layer, for an error; of its ``linear_gemms``."""
    return f"{linear_gemms.linear_id.name} under recipe {linear_gemms.recipe.name}"


def without_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Autocast would round the fp32 operands of emulated GEMMs."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IS


_AS_IS = nullcontext()


def _check_one_rank() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UserError(
            f"convert ran before init_process_group, so all {dist.get_world_size()} ranks would round alike: "
            f"convert afterwards, or pass data_parallel_rank=..."
        )


def combined(*kinds: type) -> Any:
    """Subclass of a layer's class and of the class that it replaces, whose ``isinstance`` checks hold; pickles."""
    parts = tuple(part for kind in kinds for part in parts_of(kind))
    return parts[0] if len(parts) == 1 else _combined(parts)


def parts_of(kind: type) -> tuple[type, ...]:
    """The classes that ``combined`` was given, or the class itself."""
    parts: tuple[type, ...] = vars(kind).get("_parts", (kind,))
    return parts


@cache
def _combined(parts: tuple[type, ...]) -> type:
    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _empty, parts, self.__getstate__()

    members = {"_parts": parts, "__reduce_ex__": reduce, "__module__": parts[0].__module__}
    return type(parts[0].__name__, parts, members)


def _empty(*parts: type) -> Any:
    kind: Any = _combined(parts)
    return kind.__new__(kind)


def added_keys(model: nn.Module) -> set[str]:
    """Keys of the state dict that the unconverted model has not."""
    return {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, StatefulLayer)
        for key in module.added_keys
    }


def drop_unused_state(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pop the state of linear layers that this recipe does not use, with a warning.

    A pre-hook of ``load_state_dict``: the state dict may be of a model under another recipe.
    """
    used, unused = added_keys(model), {}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        found = _KEY.fullmatch(key, len(prefix))
        if found is not None and found[0] not in used and _is_linear(model, found["layer"] or ""):
            unused[key] = "amax histories" if found["amax"] else "counts of random draws"
            del state_dict[key]
    if unused:
        kinds = " and ".join(sorted(set(unused.values())))
        warnings.warn(f"load_state_dict drops {kinds}, {len(unused)} keys that this recipe does not use", stacklevel=2)


def _is_linear(model: nn.Module, path: str) -> bool:
    """Whether the path is that of a module with a weight and without modules."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(module, StatefulLayer) or ("weight" in module._parameters and not module._modules)
