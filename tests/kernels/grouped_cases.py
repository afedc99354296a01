"""Cases of the grouped kernels against their references; run interpreted on a CPU, and natively on a GPU.

``python -m tests.kernels.grouped_cases`` runs all under Triton's interpreter and prints what differs.
"""

from tests.kernels.grouped_casts import cast_differences
from tests.kernels.grouped_operands import CASES, operand_differences
from tests.kernels.grouped_products import fp8_differences, product_differences, tiling_differences
from tests.kernels.interpreted import main


def differences(device: str) -> tuple[int, list[str]]:
    """Number of cases, and what differs."""
    found = [line for case in CASES for line in operand_differences(case, device)]
    found += product_differences(device) + tiling_differences(device)
    return len(CASES) + 4, found + fp8_differences(device) + cast_differences(device)


if __name__ == "__main__":
    main(differences)
