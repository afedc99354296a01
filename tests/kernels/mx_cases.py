"""Cases of the fused MX kernel against the reference, bit for bit; run interpreted on a CPU, and natively on a GPU.

``python -m tests.kernels.mx_cases`` runs the small set under Triton's interpreter, which must be chosen before Triton
is imported, and prints what differs.
"""

import os
import sys
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from megatron_lowprec.formats import ELEMENT_FORMATS, FORMATS
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import WHOLE, ShardSlice
from megatron_lowprec.kernels.quantize.coded_scale import PLAIN, CodedOptions
from megatron_lowprec.kernels.quantize.elements import unpacked
from megatron_lowprec.kernels.quantize.reference import encode, quantize_operand, scale_blocks, tensor_scale
from megatron_lowprec.kernels.quantize.rule import CodedMatrix, Direction, MxRule
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep, stream_key
from megatron_lowprec.quantization.tensor import as_numbers
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GemmSpec, HadamardSpec, QuantSpec
from megatron_lowprec.scaling import scale_rules

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


def small_cases() -> list[Case]:
    """A few launches that together pass through every branch; about a second each under the interpreter."""
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = [
        Case(37, 128, bf16, "e2m1", "floor", "nearest_even", 0, "r"),
        Case(37, 128, bf16, "e2m1", "floor", "nearest_even", 0, "c"),
        Case(40, 128, fp32, "e4m3", "round_up", "nearest_even", 0, "rc"),
        Case(37, 128, bf16, "e5m2", "even", "half_away", 0, "rc"),
        Case(37, 128, fp32, "e2m3", "ceil", "stochastic", 0, "rc", mx=16),
        Case(37, 128, bf16, "e2m1", "floor", "stochastic", 64, "rc", sharded=True),
        Case(70, 64, fp32, "e2m1", "floor", "stochastic", 32, "rc", random_bits=8),
        Case(20, 128, bf16, "e3m2", "floor", "half_away", 128, "c", mx=64),
        Case(20, 256, bf16, "e2m1", "floor", "stochastic", 256, "rc"),
        Case(37, 64, bf16, "e4m3", "round_up", "nearest_even", 0, "rc", codes=True),
        Case(37, 64, bf16, "e5m2", "even", "nearest_even", 0, "c", codes=True),
        Case(37, 64, bf16, "e2m1", "floor", "stochastic", 64, "rc", mx=16, codes=True),
        Case(37, 64, fp32, "e3m2", "ceil", "nearest_even", 0, "r", codes=True),
        *nvfp4_cases(),
    ]
    return cases + [Case(37, 64, fp32, *row, "nearest_even", 0, "rc", codes=True) for row in uncovered(cases)]


def nvfp4_cases() -> list[Case]:
    """Coded scales, tensor scales, transforms of one direction and square blocks: each branch once."""
    bf16, fp32 = torch.bfloat16, torch.float32
    nvfp4, nearest, sr = ("e2m1", "product"), "nearest_even", "stochastic"
    scales: dict[str, Any] = {"mx": 16, "scale": "e4m3", "target": 2688.0}
    return [
        Case(37, 128, bf16, *nvfp4, nearest, 0, "r", **scales),
        Case(37, 128, bf16, *nvfp4, sr, 16, "rc", plain="r", rounds=True, sharded=True, **scales),
        Case(37, 64, bf16, *nvfp4, nearest, 16, "rc", plain="r", rounds=True, codes=True, **scales),
        Case(37, 64, fp32, *nvfp4, nearest, 0, "c", codes=True, finite=False, **scales),
        Case(37, 104, bf16, *nvfp4, nearest, 0, "rc", square=True, **scales),
        Case(37, 64, bf16, "e1m2", "quotient", sr, 0, "c", random_bits=8, **(scales | {"scale": "ue4m3"})),
        Case(37, 64, bf16, "e4m3", "quotient", nearest, 0, "rc", codes=True, mx=16, scale="ue5m3"),
        Case(70, 64, bf16, "e4m3", "round_up", nearest, 0, "rc", square=True),
        *(
            Case(20, 128, bf16, *nvfp4, nearest, 128, "rc", plain=way, rounds=True, codes=True, **scales)
            for way in "rc"
        ),
        *rival_cases(),
    ]


