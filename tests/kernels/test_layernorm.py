"""Norms: the reference against float64, and how tight the bounds are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec.kernels.layernorm import reference
from tests.kernels.norm_cases import EPS, Case, differences, errors, errors_with_residual, tensors


def test_reference_against_float64() -> None:
    assert differences("cpu", reference)[1] == []


@pytest.mark.parametrize("name", ["y", "dx", "dweight", "dbias"])
def test_the_bounds_are_tight(name: str) -> None:
    """One bf16 step more in one entry is seen."""
    case = Case(9, 1000, torch.bfloat16, True)
    t = tensors(case, "cpu")

    def off(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        flat = value.view(-1).view(torch.int16)
        flat[flat.numel() // 2 + 3] += 2
        return value

    def norm(*arguments: object) -> reference.Normalized:
        got = reference.norm(*arguments)  # type: ignore[arg-type]
        return got._replace(y=off(got.y)) if name == "y" else got

    def norm_backward(*arguments: object) -> tuple[torch.Tensor | None, ...]:
        names = ("dx", "dweight", "dbias")
        got = reference.norm_backward(*arguments)  # type: ignore[arg-type]
        return tuple(off(g) if name == n and g is not None else g for n, g in zip(names, got, strict=True))

    broken = SimpleNamespace(norm=norm, norm_backward=norm_backward)
    assert [line.split(": ")[1].split()[0] for line in errors(case, t, broken)] == [name]


def _without_residual(*saved: Any) -> Any:
    return reference.norm_backward(*saved[:5], None, *saved[6:])


def test_a_residual_that_is_not_added_is_seen() -> None:
    case = Case(9, 1000, torch.bfloat16, True)
    broken = SimpleNamespace(norm=reference.norm, norm_backward=_without_residual)
    assert len(list(errors_with_residual(case, tensors(case, "cpu"), broken))) == 1


def test_an_offset_costs_no_digits_of_the_variance() -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) * 1e-2 + 100.0
    got = reference.norm(x, torch.ones(512), torch.zeros(512), EPS)
    want = (x.double().var(1, unbiased=False) + EPS).rsqrt()
    torch.testing.assert_close(got.rstd.double(), want, rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_change_no_bits(stages: int) -> None:
    from megatron_lowprec.kernels.layernorm import triton

    case = Case(4097, 1024, torch.bfloat16, True)
    t = tensors(case, "cuda")
    got = triton.norm(t.x, t.weight, t.bias, EPS)
    plain, staged = (
        triton.norm_backward(
            t.dy, t.x, t.weight, got.mean, got.rstd, t.dy, sizes=triton.tiling(1024)._replace(stages=n)
        )
        for n in (1, stages)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, staged, strict=True) if a is not None and b is not None)
