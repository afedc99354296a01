"""One launch of the fused MX kernel beside the reference: its case, its input, and what differs."""

from dataclasses import dataclass, fields

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import WHOLE, ShardSlice
from megatron_lowprec.kernels.quantize.coded_scale import PLAIN, CodedOptions
from megatron_lowprec.kernels.quantize.elements import unpacked
from megatron_lowprec.kernels.quantize.reference import encode, quantize_operand, scale_blocks, tensor_scale
from megatron_lowprec.kernels.quantize.rule import Direction, MxRule
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep, stream_key
from megatron_lowprec.quantization.tensor import as_numbers

MOMENT = RngStep(70_000, 3)
# a shard of a gated layer's fc1, and a plain one, at indices beyond 16 bits
SPANS = (ShardSlice(1 << 20, gate_offset=64, gate_stride=4096), ShardSlice(512))


@dataclass(frozen=True)
class Case:
    """One launch on [rows, columns], along ``ways`` ("r" rows, "c" columns), after a transform of ``block``."""

    rows: int
    columns: int
    dtype: torch.dtype
    fmt: str
    rule: str
    rounding: str
    block: int
    ways: str
    random_bits: int = 16
    sharded: bool = False
    mx: int = 32  # entries that share a scale
    codes: bool = False  # codes and scale bytes in the place of dequantized operands
    scale: str = "e8m0"
    target: float = 0.0  # of a tensor scale above coded ones; 0 for none
    square: bool = False  # blocks of as many rows
    plain: str = ""  # ways without the transform
    rounds: bool = False  # transformed values are rounded to the operand's dtype
    options: CodedOptions = PLAIN
    scale_rounding: str = "nearest_even"
    tiny: bool = False  # one entry only, whose quotient by the target underflows
    finite: bool = True  # the tensor's amax is that of its finite entries, as one from a history may be

    def __str__(self) -> str:
        given = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return "-".join(f"{field.name}={getattr(self, field.name)}" for field in given).replace("torch.", "")


