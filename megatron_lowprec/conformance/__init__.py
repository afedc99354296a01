"""Checks any project's quantizers against vectors of codes and scales: ``python -m megatron_lowprec.conformance``.

``docs/guide/conformance.md`` has the format of the files. Needs torch and safetensors; no GPU, no Megatron.
"""
