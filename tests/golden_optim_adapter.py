"""Serves the golden cases of FP8 optimizer states from the project's own functions, for ``golden_adapter.py``.

The moments are flattened into blocks with one fp32 scale each, and updated by the reference of ``kernels/scaled_adam``.
"""

from collections.abc import Mapping

import torch

from megatron_lowprec.kernels.scaled_adam.reference import Hyperparameters, Slot, update_
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import QuantSpec

Results = dict[str, torch.Tensor]

TORCHAO = QuantSpec("e4m3", "1x256", amax_floor=1e-12)
COAT = QuantSpec("e4m3", "1x128")
# as the files' arguments and layouts give them, by the beginning of a group's name
HYPERPARAMETERS = {
    "f32": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
    "bf16": {"lr": 3e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01},
    "even": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
    "ragged": {"lr": 3e-4, "beta1": 0.8, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01},
}
MOMENTS = ("exp_avg", "exp_avg_sq")


def _adamw(case: str, name: str, x: torch.Tensor | None, inputs: Mapping[str, torch.Tensor]) -> Results:
    """One step of a group, whose number ends the group's name."""
    kind, _, number = name.partition("_step")
    spec = TORCHAO if "torchao" in case else COAT
    weight = inputs["in.p"].flatten().clone()
    old = [_decoded(inputs[f"in.{moment}_codes"], inputs[f"in.{moment}_scale"], spec) for moment in MOMENTS]
    slot = Slot(inputs["in.grad"].flatten(), weight, *old, weight.float(), torch.ones(3))
    update_([slot], Hyperparameters(**HYPERPARAMETERS[kind], step=int(number)), None)
    results = {"p": weight.view_as(inputs["in.p"])}
    for moment, new in zip(MOMENTS, old, strict=True):
        quantized = quantize(new.view(1, -1), spec)
        results[f"{moment}.codes"] = quantized.codes.view(inputs["in.p"].shape)
        results[f"{moment}.scale"] = quantized.scale.flatten()
    return results


def _decoded(codes: torch.Tensor, scale: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    return QuantizedTensor.from_codes(codes.view(1, -1), scale.view(1, -1), spec).dequantize().flatten()


OPTIM_KINDS = {r"optim_fp8_torchao_adamw|optim_fp8_coat_plain": _adamw}
