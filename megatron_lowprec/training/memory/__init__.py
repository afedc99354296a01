"""Memory plan of one GPU in training, from sizes only. No torch, no megatron.

``docs/guide/memory.md`` derives every term. Bytes per value are written out: 2 for bf16, 4 for fp32, 1 for a dropout
mask.
"""
