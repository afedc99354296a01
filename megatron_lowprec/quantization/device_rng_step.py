"""RNG steps in GPU memory, read by kernels: a CUDA graph would freeze a launch argument."""

from collections import OrderedDict

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.quantization.random_stream import RngStep

_CACHED = 16  # RNG steps in flight: one, or the microbatches of a pipeline between forward and backward
_rng_steps: OrderedDict[tuple[torch.device, RngStep], torch.Tensor] = OrderedDict()
_running: dict[torch.device, torch.Tensor] = {}


def capturing() -> bool:
    """Whether the current stream captures a CUDA graph; values cached before the capture must not be used then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Guard for draws from host counters, which a CUDA graph would repeat in each replay.

    Raises:
        UserError: a CUDA graph is being captured.
    """
    if capturing():
        raise UserError(
            f"{what} on this device outside of the fused MX kernel, and a CUDA graph would repeat the draws"
        )


def device_rng_step(rng_step: RngStep, device: torch.device) -> torch.Tensor:
    """int32 [2] on ``device``: step and microbatch; under graph capture the cell that ``enter_rng_step`` writes."""
    if capturing():
        return _cell(device)
    key = (device, rng_step)
    found = _rng_steps.get(key)
    if found is None:
        found = _rng_steps[key] = _write(torch.empty(2, dtype=torch.int32, device=device), rng_step)
        if len(_rng_steps) > _CACHED:
            _rng_steps.popitem(last=False)
    return found


def enter_rng_step(rng_step: RngStep, device: torch.device) -> None:
    """Set the RNG step of a graph's draws, before its capture and each replay; in stream order, without host copy."""
    _write(_cell(device), rng_step)


def _cell(device: torch.device) -> torch.Tensor:
    if device not in _running:
        if capturing():  # a zero fill would become part of the graph and run in each replay
            raise RuntimeError("call enter_rng_step before a CUDA graph is captured, as before each of its replays")
        _running[device] = torch.zeros(2, dtype=torch.int32, device=device)
    return _running[device]


def _write(cell: torch.Tensor, rng_step: RngStep) -> torch.Tensor:
    for slot, value in zip(cell.unbind(), rng_step, strict=True):
        slot.fill_(value)
    return cell
