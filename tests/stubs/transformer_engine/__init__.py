"""Stands in for TransformerEngine on a CPU, in tests of what Megatron-core and the driver make of it.

It has the names and arguments of TransformerEngine 2.20 that Megatron-core 0.16.1 uses for a GPT without tensor
parallelism, and computes them in plain torch: no FP8. Each call of a linear layer is a line of JSON in the file that
``TE_STAND_IN_LOG`` names: the layer's sizes, the FP8 recipe that it runs under, and whether it was told to keep its
quantized weight. What it cannot prove is anything about TransformerEngine's numerics or speed.
"""

from transformer_engine import common, pytorch

__all__ = ["__version__", "common", "pytorch"]
__version__ = "2.20.2"
