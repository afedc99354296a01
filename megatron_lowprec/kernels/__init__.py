"""One folder an op: ``reference.py`` is its meaning in plain torch, on any device; other implementations give the
same bits, but for the order of long sums (norms, losses, gradients of biases), which is fixed for each of them.

Kernels know no recipe: they take tensors, sizes, a format row and names of rules.
"""
