"""Memory of one GPU in training, from sizes alone. No torch, no megatron.

``docs/memory.md`` derives every term; bytes a value are written out: 2 for bf16, 4 for fp32, 1 for a dropout mask.
"""
