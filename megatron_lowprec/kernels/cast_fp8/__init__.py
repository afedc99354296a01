"""Casts to FP8 for native GEMMs: rowwise and columnwise codes of a matrix from one read, and their scales."""
