"""Block-scaled GEMMs: the layout of their operands, a model that reads bytes, and what the kernel compiles to."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.kernels.mx_gemm import native
from megatron_lowprec.kernels.mx_gemm.operand import MxOperand, aligned_codes, from_tiles, of_experts, to_tiles
from megatron_lowprec.kernels.mx_gemm.reference import mx_gemm, mx_grouped_gemm, values
from tests.kernels.compiling import printed_by
from tests.kernels.mx_gemm_cases import KINDS, operand
from tests.weekly import also_weekly

# ---- layout


def test_tiles_are_those_of_torchao() -> None:
    """Bytes of torchao 0.18.0's ``to_blocked``: the first of four tiles, the last of which are mostly padding."""
    scales = ((torch.arange(160).unsqueeze(1) * 7 + torch.arange(6) * 40) % 251).to(torch.uint8)
    tiles = to_tiles(scales)
    assert tiles.numel() == 4 * 512
    first = {
        0: [0, 40, 80, 120, 224, 13, 53, 93, 197, 237, 26, 66, 170, 210, 250, 39, 7, 47, 87, 127, 231, 20, 60, 100],
        512: [160, 200, 0, 0, 133, 173, 0, 0, 106, 146, 0, 0, 79, 119, 0, 0, 167, 207, 0, 0, 140, 180, 0, 0],
        1024: [143, 183, 223, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 150, 190, 230, 19, 0, 0, 0, 0],
        1536: [52, 92, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 59, 99, 0, 0, 0, 0, 0, 0],
    }
    for start, expected in first.items():
        assert tiles[start : start + len(expected)].tolist() == expected


def test_addresses_in_tiles_are_those_of_cublas() -> None:
    """Addresses by hand from cuBLAS's description of its 128x4 tiles, for [256, 8] scales: two tiles across."""
    for (row, block), address in {
        (0, 0): 0,
        (0, 3): 3,
        (1, 0): 16,
        (31, 0): 496,
        (32, 0): 4,
        (127, 3): 511,
        (0, 4): 512,
        (128, 0): 1024,
        (200, 6): 1536 + 8 * 16 + 2 * 4 + 2,
    }.items():
        scales = torch.zeros(256, 8, dtype=torch.uint8)
        scales[row, block] = 1
        assert to_tiles(scales).nonzero().flatten().tolist() == [address]


@pytest.mark.parametrize("size", [(1, 1), (128, 4), (129, 5), (300, 17)])
def test_tiles_are_undone(size: tuple[int, int]) -> None:
    scales = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(from_tiles(to_tiles(scales), *size), scales)


def test_square_blocks_repeat_their_scale_for_each_row() -> None:
    tiles = to_tiles(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8), block_rows=16, rows=20)
    assert from_tiles(tiles, 20, 2)[[0, 15, 16, 19]].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert int(tiles.count_nonzero()) == 40


