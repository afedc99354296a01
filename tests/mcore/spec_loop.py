"""A small GPTModel in a training loop: from ``layer_spec`` without calls, or by ``bind_recipe`` with all its calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from megatron_lowprec import load_recipe

LAYERS, VOCABULARY, SEQUENCE = 2, 128, 32
STEPS, MICROBATCHES = 3, 2
# no recipe state, amax histories, random draws
RECIPES = ("mxfp8", "fp8_delayed", "mxfp4_rht_sr")
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SEED = 7
# of Megatron-core's config: no draws in the layers, and none of its kernels
UNFUSED: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}


def config_of(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    shared = {"num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 2, **UNFUSED}
    return TransformerConfig(**{**shared, **options})


def gpt(spec: Any, **options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    return GPTModel(config_of(**options), spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)


def tracked(recipe: str, *overrides: str, **options: Any) -> Any:
    from megatron_lowprec.mcore.layer_spec import layer_spec

    return gpt(layer_spec(load_recipe(recipe, overrides), seed=SEED), **options)


class Loop:
    """A training loop; with ``calls`` it reports steps and microbatches to a runtime."""

    def __init__(self, model: Any, calls: Any = None) -> None:
        self.model, self.calls, self.step = model, calls, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.losses: list[float] = []

    def run(self, *, update: bool = True, indexed: bool = True, evaluate: bool = False) -> None:
        """One step; ``indexed`` as in Megatron-core's schedules, which set a microbatch's index."""
        from megatron.core.pipeline_parallel.schedules import set_current_microbatch

        self.optimizer.zero_grad()
        if self.calls is not None:
            self.calls.begin_step(self.step)
        for index in range(MICROBATCHES):
            if self.calls is not None:
                self.calls.begin_microbatch(index)
            elif indexed:
                set_current_microbatch(self.model, index)
            self.losses.append(float(self.backward(index)))
            if evaluate and self.calls is None:  # in the middle of a step, which begin_microbatch cannot have
                self.evaluate()
        if update:
            self.optimizer.step()
        if self.calls is not None:
            self.calls.end_step(updated=update)
        self.step += 1

    def backward(self, index: int) -> torch.Tensor:
        loss = self.loss(index)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def loss(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)
        positions = torch.arange(SEQUENCE).expand_as(tokens)
        loss: torch.Tensor = self.model(tokens, positions, None, labels=tokens.roll(-1, dims=1)).mean()
        return loss

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = float(self.loss(MICROBATCHES))
        self.model.train()
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, gradients and amax histories."""
        found = {name: weight.detach() for name, weight in self.model.named_parameters()}
        found |= {f"{name}.grad": weight.grad for name, weight in self.model.named_parameters()}
        for name, layer in self.model.named_modules():
            counts, histories = ("steps", "microbatches"), layer.get_extra_state() if "linear" in name else None
            found |= {f"{name}.{key}": value for key, value in (histories or {}).items() if key not in counts}
        return {name: tensor.clone() for name, tensor in found.items()}


def explicit(recipe: str, *overrides: str, **options: Any) -> Loop:
    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    model = gpt(gpt_block_spec(config_of(**options)), **options)
    chosen = load_recipe(recipe, overrides)
    calls = bind_recipe([model], chosen, num_layers=LAYERS, seed=SEED, accumulate_wgrad=False)
    return Loop(model, calls)


@cache
def expected(recipe: str, skipped: int | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final state of the loop with all calls; ``skipped`` is a step without an update."""
    loop = explicit(recipe)
    for step in range(STEPS):
        loop.run(update=step != skipped)
    return loop.losses, loop.state()


def assert_same(loop: Loop, want: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, state = want
    assert loop.losses == losses
    found = loop.state()
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name])] == []
