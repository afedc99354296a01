"""Casts to FP8 for native products: codes along rows and columns of a matrix from one read, and their scales."""
