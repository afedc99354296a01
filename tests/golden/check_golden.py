#!/usr/bin/env python3
"""Compare quantizers with the golden cases beside this file, bit for bit where a peer's result is exact.

    python tests/golden/check_golden.py FOLDER                     # list the cases
    python tests/golden/check_golden.py FOLDER --adapter mod:fn    # exit 1 on a difference or a left-out result
        [--only SUBSTRING] [--require REGEX]                       # --require: cases that may not be declined

An adapter is called as fn(case, name, x, inputs, meta) and returns a dict of tensors keyed like the case's results, or
None for "not for me". ``case`` is the file's name; ``name`` the input's (with "@axis0" where blocks run along axis 0: x
is then transposed already), or the group's own name for cases that carry their inputs; ``inputs`` what else the case
hands in (noise, sign vectors, operands, amax); ``meta`` the file's metadata.

What is a peer's quirk and not its numerics is not compared; ``quirks`` and ``README.md`` say what that is.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open

Tensors = dict[str, torch.Tensor]
Adapter = Callable[[str, str, torch.Tensor | None, Tensors, dict[str, str]], Mapping[str, torch.Tensor] | None]
Tolerance = tuple[str, float]
"""("rtol", relative to each entry), ("norm", relative to the tensor's norm) or ("ulp", units in the last place)."""

NAN_CODES = {"fp8_e4m3": (0x7F, 0xFF), "fp8_e5m2": (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)}
SIGN_BIT = {"fp4_e2m1": 0x8, "fp6_e2m3": 0x20, "fp6_e3m2": 0x20, "fp8_e4m3": 0x80, "fp8_e5m2": 0x80}
LARGEST = {"fp4_e2m1": 6.0, "fp6_e2m3": 7.5, "fp6_e3m2": 28.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
LARGEST_CODE = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}
MANTISSA_AND_MIN_EXPONENT = {"fp4_e2m1": (1, 0), "fp8_e4m3": (3, -6)}
TILE = {
    "token": (1, 128),
    "token32": (1, 32),
    "block": (128, 128),
    "channel": (128, 1),
    "two": (1, 16),
    "single": (1, 16),
}
HANDED_IN = re.compile(r"noise\d*|sign\d*|x|w|dy|grad_output|amax|old_scale|sizes|in\..*")
FOR_INFORMATION = re.compile(
    r"linear_backward\w+:y|mx_\w+:dequant|\w+:((\w+\.)?quirk_\w+|S|torch_\w+|history_after|fp4\..*|(\w+\.)?amax(_t)?)"
)
TOLERANCES: tuple[tuple[str, str, Tolerance], ...] = (
    ("mxfp4_alg2", "dequant", ("rtol", 3e-7)),  # the peer divides by 3 in fp32 where we divide by 3/4: 2 roundings
    ("rht_", "y", ("norm", 1e-5)),  # any order of summation
    ("linear_backward", "grad_", ("norm", 1e-5)),  # any order of summation
    ("fp8block_deepgemm", "sf", ("ulp", 1)),  # fl(amax / M) there, fl(1 / fl(M / amax)) here
    ("fp8_te_delayed", "scale_", ("ulp", 1)),  # the peer multiplies by a reciprocal
    ("optim_fp8_torchao", "scale", ("rtol", 1e-6)),  # as DeepGEMM's, of moments updated in another order of operations
    ("optim_fp8_coat", "scale", ("rtol", 1e-5)),  # 1 - beta2 is that of fp32 there, 1e-6 off at .99
    ("optim_fp8_", "p", ("norm", 2e-5)),  # likewise; weights in bf16 are one step apart in places
    ("nvfp4_linear_te", "", ("norm", 1e-6)),  # any order of summation
    ("nvfp4_mseden", "dequant", ("rtol", 1e-6)),  # any order of summation in the rotation
    ("nvfp4_", "dequant", ("rtol", 3e-7)),  # the peer multiplies by the scale above last
    ("nvfp4_mseden", "next_amax", ("rtol", 1e-6)),
)


ANY_ZERO = (
    *("mx_microxcaling", "nvfp4_te", "nvfp4_linear_te", "nvfp4_ragged_te", "nvfp4_4over6", "nvfp4_sr"),
    *("nvfp4_rtn_quartet2", "nvfp4_eden_quartet2", "nvfp4_mseden_quartet2", "mxfp4_tetrajet"),
)
"""Cases of peers that drop or add signs of zero."""


class Group(NamedTuple):
    """One input's share of a case."""

    x: torch.Tensor | None
    handed_in: Tensors
    results: Tensors


class Comparison(NamedTuple):
    """What one group gave."""

    entries: int
    differences: list[str]
    left_out: list[str]
    declined: bool


def load(folder: Path, case: str) -> tuple[Tensors, dict[str, str]]:
    """Arrays and metadata of a case."""
    with safe_open(str(folder / f"{case}.safetensors"), "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def cases(folder: Path) -> list[str]:
    """Names of all cases in the folder."""
    return sorted(path.stem for path in folder.glob("*.safetensors") if path.stem != "inputs")


def groups(case: str, arrays: Tensors, inputs: Tensors) -> dict[str, Group]:
    """A case's arrays by group, without what is there for information only."""
    found: dict[str, Group] = {}
    for key, value in arrays.items():
        # names of inputs may hold dots themselves (ties.fp4_e2m1): the longest that fits
        fit = [name + axis for name in inputs for axis in ("", "@axis0") if key.startswith(f"{name}{axis}.")]
        carries_inputs = case.startswith(
            ("rht_", "element_formats", "fp8_te_delayed", "greedy_", "wgmma_", "nvfp4_linear", "nvfp4_mseden", "optim_")
        )
        name = max(fit, key=len) if fit else key.split(".", 1)[0] if carries_inputs else ""
        what = key[len(name) + 1 :] if name else key
        group = found.setdefault(name, Group(_x_of(name, inputs), {}, {}))
        (group.handed_in if HANDED_IN.fullmatch(what) else group.results)[what] = value
    if "sample_f32" in found:
        found["sample_f32"] = found["sample_f32"]._replace(x=found["sample_f32"].handed_in.get("x"))
    # the peer's python reference and its kernel disagree about these: README.md
    skip = {"e8m0"} | ({n for n in found if n.startswith("nonfinite")} if case.startswith("fp8block_te") else set())
    return {n: g for n, g in found.items() if n not in skip and wanted(case, g)}


def wanted(case: str, group: Group) -> Tensors:
    """The group's results that are compared."""
    return {key: value for key, value in group.results.items() if not FOR_INFORMATION.fullmatch(f"{case}:{key}")}


def _x_of(name: str, inputs: Tensors) -> torch.Tensor | None:
    base = name.split("@")[0]
    if base in inputs:
        return inputs[base].t().contiguous() if name.endswith("@axis0") else inputs[base]
    if name in ("all_fp16", "all_bf16"):
        bits = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16))
        return bits.view(torch.float16 if name == "all_fp16" else torch.bfloat16).float()
    return None


