"""Whether a recipe means the same on every parallel layout: ``python -m tools.layout_parity``."""
