"""This rank's random state: what dropout and Megatron-core draw from. Recipes draw from counters and have none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

# Checkpoints of earlier versions hold a recipe's step and microbatch among Megatron-core's states.
_FORMER_STATE = "megatron-lowprec-moment"


def capture() -> dict[str, Any]:
    """All generators' states, as tensors, lists and numbers."""
    state = {
        "python": random.getstate(),
        "numpy": _plain(np.random.get_state()),  # noqa: NPY002 - what Megatron-core draws from
        "torch": torch.get_rng_state(),
        "tracker": {name: _value(state) for name, state in _tracked().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _tracked() -> dict[str, torch.Tensor | torch.Generator]:
    """Megatron-core's named states: values, or, for CUDA graphs, generators that graphs know by what they are."""
    states: dict[str, torch.Tensor | torch.Generator] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states


def _value(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _plain(state: Any) -> list[Any]:
    """Without the array, whose unpickling would need numpy's own functions."""
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]


def restore(state: dict[str, Any]) -> None:
    """Go back to what ``capture`` gave."""
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