def rival_cases() -> list[Case]:
    """Four-over-six by each measure, in square blocks too, scales that are not 0, and corrections."""
    bf16, nearest, sr = torch.bfloat16, "nearest_even", "stochastic"
    scales: dict[str, Any] = {"mx": 16, "scale": "e4m3"}
    mse, largest = CodedOptions(four_over_six="mse"), CodedOptions(4.0, "abs_max", "flush")
    eden = CodedOptions(6 / (17 / 16 * 0.93), zero_code="one", group=32)
    target = 255.99 * eden.largest(FORMATS["e2m1"])
    corrected: dict[str, Any] = {"target": target, "options": eden, "scale_rounding": sr}
    return [
        Case(37, 64, bf16, "e2m1", "base", nearest, 0, "rc", target=1536.0, options=mse, codes=True, **scales),
        Case(37, 72, bf16, "e2m1", "base", nearest, 0, "rc", target=1536.0, options=mse, square=True, **scales),
        Case(37, 64, bf16, "e2m1", "divided", sr, 16, "c", target=1536.0, options=CodedOptions(None, "mae"), **scales),
        Case(37, 72, bf16, "e2m1", "product", nearest, 0, "rc", options=largest, square=True, **scales),
        Case(37, 64, bf16, "e2m1", "divided", nearest, 32, "rc", sharded=True, **corrected, **scales),
        Case(37, 64, bf16, "e2m1", "product", nearest, 0, "r", scale_rounding=sr, random_bits=8, codes=True, **scales),
    ]


def uncovered(cases: list[Case]) -> list[tuple[str, str]]:
    """(format, scale rule) pairs with each row of both tables that no case has."""
    formats, rules = list(ELEMENT_FORMATS), scale_rules("e8m0")
    pairs = [(formats[i % len(formats)], rules[i % len(rules)]) for i in range(max(len(formats), len(rules)))]
    known = {case.fmt for case in cases}, {case.rule for case in cases}
    return [(fmt, rule) for fmt, rule in pairs if fmt not in known[0] or rule not in known[1]]


def gpu_cases() -> list[Case]:
    """Every format, scale rule, rounding, block, direction and dtype, at odd sizes."""
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = [
        Case(*size, dtype, "e2m1", "floor", rounding, block, ways, sharded=block == 64)
        for (*size, dtype), rounding, block, ways in product(
            ((37, 256, bf16), (1000, 1024, bf16), (37, 256, fp32)),
            ("nearest_even", "stochastic"),
            (0, 32, 64, 128, 256),
            ("r", "c", "rc"),
        )
    ]
    rules = (("e4m3", "round_up"), ("e5m2", "even"), ("e2m3", "ceil"), ("e3m2", "floor"))
    cases += [
        Case(37, 256, bf16, *rule, rounding, block, "rc")
        for rule, rounding, block in product(rules, ("nearest_even", "half_away", "stochastic"), (0, 64))
    ]
    cases += [Case(333, 256, bf16, *rule, "nearest_even", 0, ways, codes=True) for rule in rules for ways in ("r", "c")]
    cases += [
        Case(333, 512, bf16, "e2m1", "floor", rounding, block, ways, codes=True)
        for rounding, block, ways in product(("nearest_even", "stochastic"), (0, 64), ("r", "c", "rc"))
    ]
    cases += [
        Case(333, 256, bf16, "e2m1", "floor", "stochastic", block, "rc", mx=mx, codes=codes)
        for mx, block, codes in product((16, 64), (0, 64), (False, True))
    ]
    cases += [
        replace(case, rows=rows, columns=columns + -columns % max(case.block, case.mx))
        for case, (rows, columns) in product(nvfp4_cases(), ((333, 512), (1000, 1056)))
    ]
    return cases + [Case(333, 256, bf16, *row, "nearest_even", 0, "rc", codes=True) for row in uncovered(cases)]


