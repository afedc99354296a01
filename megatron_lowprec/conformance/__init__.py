"""Checks any project's quantizers against vectors of codes and scales: ``python -m megatron_lowprec.conformance``.

``docs/guide/conformance.md`` has the format of the files. Needs torch, for files safetensors; no GPU, no Megatron.
"""
