"""This rank's random state, for dropout and Megatron-core. Recipes use counter-based streams without state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

# Checkpoints of earlier versions store a recipe's step and microbatch among Megatron-core's states.
_FORMER_STATE = "megatron-lowprec-moment"


def capture() -> dict[str, Any]:
    """States of all generators, as tensors, lists and numbers."""
    state = {
        "python": random.getstate(),
        "numpy": _plain(np.random.get_state()),  # noqa: NPY002 - Megatron-core uses this generator
        "torch": torch.get_rng_state(),
        "tracker": {name: _value(state) for name, state in _tracked().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _tracked() -> dict[str, torch.Tensor | torch.Generator]:
    """Megatron-core's named states: tensors, or, with CUDA graphs, the generator objects registered with the graphs."""
    states: dict[str, torch.Tensor | torch.Generator] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states


def _value(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _plain(state: Any) -> list[Any]:
    """The state without an array, whose unpickling would need numpy's own functions."""
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]


def restore(state: dict[str, Any]) -> None:
    """Restore the state that ``capture`` returned."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    tracked, found = _tracked(), dict(state["tracker"])
    found.pop(_FORMER_STATE, None)
    for name, own in tracked.items():
        if isinstance(own, torch.Generator) and name in found:
            own.set_state(found[name])
            found[name] = own
    tensor_parallel.get_cuda_rng_tracker().set_states(found)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