def input_of(case: Case, device: str) -> torch.Tensor:
    """Normal numbers over 24 binades, and zeros of both signs, ties, Inf, NaN, huge and tiny numbers, a zero block."""
    generator = torch.Generator().manual_seed(case.rows * 1000 + case.columns)
    shape = (case.rows, case.columns)
    spread = 1 if case.options.four_over_six else 12  # more would leave one entry in a block
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-spread, spread, shape, generator=generator).float())
    x = x.to(case.dtype)
    edge = torch.tensor([0.0, -0.0, torch.inf, torch.nan, 1e-40, -1e-38, 3e38, 6.0, 0.25, -0.25, 2.5, 5.0, -torch.inf])
    where = torch.randperm(x.numel(), generator=generator)[: 3 * edge.numel()]
    x.view(-1)[where] = edge.repeat(3).to(case.dtype)
    x[:, :32] = 0
    x[: case.rows // 2, 32:64] = 6.0 * 2.0 ** torch.randint(-3, 3, (case.rows // 2, 32), generator=generator)
    if case.tiny:
        x = torch.zeros_like(x)
        x[0, 0] = 1e-42
    return x.to(device)


def differences(case: Case, device: str) -> list[str]:
    """What the kernel and the reference disagree about, one line a direction; empty where all bits agree."""
    from megatron_lowprec.kernels.hadamard.triton import scaled_signs
    from megatron_lowprec.kernels.quantize.triton import quantize_mx

    x, fmt = input_of(case, device), FORMATS[case.fmt]
    spans = SPANS if case.sharded else (WHOLE, WHOLE)
    headroom = 0.75 if case.rounding == "stochastic" and case.options == PLAIN else 1.0
    rng_step = torch.tensor(MOMENT, dtype=torch.int32, device=device)
    directions: dict[str, Direction] = {}
    wanted: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
    for way in case.ways:
        signs_key = stream_key(1, "sign", layer=2, linear="x", gemm=way)
        row_span, column_span = spans if way == "r" else spans[::-1]
        stream = RandomStream(
            stream_key(1, "rounding", layer=2, linear="x", gemm=way, operand=way), MOMENT, row_span, column_span
        )
        # drawn in the second place of a launch for two, as a layer has them
        block = 0 if way in case.plain else case.block
        scaled = scaled_signs((Key(), Key.of(signs_key)), rng_step, block)[1] if block else None
        matrix = x if way == "r" else x.t()
        if not case.square:
            matrix = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % (block or case.mx)))
        signs = RandomStream(signs_key, MOMENT).signs(block, x.device) if block else None
        if block and case.rounds:
            matrix, signs = hadamard_transform(matrix, signs).to(case.dtype), None
        amax = of_tensor = None
        if case.target:
            entries = matrix.float() if signs is None else hadamard_transform(matrix, signs)
            if case.finite:
                entries = entries.nan_to_num(0.0, 0.0, 0.0)
            amax = entries.abs().amax().view(1)
            of_tensor = tensor_scale(amax.view(1, 1), case.target, case.rule, largest=case.options.largest(fmt))
            assert case.rounding == "stochastic" or case.finite == bool(of_tensor.decode.isfinite())
        of_scales = stream.of_scales()
        directions[way] = Direction(Key.of(stream.key), scaled, amax, Key.of(of_scales.key))
        elements, scale = quantize_operand(
            matrix,
            fmt,
            (case.mx if case.square else 1, case.mx),
            scale_format=case.scale,
            of_tensor=of_tensor,
            scale_rule=case.rule,
            rounding=case.rounding,
            headroom=headroom,
            signs=signs,
            uniform=stream.uniform(matrix.shape[1], case.random_bits, x.device),
            scale_rounding=case.scale_rounding,
            scale_uniform=of_scales.uniform(matrix.shape[1], case.random_bits, x.device),
            options=case.options,
        )
        values = scale_blocks(elements.float(), as_numbers(scale, case.scale), (case.mx if case.square else 1, case.mx))
        wanted[way] = (elements, scale, values.to(x.dtype), None if of_tensor is None else of_tensor.decode)
    rule = MxRule(
        fmt,
        case.rule,
        case.rounding,
        case.random_bits,
        headroom,
        case.mx,
        block_rows=case.mx if case.square else 1,
        scale_fmt=FORMATS.get(case.scale),
        target=case.target or None,
        rounds_transform=case.rounds,
        scale_rounding=case.scale_rounding,
        options=case.options,
    )
    ways = {"rows": directions.get("r"), "columns": directions.get("c"), "rng_step": rng_step, "spans": spans}
    lines = []
    made = quantize_mx(x, rule, **ways, codes=case.codes)  # type: ignore[arg-type]
    for way, out, out_scale, of_tensor in (
        ("r", made.rowwise_data, made.rowwise_scale, made.rowwise_tensor_scale),
        ("c", made.columnwise_data, made.columnwise_scale, made.columnwise_tensor_scale),
    ):
        want = None if out is None else wanted[way][3]
        assert (want is None) == (of_tensor is None)
        if want is not None and of_tensor is not None:
            same = (of_tensor == want) | (of_tensor.isnan() & want.isnan())
            lines += difference(f"{case} tensor scale along {way}", same, of_tensor, want)
        if out is not None and not case.codes:
            out = out if way == "r" else out.t()
            want = wanted[way][2] if way == "r" else wanted[way][2].t()[: out.shape[0]]
            bits = torch.int16 if out.element_size() == 2 else torch.int32
            same = (out.view(bits) == want.contiguous().view(bits)) | (out.isnan() & want.isnan())
            lines += difference(f"{case} along {way}", same, out, want)
        elif out is not None:
            assert out_scale is not None
            elements, scale = wanted[way][:2]
            codes, want = out, encode(elements, fmt)
            if fmt.bits == 4:
                codes = unpacked(codes)
            sign_of_nan = elements.isnan() & ((codes ^ want) == 1 << (fmt.bits - 1))
            lines += difference(f"{case} codes along {way}", (codes == want) | sign_of_nan, codes, want)
            lines += difference(f"{case} scales along {way}", out_scale == scale, out_scale, scale)
    return lines


def difference(name: str, same: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """A line with the first disagreement; nothing where all is the same."""
    if bool(same.all()):
        return []
    at = tuple((~same).nonzero()[0].tolist())
    return [f"{name}: {int((~same).sum())} differ, at {at} {got[at]} instead of {want[at]}"]
