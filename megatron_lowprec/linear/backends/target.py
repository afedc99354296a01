"""Where a layer's GEMMs run: the key by which backends are resolved. No torch."""

from typing import NamedTuple

_MULTIPLE = 16


class Target(NamedTuple):
    """Device, sizes and dtype of a linear layer on one rank.

    Attributes:
        arch: "cpu", or a GPU's compute capability as "sm90".
        in_features, out_features: of the layer on one rank; 0 skips the size checks.
        dtype: of the layer's weight.
    """

    arch: str
    in_features: int = 0
    out_features: int = 0
    dtype: str = "bfloat16"

    def why_not_native(self, gemms: str) -> str | None:
        """Reason why low-precision units do not take the dtype or the sizes for such ``gemms``; None if they do."""
        if self.dtype != "bfloat16":
            return f"{gemms} are for bf16 models, this one is {self.dtype}"
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        wrong = (f"{name} {size} is no multiple of {_MULTIPLE}" for name, size in sizes.items() if size % _MULTIPLE)
        return next(wrong, None)
