"""FP8 products that add to their output: what a library is asked that computes it on a CPU, and a GPU's results."""

# ruff: noqa: N802  functions of cuBLASLt

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_lowprec.kernels.fp8_accumulate import cublaslt, reference
from megatron_lowprec.kernels.gemm import native

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {0: torch.float32, 28: E4M3, 29: E5M2}
NAMES = {3: "operation", 17: "scale_a", 18: "scale_b", 25: "fast"}


class FakeLibrary:
    """cuBLASLt's functions by its documentation, on a CPU: matrices stored by columns, D = alpha A.T B + beta C."""

    def __init__(self, algorithms: int = 1, status: int = 0) -> None:
        self.objects: list[dict[str, Any]] = []
        self.searches, self.products, self.algorithms, self.status = 0, 0, algorithms, status

    def _make(self, into: Any, **made: Any) -> int:
        self.objects.append(made)
        into._obj.value = len(self.objects)
        return 0

    def _of(self, handle: ctypes.c_void_p) -> dict[str, Any]:
        assert handle.value is not None
        found = self.objects[handle.value - 1]
        assert "destroyed" not in found
        return found

    def cublasLtMatmulDescCreate(self, into: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._make(into)

    def cublasLtMatmulDescSetAttribute(self, of: Any, attribute: int, value: Any, size: int) -> int:
        assert size == {3: 4, 17: 8, 18: 8, 25: 1}[attribute]
        self._of(of)[NAMES[attribute]] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, into: Any, dtype: int, rows: int, columns: int, pitch: int) -> int:
        assert pitch == rows
        return self._make(into, dtype=DTYPES[dtype], rows=rows, columns=columns)

    def cublasLtMatmulPreferenceCreate(self, into: Any) -> int:
        return self._make(into)

    def cublasLtMatmulPreferenceSetAttribute(self, of: Any, attribute: int, value: Any, size: int) -> int:
        assert size == (8 if attribute == 1 else 4)
        self._of(of)[str(attribute)] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        return self._destroy(preference)

    def cublasLtMatmulDescDestroy(self, description: Any) -> int:
        return self._destroy(description)

    def cublasLtMatrixLayoutDestroy(self, layout: Any) -> int:
        return self._destroy(layout)

    def _destroy(self, handle: Any) -> int:
        self._of(handle)["destroyed"] = True
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle: int, description: Any, *arguments: Any) -> int:
        *_, preference, wanted, found, count = arguments
        assert (handle, wanted) == (7, 1)
        self.searches += 1
        self.preference = self._of(preference)
        found._obj.workspace, found._obj.algorithm[0], count._obj.value = 64, 11, self.algorithms
        return 0

    def cublasLtMatmul(self, handle: int, description: Any, alpha: Any, *arguments: Any) -> int:
        a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm, workspace, size, stream = arguments
        assert (handle, size, stream, algorithm._obj[0]) == (7, 64, 9, 11)
        assert workspace
        self.products += 1
        asked = self._of(description)
        assert asked["operation"] == 1
        scale = _number(asked["scale_a"]) * _number(asked["scale_b"]) * alpha._obj.value
        product = self._read(a, of_a).t() @ self._read(b, of_b) * scale
        total = product + beta._obj.value * self._read(c, of_c)
        bytes_of = total.t().contiguous().view(torch.uint8).flatten()  # by columns
        ctypes.memmove(d, bytes_of.data_ptr(), bytes_of.numel())
        self.asked = asked | {"in place": (c, of_c.value) == (d, of_d.value)}
        return self.status

    def _read(self, address: int, layout: Any) -> torch.Tensor:
        of = self._of(layout)
        size = of["rows"] * of["columns"] * torch.empty((), dtype=of["dtype"]).element_size()
        stored = torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8).view(of["dtype"])
        return stored.float().view(of["columns"], of["rows"]).t()


