"""The ops of a training step besides its linear layers, by this project's kernels and by torch or Megatron-core.

A case holds random tensors of a model's sizes and the variants that do the same work on them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tools.bench.measure import Call, distance, errors_as_faults
from tools.bench.shapes import ModelShape

EPS, DROPOUT, LAYERS = 1e-5, 0.1, 24
Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class OpCase:
    """One op of the step."""

    name: str
    size: str  # of its tensors
    times: int  # how often a step of ``LAYERS`` layers runs it
    moved: int | None  # bytes that one pass must read and write; None if bandwidth does not bound it
    variants: Mapping[str, Call]  # name -> call; ratios are over the first one
    results: Callable[[], Pairs] = tuple  # pairs of ``ours`` and of the first variant
    near: float = 4e-3  # largest relative distance of a pair

    @errors_as_faults
    def fault(self) -> str | None:
        """The difference between the results, or an error; None if they agree."""
        for ours, theirs in self.results():
            # Triton's interpreter truncates fp32 to bf16 where a GPU rounds.
            if not (error := distance(ours, theirs)) < self.near * (1 if theirs.is_cuda else 3):
                return f"results differ by {error:.1e}"
        return None


@dataclass
class Inputs:
    """Random bf16 tensors of one model's step."""

    model: ModelShape
    device: torch.device
    generator: torch.Generator
    tokens: int
    vocabulary: int
    sequences: int = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = self.model.micro_batch or 1

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """bf16"""
        return (torch.randn(shape, generator=self.generator, device=self.device) * scale).to(torch.bfloat16)


def norms(given: Inputs) -> Iterator[OpCase]:
    """LayerNorm, two a layer and one at the end."""
    from megatron_lowprec.kernels.layernorm import triton as ours

    H = given.model.hidden
    x, dy, dresidual = given.normal(given.tokens, H), *(given.normal(given.tokens, H, scale=1e-3) for _ in range(2))
    weight, bias = 1 + given.normal(H, scale=0.1), given.normal(H, scale=0.1)
    got = ours.norm(x, weight, bias, EPS)
    size, times = f"{given.tokens}x{H}", 2 * LAYERS + 1
    mean, rstd = got.mean, got.rstd
    assert mean is not None

    def stock() -> torch.Tensor:
        return F.layer_norm(x, (H,), weight, bias, EPS)

    def stock_backward() -> tuple[torch.Tensor, ...]:
        stats = mean[:, None], rstd[:, None]
        if not x.is_cuda:  # a CPU keeps them in the dtype of x
            stats = stats[0].to(x.dtype), stats[1].to(x.dtype)
        return torch.ops.aten.native_layer_norm_backward(dy, x, [H], *stats, weight, bias, [True] * 3)

    backward = partial(ours.norm_backward, dy, x, weight, mean, rstd)
    fused = partial(backward, dresidual)

    def unfused() -> tuple[torch.Tensor | None, ...]:
        dx, dw, db = backward()
        return dx + dresidual, dw, db

    variants: dict[str, Call] = {"torch": stock, "ours": lambda: ours.norm(x, weight, bias, EPS)}
    yield OpCase("norm forward", size, times, 4 * x.numel(), variants, lambda: [(got.y, stock())])
    variants = {"torch": stock_backward, "ours": backward}
    pairs = _pairs(backward, stock_backward)
    yield OpCase("norm backward", size, times, 6 * x.numel(), variants, pairs)
    variants, pairs = {"unfused": unfused, "fused": fused}, _pairs(fused, unfused)
    yield OpCase("norm backward + the residual's gradient", size, 2 * LAYERS, 8 * x.numel(), variants, pairs)


def qkv_bias(given: Inputs) -> Iterator[OpCase]:
    """The bias of the linear layer before attention."""
    from megatron_lowprec.kernels.bias import triton as ours

    N = given.model.linears[0].out_features
    y, bias = given.normal(given.tokens, N), given.normal(N)
    variants: dict[str, Call] = {"torch": lambda: y + bias, "ours": lambda: ours.add_bias(y, bias)}
    size, pairs = f"{given.tokens}x{N}", lambda: [(ours.add_bias(y.clone(), bias), y + bias)]
    yield OpCase("qkv bias", size, LAYERS, 4 * y.numel(), variants, pairs)


