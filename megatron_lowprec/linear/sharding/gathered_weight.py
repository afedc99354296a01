"""A weight of which FSDP2 gathered codes and scales, in the directions that GEMMs take."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.backends.protocol import GemmBackend
from megatron_lowprec.quantization.primary_weight import aliases
from megatron_lowprec.quantization.tensor import QuantizedTensor, quantized_direction


class Gathered(Protocol):
    """What the last all-gather of a weight brought."""

    path: str
    gemms: tuple[str, ...]
    requantizes: bool

    def codes(self, gemm: str) -> QuantizedTensor:
        """Rowwise codes of the operand of a GEMM in ``gemms``: [O, I] for fprop, [I, O] for dgrad."""


class GatheredWeight(torch.Tensor):
    """Weight [O, I] as codes and scales; to autograd a tensor of the compute dtype without values.

    Attributes:
        gathered: its codes, which change with each all-gather; aliases share it.
    """

    gathered: Gathered

    # only __torch_dispatch__, below autograd, handles this class
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gathered: Gathered, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> GatheredWeight:
        self: GatheredWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.gathered = gathered
        return self

    def operand(self, gemm: str, backend: GemmBackend) -> QuantizedTensor | None:
        """The backend's operand of fprop (rowwise) or dgrad (columnwise); None if it quantizes ``fprop_values``.

        Raises:
            UserError: the last all-gather brought the codes of the other direction only.
        """
        if gemm == "dgrad" and self.gathered.requantizes:
            return None
        if gemm not in self.gathered.gemms:
            raise UserError(
                f"{gemm} of {self.gathered.path} takes other codes of the weight than {self.gathered.gemms[0]}, for "
                "which FSDP2 gathered it last: let it gather for each forward and each backward pass, by "
                "fully_shard(..., reshard_after_forward=True) without set_reshard_after_backward(False) and activation "
                "recomputation, or leave enable_fp8_all_gather out"
            )
        codes = self.gathered.codes(gemm)
        data, scale = backend.from_codes(codes, columnwise=False)
        above = codes.rowwise_tensor_scale
        return quantized_direction(self, codes.spec, gemm == "fprop", data, scale=scale, tensor_scale=above)

    def fprop_values(self) -> torch.Tensor:
        """fp32 [O, I], values of fprop's operand."""
        return self.gathered.codes("fprop").dequantize()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {' and '.join(self.gathered.gemms)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, GatheredWeight) and aliases(func, args):
            return cls(first.gathered, first.shape, first.dtype, first.device)
        raise NotImplementedError(f"{func} reads a weight of which FSDP2 gathered only codes")
