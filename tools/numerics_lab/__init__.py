"""Experiments of ``tools/numerics.py``: one module each, and what they share."""
