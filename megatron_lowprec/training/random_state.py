"""This rank's random state: what dropout and Megatron-core draw from. Recipes draw from counters and have none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def capture() -> dict[str, Any]:
    """All generators' states, as tensors, lists and numbers."""
    state = {
        "python": random.getstate(),
        "numpy": _plain(np.random.get_state()),  # noqa: NPY002 - what Megatron-core draws from
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _plain(state: Any) -> list[Any]:
    """Without the array, whose unpickling would need numpy's own functions."""
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]


def restore(state: dict[str, Any]) -> None:
    """Go back to what ``capture`` gave."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
