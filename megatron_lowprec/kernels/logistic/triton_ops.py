"""The logistic function in Triton programs, of which GELU and SwiGLU are made."""

import triton
import triton.language as tl

from megatron_lowprec.kernels.interpreted import INTERPRETED


@triton.jit
def reciprocal_of_one_plus_exp2(power):
    """``1 / (1 + 2^power)`` of fp32 entries, which is ``sigmoid(x)`` at ``power = -x / ln 2``."""
    if INTERPRETED:
        factor = 1.0 / (1.0 + tl.exp2(power))
    else:
        # omits the subnormal handling of Triton's exp2 and division, a fifth of a cast's instructions
        factor = tl.inline_asm_elementwise(
            """{ .reg .f32 sum; ex2.approx.ftz.f32 sum, $1; add.f32 sum, sum, 0f3F800000;
            rcp.approx.ftz.f32 $0, sum; }""",
            "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return factor
