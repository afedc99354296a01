"""Products: where scales, alpha and the one rounding come, bit by bit on sums that fp32 holds exactly."""

import ctypes
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gemm import device_alpha
from megatron_lowprec.kernels.gemm.reference import gemm
from tests.kernels.exact import magnitudes

ALPHA = 1 / 0.75**2  # 16/9


class Side(NamedTuple):
    """One operand, its scale, and the block that shares one."""

    data: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (1, 1)


def multiply(a: Side, b: Side, **options: Any) -> torch.Tensor:
    return gemm(a.data, b.data, a_scale=a.scale, b_scale=b.scale, a_block=a.block, b_block=b.block, **options)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def fp4(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """E2M1 values: multiples of 1/2 up to 6, so that every sum of products is a multiple of 1/4 and exact in fp32."""
    table = magnitudes(FORMATS["e2m1"])
    values = table[torch.randint(0, len(table), (rows, columns), generator=generator)]
    return values * (1 - 2 * torch.randint(0, 2, values.shape, generator=generator))


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = a.double() @ b.double().t()
    assert torch.equal(product.float().double(), product)
    return product


@DTYPES
def test_plain_product_is_rounded_once(dtype: torch.dtype, generator: torch.Generator) -> None:
    a, b = fp4(33, 640, generator).to(dtype), fp4(17, 640, generator).to(dtype)
    got = gemm(a, b, out_dtype=dtype)
    assert got.dtype == dtype
    assert torch.equal(got, exact_product(a, b).to(dtype))


@pytest.mark.parametrize("columns", [(4, 8), (8, 4)])
def test_operands_of_other_columns_are_refused(columns: tuple[int, int]) -> None:
    a, b = (torch.ones(2, each) for each in columns)
    with pytest.raises(ValueError, match=f"equal columns, got {columns[0]} and {columns[1]}"):
        gemm(a, b, a_scale=torch.ones(1, 1), out_dtype=torch.float32)


def test_bf16_operands_are_summed_in_fp32() -> None:
    # a bf16 accumulator of ones stays at 256, whose neighbour is 258
    ones = torch.ones(1, 1000, dtype=torch.bfloat16)
    assert gemm(ones, ones, out_dtype=torch.bfloat16).item() == 1000.0


def test_fp32_output_of_bf16_operands(generator: torch.Generator) -> None:
    a, b = fp4(9, 128, generator).bfloat16(), fp4(5, 128, generator).bfloat16()
    got = gemm(a, b, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert torch.equal(got.double(), exact_product(a, b))


@DTYPES
def test_alpha_multiplies_the_fp32_sum_before_the_one_rounding(dtype: torch.dtype, generator: torch.Generator) -> None:
    a, b = fp4(64, 256, generator).to(dtype), fp4(64, 256, generator).to(dtype)
    product = exact_product(a, b).float()
    got = gemm(a, b, alpha=ALPHA, out_dtype=dtype)
    assert torch.equal(got, (product * torch.tensor(ALPHA, dtype=torch.float32)).to(dtype))


def test_other_places_for_16_9_would_give_other_bits(generator: torch.Generator) -> None:
    """What the test above rules out: the sum rounded to bf16 before alpha, and 4/3 on bf16 operands."""
    a, b = fp4(64, 256, generator).bfloat16(), fp4(64, 256, generator).bfloat16()
    got = gemm(a, b, alpha=ALPHA, out_dtype=torch.bfloat16)
    rounded_first = (exact_product(a, b).bfloat16().float() * ALPHA).bfloat16()
    assert int((rounded_first != got).sum()) > 100
    per_operand = ((a * (4 / 3)).float() @ (b * (4 / 3)).float().t()).bfloat16()
    assert int((per_operand != got).sum()) > 100
    # and it is biased: 4/3 of .5, 1, 2 and 4 rounds up in bf16
    assert (torch.tensor([0.5, 1, 2, 4]).bfloat16() * (4 / 3)).double().sum() > 7.5 * 4 / 3


@pytest.mark.parametrize("alpha", [1.0, ALPHA])
@DTYPES
def test_accumulate_into_adds_in_fp32(dtype: torch.dtype, alpha: float, generator: torch.Generator) -> None:
    a, b = fp4(24, 128, generator).to(dtype), fp4(40, 128, generator).to(dtype)
    total = torch.randint(-1000, 1000, (24, 40), generator=generator).float() + 2.0**-10  # lost if rounded to bf16
    before = total.clone()
    got = gemm(a, b, alpha=alpha, out_dtype=dtype, accumulate_into=total)
    assert got is total
    assert torch.equal(total, before + exact_product(a, b).float() * alpha)


# ---- scales
def operand(elements: torch.Tensor, tile: tuple[int, int], generator: torch.Generator) -> Side:
    rows, columns = elements.shape
    shape = (-(-rows // tile[0]), -(-columns // tile[1]))
    return Side(elements, torch.rand(shape, generator=generator) + 0.5, tile)


def row_scales(side: Side, k: slice) -> torch.Tensor:
    """float64 [R] decode scales of the rows in a part of K over which none changes."""
    rows = torch.arange(side.data.shape[0])
    if side.scale is None:
        return torch.ones(len(rows), dtype=torch.float64)
    return side.scale.double()[rows // side.block[0], k.start // side.block[1]]


M, N, K = 200, 130, 300  # multiples of nothing
TENSOR, ROW = "tensor", "row"


@DTYPES
@pytest.mark.parametrize(
    ("a_tile", "b_tile", "parts"),
    [
        (TENSOR, TENSOR, 1),
        (ROW, ROW, 1),
        (ROW, TENSOR, 1),
        (ROW, None, 1),
        (None, TENSOR, 1),
        ((1, 128), (128, 128), 3),
        ((1, 128), (1, 128), 3),
        ((128, 128), (1, 128), 3),
        ((1, 128), TENSOR, 3),
        ((1, 128), None, 3),
        ((1, 64), (64, 64), 5),
    ],
)
def test_scales(dtype: torch.dtype, a_tile: object, b_tile: object, parts: int, generator: torch.Generator) -> None:
    """Each partial sum is exact; then two scales, and the sum of the parts: (parts + 2) roundings of 2^-24 at most."""

    def side(rows: int, tile: object) -> Side:
        elements = fp4(rows, K, generator).to(dtype)
        if tile is None:
            return Side(elements)
        sizes = {TENSOR: (rows, K), ROW: (1, K)}.get(tile, tile)  # type: ignore[call-overload]
        return operand(elements, sizes, generator)

    a, b = side(M, a_tile), side(N, b_tile)
    got = multiply(a, b, out_dtype=torch.float32)
    step = K if parts == 1 else -(-K // parts // 64) * 64
    spans = [slice(k, k + step) for k in range(0, K, step)]
    assert len(spans) == parts
    scaled = [
        exact_product(a.data[:, k], b.data[:, k]) * row_scales(a, k).unsqueeze(1) * row_scales(b, k) for k in spans
    ]
    limit = (parts + 2) * 2.0**-24 * sum(part.abs() for part in scaled)
    assert bool(((got.double() - sum(scaled)).abs() <= limit).all())


def test_scales_of_one_tile_of_rows() -> None:
    """A 128x128 tile that is one row high in scales, with fewer, as many and more rows than 128."""
    for rows in (1, 127, 128, 129, 256):
        elements = torch.ones(rows, 256)
        scale = torch.arange(1.0, 1 + 2 * -(-rows // 128)).view(-1, 2)
        got = multiply(Side(elements, scale, (128, 128)), Side(torch.ones(1, 256)), out_dtype=torch.float32)
        want = (scale.sum(1) * 128).repeat_interleave(128)[:rows].unsqueeze(1)
        assert torch.equal(got, want)


def test_partial_sums_are_promoted_every_tile() -> None:
    """Each part of 128 is scaled by itself and then added: scaling the finished sum would give 0 here."""
    elements = torch.cat((torch.ones(1, 128), -torch.ones(1, 128)), dim=1)
    scale = torch.tensor([[2.0, 1.0]])
    got = multiply(Side(elements, scale, (1, 128)), Side(torch.ones(1, 256)), out_dtype=torch.float32)
    assert got.item() == 128.0


def test_alpha_comes_after_scales_and_before_the_rounding(generator: torch.Generator) -> None:
    a, b = fp4(32, 64, generator).bfloat16(), fp4(32, 64, generator).bfloat16()
    scale = torch.tensor([[1.7]])
    got = multiply(Side(a, scale, (32, 64)), Side(b), alpha=ALPHA, out_dtype=torch.bfloat16)
    assert torch.equal(got, (exact_product(a, b).float() * scale * ALPHA).bfloat16())


def test_scaled_operands_accumulate_in_fp32(generator: torch.Generator) -> None:
    a, b = fp4(8, 64, generator).bfloat16(), fp4(8, 64, generator).bfloat16()
    total, scale = torch.full((8, 8), 2.0**-10), torch.tensor([[0.3]])
    got = multiply(Side(a, scale, (8, 64)), Side(b), out_dtype=torch.bfloat16, accumulate_into=total)
    assert got is total
    assert torch.equal(total, exact_product(a, b).float() * scale + 2.0**-10)


def test_different_tiles_along_k_are_refused(generator: torch.Generator) -> None:
    a, b = (operand(fp4(4, 256, generator), (1, step), generator) for step in (64, 128))
    with pytest.raises(ValueError, match=r"equal blocks .* \[64, 128\]"):
        multiply(a, b, out_dtype=torch.float32)


@pytest.mark.parametrize("accumulate", [False, True])
def test_nothing_to_contract_gives_zeros(accumulate: bool) -> None:
    total = torch.ones(3, 2) if accumulate else None
    got = gemm(torch.zeros(3, 0), torch.zeros(2, 0), out_dtype=torch.float32, accumulate_into=total)
    assert got.tolist() == torch.full((3, 2), float(accumulate)).tolist()


class ColumnMajor:
    """cuBLAS's two functions on a CPU, by their documentation: matrices by columns, alpha and beta behind pointers."""

    def __init__(self) -> None:
        self.modes: list[int] = []

    def cublasSetPointerMode_v2(self, handle: int, mode: int) -> int:  # noqa: N802
        self.modes.append(mode)
        return 0

    def cublasGemmEx(self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, *rest: int) -> int:  # noqa: N802
        alpha, a, a_type, a_pitch, b, b_type, b_pitch, beta, c, c_type, c_pitch, compute, _ = rest
        assert (self.modes[-1], compute) == (1, 68)

        def matrix(pointer: int, kind: int, pitch: int, rows: int, columns: int) -> torch.Tensor:
            dtype = {0: torch.float32, 14: torch.bfloat16}[kind]
            count = pitch * (columns - 1) + rows
            memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
            return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (1, pitch))

        left = matrix(a, a_type, a_pitch, *((k, m) if op_a else (m, k)))
        right = matrix(b, b_type, b_pitch, *((n, k) if op_b else (k, n)))
        product = (left.t() if op_a else left).double() @ (right.t() if op_b else right).double()
        factors = [ctypes.c_float.from_address(pointer).value for pointer in (alpha, beta)]
        out = matrix(c, c_type, c_pitch, m, n)
        out.copy_((product.float() * factors[0] + (out * factors[1] if factors[1] else 0)).to(out.dtype))
        return 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_alpha_on_the_device_multiplies_the_fp32_sum(
    device: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands stored by rows and by columns, written, added and rounded once; cuBLAS is left as torch has it."""
    library = ColumnMajor()
    if device == "cpu":
        monkeypatch.setattr(device_alpha, "_cublas", lambda: library)
        monkeypatch.setattr(device_alpha, "takes", device_alpha.fits)
        monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    alpha = torch.full((1, 1), 1 / 3, device=device)
    for a_by_rows, b_by_rows in product((True, False), repeat=2):
        a, b = (fp4(rows, 64, generator).bfloat16().to(device) for rows in (24, 40))
        exact = exact_product(a, b).float() * alpha
        a, b = a if a_by_rows else a.t().contiguous().t(), b if b_by_rows else b.t().contiguous().t()
        assert torch.equal(gemm(a, b, alpha=alpha, out_dtype=torch.bfloat16), exact.bfloat16())
        total = torch.ones(24, 40, device=device)
        for overwrite, want in ((True, exact), (False, exact + exact)):
            got = gemm(a, b, alpha=alpha, out_dtype=torch.bfloat16, accumulate_into=total, overwrite=overwrite)
            assert got is total
            torch.testing.assert_close(total, want, rtol=2.0**-22, atol=0.0)  # a GPU may add without rounding first
    assert device != "cpu" or library.modes == [1, 0] * 12
    assert torch.equal(torch.mm(a, b.t()), exact_product(a, b).bfloat16())


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        ((24, 64), (64, 1), True),
        ((24, 64), (96, 1), True),
        ((24, 64), (1, 24), True),
        ((24, 64), (1, 40), True),
        ((1, 64), (0, 1), True),
        ((24, 64), (0, 1), False),
        ((24, 64), (32, 1), False),
        ((24, 64), (1, 0), False),
        ((24, 64), (1, 16), False),
        ((24, 64), (1, 1), False),
        ((24, 64), (128, 2), False),
    ],
)
def test_cublas_takes_rows_and_columns_that_do_not_overlap(
    shape: tuple[int, int],
    strides: tuple[int, int],
    fits: bool,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product that does not fit is torch's, with the same bits."""
    library = ColumnMajor()
    monkeypatch.setattr(device_alpha, "_cublas", lambda: library)
    monkeypatch.setattr(device_alpha, "takes", device_alpha.fits)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    a, b = (fp4(*size, generator).to(BF16) for size in ((1, 4096), (40, 64)))
    a, alpha = a.as_strided(shape, strides), torch.full((1, 1), 1 / 3)
    for left, right in ((a, b), (b, a)):
        assert device_alpha.fits(left, right, BF16) == fits
        got = gemm(left, right, alpha=alpha, out_dtype=BF16)
        assert torch.equal(got, (exact_product(left, right).float() * alpha).to(BF16))
    assert bool(library.modes) == fits


@pytest.mark.parametrize(
    ("a", "b", "out", "fits"),
    [
        (BF16, BF16, BF16, True),
        (BF16, BF16, FP32, True),
        (FP32, FP32, FP32, True),
        (FP32, FP32, BF16, False),
        (BF16, FP32, FP32, False),
        (FP32, BF16, BF16, False),
        (torch.float16, torch.float16, FP32, False),
    ],
)
def test_cublas_takes_dtypes_that_it_has(a: torch.dtype, b: torch.dtype, out: torch.dtype, fits: bool) -> None:
    assert device_alpha.fits(torch.ones(8, 16, dtype=a), torch.ones(4, 16, dtype=b), out) == fits


def test_the_dtype_of_a_product_that_is_added_is_that_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[torch.dtype]()
    monkeypatch.setattr(device_alpha, "takes", lambda _a, _b, out_dtype: asked.append(out_dtype))
    a, total = torch.ones(8, 16), torch.zeros(8, 8)
    gemm(a, a, alpha=torch.ones(1, 1), out_dtype=BF16, accumulate_into=total)
    assert asked == [FP32]


def test_cublas_takes_no_bf16_where_torch_is_told_to_sum_in_fp32() -> None:
    matmul, ones = torch.backends.cuda.matmul, torch.ones(8, 16)
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = False
        assert not device_alpha.fits(ones.to(BF16), ones.to(BF16), BF16)
        assert device_alpha.fits(ones, ones, FP32)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
