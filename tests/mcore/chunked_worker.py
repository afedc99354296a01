"""The loss by chunks of tokens beside Megatron-core's output layer and loss; ``test_chunked_loss.py`` starts it.

Hidden states and weights are small multiples of 1/8: logits are exact in any order of summation, so that a token's
loss must have the same bits in any chunk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lowprec.kernels import dispatch
from megatron_lowprec.kernels.cross_entropy.reference import logit_sums, logits_gradient_
from megatron_lowprec.mcore import chunked_loss
from tests.checks import run_checks

SEQUENCE, BATCH, HIDDEN, VOCABULARY = 12, 4, 32, 192
SIZES = (20, 1, 47)
CHECKS: dict[str, Callable[[], None]] = {}


def check(name: str, *arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        CHECKS[name] = partial(function, *arguments)
        return function

    return register


def build(tied: bool = False, dtype: torch.dtype = torch.float32, shards: bool = False) -> Any:
    """A GPT of one layer, whose output layer has exact weights; ``shards`` for sequence parallelism."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_lowprec import get_recipe
    from megatron_lowprec.mcore.layers.gpt_model import LowPrecGPTModel
    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=shards,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    spec = gpt_block_spec(config)
    model = LowPrecGPTModel(config, spec, VOCABULARY, SEQUENCE, share_embeddings_and_output_weights=tied).to(dtype)
    bind_recipe([model], get_recipe("bf16"), num_layers=1, seed=1)
    weight = weight_of(model)
    weight.data = exact(*weight.shape, seed=dist.get_rank()).to(dtype)
    return model


def weight_of(model: Any) -> Any:
    return model.embedding.word_embeddings.weight if model.output_layer.weight is None else model.output_layer.weight


def exact(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)) / 8


def labels() -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(4))


def gradient() -> torch.Tensor:
    """Of each token's loss; a third of them is masked."""
    drawn = torch.rand(BATCH, SEQUENCE, generator=torch.Generator().manual_seed(6))
    return torch.where(drawn < 1 / 3, 0.0, drawn)


