"""Cases of the block-scaled GEMM's kernel against the model that reads bytes, bit for bit; interpreted, and on a GPU.

Sums of these operands are exact in fp32, so that no order of theirs matters. Triton's interpreter has no
``dot_scaled``: it runs the variant that folds scales into the values, which reads the same addresses.
"""

from itertools import product

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.mx_gemm import reference
from megatron_lowprec.kernels.mx_gemm.operand import MxOperand, aligned_codes, to_tiles
from megatron_lowprec.kernels.quantize.elements import unpacked
from megatron_lowprec.kernels.quantize.reference import encode
from megatron_lowprec.kernels.quantize.rule import Direction
from megatron_lowprec.quantization.quantizer import mx_rule, quantize_by_reference, with_amaxes
from megatron_lowprec.recipe.registry import get_recipe

# (format of a, of b, block): MXFP8 with both gradients' formats, MXFP4, NVFP4
KINDS = (("e4m3", "e4m3", 32), ("e5m2", "e4m3", 32), ("e4m3", "e5m2", 32), ("e2m1", "e2m1", 32), ("e2m1", "e2m1", 16))
# (M, N, K): whole tiles, and more than a tile in each dimension that nothing divides
SIZES = ((128, 128, 128), (130, 144, 176))


def operand(rows: int, columns: int, fmt: str, block: int, seed: int, tensor_scale: float | None = None) -> MxOperand:
    """Random codes of at most 3 significant bits, over three binades or of all 4-bit ones; scales over four binades."""
    generator = torch.Generator().manual_seed(seed)
    if fmt == "e2m1":
        codes = torch.randint(0, 16, (rows, columns), generator=generator)
    else:
        mantissa = FORMATS[fmt].mantissa_bits
        binade = torch.randint(FORMATS[fmt].bias - 1, FORMATS[fmt].bias + 2, (rows, columns), generator=generator)
        fraction = torch.randint(0, 4, (rows, columns), generator=generator) << (mantissa - 2)
        codes = (torch.randint(0, 2, (rows, columns), generator=generator) << 7) | (binade << mantissa) | fraction
    powers = torch.randint(-2, 2, (rows, -(-columns // block)), generator=generator)
    scales = (powers + 127 if block == 32 else (powers + 7) << 3).to(torch.uint8)
    above = None if tensor_scale is None else torch.tensor([tensor_scale])
    codes = aligned_codes(codes.to(torch.uint8), FORMATS[fmt].bits)
    return MxOperand(codes, to_tiles(scales), fmt, block, columns, above)


def moved(one: MxOperand, device: str) -> MxOperand:
    above = None if one.tensor_scale is None else one.tensor_scale.to(device)
    return one._replace(codes=one.codes.to(device), scales=one.scales.to(device), tensor_scale=above)


def product_differences(device: str) -> tuple[int, list[str]]:
    """(comparisons, faults) of the kernel."""
    from megatron_lowprec.kernels.mx_gemm import triton

    found, compared = [], 0
    # the interpreter cuts what it adds to bf16
    compute_dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for (a_format, b_format, block), size, above in product(KINDS, SIZES, (None, 0.375)):
        M, N, K = size
        a, b = operand(M, K, a_format, block, 1, above), operand(N, K, b_format, block, 2)
        if device == "cpu":
            folds: tuple[bool, ...] = (True,)
        else:
            folds = (False, True) if torch.cuda.get_device_capability() >= (10, 0) or block == 32 else (True,)
        for folded, total in product(folds, (None, torch.full((M, N), 0.5))):
            if device == "cpu" and (total is not None) != (above is not None):
                continue  # the interpreter takes its time
            mine = total if total is None else total.to(device, copy=True)
            theirs = total if total is None else total.clone()
            # the interpreter cuts fp32 to bf16, a GPU rounds; these values are exact in both
            arguments = {"alpha": 16 / 9, "out_dtype": torch.float32, "compute_dtype": compute_dtype}
            got = triton.mx_gemm(moved(a, device), moved(b, device), **arguments, accumulate_into=mine, folds=folded)
            want = reference.mx_gemm(a, b, **arguments, accumulate_into=theirs)
            compared += 1
            if not torch.equal(got.cpu(), want):
                at = tuple((got.cpu() != want).nonzero()[0].tolist())
                found.append(
                    f"{a_format} {b_format} {block} {size} {above} folds {folded}, adds {total is not None}: "
                    f"{int((got.cpu() != want).sum())} differ, at {at} {got[at]}, not {want[at]}"
                )
    return compared, found


def square_differences(device: str) -> tuple[int, list[str]]:
    """(comparisons, faults) of codes of square blocks along columns, which the backend's weights have."""
    from megatron_lowprec.kernels.quantize.triton import quantize_mx

    found, cases = [], (("nvfp4_all", (37, 104)), ("nvfp4_four_over_six", (64, 48)), ("mxfp8_2d", (70, 64)))
    for name, size in cases:
        spec = get_recipe(name).fprop.weight
        assert spec is not None
        rule, x = mx_rule(spec), torch.randn(size, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
        assert rule is not None
        ways = with_amaxes(x, rule, None, Direction())
        rng_step = torch.zeros(2, dtype=torch.int32, device=device)
        codes, scale, above = quantize_mx(x, rule, **ways, rng_step=rng_step, codes=True).direction(False)
        want = quantize_by_reference(x.t(), spec)
        assert codes is not None
        assert scale is not None
        entries = unpacked(codes) if rule.fmt.bits == 4 else codes
        same = torch.equal(entries[:, : size[0]], encode(want.data, rule.fmt))
        same = same and torch.equal(scale, want.scale.repeat_interleave(rule.block_rows, 0)[: size[1]])
        same = same and (above is None or torch.equal(above, want.tensor_scale))
        found += [] if same else [f"square blocks of {name} {size}"]
    return len(cases), found


def differences(device: str) -> tuple[int, list[str]]:
    """(comparisons, faults)"""
    products, squares = product_differences(device), square_differences(device)
    return products[0] + squares[0], products[1] + squares[1]
