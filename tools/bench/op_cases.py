"""The ops of a training step besides its linear layers, by this project's kernels and by torch or Megatron-core.

A case holds random tensors of a model's sizes and the variants that do the same work on them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tools.bench.measure import Call, errors, one_line
from tools.bench.shapes import ModelShape

EPS, DROPOUT, LAYERS = 1e-5, 0.1, 24


@dataclass(frozen=True)
class OpCase:
    """One op of the step.

    Attributes:
        name, size: the op and the size of its tensors.
        moved: bytes that one pass must read and write; None where that is not what takes the time.
        times: how often a step of ``LAYERS`` layers does it.
        variants: name -> call; the first is what the others are compared with.
        results: what ``ours`` and the first variant compute, in pairs, and how far apart they may be.
        near: largest relative distance of a pair.
    """

    name: str
    size: str
    moved: int | None
    times: int
    variants: dict[str, Call]
    results: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]] = lambda: iter(())
    near: float = 4e-3

    def fault(self) -> str | None:
        """Why its results are wrong; None where the results agree."""
        try:
            for ours, theirs in self.results():
                theirs = theirs.detach().double()
                error = float((ours.detach().double() - theirs).norm() / theirs.norm())
                # Triton's interpreter cuts fp32 to bf16 where a GPU rounds
                if not error < self.near * (1 if theirs.is_cuda else 3):
                    return f"results differ by {error:.1e}"
        except errors() as error:
            return one_line(error)
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
    x, dy = given.normal(given.tokens, H), given.normal(given.tokens, H, scale=1e-3)
    weight, bias = 1 + given.normal(H, scale=0.1), given.normal(H, scale=0.1)
    got = ours.norm(x, weight, bias, EPS)
    size, times = f"{given.tokens}x{H}", 2 * LAYERS + 1

    def torchs() -> torch.Tensor:
        return F.layer_norm(x, (H,), weight, bias, EPS)

    mean, rstd = got.mean, got.rstd
    assert mean is not None

    def torchs_backward() -> tuple[torch.Tensor, ...]:
        stats = mean[:, None], rstd[:, None]
        if not x.is_cuda:  # a CPU keeps them in the dtype of x
            stats = stats[0].to(x.dtype), stats[1].to(x.dtype)
        return torch.ops.aten.native_layer_norm_backward(dy, x, [H], *stats, weight, bias, [True] * 3)

    backward = partial(ours.norm_backward, dy, x, weight, mean, rstd)
    staged = {f"ours, {n} stages": partial(backward, sizes=ours.tiling(H)._replace(stages=n)) for n in (2, 3)}
    yield OpCase(
        "norm forward",
        size,
        4 * x.numel(),
        times,
        {"torch": torchs, "ours": lambda: ours.norm(x, weight, bias, EPS)},
        lambda: iter([(got.y, torchs())]),
    )
    yield OpCase(
        "norm backward",
        size,
        6 * x.numel(),
        times,
        {"torch": torchs_backward, "ours": backward, **staged},
        lambda: zip(_tensors(backward()), torchs_backward(), strict=True),
    )
    dresidual = given.normal(given.tokens, H, scale=1e-3)

    def unfused() -> tuple[torch.Tensor | None, ...]:
        dx, dw, db = backward()
        return dx + dresidual, dw, db

    fused = partial(backward, dresidual)
    yield OpCase(
        "norm backward + the residual's gradient",
        size,
        8 * x.numel(),
        2 * LAYERS,
        {"unfused": unfused, "fused": fused},
        lambda: zip(_tensors(fused()), _tensors(unfused()), strict=True),
    )


def qkv_bias(given: Inputs) -> Iterator[OpCase]:
    """The bias of the linear layer before attention."""
    from megatron_lowprec.kernels.bias import triton as ours

    N = given.model.linears[0].out_features
    y, bias = given.normal(given.tokens, N), given.normal(N)
    yield OpCase(
        "qkv bias",
        f"{given.tokens}x{N}",
        4 * y.numel(),
        LAYERS,
        {"torch": lambda: y + bias, "ours": lambda: ours.add_bias_(y, bias)},
        lambda: iter([(ours.add_bias_(y.clone(), bias), y + bias)]),
    )


def gelus(given: Inputs) -> Iterator[OpCase]:
    """Bias and GELU; backward with the bias gradient. Megatron-core's are compiled by torch."""
    from megatron.core.fusions.fused_bias_gelu import bias_gelu, bias_gelu_back

    from megatron_lowprec.kernels.gelu import triton as ours

    ffn = given.model.ffn
    y, dout = given.normal(given.tokens, ffn), given.normal(given.tokens, ffn, scale=1e-3)
    bias, size = given.normal(ffn, scale=0.1), f"{given.tokens}x{ffn}"

    def stock_backward() -> tuple[torch.Tensor, torch.Tensor]:
        dy = bias_gelu_back(dout, bias, y)
        return dy, dy.sum(0)

    backward = partial(ours.bias_gelu_backward, dout, y, bias)
    near = 4e-3 if y.is_cuda else 2e-2  # uncompiled, each of its operations rounds to bf16
    yield OpCase(
        "bias, GELU forward",
        size,
        4 * y.numel(),
        LAYERS,
        {"Megatron-core": lambda: bias_gelu(bias, y), "ours": lambda: ours.bias_gelu(y, bias)},
        lambda: iter([(ours.bias_gelu(y, bias), bias_gelu(bias, y))]),
        near,
    )
    yield OpCase(
        "bias, GELU backward",
        size,
        6 * y.numel(),
        LAYERS,
        {"Megatron-core": stock_backward, "ours": backward, "ours, 2 stages": partial(backward, 2)},
        lambda: zip(backward(), stock_backward(), strict=True),
        near,
    )


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
        torch.compiler.reset()  # what is compiled for one p and then used with another is slower
        kept, fixed = graph(p), key()
        forward = partial(ours.bias_dropout_add, x.detach(), bias.detach(), residual.detach(), p)
        backward = partial(ours.bias_dropout_add_backward, dout.detach(), p, fixed, torch.bfloat16)

        def results(
            p: float = p, forward: Any = forward, backward: Any = backward, kept: torch.Tensor = kept
        ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            if p == 0.0:  # else the masks differ, and there is nothing to compare
                dx, dbias, _ = stock_backward(kept)
                yield from zip((forward(None), *backward()), (kept.detach(), dx, dbias), strict=True)

        yield OpCase(
            f"bias, dropout {p}, add forward",
            size,
            6 * x.numel(),
            2 * LAYERS,
            {"Megatron-core": partial(graph, p), "ours": lambda forward=forward: forward(key())},  # type: ignore[misc]
            results,
            near=1e-2,
        )
        yield OpCase(
            f"bias, dropout {p}, add backward",
            size,
            (4 if p else 2) * x.numel(),
            2 * LAYERS,
            {
                "Megatron-core": partial(stock_backward, kept),
                "ours": backward,
                "ours, 2 stages": partial(backward, 2),
            },
        )


def casts(given: Inputs) -> Iterator[OpCase]:
    """What makes a tensor and casts it to FP8 along rows and columns by a known scale: two kernels, or one."""
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
    from megatron_lowprec.kernels.cast_fp8.source import Fp8Cast, Source
    from megatron_lowprec.kernels.cast_fp8.triton import cast_fp8
    from megatron_lowprec.kernels.dropout.triton import bias_dropout_add_backward
    from megatron_lowprec.kernels.layernorm.triton import norm, statistics

    T, H, heads = given.tokens, given.model.hidden, given.model.heads
    dout = given.normal(T, H)
    near = 1e-6 if dout.is_cuda else 2e-2  # the interpreter cuts to bf16 what is in memory between two kernels
    amax, observed = (torch.full((1,), value, device=dout.device) for value in (8.0, 0.0))

    def cast(source: torch.Tensor | Source, fmt: str, sums: bool = False) -> Fp8Cast:
        known = {"amax": amax, "observed": observed, "sums": sums}
        return cast_fp8(source, rules[fmt], rows=True, columns=True, **known)  # type: ignore[arg-type]

    def case(name: str, unfused: Callable[[], Fp8Cast], fused: Callable[[], Fp8Cast], N: int = H) -> OpCase:
        def results() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for ours, theirs in zip(fused()[:2], unfused()[:2], strict=True):
                yield ours.elements.float(), theirs.elements.float()  # type: ignore[union-attr]

        times = 2 * LAYERS if N == H else LAYERS
        return OpCase(name, f"{T}x{N}", 4 * T * N, times, {"unfused": unfused, "fused": fused}, results, near)

    rules = {fmt: Fp8Rule(FORMATS[fmt], "tensor") for fmt in ("e4m3", "e5m2")}
    key = torch.tensor([1, -2], dtype=torch.int32, device=dout.device)
    computed = Source.dropout_grad(dout, key, DROPOUT)
    yield case(
        "dropout's gradient and the bias's + cast, both",
        lambda: cast(bias_dropout_add_backward(dout, DROPOUT, key, torch.bfloat16)[0], "e5m2"),
        lambda: cast(computed, "e5m2", sums=True),
    )
    weight, bias = 1 + given.normal(H, scale=0.1), given.normal(H, scale=0.1)

    def normed(b: torch.Tensor | None) -> Source:
        return Source.norm(dout, weight, b, statistics(dout, EPS, b is not None))

    for name, b in (("LayerNorm", bias), ("RMSNorm", None)):
        yield case(
            f"{name} + cast, both",
            lambda b=b: cast(norm(dout, weight, b, EPS).y, "e4m3"),  # type: ignore[misc]
            lambda b=b: cast(normed(b), "e4m3"),  # type: ignore[misc]
        )
    width, dq, dk, dv = H // heads, *(given.normal(T, H) for _ in range(3))

    def join() -> torch.Tensor:
        return torch.cat([part.view(T, heads, width) for part in (dq, dk, dv)], -1).view(T, 3 * H)

    for tile, fmt in (("tensor", "e5m2"), ("1x128", "e4m3")):
        rules[tile] = Fp8Rule(FORMATS[fmt], tile)
        yield case(
            f"gradients of q, k, v + cast {tile}, both",
            lambda tile=tile: cast(join(), tile, sums=True),  # type: ignore[misc]
            lambda tile=tile: cast(Source.qkv_grad(dq, dk, dv, (width, width)), tile, sums=True),  # type: ignore[misc]
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

    kept, (_, log_total) = stock_forward(), forward()
    written = logits.clone()

    def stock_backward() -> torch.Tensor:
        return stock.calculate_gradients(kept[1], dloss, *kept[2:])

    def results() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield forward()[0], kept[0]
        yield ours.logits_gradient_(written, targets, 0, log_total, dloss), stock_backward()

    size = f"{T}x{V}"
    yield OpCase(
        "cross entropy forward",
        size,
        2 * logits.numel(),
        1,
        {"Megatron-core": stock_forward, "ours": forward},
        results,
    )
    yield OpCase(
        "cross entropy backward",
        size,
        4 * logits.numel(),
        1,
        {
            "Megatron-core": stock_backward,
            "ours": lambda: ours.logits_gradient_(written, targets, 0, log_total, dloss),
        },
    )


def attentions(given: Inputs) -> Iterator[OpCase]:
    """torch's causal attention by each of its backends; which one it chooses by itself is the first."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = given.model
    heads, width, tokens = model.heads, model.hidden // model.heads, given.tokens // given.sequences
    qkv = given.normal(tokens, given.sequences, heads, 3, width).requires_grad_()
    q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.unbind(3))
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION} if qkv.is_cuda else {}

    def run(p: float, backend: SDPBackend | None = None) -> torch.Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    dout = given.normal(tokens, given.sequences, heads, width).permute(1, 2, 0, 3)

    def back(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def results() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for backend in backends.values():
            yield run(0.0, backend), run(0.0)

    size = f"{given.sequences}x{heads}x{tokens}x{width}"
    chosen: dict[str, SDPBackend | None] = {"torch's choice": None, **backends}
    for p in (DROPOUT, 0.0):
        forward: dict[str, Call] = {name: partial(run, p, backend) for name, backend in chosen.items()}
        backward: dict[str, Call] = {name: partial(back, run(p, backend)) for name, backend in chosen.items()}
        yield OpCase(f"attention, dropout {p}, forward", size, None, LAYERS, forward, results, near=1e-2)
        yield OpCase(f"attention, dropout {p}, backward", size, None, LAYERS, backward)


OPS: dict[str, Callable[[Inputs], Iterator[OpCase]]] = {
    "norm": norms,
    "bias": qkv_bias,
    "gelu": gelus,
    "dropout": dropouts,
    "cast": casts,
    "loss": losses,
    "attention": attentions,
}


def _tensors(values: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [value for value in values if value is not None]
