"""Main figures of measurements, computed again from the JSON beside their pages."""

from __future__ import annotations

import json
import re
from statistics import median

from tests.docs.archived_columns import RESULTS
from tests.docs.page_tables import shown, table, within


def test_cost_and_peaks_without_cached_weights() -> None:
    """Steps from the fifth of 6.7B and the third of 8B on, as the runs of fewer iterations allow."""
    costs, shares, apart = [], [], []
    for model, recipe, first, ends in (("8b", "fp8_current", 3, [""]), ("6.7b", "fp8_delayed", 5, ["", ", again"])):
        data = json.loads((RESULTS / f"memory-peaks/uncached-{model}.json").read_text(encoding="utf-8"))
        variants = {row["variant"]: row for row in data["tables"][0]["rows"]}
        names = (f"{recipe} --no-cache-weights", recipe)
        for end in ends:
            steps = [
                median(step["ms"] for step in variants[name + end]["iterations"] if step["iteration"] >= first)
                for name in names
            ]
            costs.append(100 * (steps[0] / steps[1] - 1))
        peaks = {name: run["run"]["peak_memory_bytes"] for name, run in data["runs"].items()}
        shares += [peaks[name] / peaks["bf16"] for name in names]
        losses = [[row["lm loss"] for row in data["runs"][name]["metrics"]] for name in names]
        apart.append(next(abs(ours - theirs) for ours, theirs in zip(*losses, strict=True) if ours != theirs))
    page = (RESULTS / "memory.md").read_text(encoding="utf-8")
    found = re.search(
        r"costs ([\d.]+)% of a step of Llama 3 8B .* ([\d.]+) and ([\d.]+)% of one of 6.7B .*"
        r" ([\d.]+) instead of ([\d.]+), and ([\d.]+) instead of ([\d.]+), of bf16's peak",
        page,
    )
    assert found is not None
    assert [float(each) for each in found.groups()] == [
        *(within(each, 1) for each in costs),
        *(within(each, 3) for each in shares),
    ]
    found = re.search(r"Losses part by ([\d.]+) nats \(8B\) and ([\d.]+) at the third", page)
    assert found is not None
    assert [float(each) for each in found.groups()] == [within(each, 4) for each in apart]


def test_bits_of_runs_without_cached_weights_and_of_twins() -> None:
    """Runs _a and _b are twins, those of _u had no cached weights, those of det deterministic algorithms."""
    data = json.loads((RESULTS / "memory-peaks/uncached-twins.json").read_text(encoding="utf-8"))
    bits: dict[str, dict[str, tuple[list[str], list[float]]]] = {}
    for name, run in data["runs"].items():
        variant, _, letter = name.rpartition("_")
        bits.setdefault(variant, {})[letter] = (run["loss"], run["grad_norm"])
    assert len(bits) == 8
    for variant, runs in bits.items():
        different = [each != runs["a"] for letter, each in runs.items() if letter != "a"]
        assert different and not any(different) if "-det" in variant else all(different), variant
    page = (RESULTS / "memory.md").read_text(encoding="utf-8")
    found = re.search(r"of two and four layers by up to ([\d.]+) and ([\d.]+) in six", page)
    assert found is not None
    for model, apart in zip(("llama", "6.7b"), found.groups(), strict=True):
        differences = [
            abs(float.fromhex(ours) - float.fromhex(theirs))
            for way in ("eager", "graph")
            for ours, theirs in zip(bits[f"{model}-{way}"]["a"][0], bits[f"{model}-{way}"]["b"][0], strict=True)
        ]
        assert float(apart) == within(max(differences), 4)
    for model in ("6.7b", "llama"):
        assert bits[f"{model}-det"]["a"] == bits[f"{model}-detgraph"]["u"]


def test_kernels_of_experts_in_turn() -> None:
    rows = json.loads((RESULTS / "experts/in-turn.json").read_text(encoding="utf-8"))["rows"]
    page = (RESULTS / "experts.md").read_text(encoding="utf-8")
    found = re.search(
        r"takes ([\d.]+) ms .*?, ([\d.]+) by .*take ([\d.]+) to ([\d.]+)% off .*take ([\d.]+) ms, torch's ([\d.]+)\.",
        page,
    )
    assert found is not None
    (swiglu,) = (row for row in rows if "SwiGLU" in row["kernel"])
    off = [100 * (1 - row["after"]["median_ms"] / row["before"]["median_ms"]) for row in rows if "FP8" in row["kernel"]]
    bf16 = [row for row in rows if row["kernel"].startswith("bf16")]
    assert [float(each) for each in found.groups()] == [
        *(within(swiglu[name]["median_ms"], 2) for name in ("after", "before")),
        *(within(each, 1) for each in (min(off), max(off))),
        *(within(sum(row[name]["median_ms"] for row in bf16), 1) for name in ("ours", "torch")),
    ]


def test_quantizers_beside_what_bytes_and_instructions_predict() -> None:
    files = "emulated-mx-fourbit-quantize.json", "emulated-mx-instructions.json"
    measured, counted = (json.loads((RESULTS / file).read_text(encoding="utf-8")) for file in files)
    fewest: dict[tuple[str, ...], float] = {}
    for row in sorted(counted["rows"], key=lambda row: -row["total"]):
        fewest[row["format"], row["kind"], row["direction"]] = row["total"]
    found = {(row["format"], row["kind"], row["direction"], row["size"]): row for row in measured["tables"][0]["rows"]}
    rows = table("emulated-mx.md", f"quantizers {' '.join(files)} 8192x8192")
    assert len(rows) == sum(key[3] == "8192x8192" for key in found) == 25
    for row in rows:
        name, kind, way = row["format"], row["rounding, transform"], row["direction"]
        run = found[name, kind, way, "8192x8192"]
        least = fewest.get((name, kind, way))
        if least is None:
            parts = ("columns",) if kind == "square" else ("rows", "columns")
            least = sum(fewest[name, kind, part] for part in parts)
        seconds_a_byte = run["of_same_copy"] * run["ms"] / 1e3 / run["moved_bytes"]
        amax = 2.0 if name == "nvfp4" else 0.0
        bytes_ = run["moved_bytes"] / 8192**2
        cast = max((bytes_ - amax) * seconds_a_byte, least / (0.75 * 132 * 128 * 1.7e9))
        predicted = bytes_ * seconds_a_byte / (amax * seconds_a_byte + cast)
        assert shown(row["bytes an entry"]) == bytes_
        assert shown(row["instructions an entry"]) == within(least, 1)
        assert shown(row["time, us"]) == within(1e3 * run["ms"], 0)
        for column, share in (
            ("of the large copy", run["of_large_copy"]),
            ("of a copy of the size", run["of_same_copy"]),
        ):
            assert shown(row[column].rstrip("%")) == within(100 * share, 0)
        assert shown(row["predicted"].rstrip("%")) == within(100 * predicted, 0)
