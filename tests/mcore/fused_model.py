"""A GPT with fused kernels and without them: how it is built, and what one or two steps of it compute."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter takes a program for each token
HIDDEN, SEQUENCE, BATCH, VOCABULARY = 64, 16 if DEVICE == "cuda" else 8, 2, 192
# normalization, activation, sequence parallel
SHAPES = {
    "gpt": ("LayerNorm", "gelu", False),
    "gpt-sp": ("LayerNorm", "gelu", True),
    "llama": ("RMSNorm", "silu", True),
    "llama-tp": ("RMSNorm", "silu", False),
}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTED_MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
KERNELS = (
    ("bias", "add_bias"),
    ("layernorm", "norm"),
    ("gelu", "bias_gelu"),
    ("swiglu", "swiglu"),
    ("rope", "rope"),
    ("cross_entropy", "logit_sums"),
    ("dropout", "bias_dropout_add"),
)


def build(
    shape: str,
    fused: bool,
    recipe: str = "bf16",
    dtype: torch.dtype = torch.float32,
    recompute_gelu: bool = False,
    binding: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """A GPT bound to a recipe: ``binding`` of ``bind_recipe``, ``more`` of its config."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_lowprec import get_recipe
    from megatron_lowprec.mcore.layers.gpt_model import LowPrecGPTModel
    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    normalization, activation, sequence_parallel = SHAPES[shape]
    gated = activation == "silu"
    config = TransformerConfig(
        num_layers=2,
        num_attention_heads=2,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=sequence_parallel and dist.get_world_size() > 1,
        normalization=normalization,
        gated_linear_unit=gated,
        activation_func=getattr(torch.nn.functional, activation),
        add_bias_linear=not gated,
        bias_activation_fusion=True,
        # Megatron-core's own fusion rounds the logits' gradient to bf16 whatever the model is
        cross_entropy_loss_fusion=fused,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_dropout_fusion=True,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        **{"hidden_size": HIDDEN, "ffn_hidden_size": 2 * HIDDEN, "hidden_dropout": 0.0, **more},
    )
    model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    model = LowPrecGPTModel(
        config,
        gpt_block_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope" if gated else "learned_absolute",
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # biases begin as zeros, weights of norms as ones
            shared = "norm" in name or "proj.bias" in name or "fc2.bias" in name
            noise = torch.Generator().manual_seed(7) if shared else generator
            weight.data += 0.3 * torch.randn(weight.shape, generator=noise).to(weight)
    model.to(DEVICE, dtype)
    model.runtime = bind_recipe(
        [model], get_recipe(recipe), num_layers=2, seed=1, recompute_gelu=recompute_gelu, **binding or {}
    )
    return model


@contextlib.contextmanager
def switched(on: bool) -> Iterator[dict[str, int]]:
    """Fused kernels for every tensor, or for none; how often each of KERNELS was launched."""
    launched = dict.fromkeys((name for _, name in KERNELS), 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("megatron_lowprec.kernels.dispatch.fuses", lambda _: on))
        for folder, name in KERNELS:
            module = importlib.import_module(f"megatron_lowprec.kernels.{folder}.triton")
            plain = getattr(module, name)

            # no mock, which would hold on to the arguments
            def launch(*args: Any, kernel: Any = plain, name: str = name, **kwargs: Any) -> Any:
                launched[name] += 1
                return kernel(*args, **kwargs)

            stack.enter_context(patch.object(module, name, launch))
        yield launched


def run(
    shape: str, fused: bool, prepare: Callable[[torch.nn.Module], None] | None = None, **more: Any
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Losses and all gradients, of a model that ``prepare`` has had in its hands."""
    model = build(shape, fused, **more)
    if prepare is not None:
        prepare(model)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(DEVICE)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
    with switched(fused) as launched:
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        (losses * torch.rand(losses.shape, generator=generator).to(DEVICE)).sum().backward()
    found = {"losses": losses.detach()}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, launched


@contextlib.contextmanager
def native() -> Iterator[None]:
    """FP8 products; on a CPU as fp32 products of the same operands, for layers that believe to be on a Hopper GPU."""
    if DEVICE == "cuda":
        yield
        return
    from megatron_lowprec.kernels.layernorm import triton as layernorm

    def product(a: Any, b: Any, *, a_scale: Any, b_scale: Any, out_dtype: torch.dtype, bias: Any, **_: Any) -> Any:
        y = (a.float() * a_scale) @ (b.float() * b_scale).t()
        return (y if bias is None else y + bias.float()).to(out_dtype)

    def norm(x: torch.Tensor, weight: Any, bias: Any, eps: float, amax: Any) -> Any:
        """Rounded as a GPU does; the interpreter would cut."""
        made = plain_norm(*(None if t is None else t.float() for t in (x, weight, bias)), eps)
        made = made._replace(y=made.y.to(x.dtype))
        if amax is not None:
            torch.maximum(amax, made.y.abs().amax().float(), out=amax)
        return made

    plain_norm = layernorm.norm
    with (
        switched(True),
        patch.object(layernorm, "norm", norm),
        patch("megatron_lowprec.linear.backends.resolved.arch_of", lambda _: "sm90"),
        patch("megatron_lowprec.linear.backends.hopper_fp8.dense.scaled_gemm", product),
    ):
        yield


def equal_but_for(sums: tuple[str, ...], got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        if name.endswith(sums):
            torch.testing.assert_close(got[name], want[name], rtol=2**-6, atol=1e-5)
        else:
            assert torch.equal(got[name], want[name]), name


def two_steps(
    recipe: str, recompute_gelu: bool = False, shape: str = "gpt", frozen: tuple[str, ...] = (), **more: Any
) -> dict[str, torch.Tensor]:
    """Losses, gradients and amaxes of the second of two steps: the first one has empty histories."""
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512} if DEVICE == "cuda" else {}
    model = build(shape, True, recipe, torch.bfloat16, recompute_gelu, **sizes, **more)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
    for step in range(2):
        model.zero_grad()
        model.runtime.begin_step(step)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        losses.sum().backward()
        model.runtime.end_step()
    amax: dict[str, torch.Tensor] = {}
    for operand in ("input", "weight", "grad_output"):
        of_layers = [gemms.histories[operand] for gemms in model.runtime.layers if operand in gemms.histories]
        if of_layers:
            amax[f"amax {operand}"] = torch.stack([history.state(slot) for history, slot in of_layers])
    return amax | {"losses": losses} | {name: p.grad for name, p in model.named_parameters()}
