"""Embedding and output layer add their gradients to main_grad, or the header says why one does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import nn

from megatron_lowprec import specs
from megatron_lowprec.mcore.optim.vocabulary_grad import (
    AccumulatingEmbedding,
    AccumulatingOutputLayer,
    accumulate_vocabulary_gradients,
)
from tests.mcore.one_process import one_process
from tests.mcore.spec_loop import SEQUENCE, VOCABULARY, gpt


@pytest.fixture
def model() -> Iterator[Any]:
    with one_process():
        yield gpt(specs.mxfp8)


class OtherOutputLayer(ColumnParallelLinear):
    """Such as one that computes the loss as well."""


class OtherEmbedding(VocabParallelEmbedding):
    """Such as one that scales its output."""


def test_layers_of_other_classes_are_named(model: Any) -> None:
    model.output_layer.__class__, model.embedding.word_embeddings.__class__ = OtherOutputLayer, OtherEmbedding
    notes = accumulate_vocabulary_gradients([model])
    rounded = "its weight gradient passes through the compute dtype on its way to main_grad"
    assert notes == [
        f"embedding: {rounded}, since its class is OtherEmbedding",
        f"output layer: {rounded}, since its class is OtherOutputLayer",
    ]
    assert type(model.output_layer) is OtherOutputLayer
    assert type(model.embedding.word_embeddings) is OtherEmbedding


def test_a_gradient_that_megatron_core_defers_is_left_to_it(model: Any) -> None:
    model.config.defer_embedding_wgrad_compute = True
    (note,) = accumulate_vocabulary_gradients([nn.Sequential(model)])
    assert note.startswith("output layer: ")
    assert "defer_embedding_wgrad_compute" in note
    assert type(model.output_layer) is ColumnParallelLinear
    assert type(model.embedding.word_embeddings) is AccumulatingEmbedding


def test_tied_weights_are_left_to_autograd(model: Any) -> None:
    model.share_embeddings_and_output_weights = True
    assert accumulate_vocabulary_gradients([model]) == []
    assert type(model.output_layer) is ColumnParallelLinear


def test_each_pipeline_stage_replaces_what_it_has(model: Any) -> None:
    output = model.output_layer
    del model.embedding
    assert accumulate_vocabulary_gradients([model]) == []
    assert type(output) is AccumulatingOutputLayer


def test_a_weight_that_two_layers_use_has_zeros_for_megatron_core_to_add(model: Any) -> None:
    """As under multi-token prediction, where the embedding is read once more and the output layer runs again."""
    words, output = model.embedding.word_embeddings, model.output_layer
    weights = words.weight, output.weight
    ids = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(3))
    hidden = torch.randn(SEQUENCE, 2, 64, generator=torch.Generator().manual_seed(4))

    def backward() -> None:
        for _ in range(2):
            (words(ids).square().sum() + output(hidden)[0].square().sum()).backward()

    backward()
    want = [weight.grad for weight in weights]
    assert accumulate_vocabulary_gradients([model]) == []
    for weight in weights:
        weight.grad, weight.zero_out_wgrad, weight.grad_added_to_main_grad = None, True, False
        weight.main_grad = torch.zeros_like(weight)
    backward()
    for weight, grad in zip(weights, want, strict=True):
        assert weight.grad_added_to_main_grad
        assert weight.grad._nnz() == 0  # of which DDP's hook adds nothing, and which takes no memory
        torch.testing.assert_close(weight.main_grad, grad, rtol=1e-5, atol=1e-5)