def _number(address: int) -> float:
    return ctypes.c_float.from_address(address).value


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    library = FakeLibrary()
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "_handle", lambda: 7)
    monkeypatch.setattr(cublaslt, "_stream", lambda _: 9)
    cublaslt.find_plan.cache_clear()
    yield library
    cublaslt.find_plan.cache_clear()


def operands(
    a_dtype: torch.dtype, b_dtype: torch.dtype, device: str = "cpu", scale: int = 1
) -> tuple[torch.Tensor, ...]:
    """Values whose products and sums are exact in fp32."""
    generator = torch.Generator().manual_seed(3)
    sizes = 48 * scale, 32 * scale, 64 * scale
    a, b = (torch.randint(-4, 5, (rows, sizes[2]), generator=generator).float() for rows in sizes[:2])
    out = torch.randint(-8, 9, sizes[:2], generator=generator).float()
    scales = (torch.tensor([[value]]) for value in (0.5, 0.25))
    return tuple(each.to(device) for each in (a.to(a_dtype), b.to(b_dtype), *scales, out))


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("fast", [False, True])
def test_cublaslt_is_asked_for_the_product_of_the_reference(
    fake: FakeLibrary, dtypes: tuple[torch.dtype, torch.dtype], fast: bool
) -> None:
    *given, out = operands(*dtypes)
    assert cublaslt.fits(given[0], given[1], out)
    want, got = reference.add_product_(*given, out.clone()), out.clone()
    for _ in range(2):
        got.copy_(out)
        assert cublaslt.add_product_(*given, got, fast_accumulation=fast) is got
        assert torch.equal(got, want)
    assert (fake.searches, fake.products) == (1, 2)  # the plan is found once
    assert (fake.asked["fast"], fake.asked["in place"]) == (int(fast), True)
    assert fake.preference["1"] == 32 * 2**20