def compare_group(case: str, name: str, group: Group, meta: dict[str, str], adapter: Adapter) -> Comparison:
    """Call the adapter for one group and compare what it gives."""
    got = adapter(case, name, group.x, group.handed_in, meta)
    if got is None:
        return Comparison(0, [], [], declined=True)
    entries, differences, left_out = 0, [], []
    for key, want in wanted(case, group).items():
        if key not in got:
            left_out.append(f"{case}:{name}:{key}")
            continue
        result = got[key]
        if _packed(case, key):
            result, want = _unpack_fp4(result), _unpack_fp4(want)
        skip = quirks(case, key, want, group)
        entries += int((~skip).sum())
        found = _different(case, key, result, want, group.x, skip)
        if found:
            differences.append(f"{case}:{name}:{key}: {found} of {want.numel()}")
    return Comparison(entries, differences, left_out, declined=False)


def _format_of(case: str, key: str) -> str:
    if case == "element_formats":
        return key
    named = next((fmt for fmt in LARGEST if fmt in case), None)
    return named or ("fp4_e2m1" if case.startswith(("nvfp4", "mxfp4", "fp4")) else "fp8_e4m3")


def _is_codes(case: str, key: str) -> bool:
    return key.rsplit(".", 1)[-1] in ("codes", "codes_t") or case == "element_formats"


def _packed(case: str, key: str) -> bool:
    two_a_byte = "microxcaling" not in case and case != "element_formats"
    return two_a_byte and _is_codes(case, key) and _format_of(case, key) == "fp4_e2m1"


def _different(
    case: str, key: str, got: torch.Tensor, want: torch.Tensor, x: torch.Tensor | None, skip: torch.Tensor
) -> str:
    """How many entries differ, or a sentence; empty where none does."""
    fmt = _format_of(case, key)
    if case == "element_formats" and x is not None and fmt in LARGEST_CODE:
        # the peer does not saturate these two, we do
        largest = LARGEST_CODE[fmt] | (torch.signbit(x).to(want.dtype) << 7)
        want = torch.where(x.isfinite() & (x.abs() > LARGEST[fmt]), largest, want)
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    how = next((how for prefix, part, how in TOLERANCES if case.startswith(prefix) and part in key), None)
    any_zero = case.startswith(ANY_ZERO)
    if not want.is_floating_point():
        bad = _codes_differ(got.to(want.dtype), want, fmt if _is_codes(case, key) else "", any_zero)
    elif how and how[0] == "norm":
        error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300))
        return "" if error <= how[1] else f"relative error {error:.2e}"
    else:
        bad = _floats_differ(got, want, how, any_zero)
    count = int((bad & ~skip).sum())
    return str(count) if count else ""


