"""Experiments on numbers, one module each, and what they share: what `megatron-lowprec lab` runs."""
