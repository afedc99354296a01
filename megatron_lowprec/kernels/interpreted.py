"""Whether Triton interprets kernels, in Python on a CPU: inline PTX needs another way there."""

import os

import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
