"""CUDA graphs of transformer layers, in the driver and under Megatron-LM's ``--spec``."""
