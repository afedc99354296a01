"""``python -m megatron_lowprec.conformance`` as a subcommand."""

from megatron_lowprec.conformance.check import main

__all__ = ["main"]
