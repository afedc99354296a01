"""Random states and recomputation, by name; Megatron-core's own are used."""

from typing import Any


class CudaRNGStatesTracker:
    def reset(self) -> None: ...

    def set_states(self, states: Any) -> None: ...

    def add(self, name: str, seed: int) -> None: ...


def checkpoint(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


def activation_recompute_forward(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


def is_fp8_activation_recompute_enabled() -> bool:
    return False
