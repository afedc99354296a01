"""The driver in this process, for a report on what it writes."""

from tests.training.conftest import drive

__all__ = ["drive"]
