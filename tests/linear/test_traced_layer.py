"""Prototype of a layer with draws and amaxes that torch.compile traces as one graph: docs/design/tracing.md."""

from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import ScalingType, scaled_mm

from megatron_lowprec import RandomStream, get_recipe, quantize
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale, round_to_format, scale_blocks
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.registry import MXFP4_SR
from megatron_lowprec.three_gemms import Draws, three_gemms

SIZE, DRAWS = 64, Draws(seed=3)
KEYS = {
    (gemm, tensor): DRAWS.stream("rounding", gemm, tensor).key
    for gemm, tensor in (("dgrad", "grad_output"), ("dgrad", "weight"), ("wgrad", "grad_output"), ("wgrad", "input"))
}


# casts: opaque, tensors and constants in, tensors out
@torch.library.custom_op("traced_layer::cast_fp8", mutates_args=())
def cast_fp8(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = fp32_encode_scale(amax, FORMATS["e4m3"], "amax_pow2")
    codes = round_to_format(x * scale, FORMATS["e4m3"], "nearest_even")
    return codes.to(torch.float8_e4m3fn), 1.0 / scale.view(1)


@cast_fp8.register_fake
def _(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(1)


@torch.library.custom_op("traced_layer::cast_mx", mutates_args=())
def cast_mx(x: torch.Tensor, rng_step: torch.Tensor, key: list[int]) -> torch.Tensor:
    step, microbatch = rng_step.tolist()
    q = quantize(x, MXFP4_SR, random=RandomStream((key[0], key[1]), RngStep(step, microbatch)))
    return scale_blocks(q.elements, q.decode_scale, (1, 32))


@cast_mx.register_fake
def _(x: torch.Tensor, rng_step: torch.Tensor, key: list[int]) -> torch.Tensor:
    return x.new_empty(x.shape)


# state: declared, and apart from what has a gradient
@torch.library.custom_op("traced_layer::record", mutates_args={"newest"})
def record(newest: torch.Tensor, slot: int, x: torch.Tensor) -> None:
    newest[slot] = torch.maximum(newest[slot], x.abs().amax())


@record.register_fake
def _(newest: torch.Tensor, slot: int, x: torch.Tensor) -> None: ...


class _Linear(torch.autograd.Function):
    """fprop in FP8 under delayed scales by torch's product, dgrad and wgrad in MXFP4 with stochastic rounding."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, in_effect: Any, newest: Any, newest_grad: Any, rng_step: Any) -> torch.Tensor:
        record(newest, 0, x)
        record(newest, 1, w)
        (a, a_scale), (b, b_scale) = cast_fp8(x, in_effect[0]), cast_fp8(w, in_effect[1])
        ctx.save_for_backward(x, w, rng_step)
        ctx.newest = newest_grad
        one = ScalingType.TensorWise
        return scaled_mm(a, b.t(), a_scale, one, b_scale, one, output_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, w, rng_step = ctx.saved_tensors
        record(ctx.newest, 0, dy)

        def gemm(name: str, **tensors: torch.Tensor) -> torch.Tensor:
            a, b = (cast_mx(x, rng_step, list(KEYS[name, tensor])) for tensor, x in tensors.items())
            return a @ b.t() * (1.0 / MXFP4_SR.headroom**2)

        dx = gemm("dgrad", grad_output=dy, weight=w.t())
        return dx, gemm("wgrad", grad_output=dy.t(), input=x.t()), None, None, None, None


class TracedLinear(nn.Module):
    """Owns its amaxes, those of the backward pass apart, and is given the RNG step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("in_effect", torch.full((3,), 2.0))
        self.register_buffer("newest", torch.zeros(2))
        self.register_buffer("newest_grad", torch.zeros(1))

    def forward(self, x: torch.Tensor, rng_step: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Linear.apply(x, self.weight, self.in_effect, self.newest, self.newest_grad, rng_step)
        return y


def test_a_layer_with_state_is_one_graph(generator: torch.Generator) -> None:
    """Its bits are those of eager mode, over steps and with several forward passes in flight; it compiles once."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    layer, eager = TracedLinear(), TracedLinear()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    recipe = get_recipe("mxfp4_sr")
    inputs = [torch.randn(SIZE, SIZE, generator=generator) for _ in range(3)]
    found = []
    for run in (compiled, eager):
        xs = [x.clone().requires_grad_() for x in inputs]
        # all forward passes first, as in a pipeline
        ys = [run(x, torch.tensor([number, 1])) for number, x in enumerate(xs)]
        weight = layer.weight if run is compiled else eager.weight
        found += [[y, *torch.autograd.grad(y, (x, weight), y)] for x, y in zip(xs, ys, strict=True)]
    assert all(torch.equal(*pair) for got, want in zip(found[:3], found[3:], strict=True) for pair in zip(got, want))
    for number, (x, (y, *grads)) in enumerate(zip(inputs, found, strict=False)):
        draws = DRAWS._replace(rng_step=RngStep(number, 1))
        assert all(map(torch.equal, grads, three_gemms(recipe, x, layer.weight.detach(), y.detach(), draws, {})[1:]))
    assert backend.frame_count == 1
    amax = [max(float(t.abs().max()) for t in ts) for ts in (inputs, [eager.weight], [y for y, *_ in found])]
    assert [*layer.newest.tolist(), *layer.newest_grad.tolist()] == amax
