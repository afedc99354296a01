"""PTX of the MX product's kernel for GPUs that are not here; each argument is a case as JSON.

A process of its own: one that has interpreted kernels does not compile them.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_lowprec.kernels.mx_gemm.triton import OPTIONS, _mx_gemm_kernel, constants_of


def compiled_ptx(arch: int, a_format: str, b_format: str, block: int, **constants: Any) -> str:
    """PTX of the kernel as ``mx_gemm`` launches it; ptxas has to take it."""
    fixed = {**constants_of(a_format, b_format, block, tensor_scales=3 * (block == 16), adds=False), **constants}
    names = list(_mx_gemm_kernel.arg_names)
    types = dict.fromkeys(names, "i32") | {"alpha": "fp32"} | dict.fromkeys(fixed, "constexpr")
    types |= {name: "*u8" for name in names if name.endswith("_ptr")}
    types |= {"a_tensor_scale_ptr": "*fp32", "b_tensor_scale_ptr": "*fp32", "out_ptr": "*bf16"}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name] in ("*u8", "*bf16", "i32")
    }
    source = ASTSource(_mx_gemm_kernel, types, constexprs=fixed, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=OPTIONS)
    assert "cubin" in compiled.asm
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    cases = (json.loads(case) for case in sys.argv[1:])
    print(json.dumps([compiled_ptx(*sizes, **constants) for *sizes, constants in cases]))
