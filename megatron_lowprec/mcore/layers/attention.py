"""Causal self-attention by torch's scaled_dot_product_attention, in place of Megatron-core's unfused one."""

import contextlib
import math
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import Format
from megatron_lowprec.mcore.layers.cached_attention import cached_output, token_major


class SdpaAttention(MegatronModule):
    """Core attention: q [s, b, heads, d], k [s, b, groups, d], v [s, b, groups, e] -> [s, b, heads * e], unquantized.

    Takes the arguments of Megatron-core's ``DotProductAttention``, and the widths that latent attention gives. Like it,
    draws dropout from the tensor-parallel RNG state.

    Attributes:
        output_format: format of the output saved for backward; None for the compute dtype.
    """

    output_format: Format | None = None
    reads_mask = False

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise UserError(
                f"--context-parallel-size {config.context_parallel_size} needs TransformerEngine's attention; use 1"
            )
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise UserError("windowed attention and learnable softmax offsets need --attention-backend local")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.attn_mask_type = attn_mask_type

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Causal attention over the whole sequence; only ``MaskedSdpaAttention`` reads ``attention_mask``."""
        if (attn_mask_type or self.attn_mask_type) != AttnMaskType.causal or packed_seq_params is not None:
            raise UserError("this attention is causal and unpacked; use --attention-backend local for other masks")
        visible = ~attention_mask if self.reads_mask and attention_mask is not None else None
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        draws = contextlib.nullcontext()
        if dropout > 0.0 and not self.config.sequence_parallel:
            draws = tensor_parallel.get_cuda_rng_tracker().fork()
        attend = partial(
            scaled_dot_product_attention,
            q,
            k,
            v,
            dropout_p=dropout,
            attn_mask=visible,
            is_causal=visible is None,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        with draws:
            if self.output_format is not None and torch.is_grad_enabled() and q.requires_grad:
                return cached_output(attend, self.output_format)
            return token_major(attend())


class MaskedSdpaAttention(SdpaAttention):
    """``SdpaAttention`` that follows ``attention_mask`` [b, 1, s, s], True where a query must not see a key.

    Without a mask it is causal. GPUs' fastest attention kernels take no mask, so it is a class of its own.
    """

    reads_mask = True
