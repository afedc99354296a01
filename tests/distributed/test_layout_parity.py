"""A part of ``make test-layout-parity``: each layout once, each family of recipes once.

The one-process runs use this process. Two launches, of two processes by the tool and of four, rebuild their
model-parallel groups for each layout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import fork_ranks
from tests.once import once
from tests.training.conftest import driving
from tests.weekly import also_weekly
from tools.layout_parity import layouts, plan, worker
from tools.layout_parity.compare import Verdict, compare
from tools.layout_parity.launch import Runner
from tools.layout_parity.layouts import Layout

# Layout -> the recipe that runs on it.
COVER = {
    "gpt TP2": "nvfp4_all",
    "gpt TP2+SP": "fp8_blockwise",
    "gpt PP2": "fp8_delayed",
    "gpt PP2 interleaved": "mxfp4_rht_sr",
    "gpt DP2": "mxfp8",
    "gpt DP2 distributed optimizer": "bf16",
    "gpt TP2xDP2": "bf16",
    "gpt TP2xPP2+SP": "fp8_mxfp4_rht_sr",
    "moe_tiny DP2": "bf16",
    "moe_tiny PP2": "bf16",
    "moe_tiny EP2": "nvfp4_all",
    "moe_tiny TP2+SP": "mxfp4",
    # bf16 draws and regroups nothing, so that losses behind updates are compared, and the layers' gradients with them
    **{f"deepseek_tiny {layout}": "bf16" for layout in ("DP2", "PP2", "EP2", "TP2+SP")},
}
WEEKLY = {
    "gpt TP2xDP2",
    "moe_tiny EP2",
    *(f"{model} {layout}" for model in ("moe_tiny", "deepseek_tiny") for layout in ("DP2", "PP2", "TP2+SP")),
}
EACH_TIME = [layout for layout in COVER if layout not in WEEKLY]
STEPS = 2


def named(layout: Layout) -> str:
    return f"{layout.model} {layout.name}"


def selected(recipes: Sequence[str], precision: str = "fp64") -> plan.Selection:
    return plan.Selection(recipes, steps=STEPS, seeds=(), precisions=(precision,))


def launches(folder: Path, cover: Sequence[str]) -> list[plan.Launch]:
    chosen_layouts = [layout for layout in layouts.LAYOUTS if named(layout) in cover]
    one, two, four = (plan.Launch(f"of {count}", count) for count in (1, 2, 4))
    precisions = {layout: "fp32" if layout.distributed_optimizer else "fp64" for layout in chosen_layouts}
    for reference in layouts.ONE:
        for precision in ("fp64", "fp32"):
            chosen = [
                COVER[named(layout)]
                for layout in chosen_layouts
                if layout.model == reference.model and precisions[layout] == precision
            ]
            what = {"checks": ["losses"], "recipes": list(dict.fromkeys(chosen))}
            one.groups += [plan.group(reference, precision, selected(()), folder, **what)] if chosen else []
    for layout in chosen_layouts:
        recipe = COVER[named(layout)]
        what = {"checks": ["losses", "operands"], "recipes": [recipe]}
        groups = [plan.group(layout, precisions[layout], selected(()), folder, **what)]
        if named(layout) == "gpt TP2+SP":
            groups += plan.checks_of(layout, plan.Selection([recipe], checks=("stock",), precisions=()), folder)
            gated = Layout(layout.name, 2, layout.flags, "gated")
            groups.append(plan.group(gated, "fp32", selected(()), None, checks=["operands"], recipes=["mxfp4_rht_sr"]))
        if named(layout) == "gpt DP2":
            noise = plan.checks_of(layout, plan.Selection(["mxfp4_rht_sr"], checks=("noise",)), folder)
            groups += [{**group, "layers": 4} for group in noise]
        (two if layout.processes == 2 else four).groups += groups
    flags = [group["flags"] for launch in (one, two, four) for group in launch.groups]
    loaded = {line[line.index("--load") + 1] for line in flags if "--load" in line}
    bases = plan.base_launch(selected(()), folder).groups
    one.groups = [group for group in bases if group["save"] in loaded] + one.groups
    return [one, two, four]


@pytest.fixture(scope="module")
def cover(weekly: bool) -> list[str]:
    """The layouts of this run."""
    return list(COVER) if weekly else EACH_TIME


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, cover: list[str]) -> list[Verdict]:
    return compare(Runner(once(tmp_path_factory, "layout-parity", lambda folder: run(folder, cover))).rows())


def run(folder: Path, cover: Sequence[str]) -> None:
    one, two, four = launches(folder, cover)
    with driving(folder):
        worker.main({"out": str(folder / "one.rows.jsonl"), "groups": one.groups})
    runner = Runner(folder)
    runner.run([two])
    assert runner.done[0].code == 0, runner.done[0].said
    job = folder / "four.json"
    job.write_text(json.dumps({"out": str(folder / "four.rows.jsonl"), "groups": four.groups}))
    fork_ranks(4, ["-m", "tools.layout_parity.worker", str(job)])


def test_the_cover_has_every_layout() -> None:
    assert set(COVER) == {named(layout) for layout in layouts.LAYOUTS}
    families = {"bf16", "fp8_delayed", "fp8_blockwise", "mxfp8", "nvfp4_all"}
    assert families | {"mxfp4_rht_sr"} <= {COVER[layout] for layout in EACH_TIME}


@pytest.mark.slow
@pytest.mark.parametrize("layout", also_weekly(COVER, EACH_TIME))
@pytest.mark.parametrize("check", ["losses", "operands"])
def test_a_layout_changes_no_recipe(verdicts: list[Verdict], layout: str, check: str) -> None:
    found = [v for v in verdicts if v.check == check and f"{v.model} {v.layout}" == layout]
    assert len(found) == 1
    assert found[0].ok, found[0].text
    if check == "losses" and not found[0].why:
        assert max(found[0].first, found[0].later) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("check", "count"), [("stock", 1), ("noise", 2), ("operands", 1)])
def test_all_other_checks_hold(verdicts: list[Verdict], cover: list[str], check: str, count: int) -> None:
    found = [verdict for verdict in verdicts if verdict.check == check]
    assert len(found) == count + (len(cover) if check == "operands" else 0)
    assert [v.text for v in found if not v.ok] == []