def nvfp4_recipe() -> Recipe:
    """TransformerEngine's NVFP4."""
    by_row = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0))
    square, drawn = replace(by_row, granularity="16x16"), replace(by_row, rounding="stochastic")
    return Recipe(
        "nvfp4_here",
        "",
        fprop=GemmSpec(input=by_row, weight=square),
        dgrad=GemmSpec(grad_output=drawn, weight=square),
        wgrad=GemmSpec(grad_output=drawn, input=by_row, hadamard=HadamardSpec(16, signs="nvfp4", output="operand")),
    )


def two_outputs_recipe() -> Recipe:
    """NVFP4 of dy, transformed for both GEMMs: rounded to its dtype after the transform for wgrad only."""
    recipe = nvfp4_recipe()
    assert recipe.dgrad.grad_output is not None
    dgrad = GemmSpec(grad_output=recipe.dgrad.grad_output, hadamard=HadamardSpec(16, signs="nvfp4"))
    wgrad = replace(recipe.wgrad, input=None)
    return Recipe("two_outputs", "", dgrad=dgrad, wgrad=wgrad)


def quartet2_recipe() -> Recipe:
    """Quartet II but for the size of its transform: four-over-six, then corrected scales of fprop's operands."""
    forward = QuantSpec(
        "e2m1",
        scale=ScaleSpec("1x16", "e4m3", "divided", four_over_six="mse", zero_code="one"),
        tensor_scale=TensorScaleSpec(1536.0),
    )
    scale = ScaleSpec("1x16", "e4m3", "divided", "stochastic", block_target=6 / (17 / 16 * 0.93), zero_code="one")
    backward = replace(forward, scale=scale, correction="eden")
    again, transform = replace(backward, source="fprop"), HadamardSpec(32)
    return Recipe(
        "quartet2_here",
        "",
        fprop=GemmSpec(input=forward, weight=forward),
        dgrad=GemmSpec(grad_output=backward, weight=again, hadamard=transform),
        wgrad=GemmSpec(grad_output=backward, input=again, hadamard=transform),
    )


def linear_differences() -> list[str]:
    """A layer's GEMMs with operands by the interpreted kernel and by the reference: the host's side of the path."""
    from megatron_lowprec.kernels import dispatch
    from megatron_lowprec.kernels.amax import triton as amax
    from megatron_lowprec.kernels.quantize import triton
    from megatron_lowprec.linear.layer_tensors import SavedForBackward
    from megatron_lowprec.linear.linear_gemms import LinearGemms
    from megatron_lowprec.linear.linear_id import LinearId
    from megatron_lowprec.quantization.amax_history import AmaxHistory
    from megatron_lowprec.recipe.registry import get_recipe

    generator = torch.Generator().manual_seed(4)
    x, w, dy = (torch.randn(size, generator=generator).bfloat16() for size in ((70, 64), (192, 64), (70, 192)))
    place = LinearId(3, "mlp.linear_fc1", spans={"O": ShardSlice(192, gate_offset=96, gate_stride=192)}, split="O")
    lines, of_codes = [], x.numel() // 2
    for recipe, caches, launches, amaxes, held in (
        (get_recipe("mxfp4_rht_sr"), True, 5, 0, x.nbytes),  # a call for both directions of dy makes one for each
        # wgrad takes codes that fprop's cast of x wrote; twice for the operand of fprop's w that dgrad takes
        (quartet2_recipe(), True, 8, 6, of_codes),
        (quartet2_recipe(), False, 8, 5, of_codes),  # the amax of fprop's w serves dgrad
        (nvfp4_recipe(), True, 5, 3, x.nbytes),  # one for the weight serves both GEMMs and is made by another
        (nvfp4_recipe(), False, 6, 3, x.nbytes),
        (two_outputs_recipe(), True, 2, 2, x.nbytes),  # no call for both directions
    ):
        saved_bytes: list[int] = []

        def products(
            recipe: Recipe = recipe, caches: bool = caches, saved_bytes: list[int] = saved_bytes
        ) -> list[torch.Tensor]:
            run = LinearGemms(recipe, place, 1, AmaxHistory, lambda amax: amax * 1.5, cache_weights=caches)
            y, saved = run.forward(x, w, MOMENT, save_input=True)
            assert saved.x is not None
            saved_bytes.append(saved.x.nbytes)
            saved = SavedForBackward(*saved.tensors(), layout=saved.layout)
            both, total = run.grad_output(dy, MOMENT), torch.zeros(192, 64)
            dx = run.dgrad(both, w, MOMENT, saved.weight_amax)
            return [y, dx, run.wgrad(both, saved.input(), MOMENT, total, input_amax=saved.input_amax)]

        want, quantize_mx, operand_amaxes = products(), triton.quantize_mx, amax.operand_amaxes
        with (
            patch.object(dispatch, "has_mx_kernel", lambda _, rule: rule is not None),
            patch.object(triton, "quantize_mx", side_effect=quantize_mx) as taken,
            patch.object(amax, "operand_amaxes", side_effect=operand_amaxes) as found,
        ):
            got = products()
        if saved_bytes != [x.nbytes, held]:
            lines.append(f"{recipe.name}: bytes of x by the reference and by the kernel are {saved_bytes}")
        for made, expected, what in ((taken, launches, "the fused kernel"), (found, amaxes, "amaxes of operands")):
            if made.call_count != expected:
                lines.append(f"{recipe.name}: {made.call_count} calls for {what} instead of {expected}")
        lines += [
            f"{recipe.name}: {gemm} differs"
            for gemm, a, b in zip("fdw", got, want, strict=True)
            if not torch.equal(a, b)
        ]
    return lines


