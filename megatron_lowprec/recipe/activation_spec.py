"""Formats of activations that a recipe saves for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowprec.recipe.field_types import check_fields

ActivationFormat = Literal["none", "e4m3", "e5m6"]


@dataclass(frozen=True)
class ActivationSpec:
    """Formats of activations saved for the backward pass (DeepSeek-V3, arXiv 2412.19437, section 3.3.3).

    ``"none"`` saves the compute dtype, or the codes of a native FP8 GEMM. A format saves codes of blocks of 1x128
    entries of a token with power-of-two scales (E8M0, ``round_up``), rounded to nearest even. The forward pass is
    unchanged, the backward pass computes with the decoded values. Layers that ``keep_bf16`` names are included.

    Attributes:
        attention_output: output of core attention, saved once for attention's own backward pass and for wgrad of
            linear_proj. DeepSeek-V3: ``"e5m6"``.
        swiglu_input: input of SwiGLU, in dense MLPs and experts. Its output is recomputed for wgrad of linear_fc2.
            DeepSeek-V3: ``"e4m3"``.
    """

    attention_output: ActivationFormat = "none"
    swiglu_input: ActivationFormat = "none"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def formats(self) -> dict[str, str]:
        """Activation -> its format."""
        return {"attention_output": self.attention_output, "swiglu_input": self.swiglu_input}

    @property
    def quantized(self) -> bool:
        """Whether any activation is saved in a format."""
        return set(self.formats.values()) != {"none"}