def gelus(given: Inputs) -> Iterator[OpCase]:
    """Bias and GELU; backward with the bias gradient. Megatron-core's are compiled by torch."""
    from megatron.core.fusions.fused_bias_gelu import bias_gelu, bias_gelu_back

    from megatron_lowprec.kernels.gelu import triton as ours

    ffn = given.model.ffn
    y, dout = given.normal(given.tokens, ffn), given.normal(given.tokens, ffn, scale=1e-3)
    bias, size = given.normal(ffn, scale=0.1), f"{given.tokens}x{ffn}"
    near = 4e-3 if y.is_cuda else 2e-2  # uncompiled, each of Megatron-core's operations rounds to bf16

    def stock_backward() -> tuple[torch.Tensor, torch.Tensor]:
        dy = bias_gelu_back(dout, bias, y)
        return dy, dy.sum(0)

    variants: dict[str, Call] = {"Megatron-core": partial(bias_gelu, bias, y), "ours": partial(ours.bias_gelu, y, bias)}
    pairs: Callable[[], Pairs] = lambda: [(ours.bias_gelu(y, bias), bias_gelu(bias, y))]  # noqa: E731
    yield OpCase("bias, GELU forward", size, LAYERS, 4 * y.numel(), variants, pairs, near)
    backward = partial(ours.bias_gelu_backward, dout, y, bias)
    variants = {"Megatron-core": stock_backward, "ours": backward}
    pairs = _pairs(backward, stock_backward)
    yield OpCase("bias, GELU backward", size, LAYERS, 6 * y.numel(), variants, pairs, near)


def swiglus(given: Inputs) -> Iterator[OpCase]:
    """SwiGLU of models that have it. Megatron-core's are compiled by torch."""
    from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back

    from megatron_lowprec.kernels.swiglu import triton as ours

    if not given.model.gated:
        return
    ffn = given.model.ffn
    h, dout = given.normal(given.tokens, 2 * ffn), given.normal(given.tokens, ffn, scale=1e-3)
    size, near = f"{given.tokens}x{ffn}", 4e-3 if h.is_cuda else 2e-2  # uncompiled, as GELU's
    variants: dict[str, Call] = {"Megatron-core": partial(swiglu, h), "ours": partial(ours.swiglu, h)}
    pairs: Callable[[], Pairs] = lambda: [(ours.swiglu(h), swiglu(h))]  # noqa: E731
    yield OpCase("SwiGLU forward", size, LAYERS, 6 * dout.numel(), variants, pairs, near)
    variants = {"Megatron-core": partial(swiglu_back, dout, h), "ours": partial(ours.swiglu_backward, dout, h)}
    pairs = lambda: [(ours.swiglu_backward(dout, h), swiglu_back(dout, h))]  # noqa: E731
    yield OpCase("SwiGLU backward", size, LAYERS, 10 * dout.numel(), variants, pairs, near)


