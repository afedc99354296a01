"""Every recipe on every parallel layout against one process: ``python -m tools.layout_parity``."""