def _unpack_fp4(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def _codes_differ(got: torch.Tensor, want: torch.Tensor, fmt: str, any_zero: bool) -> torch.Tensor:
    bad = got != want
    if fmt in NAN_CODES:
        nan = torch.tensor(NAN_CODES[fmt], dtype=want.dtype)
        bad &= ~(torch.isin(got, nan) & torch.isin(want, nan))
    if any_zero and fmt:
        magnitude = SIGN_BIT[fmt] - 1
        bad &= ~(((got & magnitude) == 0) & ((want & magnitude) == 0))
    return bad


def _floats_differ(got: torch.Tensor, want: torch.Tensor, how: Tolerance | None, any_zero: bool) -> torch.Tensor:
    g, w = got.double(), want.double()
    same = (g == w) | (g.isnan() & w.isnan())
    if how and how[0] == "rtol":
        same |= (g - w).abs() <= how[1] * w.abs()
    elif how and how[0] == "ulp":
        same |= (got.float().view(torch.int32) - want.float().view(torch.int32)).abs() <= how[1]
    elif not any_zero:
        same &= (torch.signbit(got) == torch.signbit(want)) | w.isnan()
    return ~same


def quirks(case: str, key: str, want: torch.Tensor, group: Group) -> torch.Tensor:
    """Mask of entries that are not compared: payloads of NaN blocks, and the peers' quirks."""
    x, given, results = group
    masks = [results["quirk_blocks"].bool()] if "quirk_blocks" in results else []
    if key == "codes" and "scale_e8m0" in results:
        masks.append(results["scale_e8m0"] == 255)
    of, dot, what = key.rpartition(".")
    marks = results.get(f"{of}{dot}quirk_elements")
    if marks is not None and what in ("codes", "dequant"):
        masks.append(marks.bool())
    if case == "element_formats" and x is not None:
        masks.append(~x.isfinite())
    if case == "scale_msamp":  # an infinite amax; max / amax beyond fp32
        masks.append(given["amax"].isinf() | want.isinf())
    kind, _, what = key.partition(".")
    step = None  # of a code, where the peer's order of fp32 operations shows at ties
    if case == "fp8block_deepgemm_fp32scale" and what == "codes":
        step = results[f"{kind}.sf"].double()
    if case == "nvfp4_torchao" and what != "tensor_scale":
        byte = results[f"{kind}.scale_e4m3"]
        masks.append((byte == 0x08) | (byte == 0x7F))  # the block scale's floor; NaN where all of the tensor is zero
        if key == "two.codes":
            step = byte.view(torch.float8_e4m3fn).double() * results["two.tensor_scale"].double()
    if step is not None and x is not None:
        for axis in (0, 1):
            step = step.repeat_interleave(TILE[kind][axis], axis).narrow(axis, 0, x.shape[axis])
        masks.append(_near_tie(x.double() / step, "fp4_e2m1" if case.startswith("nvfp4") else "fp8_e4m3"))
    skip = torch.zeros(want.shape, dtype=torch.bool)
    for mask in masks:
        for axis in range(mask.dim()):  # a block's mark counts for each of its entries
            mask = mask.repeat_interleave(max(1, want.shape[axis] // mask.shape[axis]), axis)
        skip |= mask if mask.shape == want.shape else False
    return skip


def _near_tie(v: torch.Tensor, fmt: str) -> torch.Tensor:
    """Where float64 v is so close to a tie of the format that the order of a few fp32 operations decides."""
    mantissa_bits, min_exponent = MANTISSA_AND_MIN_EXPONENT[fmt]
    steps = torch.ldexp(v.abs(), mantissa_bits - (torch.frexp(v)[1] - 1).clamp(min=min_exponent))
    return (steps - steps.floor() - 0.5).abs() < 4e-7 * steps  # three fp32 roundings of 2^-23 each


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapter")
    parser.add_argument("--only", default="")
    parser.add_argument("--require", default="")
    options = parser.parse_args()
    chosen = [case for case in cases(options.folder) if options.only in case]
    if not options.adapter:
        print("\n".join(chosen))
        return 0
    sys.path.insert(0, str(Path.cwd()))
    module, _, function = options.adapter.partition(":")
    adapter = getattr(importlib.import_module(module), function)
    inputs, _ = load(options.folder, "inputs")
    entries, faults, declined = 0, [], []
    for case in chosen:
        arrays, meta = load(options.folder, case)
        for name, group in groups(case, arrays, inputs).items():
            found = compare_group(case, name, group, meta, adapter)
            entries += found.entries
            faults += found.differences + [f"{left_out}: left out" for left_out in found.left_out]
            if found.declined:
                declined.append(f"{case}:{name}")
    faults += [f"{d}: required" for d in declined if options.require and re.search(options.require, d.split(":")[0])]
    print("\n".join([*faults, f"declined: {', '.join(declined) or 'none'}"]))
    print(f"compared {entries} entries, {len(faults)} results differ or are missing")
    return int(bool(faults) or not entries)


if __name__ == "__main__":
    sys.exit(main())