def passes(model: Any, size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the gradient of this rank's hidden states, from a forward and a backward pass; ``None``: stock."""
    layer = model.output_layer
    hidden = exact(SEQUENCE, BATCH, HIDDEN, seed=3).to(weight_of(model).dtype)
    if layer.sequence_parallel:
        hidden = hidden.chunk(2)[dist.get_rank()]
    hidden.requires_grad_()
    if size is None:
        losses = model.compute_language_model_loss(labels(), layer(hidden, weight=weight_of(model))[0])
    else:
        losses = chunked_loss.chunked_losses(model, hidden, labels(), size)
    losses.backward(gradient())
    assert hidden.grad is not None
    return losses.detach(), hidden.grad


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the order of fp32 sums, and for the rounding of either to bf16."""
    relative = 1e-5 if want.dtype == torch.float32 else 2.0**-7
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=relative, atol=float(want.abs().max()) * relative / 10)


@check("fp32")
@check("bf16", False, torch.bfloat16)
@check("tied", True)
@check("tied-bf16", True, torch.bfloat16)
@check("sequence-parallel", False, torch.float32, True)
@check("sequence-parallel-tied-bf16", True, torch.bfloat16, True)
@check("fused", False, torch.bfloat16, False, True)
def beside_stock(
    tied: bool = False, dtype: torch.dtype = torch.float32, shards: bool = False, fused: bool = False
) -> None:
    """Bits of losses; gradients to the order of sums, in ``weight.grad`` or added to an fp32 ``main_grad``."""
    model = build(tied, dtype, shards)
    weight = weight_of(model)
    model.config.cross_entropy_loss_fusion = fused
    with patch.multiple(dispatch, fuses=lambda _: fused, logit_sums=logit_sums, logits_gradient_=logits_gradient_):
        losses, dx = passes(model, None)
        dw, weight.grad = weight.grad, None
        assert dw.abs().max() > 0
        for size in SIZES:
            found, found_dx = passes(model, size)
            assert torch.equal(found, losses), size
            assert_close(found_dx, dx)
            assert_close(weight.grad, dw)
            weight.grad = None
        weight.main_grad, weight.grad_added_to_main_grad = torch.full(weight.shape, 0.5), False
        passes(model, SIZES[0])
        main_grad = weight.main_grad.clone()
        assert_close((main_grad - 0.5).to(dtype), dw)
        assert weight.grad_added_to_main_grad
        assert (weight.grad.dtype, weight.grad._nnz()) == (dtype, 0)  # takes no memory
        assert torch.equal(weight.main_grad.add_(weight.grad), main_grad)  # as DDP's hook of a tied weight
    if not shards:
        assert not dx.transpose(0, 1)[gradient() == 0].any()


@check("frozen")
def a_frozen_weight_or_input_has_no_gradient() -> None:
    model = build()
    want = passes(model, 20)
    weight = weight_of(model)
    dw, weight.grad = weight.grad, None
    weight.requires_grad_(False)
    for got, wanted in zip(passes(model, 20), want, strict=True):
        assert torch.equal(got, wanted)
    assert weight.grad is None
    weight.requires_grad_(True)
    chunked_loss.chunked_losses(model, exact(SEQUENCE, BATCH, HIDDEN, seed=3), labels(), 20).backward(gradient())
    assert torch.equal(weight.grad, dw)


class LiveLogits(TorchDispatchMode):
    """Entries of tensors with this rank's vocabulary as last dimension, the most that are alive at once."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.most, self._live, self._weight = 0, dict[int, int](), weight.data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() and out.shape[-1] == VOCABULARY // dist.get_world_size():
            storage = out.untyped_storage()
            if id(storage) not in self._live and storage.data_ptr() != self._weight:
                self._live[id(storage)] = storage.nbytes() // out.element_size()
                weakref.finalize(storage, self._live.pop, id(storage))
            self.most = max(self.most, sum(self._live.values()))
        return out


def most_logits(size: int | None) -> int:
    model = build()
    with LiveLogits(weight_of(model)) as found:
        passes(model, size)
    return found.most


@check("one-chunk-in-memory")
def the_logits_of_one_chunk_exist_at_once() -> None:
    """As many as a microbatch of one chunk has; fp32 logits become softmax and gradient in place."""
    width = VOCABULARY // dist.get_world_size()
    assert most_logits(None) >= SEQUENCE * BATCH * width
    assert most_logits(20) == 20 * width
    assert most_logits(1) == width


@check("collectives", False)
@check("collectives-of-sequence-parallelism", True)
def collectives_of_a_chunk(shards: bool) -> None:
    """Those of the loss for each chunk, in both passes; the input is gathered and its gradient reduced once a pass."""
    model, chunks = build(shards=shards), 3
    with (
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces,
        patch.object(chunked_loss, "gather_sequence", wraps=chunked_loss.gather_sequence) as gathers,
        patch.object(chunked_loss, "scatter_sequence", wraps=chunked_loss.scatter_sequence) as scatters,
    ):
        passes(model, 20)
    of_the_input = dist.get_world_size() > 1 and not shards
    assert reduces.call_count == 2 * 3 * chunks + of_the_input
    assert (gathers.call_count, scatters.call_count) == (2 * shards, 1 * shards)


@check("model", False)
@check("model-tied", True)
def a_model_with_chunks(tied: bool) -> None:
    """Loss in training and evaluation, and logits where there are no labels; the layer's pre-hooks run once a call."""
    model, called = build(tied), list[Any]()
    ids, positions = labels().roll(1, 1), torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    model.output_layer.register_forward_pre_hook(lambda *_: called.append(_))
    found = []
    for size in (None, 20):
        model.output_layer_chunk_size = size
        losses = model(ids, positions, None, labels=labels())
        losses.backward(gradient())
        found.append((losses.detach(), weight_of(model).grad, model.decoder.layers[0].mlp.linear_fc1.weight.grad))
        model.zero_grad()
    for want, got in zip(*found, strict=True):
        assert_close(got, want)
    assert len(called) == 2
    model.eval()
    with torch.no_grad():
        assert_close(model(ids, positions, None, labels=labels()), found[0][0])
        assert model(ids, positions, None).shape == (BATCH, SEQUENCE, VOCABULARY // dist.get_world_size())


def main() -> None:
    from megatron_lowprec.mcore.cpu_compat import install

    install()
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