def dropouts(given: Inputs) -> Iterator[OpCase]:
    """Bias, dropout and residual; backward with the bias gradient. Two a layer."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    from megatron_lowprec.kernels.dropout import triton as ours

    H, stock = given.model.hidden, get_bias_dropout_add(True, True)
    x, residual, dout = (given.normal(given.tokens, H).requires_grad_() for _ in range(3))
    bias = given.normal(H).requires_grad_()
    size, inputs = f"{given.tokens}x{H}", (x, bias, residual)

    def graph(p: float) -> torch.Tensor:
        return stock((x, bias), residual, p)

    def stock_backward(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def key() -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, device=x.device)

    for p in (DROPOUT, 0.0):
        torch.compiler.reset()  # code compiled for one p is slower with another
        out, fixed = graph(p), key()
        forward = partial(ours.bias_dropout_add, x.detach(), bias.detach(), residual.detach(), p)
        backward = partial(ours.bias_dropout_add_backward, dout.detach(), p, fixed, torch.bfloat16)

        def pairs(p: float = p, forward: Any = forward, backward: Any = backward, out: torch.Tensor = out) -> Pairs:
            if p:  # the masks differ
                return []
            dx, dbias, _ = stock_backward(out)
            return zip((forward(None), *backward()), (out.detach(), dx, dbias), strict=True)

        variants: dict[str, Call] = {
            "Megatron-core": partial(graph, p),
            "ours": lambda forward=forward: forward(key()),  # type: ignore[misc]
        }
        name, times = f"bias, dropout {p}, add", 2 * LAYERS
        yield OpCase(f"{name} forward", size, times, 6 * x.numel(), variants, pairs, near=1e-2)
        variants = {"Megatron-core": partial(stock_backward, out), "ours": backward}
        yield OpCase(f"{name} backward", size, times, (4 if p else 2) * x.numel(), variants)


def casts(given: Inputs) -> Iterator[OpCase]:
    """An op and a cast of its output to FP8 along rows and columns by a known scale: two kernels, or one."""
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.kernels.cast_fp8.prologue import (
        CastPrologue,
        DropoutGrad,
        QkvGrad,
        Swiglu,
        SwigluGrad,
        norm_output,
    )
    from megatron_lowprec.kernels.cast_fp8.rule import Fp8Cast, Fp8Rule
    from megatron_lowprec.kernels.cast_fp8.triton import cast_fp8
    from megatron_lowprec.kernels.dropout.triton import bias_dropout_add_backward
    from megatron_lowprec.kernels.layernorm.triton import norm, statistics
    from megatron_lowprec.kernels.swiglu.triton import swiglu, swiglu_backward

    T, H, heads = given.tokens, given.model.hidden, given.model.heads
    dout = given.normal(T, H)
    near = 1e-6 if dout.is_cuda else 2e-2  # the interpreter truncates to bf16 between two kernels
    amax, observed = (torch.full((1,), value, device=dout.device) for value in (8.0, 0.0))

    def cast(source: torch.Tensor | CastPrologue, fmt: str, sums: bool = False) -> Fp8Cast:
        known = {"amax": amax, "observed": observed, "sums": sums}
        return cast_fp8(source, rules[fmt], rowwise=True, columnwise=True, **known)  # type: ignore[arg-type]

    def case(
        name: str, unfused: Callable[[], Fp8Cast], fused: Callable[[], Fp8Cast], N: int = H, entry_bytes: int = 4
    ) -> OpCase:
        def pairs() -> Pairs:
            ours, theirs = fused(), unfused()
            for pair in (ours.rowwise_data, theirs.rowwise_data), (ours.columnwise_data, theirs.columnwise_data):
                yield tuple(data.float() for data in pair)  # type: ignore[union-attr,misc]

        variants, times = {"unfused": unfused, "fused": fused}, 2 * LAYERS if N == H else LAYERS
        return OpCase(name, f"{T}x{N}", times, entry_bytes * T * N, variants, pairs, near)

    rules = {fmt: Fp8Rule(FORMATS[fmt], "tensor") for fmt in ("e4m3", "e5m2")}
    key = torch.tensor([1, -2], dtype=torch.int32, device=dout.device)
    computed = DropoutGrad(dout, key, DROPOUT)
    yield case(
        "dropout's gradient and the bias's + cast, both",
        lambda: cast(bias_dropout_add_backward(dout, DROPOUT, key, torch.bfloat16)[0], "e5m2"),
        lambda: cast(computed, "e5m2", sums=True),
    )
    weight, bias = 1 + given.normal(H, scale=0.1), given.normal(H, scale=0.1)

    def normed(b: torch.Tensor | None) -> CastPrologue:
        return norm_output(dout, weight, b, statistics(dout, EPS, b is not None))

    for name, b in (("LayerNorm", bias), ("RMSNorm", None)):
        yield case(
            f"{name} + cast, both",
            lambda b=b: cast(norm(dout, weight, b, EPS).y, "e4m3"),  # type: ignore[misc]
            lambda b=b: cast(normed(b), "e4m3"),  # type: ignore[misc]
        )
    if given.model.gated:
        F = given.model.ffn
        h, grad = given.normal(T, 2 * F), given.normal(T, F)
        yield case(
            "SwiGLU + cast, both", lambda: cast(swiglu(h), "e4m3"), lambda: cast(Swiglu(h), "e4m3"), F, entry_bytes=6
        )
        yield case(
            "SwiGLU's gradient + cast, both",
            lambda: cast(swiglu_backward(grad, h), "e5m2"),
            lambda: cast(SwigluGrad(grad, h), "e5m2"),
            2 * F,
            entry_bytes=5,
        )
    width, dq, dk, dv = H // heads, *(given.normal(T, H) for _ in range(3))

    def join() -> torch.Tensor:
        return torch.cat([part.view(T, heads, width) for part in (dq, dk, dv)], -1).view(T, 3 * H)

    for tile, fmt in (("tensor", "e5m2"), ("1x128", "e4m3")):
        rules[tile] = Fp8Rule(FORMATS[fmt], tile)
        yield case(
            f"gradients of q, k, v + cast {tile}, both",
            lambda tile=tile: cast(join(), tile, sums=True),  # type: ignore[misc]
            lambda tile=tile: cast(QkvGrad(dq, dk, dv, (width, width)), tile, sums=True),  # type: ignore[misc]
            3 * H,
        )


def losses(given: Inputs) -> Iterator[OpCase]:
    """Cross entropy of all logits of the step, in one part. Megatron-core's are compiled by torch."""
    from megatron.core.fusions import fused_cross_entropy as stock

    from megatron_lowprec.kernels.cross_entropy import triton as ours

    T, V = given.tokens, given.vocabulary
    logits = given.normal(T, V, scale=3.0)
    targets = torch.randint(V, (T,), generator=given.generator, device=given.device)
    dloss = torch.full((T,), 1.0 / T, device=given.device)

    def stock_forward() -> tuple[torch.Tensor, ...]:
        whole, maximum = stock.calculate_logits_max(logits)
        mask, masked, sums, exps = stock.calculate_predicted_logits(whole, targets, maximum, 0, V)
        softmax, loss = stock.calculate_cross_entropy_loss(exps, sums)
        return loss, softmax, mask, masked

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        sums = ours.logit_sums(logits, targets, 0)
        log_total = sums.total.log() + sums.maximum
        return log_total - sums.target, log_total

    saved, (_, log_total) = stock_forward(), forward()
    written = logits.clone()

    def stock_backward() -> torch.Tensor:
        return stock.calculate_gradients(saved[1], dloss, *saved[2:])

    def backward() -> torch.Tensor:
        return ours.logits_gradient_(written, targets, 0, log_total, dloss)

    def pairs() -> Pairs:
        yield forward()[0], saved[0]
        yield backward(), stock_backward()

    size = f"{T}x{V}"
    variants: dict[str, Call] = {"Megatron-core": stock_forward, "ours": forward}
    yield OpCase("cross entropy forward", size, 1, 2 * logits.numel(), variants, pairs)
    variants = {"Megatron-core": stock_backward, "ours": backward}
    yield OpCase("cross entropy backward", size, 1, 4 * logits.numel(), variants)


