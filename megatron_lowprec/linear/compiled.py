"""A linear layer within ``torch.compile``: the GEMMs that the compiler traces, and the state of a pass.

``traced_gemms`` have the layer's backends behind operators (``backends/traced.py``). The compiler traces through them
without Dynamo, so only what calls torch is in the graph. A layer with draws or amax histories begins its pass by an
operator of its own, ``begin_pass``, which the compiler keeps in order, and does not repeat where it recomputes
activations. Its casts find the layer by the result.
"""

import warnings
import weakref
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from megatron_lowprec.linear.backends.traced import TracedGemms, define, number_of, numbered, recipe_of
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import NO_DRAWS

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_next_number = count()
_CPU = torch.device("cpu")  # of what the host reads, whatever torch's default device


def identity_of(layer: Any) -> torch.Tensor:
    """int64 [1] on the CPU that tells graphs, which layers share, which ``StatefulLayer`` runs."""
    number = next(_next_number)
    _layers[number] = layer
    return torch.tensor([number], device=_CPU)


@lru_cache(maxsize=1024)
def traced_gemms(key: int, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> LinearGemms:
    """The GEMMs of a graph, of a recipe and a weight; native support depends on the sizes."""
    gemms = LinearGemms(recipe_of(key), LinearId(0, "compiled"), 0, AmaxHistory, histories={})
    gemms.backends.wrap(lambda backend: TracedGemms(backend, key))
    return gemms


def traced_pass(identity: torch.Tensor | None, grad: bool) -> torch.Tensor | None:
    """The pass of a layer that begins, as ``begin_pass``. Activation recomputation saves it: another would draw anew.

    Args:
        identity: of ``identity_of``; None for a layer without state.
        grad: whether gradients are enabled.
    """
    if identity is None:
        return None
    if grad:
        _warn_of_repeated_captures()
    return always_saved(begin_pass, identity, grad)


def _warn_of_repeated_captures() -> None:
    from torch._inductor import config

    # torch 2.13 knows that operators between captured parts save tensors at other addresses in each step
    if config.triton.cudagraphs and torch.__version__ < "2.13":
        warnings.warn(
            f"the compiler's CUDA graphs with draws or amax histories: torch {torch.__version__} captures a backward "
            'pass again whenever saved codes lie elsewhere; use torch 2.13, a mode other than "reduce-overhead", or a '
            "recipe without state such as fp8_current",
            stacklevel=2,
        )


def always_saved(operator: Any, *arguments: Any) -> torch.Tensor:
    """An operator's result, which the compiler does not compute again where it recomputes activations."""
    mode = get_proxy_mode()
    before = 0 if mode is None else len(mode.tracer.graph.nodes)
    found: torch.Tensor = operator(*arguments)
    if mode is not None:
        for node in list(mode.tracer.graph.nodes)[before:]:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return found


def _begin_pass(identity: torch.Tensor, grad: bool) -> torch.Tensor:
    layer = _layers[int(identity)]
    layer.histories.to(layer.stored_weight.device)  # a wrapper may have moved the weight without a call of the layer
    # compiled code runs within an autograd function of its own, which turns gradients off
    within = grad and not torch.is_grad_enabled()
    with torch.set_grad_enabled(grad or torch.is_grad_enabled()):
        gemms = layer.begin_pass(own_node=within)
    # the GEMMs of experts have no backends in common
    number = number_of(getattr(gemms, "backends", gemms))
    return _first_of(number).clone() if layer.rng_step == NO_DRAWS else _at(number, *layer.rng_step)


@lru_cache(maxsize=4096)
def _first_of(number: int) -> torch.Tensor:
    """Of passes without draws, whose copy takes the host half the time."""
    return _at(number, *NO_DRAWS)


def _at(*words: int) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64, device=_CPU)


begin_pass = define(
    "begin_pass",
    "(Tensor(a!) identity, bool grad) -> Tensor",
    _begin_pass,
    lambda identity, grad: identity.new_empty(3),
    "cudagraph_unsafe",
)
"""``StatefulLayer.begin_pass``: int64 [3] on the CPU, number of the pass's GEMMs or backends, step and microbatch.

The mutation of ``identity`` keeps calls in order, and each of them.
"""


def _record_weight(identity: torch.Tensor, at: torch.Tensor, weight: torch.Tensor) -> None:
    layer_amax = numbered(int(at[0])).context.layer_amax
    if layer_amax.records and "weight" in layer_amax.histories:
        history, slot = layer_amax.histories["weight"]
        history.update_amax(slot, weight.abs().amax().float())


record_weight = define(
    "record_weight",
    "(Tensor(a!) identity, Tensor at, Tensor weight) -> ()",
    _record_weight,
    lambda identity, at, weight: None,
    "cudagraph_unsafe",
)
"""Record the weight's amax for a pass without casts, which has no tokens; ``at`` of ``begin_pass``."""
