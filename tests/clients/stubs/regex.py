"""Stands in for regex, which Megatron-LM imports for tokenizers that no test uses."""

from re import *  # noqa: F403