def coded_differences(device: str) -> list[str]:
    """fprop's operand with codes beside it, and what is quantized again from them instead of from fp32 values."""
    from megatron_lowprec.kernels.amax.triton import operand_amaxes
    from megatron_lowprec.kernels.quantize.triton import quantize_mx
    from megatron_lowprec.quantization.quantizer import mx_rule
    from megatron_lowprec.quantization.tensor import QuantizedTensor

    lines = []
    for dtype, recipe, finite in (
        (torch.bfloat16, quartet2_recipe(), True),
        (torch.float32, quartet2_recipe(), False),
    ):
        x = input_of(Case(83, 208, dtype, "e2m1", "divided", "nearest_even", 0, "r"), device)
        spec, again = recipe.fprop.input, recipe.wgrad.input
        assert spec is not None
        assert again is not None
        first, second = mx_rule(spec), mx_rule(again, recipe.wgrad.hadamard)
        assert first is not None
        assert second is not None
        # NaN and Inf make NaN of their blocks, or of all
        amax = (x.float().nan_to_num(0.0, 0.0, 0.0) if finite else x.float()).abs().amax().view(1)
        rng_step, rows = torch.tensor(MOMENT, dtype=torch.int32, device=device), Direction(amax=amax)
        options: dict[str, Any] = {"rng_step": rng_step, "rows": rows}
        plain, both = (quantize_mx(x, first, **options, beside=beside) for beside in (False, True))
        values = quantize_mx(x, first, **options, whole=True, out_dtype=torch.float32).rowwise_data
        assert plain.rowwise_data is not None
        assert both.rowwise_data is not None
        assert both.beside is not None
        assert plain.beside is None
        assert values is not None
        codes = QuantizedTensor(x.shape, x.dtype, spec, *both.beside[:2])
        codes.rowwise_tensor_scale = both.beside.tensor_scale
        way = Direction(Key(5, 6), torch.ones(32, device=device), amax.new_ones(1), Key(7, 8))

        def again_from(source: torch.Tensor | CodedMatrix, way: Direction = way) -> torch.Tensor | None:
            made = quantize_mx(source, second, columns=way, rng_step=rng_step, out_dtype=dtype)  # noqa: B023
            return made.columnwise_data

        for what, got, want in (
            ("values beside codes", both.rowwise_data, plain.rowwise_data),
            ("values of codes", codes.dequantize(), values),
            ("again from codes", again_from(both.beside), again_from(values)),
            ("amax of codes", *(operand_amaxes(one, rows=None, columns=way) for one in (both.beside, values))),
        ):
            assert got is not None
            assert want is not None
            same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
            lines += difference(f"{what} of {dtype}", same, got, want)
    return lines


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels import block_sum_kernel

    found = [line for case in small_cases() for line in differences(case, "cpu")] + linear_differences()
    found += coded_differences("cpu")
    found += block_sum_kernel.differences("cpu")
    print(*found, f"{len(small_cases())} cases compared", sep="\n")
    sys.exit(bool(found))
