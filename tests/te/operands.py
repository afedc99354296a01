"""Overrides of several operands."""

from megatron_lowprec.recipe.schema import GEMM_OPERANDS


def operands_of(tensor: str, field: str) -> list[str]:
    """The field of a tensor in both of its GEMMs."""
    return [f"{gemm}.{tensor}.{field}" for gemm, operands in GEMM_OPERANDS.items() if tensor in operands]


def all_operands(field: str) -> list[str]:
    """The field of all six operands."""
    return [line for tensor in ("input", "weight", "grad_output") for line in operands_of(tensor, field)]
