"""Whether Triton interprets kernels in Python on a CPU, where inline PTX needs a replacement."""

import os

import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
