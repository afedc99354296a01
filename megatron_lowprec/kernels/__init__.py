"""Ops, one folder each: ``reference.py`` defines the op in plain torch on any device. Other implementations give equal
bits, except for the order of long sums (norms, losses, gradients of biases), which each implementation fixes.

Kernels do not depend on recipes: they take tensors, sizes, a format row and names of rules.
"""
