"""Frozen weights of converted layers as codes."""

from megatron_lowprec.finetuning.frozen_layer import FrozenLayer, dequantize_frozen_weights, quantize_frozen_weights

__all__ = ["FrozenLayer", "dequantize_frozen_weights", "quantize_frozen_weights"]
