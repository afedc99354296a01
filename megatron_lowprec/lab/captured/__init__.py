"""Experiments on operands that a run has captured (--capture-step)."""
