"""tools.bench.peers without a GPU: an emulated module takes the place of TransformerEngine."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec import recipes
from megatron_lowprec.te.translation import INSTALL
from tests.tools.bench_process import CPU, REPOSITORY, environment  # noqa: F401 - for main in this process
from tools.bench import shapes
from tools.bench.__main__ import main
from tools.bench.cases import layer
from tools.bench.commands import step
from tools.bench.peers import layers


class Emulated:
    """A TransformerEngine with a Linear that rounds operands to E4M3 under an FP8 recipe, or only says so."""

    def __init__(self, honest: bool = True) -> None:
        self.honest, self.recipe, self.calls = honest, None, []  # type: tuple[bool, Any, list[tuple[Any, bool | None]]]
        emulated = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, linear: Any, first: bool | None) -> torch.Tensor:
                quantized = emulated.rounded(linear.weight.detach())
                if first is False:
                    quantized = linear.kept
                elif first:
                    linear.kept = quantized
                ctx.x, ctx.weight, ctx.linear, ctx.first = emulated.rounded(x), quantized, linear, first
                return ctx.x @ quantized.t()

            @staticmethod
            def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
                weight = ctx.linear.weight
                fresh = ctx.first or getattr(weight, "overwrite_main_grad", False)
                weight.main_grad.mul_(0 if fresh else 1).add_((dy.t() @ ctx.x).float())

                return dy @ ctx.weight, None, None

        class Linear:
            def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
                assert options == {
                    "bias": False,
                    "params_dtype": torch.bfloat16,
                    "device": CPU,
                    "fuse_wgrad_accumulation": True,
                }
                self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=torch.bfloat16))

            def __call__(self, x: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
                emulated.calls.append((emulated.recipe, is_first_microbatch))
                return Function.apply(x, self, is_first_microbatch)

        self.Linear = Linear

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self.recipe is None or not self.honest:
            return x.detach()
        scale = 448 / x.detach().abs().max()
        return ((x.detach() * scale).to(torch.float8_e4m3fn).to(torch.float32) / scale).to(x.dtype)

    @contextmanager
    def autocast(self, recipe: Any) -> Iterator[None]:
        self.recipe = recipe
        yield
        self.recipe = None


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    return install_emulated(monkeypatch, Emulated())


def install_emulated(monkeypatch: pytest.MonkeyPatch, te: Emulated) -> Emulated:
    named = SimpleNamespace(
        Format={"HYBRID": "hybrid", "E4M3": "e4m3"},
        MMParams=SimpleNamespace,
        QParams=SimpleNamespace,
        DelayedScaling=partial(SimpleNamespace, kind="delayed"),
        Float8CurrentScaling=partial(SimpleNamespace, kind="current"),
        Float8BlockScaling=partial(SimpleNamespace, kind="blockwise"),
    )
    common = SimpleNamespace(recipe=named)
    package = SimpleNamespace(pytorch=te, common=common)
    for name, module in {"": package, ".pytorch": te, ".common": common, ".common.recipe": named}.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    return te


def test_transformer_engine_s_rows(emulated: Emulated, generator: torch.Generator) -> None:
    makes = layers._te_layers()
    fp8 = [f"TE {name}{end}" for name in ("fp8_delayed", "fp8_current", "fp8_blockwise") for end in ("", ", cached")]
    assert list(makes) == ["TE bf16", *fp8]
    asked = {}
    for row, make in makes.items():
        emulated.calls.clear()
        t = layer.tensors(shapes.LinearShape("check", "check", 64, 32), 16, CPU, generator)
        call = make(t)
        for _ in range(3):
            call(t)
        recipe, _ = emulated.calls[0]
        asked[row] = recipe
        cached = row.endswith("cached")
        assert [first for _, first in emulated.calls] == ([True, False, False] if cached else [None] * 3)
        one = t.dy.float().t() @ t.x.detach().float()
        added = 3 if cached else 1  # each call adds to main_grad; a step's first microbatch takes its place
        assert (t.main_grad - added * one).norm() < 0.1 * t.main_grad.norm()
    assert asked["TE bf16"] is None
    assert asked["TE fp8_delayed"].amax_history_len == 1024
    kinds = {row: (recipe.kind, recipe.fp8_format) for row, recipe in asked.items() if recipe is not None}
    for end in ("", ", cached"):
        assert kinds[f"TE fp8_delayed{end}"] == ("delayed", "hybrid")
        assert kinds[f"TE fp8_current{end}"] == ("current", "hybrid")
        assert kinds[f"TE fp8_blockwise{end}"] == ("blockwise", "e4m3")
    assert asked["TE fp8_blockwise"].use_f32_scales, "as in our recipe"


def test_the_gate_lets_fp8_through_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, emulated: Emulated, generator: torch.Generator
) -> None:
    makes = layers._te_layers()
    assert [layers.fault(row, make, CPU, generator) for row, make in makes.items()] == [None] * len(makes)
    install_emulated(monkeypatch, Emulated(honest=False))
    makes = layers._te_layers()
    assert layers.fault("TE bf16", makes["TE bf16"], CPU, generator) is None
    assert "expected 0.01 to 0.15" in str(layers.fault("TE fp8_current", makes["TE fp8_current"], CPU, generator)), (
        "that was bf16"
    )

    def broken(t: layer.Tensors) -> layers.Layer:
        raise RuntimeError("no such kernel")

    assert layers.fault("TE bf16", broken, CPU, generator) == "RuntimeError: no such kernel"


def test_the_readme_installs_the_tested_transformer_engine() -> None:
    assert f"\n{INSTALL}\n" in (REPOSITORY / "tools/bench/README.md").read_text()


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    makes, notes = layers.peer_layers(["te", "torchao"], CPU)
    assert makes == {}
    assert [note.split(":")[0] for note in notes] == ["peer te is missing", "peer torchao is missing"]
    assert "tools/bench/README.md" in notes[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["linear", "--peers", "apex"], "linear has te, torchao"), (["step", "--peers", "torchao"], "step has te")],
)
def test_an_unknown_peer_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("recipe", recipes())
def test_which_recipes_keep_a_weight(recipe: str, generator: torch.Generator) -> None:
    """Those, and only those, whose product does not change with a weight that changes within a step."""
    shape = shapes.LinearShape("check", "check", 128, 128)
    t = layer.tensors(shape, 32, CPU, generator)
    other = replace(t, weight=t.weight.detach() * 2)

    def outputs(cached: bool) -> tuple[bool, ...]:
        gemms = layer.RecipeGemms(recipe, CPU, cached=cached)
        with torch.no_grad():
            before, after = (
                (gemms.forward(t.x, w)[0], gemms.backward(t.dy, layer.unquantized(t.x, w), t.main_grad))
                for w in (t.weight, other.weight)
            )
        return tuple(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    assert any(outputs(cached=True)) == layer.keeps_weights(recipe)
    assert not any(outputs(cached=False))


@pytest.mark.slow
def test_a_peer_s_failure_costs_its_number_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plain(t: layer.Tensors) -> layers.Layer:
        return layer.plain_torch

    def large_only(t: layer.Tensors) -> layers.Layer:
        if t.x.shape[0] < 100:
            raise RuntimeError("wants 128 tokens")
        return layer.plain_torch

    makes = {"peer bf16": plain, "other bf16": large_only}
    monkeypatch.setattr(layers, "peer_layers", lambda names, device: (makes, ["peer te: of this test"]))
    out = tmp_path / "linear.json"
    asked = ["--shapes", "smoke", "--linears", "proj", "--recipes", "mxfp8", "--tokens", "32", "--rounds", "1"]
    assert main(["linear", "--device", "cpu", *asked, "--peers", "te", "--out", str(out)]) == 1
    rows = {row["recipe"]: row for row in json.loads(out.read_text())["tables"][0]["rows"]}
    ours = {"torch F.linear", "torch, bare GEMMs", "bf16", "mxfp8", "mxfp8, cached"}
    assert set(rows) == ours | set(makes)
    assert rows["other bf16"]["failed"] == "RuntimeError: wants 128 tokens"
    assert rows["peer bf16"]["over_bf16"] == rows["peer bf16"]["ms"] / rows["bf16"]["ms"]
    assert "peer te: of this test" in capsys.readouterr().out


@pytest.mark.slow
def test_step_compares_with_the_peer_s_own_bf16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def run(model: shapes.ModelShape, flags: list[str], args: object, processes: None) -> dict[str, Any]:
        asked.append(flags)
        ms = (5.0 if "transformer_engine" in flags else 4.0) * (1 if flags[-1] == "bf16" else 2)
        sizes = {"micro_batch": 2, "sequence": 128, "peak_gib": 1.0, "reserved_gib": 2.0, "first_seconds": 1.0}
        parts = {"kernel_ms": ms, "idle": None, "isolated_ms": ms, "update_ms": 1.0, "stock_update_ms": 1.0}
        return {"ms": ms, "low": ms, "high": ms, "losses": [1.0], "layers": "x", **sizes, **parts}

    monkeypatch.setattr(step, "in_fresh_process", run)
    monkeypatch.setattr(step, "absent", lambda name, device: None)
    out = tmp_path / "step.json"
    arguments = ["--shapes", "smoke", "--recipes", "mxfp8", "--peers", "te", "--out", str(out)]
    assert main(["step", "--device", "cpu", *arguments]) == 0
    rows = {row["recipe"]: row for row in json.loads(out.read_text())["tables"][0]["rows"]}
    assert list(rows) == ["bf16", "mxfp8", "TE bf16", "TE fp8_delayed", "TE fp8_current", "TE fp8_blockwise"]
    assert (rows["TE fp8_current"]["over_bf16"], rows["TE fp8_current"]["over_own"]) == (2.5, 2.0)
    assert rows["mxfp8"]["over_own"] == 2.0
    assert asked[-1] == ["--transformer-impl", "transformer_engine", "--recipe", "fp8_blockwise"]
