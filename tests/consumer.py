"""A program that uses the public names: `make types` checks it as mypy --strict does, test_architecture.py runs it."""

import torch

import megatron_lowprec
from megatron_lowprec import GemmSpec, GradientSpec, OptimizerSpec, QuantSpec, Recipe, RecipeLike, UserError


def mine(name: str) -> Recipe:
    operand = QuantSpec("e4m3", "1x32", "e8m0", scale_rule="round_up")
    return Recipe(
        name,
        summary="MXFP8 in every GEMM",
        source="ours",
        fprop=GemmSpec(input=operand, weight=operand),
        dgrad=GemmSpec(grad_output=operand, weight=operand),
        wgrad=GemmSpec(grad_output=operand, input=operand),
        optimizer=OptimizerSpec(),
        gradients=GradientSpec(),
    )


def losses(recipe: RecipeLike, steps: int = 3) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    model = megatron_lowprec.convert(model, recipe, seed=1)
    first: torch.nn.Module = model[0]
    assert isinstance(first, megatron_lowprec.LowPrecLinear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[float] = []
    for _ in range(steps):
        loss = model(torch.ones(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def error_of(recipe: str) -> float:
    spec = megatron_lowprec.load_recipe(recipe, ["fprop.input.rounding=nearest_even"]).fprop.input
    if spec is None:
        raise UserError(f"{recipe} does not quantize the input")
    x = torch.linspace(-1, 1, 64).reshape(2, 32)
    return float((megatron_lowprec.quantize(x, spec).dequantize() - x).abs().max())
