"""Where a layer's GEMMs run: the key by which backends are resolved. No torch."""

from typing import NamedTuple


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