def test_even_entries_are_in_low_nibbles() -> None:
    codes = torch.arange(6, dtype=torch.uint8).unsqueeze(0)
    assert aligned_codes(codes, 4).tolist() == [[0x10, 0x32, 0x54, *[0] * 13]]
    assert aligned_codes(codes, 8).tolist() == [[0, 1, 2, 3, 4, 5, *[0] * 26]]


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_a_transposed_view_lie_in_rows(bits: int) -> None:
    codes = torch.randint(0, 16, (64, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = aligned_codes(codes.t(), bits)
    assert found.is_contiguous()
    assert torch.equal(found, aligned_codes(codes.t().clone(memory_format=torch.contiguous_format), bits))


# ---- the model reads exactly these bytes


def test_values_of_bytes_by_hand() -> None:
    """One row of 20 entries in blocks of 16, the bytes written by hand: 1 and 2 E2M1 codes, scales 1.5 and 2^-6."""
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0], codes[0, 8] = 0xA5, 0x07  # entries 0 and 1 are 3 and -1, entry 16 is 6
    scales = torch.zeros(512, dtype=torch.uint8)
    scales[0], scales[1] = 0x3C, 0x08
    found = values(MxOperand(codes, scales, "e2m1", 16, 20))
    assert {int(k): float(found[0, k]) for k in found[0].nonzero()} == {0: 4.5, 1: -1.5, 16: 6 * 2.0**-6}
    assert found.shape == (1, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_each_permuted_tile_and_swapped_nibble_changes_the_product(kind: tuple[str, str, int]) -> None:
    a_format, b_format, block = kind
    a, b = operand(130, 9 * block, a_format, block, 1), operand(16, 9 * block, b_format, block, 2)

    def product(a: MxOperand, b: MxOperand) -> torch.Tensor:
        return mx_gemm(a, b, out_dtype=torch.float32)

    right = product(a, b)
    assert a.scales.numel() == 6 * 512  # two tiles down, three across
    for one, other in ((0, 1), (0, 2), (1, 2), (0, 3), (3, 4), (2, 5)):
        tiles = a.scales.view(6, 512).clone()
        tiles[[one, other]] = tiles[[other, one]]
        assert not torch.equal(product(a._replace(scales=tiles.flatten()), b), right)
    plain = from_tiles(a.scales, 130, 9)
    as_stored = torch.nn.functional.pad(plain, (0, 3, 0, 126)).flatten()
    assert not torch.equal(product(a._replace(scales=as_stored), b), right)
    if a_format == "e2m1":
        for column in range(a.codes.shape[1]):
            low, high = a.codes[:, column] & 15, a.codes[:, column] >> 4
            if column < 9 * block // 2 and not torch.equal(low, high):
                swapped = a.codes.clone()
                swapped[:, column] = low << 4 | high
                assert not torch.equal(product(a._replace(codes=swapped), b), right)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_that_lie_in_columns_change_the_product(kind: tuple[str, str, int]) -> None:
    """The model knows a row's bytes and no other stride; the products of GPUs refuse such codes."""
    a_format, b_format, block = kind
    a, b = operand(48, 2 * block, a_format, block, 1), operand(16, 2 * block, b_format, block, 2)
    in_columns = a._replace(codes=a.codes.t().contiguous().t())
    assert torch.equal(in_columns.codes, a.codes)
    products = [mx_gemm(one, b, out_dtype=torch.float32) for one in (a, in_columns)]
    assert not torch.equal(*products)
    with pytest.raises(AssertionError, match="row-major"):
        native.mx_gemm(in_columns, b, out_dtype=torch.float32)


@pytest.mark.parametrize("kind", [("e2m1", 16), ("e4m3", 32)])
def test_torch_takes_the_operands(kind: tuple[str, int]) -> None:
    """torch's own checks of sizes, dtypes, recipes and layouts, on its device without data."""
    fmt, block = kind
    above = None if block == 32 else 0.5
    a, b = (operand(rows, 176, fmt, block, rows, above) for rows in (130, 144))
    on_meta = [
        one._replace(
            codes=one.codes.to("meta"),
            scales=one.scales.to("meta"),
            tensor_scale=None if above is None else torch.ones(1, device="meta"),
        )
        for one in (a, b)
    ]
    found = native.mx_gemm(*on_meta, out_dtype=torch.bfloat16)
    assert (found.shape, found.dtype) == ((130, 144), torch.bfloat16)
    cut = on_meta[0]._replace(scales=on_meta[0].scales[:-512])
    with pytest.raises(RuntimeError, match="scale_a must have"):
        native.mx_gemm(cut, on_meta[1], out_dtype=torch.bfloat16)


# ---- experts


def group(
    fmt: str, block: int, rows: tuple[int, ...]
) -> tuple[list[tuple[MxOperand, MxOperand]], MxOperand, MxOperand]:
    """Operands of each expert, and those of all."""
    above = (0.5, 0.25, 3.0) if block == 16 else (None,) * 3
    pairs = [
        (operand(count, 176, fmt, block, at, above[at]), operand(144, 176, fmt, block, 10 + at, above[-at]))
        for at, count in enumerate(rows)
    ]
    a, b = (of_experts([pair[side] for pair in pairs]) for side in range(2))
    return pairs, a, b._replace(codes=b.codes.unflatten(0, (len(rows), -1)))


@pytest.mark.parametrize("kind", [("e2m1", 16), ("e4m3", 32), ("e5m2", 32)])
def test_products_of_experts_are_those_of_each(kind: tuple[str, int]) -> None:
    """Tiles of scales begin anew with each expert: more than a tile of rows, none, and a part of one."""
    rows = (130, 0, 40)
    pairs, a, b = group(*kind, rows)
    ends = torch.tensor(rows).cumsum(0).int()
    found = mx_grouped_gemm(a, b, ends, alpha=1.5, out_dtype=torch.float32)
    assert torch.equal(found, torch.cat([mx_gemm(*each, alpha=1.5, out_dtype=torch.float32) for each in pairs]))
    tiles = a.scales.view(-1, 512)
    for wrong in (
        (a._replace(scales=torch.cat((tiles[-1:], tiles[:-1])).flatten()), b),  # of another expert
        (a, b._replace(codes=b.codes.flip(0))),
        (a, b._replace(codes=b.codes.mT.contiguous().mT)),  # which lie in columns
    ):
        assert not torch.equal(mx_grouped_gemm(*wrong, ends, alpha=1.5, out_dtype=torch.float32), found)


@pytest.mark.parametrize("kind", [("e2m1", 16), ("e4m3", 32)])
def test_torch_takes_the_operands_of_experts(kind: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments by torch's schema; sizes by its meta function of MXFP8's former operator, as the operator has none."""
    rows = (130, 0, 40)
    _, a, b = group(*kind, rows)
    fields = torch.ops.aten._scaled_grouped_mm_v2.default._schema.arguments

    def product(*arguments: Any) -> torch.Tensor:
        given = dict(zip([field.name for field in fields], arguments, strict=True))
        assert [len(given[each]) for each in ("scale_a", "recipe_a", "swizzle_a")] == [1 + (kind[1] == 16)] * 3
        of_blocks = [given["scale_a"][0], given["scale_b"][0]]
        padded = 12 if kind[1] == 16 else 8  # scales along K, a multiple of 4
        assert [tuple(each.shape) for each in of_blocks] == [(3 * 128, padded), (3, 256 * padded)]
        if kind[1] == 16:
            assert [each[1].tolist() for each in (given["scale_a"], given["scale_b"])] == [
                [0.75, 0.375, 4.5],
                [0.5, 3.0, 0.25],
            ]
            return torch.empty(170, 144, dtype=given["out_dtype"])
        on_meta = [each.to("meta") for each in (given["self"], given["mat2"], *of_blocks, given["offs"])]
        return torch._scaled_grouped_mm(*on_meta, out_dtype=given["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_grouped_mm_v2", product)
    alpha = 1.5 if kind[1] == 16 else 1.0
    ends = torch.tensor(rows).cumsum(0).int()
    found = native.mx_grouped_gemm(a, b, ends, alpha=alpha, out_dtype=torch.bfloat16)
    assert (found.shape, found.dtype) == ((170, 144), torch.bfloat16)


# ---- instructions

_PRODUCT = re.compile(r"\b((?:tcgen05\.mma|mma\.sync|mma|wgmma\.mma_async)\.[\w.:]*)")
_KIND = {  # (family, format pair or block) -> what the instruction must say
    ("sm10x", "fp8", 32): ("tcgen05.mma", "kind::mxf8f6f4"),
    ("sm10x", "e2m1", 32): ("tcgen05.mma", "kind::mxf4."),
    ("sm10x", "e2m1", 16): ("tcgen05.mma", "kind::mxf4nvf4"),
    ("sm12x", "fp8", 32): ("mma.sync", "kind::mxf8f6f4"),
    ("sm12x", "e2m1", 32): ("mma.sync", "kind::mxf4nvf4"),
    ("sm12x", "e2m1", 16): ("mma.sync", "kind::mxf4nvf4"),
}


def faults_of(ptx: str, arch: int, fmt: str, block: int) -> list[str]:
    """Products in PTX that are not block-scaled ones of the format; or that there is none."""
    name, kind = _KIND["sm10x" if arch < 110 else "sm12x", "e2m1" if fmt == "e2m1" else "fp8", block]
    found = [one for one in set(_PRODUCT.findall(ptx)) if not one.startswith(("tcgen05.mma.ws", "mma.sync.sp"))]
    wrong = [one for one in found if not (one.startswith(name) and kind in one and "block_scale" in one)]
    return wrong if found else ["no product"]


def compiled(cache: Path, *cases: tuple[Any, ...]) -> list[str]:
    """PTX of each case: compute capability, both formats, block and the kernel's constants."""
    found: list[str] = json.loads(printed_by(cache, "tests.kernels.mx_gemm_ptx", *map(json.dumps, cases)))
    return found


_TARGETS = [(str(arch), a, b, str(block)) for arch in (100, 103, 120) for a, b, block in KINDS]


@pytest.fixture(scope="module")
def ptx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the cases of ``test_block_scaled_instructions`` that are to run, by their names."""
    chosen = {
        item.callspec.id: tuple(item.callspec.params.values())
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_block_scaled_instructions"
    }
    cases = [(int(arch), a, b, int(block), {}) for arch, a, b, block in chosen.values()]
    return dict(zip(chosen, compiled(tmp_path_factory.mktemp("cache"), *cases), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "a_format", "b_format", "block"),
    also_weekly(
        _TARGETS, ("100-e5m2-e4m3-32", "100-e2m1-e2m1-16", "103-e2m1-e2m1-32", "120-e4m3-e5m2-32", "120-e2m1-e2m1-16")
    ),
)
def test_block_scaled_instructions(ptx: dict[str, str], arch: str, a_format: str, b_format: str, block: str) -> None:
    assert faults_of(ptx[f"{arch}-{a_format}-{b_format}-{block}"], int(arch), a_format, int(block)) == []


def test_a_silent_bf16_product_is_a_fault() -> None:
    for line in (
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1};",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};",
        "mov.u32 %r1, %r2;",
    ):
        assert faults_of(line, 100, "e2m1", 32)
        assert faults_of(line, 120, "e2m1", 16)
    right = "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X [%r1], %rd1;"
    assert not faults_of(right, 100, "e2m1", 32)
    assert faults_of(right, 100, "e2m1", 16)
    assert faults_of(right + "\ntcgen05.mma.cta_group::1.kind::f16 [%r1];", 100, "e2m1", 32)


@pytest.mark.slow
@pytest.mark.weekly
def test_a_tile_of_64_rows_is_refused(tmp_path: Path) -> None:
    """Triton 3.7 compiles MXFP4 of this tile to bf16 products without a word, and NVFP4 not at all."""
    if not pytest.importorskip("triton").__version__.startswith(("3.6.", "3.7.")):
        pytest.skip("later Tritons may compile other instructions")
    (of_tile,) = compiled(tmp_path, (100, "e2m1", "e2m1", 32, {"BM": 64, "BN": 64}))
    assert faults_of(of_tile, 100, "e2m1", 32)
