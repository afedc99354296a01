"""The Hadamard transform against Sylvester's matrix in float64, and the fixed order of its fp32 operations."""

import math

import numpy as np
import pytest
import torch

from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization import transform
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.transform import Transforms
from megatron_lowprec.recipe.schema import HadamardSpec

FROZEN = ["0x1.1477340000000p-4", "-0x1.59df480000000p-6", "-0x1.b0f1480000000p-6", "-0x1.164c1c0000000p-4"]
blocks = pytest.mark.parametrize("g", [32, 64, 128, 256])


def sylvester(g: int) -> torch.Tensor:
    """float64 [g, g] of +-1 in natural order: H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < g:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def random_signs(g: int, generator: torch.Generator) -> torch.Tensor:
    return 1.0 - 2.0 * torch.randint(0, 2, (g,), generator=generator).float()


def bound(g: int) -> float:
    """Error relative to a group's norm: 2^-24 for the constant, the product and each of log2 g sums."""
    return (math.log2(g) + 2) * 2.0**-24 * (1 + 1e-5)


def group_norms(x: torch.Tensor, g: int) -> torch.Tensor:
    return x.double().reshape(-1, g).norm(dim=1)


@blocks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_sylvesters_matrix_after_the_signs(g: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x, signs = torch.randn(6, 3 * g, generator=generator).to(dtype), random_signs(g, generator)
    got = hadamard_transform(x, signs)
    assert got.dtype == torch.float32
    want = ((x.double().view(-1, g) * signs.double()) @ sylvester(g) / math.sqrt(g)).view(6, -1)
    assert bool((group_norms(got - want, g) <= bound(g) * group_norms(x, g)).all())


@blocks
def test_unit_vectors_give_rows_of_the_matrix(g: int) -> None:
    """Exactly: one product, no sums of two numbers. A transposed or reordered matrix would show."""
    signs = torch.ones(g)
    signs[3] = -1.0
    got = hadamard_transform(torch.eye(g), signs)
    want = sylvester(g).float() * signs.unsqueeze(1) * torch.tensor(1 / math.sqrt(g), dtype=torch.float32)
    assert torch.equal(got, want)


@blocks
def test_orthogonal_and_its_own_inverse(g: int, generator: torch.Generator) -> None:
    x, signs = torch.randn(64, g, generator=generator), random_signs(g, generator)
    y = hadamard_transform(x, signs)
    error = (group_norms(y, g) - group_norms(x, g)).abs()
    assert bool((error <= bound(g) * group_norms(x, g)).all())
    back = hadamard_transform(y, torch.ones(g)) * signs
    assert bool((group_norms(back - x, g) <= 2 * bound(g) * group_norms(x, g) * (1 + 1e-5)).all())


@blocks
def test_cancels_in_the_product_of_both_operands(g: int, generator: torch.Generator) -> None:
    a, b = torch.randn(16, 2 * g, generator=generator), torch.randn(8, 2 * g, generator=generator)
    signs = random_signs(g, generator)
    got = hadamard_transform(a, signs).double() @ hadamard_transform(b, signs).double().t()
    want = a.double() @ b.double().t()
    limit = 2.01 * bound(g) * a.double().norm(dim=1, keepdim=True) * b.double().norm(dim=1)
    assert bool(((got - want).abs() <= limit).all())
    other = hadamard_transform(a, signs).double() @ hadamard_transform(b, -signs.roll(1)).double().t()
    assert not bool(((other - want).abs() <= limit).all())  # it cancels only with the same signs


@blocks
def test_order_of_operations_is_fixed(g: int, generator: torch.Generator) -> None:
    """One fp32 product with fl(sign / sqrt g), then butterflies of stride g/2, ..., 2, 1, each sum rounded to fp32."""
    x, signs = torch.randn(5, g, generator=generator), random_signs(g, generator)
    constant = np.float32(1 / math.sqrt(g))
    for row, got in zip(x.numpy(), hadamard_transform(x, signs).numpy(), strict=True):
        y = [np.float32(value * (np.float32(sign) * constant)) for value, sign in zip(row, signs.numpy(), strict=True)]
        stride = g // 2
        while stride:
            for i in range(g):
                if not i & stride:
                    y[i], y[i + stride] = np.float32(y[i] + y[i + stride]), np.float32(y[i] - y[i + stride])
            stride //= 2
        assert np.array_equal(np.array(y, dtype=np.float32), got)


def test_frozen_bits() -> None:
    """Of the numbers 1/1, 1/2, ..., 1/32 with every third sign negative: codes hang on these bits on every device."""
    x = (1.0 / torch.arange(1, 33, dtype=torch.float64)).float().unsqueeze(0)
    signs = torch.ones(32)
    signs[::3] = -1.0
    assert [value.hex() for value in hadamard_transform(x, signs)[0, ::8].tolist()] == FROZEN


def test_groups_do_not_mix_and_nan_stays_in_its_group() -> None:
    x = torch.ones(2, 128)
    x[1, 70] = torch.nan
    got = hadamard_transform(x, torch.ones(64)).isnan()
    assert got[1, 64:].all()
    assert int(got.sum()) == 64


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_no_entries(shape: tuple[int, int]) -> None:
    assert hadamard_transform(torch.zeros(shape), torch.ones(64)).shape == shape


def test_columns_must_be_a_multiple_of_the_block() -> None:
    with pytest.raises(ValueError, match="96 columns are no multiple of the Hadamard block 64"):
        hadamard_transform(torch.zeros(2, 96), torch.ones(64))


@pytest.mark.parametrize("signs", ["nvfp4", "random"])
def test_signs_of_a_layer_follow_it_to_another_device(signs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a step are drawn once on a device, for both GEMMs that share it."""
    drawn: list[torch.device] = []

    class Draws:
        @staticmethod
        def scaled_signs(keys: tuple[Key, ...], rng_step: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
            drawn.append(rng_step.device)
            return tuple(torch.empty(group, device=rng_step.device) for _ in keys)

    monkeypatch.setattr(transform, "load", lambda _: Draws)
    specs = dict.fromkeys(("dgrad", "wgrad"), HadamardSpec(16, signs=signs))
    transforms = Transforms(specs, LinearId(1, "x").sign_streams(0))
    devices = [torch.device(kind) for kind in ("cpu", "meta", "cpu")]
    for device in devices:
        for gemm in ("dgrad", "wgrad"):
            found = transforms.at(gemm, RngStep(0, 0))
            assert found is not None
            assert found.scaled_signs(device).device == device
    assert drawn == (devices if signs == "random" else [])