def test_a_plan_belongs_to_the_alignment_of_its_tensors(fake: FakeLibrary) -> None:
    *given, out = operands(E5M2, E4M3)
    room = torch.empty(out.numel() + 64)
    first = -(room.data_ptr() // 4) % 64  # of 256 bytes
    for offset, alignment in ((0, 256), (4, 16), (4, 16)):
        shifted = room[first + offset :][: out.numel()].view_as(out).copy_(out)
        assert torch.equal(cublaslt.add_product_(*given, shifted), reference.add_product_(*given, out.clone()))
        assert (fake.preference["7"], fake.preference["8"]) == (alignment, alignment)
    assert fake.searches == 2


def test_a_plan_that_others_push_out_frees_its_descriptors(fake: FakeLibrary) -> None:
    limit = cublaslt.find_plan.cache_info().maxsize
    assert limit is not None
    for tokens in range(16, 16 * (limit + 4), 16):
        a, b, out = torch.zeros(1, tokens).to(E5M2), torch.zeros(16, tokens).to(E4M3), torch.zeros(1, 16)
        cublaslt.add_product_(a, b, torch.ones(1), torch.ones(1), out)
    assert fake.searches == limit + 3
    alive = [made for made in fake.objects if "destroyed" not in made]
    assert len(alive) == 4 * limit  # a product's description, and a layout of each matrix


def test_another_scale_is_read_by_the_same_plan(fake: FakeLibrary) -> None:
    a, b, a_scale, b_scale, out = operands(E4M3, E4M3)
    got = out.clone()
    cublaslt.add_product_(a, b, a_scale, b_scale, got)
    cublaslt.add_product_(a, b, a_scale * 4, b_scale * 2, got.copy_(out))
    assert torch.equal(got, reference.add_product_(a, b, a_scale * 4, b_scale * 2, out.clone()))
    assert fake.searches == 1


@pytest.mark.parametrize("changes", [{"algorithms": 0}, {"status": 14}])
def test_what_cublaslt_refuses_is_an_error(fake: FakeLibrary, changes: dict[str, int]) -> None:
    for name, value in changes.items():
        setattr(fake, name, value)
    with pytest.raises(RuntimeError, match=f"status {changes.get('status', 15)}"):
        cublaslt.add_product_(*operands(E4M3, E4M3))


def test_what_fits() -> None:
    a, b, *_, out = operands(E5M2, E4M3)
    assert not cublaslt.fits(a, b.to(E5M2), out)
    assert not cublaslt.fits(a[:, :40], b[:, :40], out)
    assert not cublaslt.fits(a, b, out.bfloat16())
    assert not cublaslt.fits(a, b[:24], out[:, :24].contiguous())
    shifted = torch.empty(out.numel() + 1)[1:].view_as(out)  # a gradient in a buffer that pads no weight
    assert not cublaslt.fits(a, b, shifted)


def test_it_is_off_by_default_and_refused_without_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, *_, out = operands(E5M2, E4M3)
    assert not cublaslt.takes(a, b, out, "tensor", "tensor")
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    with pytest.raises(RuntimeError, match="need cuBLASLt"):
        cublaslt.enable(True)
    cublaslt.enable(False)


def test_the_scaled_gemm_uses_it_to_add_alone(fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, a_scale, b_scale, out = operands(E4M3, E4M3)
    monkeypatch.setattr(cublaslt, "takes", lambda *arguments: arguments[3:] == ("tensor", "tensor"))
    options: dict[str, Any] = {"a_scale": a_scale, "b_scale": b_scale, "out_dtype": torch.bfloat16}
    options |= {"a_granularity": "tensor", "b_granularity": "tensor", "fast_accumulation": False}
    got = out.clone()
    assert native.scaled_gemm(a, b, **options, accumulate_into=got) is got
    assert torch.equal(got, reference.add_product_(a, b, a_scale, b_scale, out.clone()))
    native.scaled_gemm(a, b, **options, accumulate_into=got, overwrite=True)
    assert fake.products == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("scale", [1, 16])
def test_on_a_gpu(dtypes: tuple[torch.dtype, torch.dtype], scale: int) -> None:
    """Exact sums of integers, then random numbers beside torch's product and a sum, and in a replayed graph."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 products")
    *given, out = operands(*dtypes, "cuda", scale)
    want = reference.add_product_(*given, out.clone())
    assert torch.equal(cublaslt.add_product_(*given, out.clone()), want)
    a, b = (torch.randn(each.shape, device="cuda").to(each.dtype) for each in given[:2])
    a_scale, b_scale = given[2:]
    product = (a.double() @ b.double().t()) * 0.125
    bound = 2.0**-10 * (a.double().abs() @ b.double().abs().t()) * 0.125 + 2.0**-22 * out.double().abs()
    got = cublaslt.add_product_(a, b, a_scale, b_scale, out.clone())
    assert ((got.double() - product - out.double()).abs() <= bound).all()
    stream, graph, held = torch.cuda.Stream(), torch.cuda.CUDAGraph(), out.clone()
    with torch.cuda.graph(graph, stream=stream):
        cublaslt.add_product_(a, b, a_scale, b_scale, held)
    held.copy_(out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(held, got)


@pytest.mark.gpu
def test_the_scaled_gemm_on_a_gpu() -> None:
    """Enabled, a weight gradient is within two roundings of fp32 of the product and sum that it replaces."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 products")
    a, b, a_scale, b_scale, out = operands(E5M2, E4M3, "cuda", 16)
    options: dict[str, Any] = {"a_scale": a_scale, "b_scale": b_scale, "out_dtype": torch.bfloat16}
    options |= {"a_granularity": "tensor", "b_granularity": "tensor", "fast_accumulation": False}
    found = []
    try:
        for on in (False, True):
            cublaslt.enable(on)
            found.append(native.scaled_gemm(a, b, **options, accumulate_into=out.clone()))
    finally:
        cublaslt.enable(False)
    torch.testing.assert_close(found[1], found[0], rtol=2.0**-22, atol=0)
