"""The driver in this process, for the tools that work on its checkpoints."""

from tests.training.conftest import drive

__all__ = ["drive"]
