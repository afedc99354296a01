"""AdamW with moments and main weights in narrow formats (FP8-LM, arXiv 2310.18313, "FP8 optimizer")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_lowprec.kernels.dispatch import adam_update_, adam_update_amax
from megatron_lowprec.kernels.format_dtypes import DTYPES as FP8_DTYPES
from megatron_lowprec.kernels.scaled_adam.reference import (
    FORMAT_OF,
    SECOND,
    STATE,
    Hyperparameters,
    Slot,
    Stream,
    encode_scale,
    not_to_zero,
)
from megatron_lowprec.recipe.recipe import OptimizerSpec

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **FP8_DTYPES,
}
_MASTER = "master_param"  # Megatron-core's name of a main weight in the optimizer state
_NAMES = tuple(_MASTER if name == "master" else name for name in STATE)


class Place(NamedTuple):
    """Location of a weight, or a flat shard of one, among the tensors whose scales ranks share.

    Attributes:
        row: row of the tensor in ``amax``.
        keeps_fp32: whether its state is fp32 regardless of the spec.
        stream: draws of stochastic rounding; None rounds to nearest even.
        values: of a weight whose tensor holds codes: returns its values, any float dtype. The update leaves the codes
            unchanged. None for other weights.
    """

    row: int
    keeps_fp32: bool = False
    stream: Stream | None = None
    values: Callable[[], torch.Tensor] | None = None


class _Batch(NamedTuple):
    """Tensors that one launch updates.

    Attributes:
        rows: int64 [slots], rows of ``amax``.
        dtypes: dtypes of the three parts of the state.
        slots: the tensors.
        step: the step's hyperparameters.
    """

    rows: torch.Tensor
    dtypes: Sequence[torch.dtype]
    slots: list[Slot]
    step: Hyperparameters


class ScaledAdamW(torch.optim.Optimizer):
    """AdamW that updates the model's weights; its state has moments and main weights as codes with a scale a tensor.

    ``state[weight]`` has "exp_avg", "exp_avg_sq" and "master_param", codes of the weight's shape, or fp32 by
    ``Place.keeps_fp32``; "decode_scale", fp32 [3], which multiplies these three; and "step", a scalar as in torch's
    AdamW. The gradient is read from ``decoupled_grad``, since its dtype may differ from the weight's.

    Args:
        param_groups: groups of weights or flat shards of weights, with "lr", "betas", "eps" and "weight_decay".
        defaults: as for torch's optimizers.
        spec: formats of the state; rounding is stochastic for places with a stream.
        places: each weight -> its place among all tensors that the ranks of ``reduce_amax`` share.
        amax: fp32 [tensors, 3] on the weights' device, one row for each of these tensors.
        reduce_amax: returns the elementwise maximum of ``amax`` over the ranks that hold parts or copies.

    Attributes:
        launched: whether an update was launched that ``step`` has not recorded. Set it to False if it was skipped.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        spec: OptimizerSpec,
        places: Mapping[torch.Tensor, Place],
        amax: torch.Tensor,
        reduce_amax: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__([{"params": []}], defaults)
        # add_param_group would reject Megatron-core's shards of fp32 weights, which are views
        self.param_groups = param_groups
        self._formats = [DTYPES[name] for name in spec.formats.values()]
        self._places, self._amax, self._reduce_amax = places, amax, reduce_amax
        self.launched = False
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        for weight in self._weights():
            self.state[weight] = {
                "step": torch.zeros(()),
                "decode_scale": torch.ones(3, device=weight.device),
                **{
                    name: torch.zeros_like(weight, dtype=dtype, requires_grad=False)
                    for name, dtype in zip(_NAMES, self._dtypes(places[weight].keeps_fp32), strict=True)
                },
            }
        self.read_weights()

    @torch.no_grad()
    def read_weights(self) -> None:
        """Set the main weights from the model's weights."""
        for weight in self._weights():
            values = self._places[weight].values
            self.set_scaled_state(weight, _MASTER, weight if values is None else values())

    def main_weight(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(codes of a main weight, their decode scale, fp32 [1]), or (the fp32 main weight, None)."""
        stored: torch.Tensor = self.state[weight][_MASTER]
        return stored, None if stored.dtype == torch.float32 else self.state[weight]["decode_scale"][2:]

    @torch.no_grad()
    def launch(self, grad_factor: torch.Tensor | None = None) -> None:
        """Update state and weights from the gradients; collective over the ranks of ``reduce_amax``.

        Args:
            grad_factor: fp32 scalar on the weights' device, multiplies the gradients; NaN: nothing changes. None: 1.
        """
        batches = [batch for group in self.param_groups for batch in self._batches(group)]
        self._amax.zero_()
        for batch in batches:
            self._amax[batch.rows] = adam_update_amax(batch.slots, batch.step, grad_factor)
        amax = self._reduce_amax(self._amax)
        for batch in batches:
            parts = zip(amax[batch.rows].unbind(1), batch.dtypes, strict=True)
            scales = [encode_scale(part, dtype) for part, dtype in parts]
            adam_update_(batch.slots, batch.step, torch.stack(scales, 1), grad_factor)
        self.launched = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Count the launched update; without one, launch it first."""
        assert closure is None
        if not self.launched:
            self.launch()
        self.launched = False
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            for weight in group["params"]:
                if getattr(weight, "decoupled_grad", None) is not None:
                    self.state[weight]["step"].fill_(group["step"])

    def decode_scales(self, name: str) -> torch.Tensor:
        """Decode scales of one part of the state ("exp_avg", "exp_avg_sq" or "master"), of tensors that have one: fp32
        [tensors].
        """
        part = STATE.index(name)
        states = [self.state[weight] for weight in self._weights() if weight.numel()]
        scales = [state["decode_scale"][part] for state in states if state[_NAMES[part]].dtype in FORMAT_OF]
        return torch.stack(scales) if scales else torch.empty(0, device=self._amax.device)

    def _batches(self, group: dict[str, Any]) -> Iterator[_Batch]:
        """Batches of the tensors of a group that have a gradient, by the dtypes of their state and weights."""
        by_kind: dict[tuple[bool, bool], tuple[list[int], list[Slot]]] = {}
        for weight in group["params"]:
            grad = getattr(weight, "decoupled_grad", None)
            if grad is None:
                continue
            state, place = self.state[weight], self._places[weight]
            exp_avg, exp_avg_sq, master = (state[name] for name in _NAMES)
            stream = None if place.keeps_fp32 else place.stream
            model_weight = None if place.values is not None else weight.detach()
            slot = Slot(grad, model_weight, exp_avg, exp_avg_sq, master, state["decode_scale"], stream)
            rows, slots = by_kind.setdefault((place.keeps_fp32, model_weight is None), ([], []))
            rows.append(place.row)
            slots.append(slot)
        beta1, beta2 = group["betas"]
        step = int(group.get("step", 0)) + 1
        numbers = (float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step)
        for (keeps_fp32, _), (rows, slots) in by_kind.items():
            key = tuple(rows)
            if key not in self._indices:  # cached, since the copy to the device blocks the host
                self._indices[key] = torch.tensor(rows, dtype=torch.int64, device=self._amax.device)
            yield _Batch(self._indices[key], self._dtypes(keeps_fp32), slots, Hyperparameters(*numbers))

    def _dtypes(self, keeps_fp32: bool) -> Sequence[torch.dtype]:
        """Dtypes of the three parts of a weight's state."""
        return [torch.float32] * 3 if keeps_fp32 else self._formats

    def _weights(self) -> Sequence[torch.Tensor]:
        return [weight for group in self.param_groups for weight in group["params"]]

    # ---- Megatron-core's interface of optimizers with main weights

    def get_unscaled_state(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        """One part of a weight's state, decoded to fp32."""
        value: torch.Tensor = self.state[weight][name]
        if name not in _NAMES:
            return value
        return value.float() * self.state[weight]["decode_scale"][_NAMES.index(name)]

    @torch.no_grad()
    def set_scaled_state(self, weight: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Encode one part of a weight's state by its own scale, until the next step.

        Values decoded with a scale that the tensor's other shards shared stay exact: this encode scale is no smaller.
        """
        state = self.state[weight]
        if name not in _NAMES:
            state[name].copy_(value)
            return
        place = _NAMES.index(name)
        value = value.to(state[name].device, torch.float32)
        amax = value.abs().amax() if value.numel() else torch.zeros((), device=value.device)
        scale = encode_scale(amax, state[name].dtype)
        scaled = value.view_as(state[name]) * scale
        state[name].copy_(not_to_zero(scaled, state[name].dtype) if place == SECOND else scaled)
        state["decode_scale"][place] = 1 / scale

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load group options and step counts. ``set_scaled_state`` restores codes, since torch would convert them to a
        weight's dtype.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
            for weight in group["params"]:
                self.state[weight]["step"].fill_(group.get("step", 0))
