#!/bin/bash
# Checks MX and NVFP4 products of this Blackwell GPU:
#
#   scripts/check_native.sh [FLAGS of tools/check_native.py]
#
# It compares the bits of operands, the products of the layers of 345M and 1.3B, and the frequencies of stochastic
# rounding; then it times steps of both beside bf16, and TransformerEngine where that is installed. It prints one text
# to paste into an issue and writes it with one JSON to the folder check_native.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
exec python -W ignore -m tools.check_native "$@"
