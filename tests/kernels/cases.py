"""The modules of cases that run together under Triton's interpreter: starting a process takes longer than most of them.

``python -m tests.kernels.interpreted tests.kernels.cases NAME...`` runs ``NAME_cases.py`` and prints what differs.
"""

import sys
from importlib import import_module

COMPARED = {
    "amax": 86,
    "amax_history": 288,
    "bias": 30,
    "cross_entropy": 8,
    "gradient_codes": 173,
    "multi_tensor_cast": 67,
    "mx_gemm": 23,
    "norm": 18,
    "operand_stats": 23,
    "packed_cast": 24,
    "partial_cast": 36,
    "scaled_adam": 2874,
    "transpose_codes": 66,
}
"""Name of a module -> what it compares on a CPU; on a GPU no less."""
_ON_GPU = {"mx_gemm": 43, "norm": 13}
"""Where a GPU compares more, or fewer and larger ones."""


def faults(name: str, device: str) -> list[str]:
    """What differs between kernels and their references, a line each; too few comparisons are a fault as well."""
    compared, found = import_module(f"tests.kernels.{name}_cases").differences(device)
    few = compared < _ON_GPU.get(name, COMPARED[name]) if device == "cuda" else compared != COMPARED[name]
    return [f"{name}: {line}" for line in [*found, *([f"{compared} compared"] if few else [])]]


if __name__ == "__main__":
    different = [line for name in sys.argv[1:] for line in faults(name, "cpu")]
    print(*different, f"{len(sys.argv) - 1} modules compared", sep="\n")
    sys.exit(bool(different))