def attentions(given: Inputs) -> Iterator[OpCase]:
    """torch's causal attention: its default backend, which is the first variant, and each backend by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = given.model
    heads, width, tokens = model.heads, model.hidden // model.heads, given.tokens // given.sequences
    qkv = given.normal(tokens, given.sequences, heads, 3, width).requires_grad_()
    q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.unbind(3))
    dout = given.normal(tokens, given.sequences, heads, width).permute(1, 2, 0, 3)
    backends: dict[str, list[SDPBackend]] = {"torch's choice": []}
    if qkv.is_cuda:
        backends |= {"cuDNN": [SDPBackend.CUDNN_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION]}

    def run(p: float, backend: list[SDPBackend]) -> torch.Tensor:
        with sdpa_kernel(backend) if backend else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    def run_backward(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def pairs() -> Pairs:
        for backend in backends.values():
            if backend:
                yield run(0.0, backend), run(0.0, [])

    size = f"{given.sequences}x{heads}x{tokens}x{width}"
    for p in (DROPOUT, 0.0):
        forward: dict[str, Call] = {name: partial(run, p, backend) for name, backend in backends.items()}
        backward: dict[str, Call] = {name: partial(run_backward, run(p, backend)) for name, backend in backends.items()}
        yield OpCase(f"attention, dropout {p}, forward", size, LAYERS, None, forward, pairs, near=1e-2)
        yield OpCase(f"attention, dropout {p}, backward", size, LAYERS, None, backward)


def transposes(given: Inputs) -> Iterator[OpCase]:
    """FP8 codes of each weight for dgrad, where the layer has no other copy of the weight."""
    from megatron_lowprec.kernels.transpose_codes.triton import transpose_codes as ours

    def stock(codes: torch.Tensor) -> torch.Tensor:
        return codes.t().contiguous()

    def pairs(codes: torch.Tensor) -> Pairs:
        return [(ours(codes), stock(codes))]

    for linear in given.model.linears:
        codes = given.normal(linear.out_features, linear.in_features).to(torch.float8_e4m3fn)
        variants: dict[str, Call] = {"torch": partial(stock, codes), "ours": partial(ours, codes)}
        size, moved = f"{linear.out_features}x{linear.in_features}", 2 * codes.numel()
        yield OpCase(f"transpose {linear.name} codes", size, LAYERS, moved, variants, partial(pairs, codes))


OPS: dict[str, Callable[[Inputs], Iterator[OpCase]]] = {
    "norm": norms,
    "bias": qkv_bias,
    "gelu": gelus,
    "swiglu": swiglus,
    "dropout": dropouts,
    "cast": casts,
    "transpose": transposes,
    "loss": losses,
    "attention": attentions,
}


def _pairs(ours: Callable[[], Sequence[Any]], theirs: Callable[[], Sequence[Any]]) -> Callable[[], Pairs]:
    """Results of both, without those that are None."""
    return lambda: [pair for pair in zip(ours(), theirs(), strict=True) if pair[0] is not None]
