"""tools.bench megatron_lm: rows in processes of their own, their log, and what they may import."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from megatron_lowprec.errors import UserError
from tools.bench import shapes
from tools.bench.__main__ import build_parser, main
from tools.bench.apex.fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32
from tools.bench.commands import megatron_lm
from tools.bench.report import Report

WINDOW = (
    "iteration 5/ 10 | elapsed time per iteration (ms): {ms} | lm loss: {loss} | number of skipped iterations:   0 |"
)
SCRIPT = f"""
import importlib.util, pathlib, sys
seen = pathlib.Path({{seen!r}})
recipe = sys.argv[sys.argv.index("--spec") + 2] if "--spec" in sys.argv else "stock"
name = "te-seen" if importlib.util.find_spec("transformer_engine") else recipe
(seen / name).write_text((seen / "out.json").read_text() if (seen / "out.json").exists() else "")
if recipe == "fp8_delayed":
    raise RuntimeError("no such kernel")
for ms in (900.0, 50.0 if recipe == "bf16" else 100.0):
    print("{WINDOW}".format(ms=ms, loss=1.5))
"""


@pytest.fixture
def client(tmp_path: Path) -> Path:
    """What passes for a Megatron-LM: it logs two windows, fails under fp8_delayed, and copies --out as it starts."""
    folder = tmp_path / "Megatron-LM"
    for name in ("core/datasets/utils", "core/package_info", "training/initialize"):
        path = folder / "megatron" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("__init__.py").touch()
        path.write_text("MAJOR = 0\nMINOR = 19\n")
    (folder / "megatron/core/datasets/helpers_cpp.so").touch()
    (folder / "pretrain_gpt.py").write_text(SCRIPT.format(seen=str(tmp_path), ms="{ms}", loss="{loss}"))
    return folder


def arguments(client: Path, *more: str) -> list[str]:
    folders = ["--clients", str(client), "--megatron-core", str(client), "--shapes", "smoke"]
    return ["megatron_lm", "--device", "cpu", *folders, "--warm-up", "5", "--iterations", "5", *more]


def test_rows_that_fail_end_no_others_and_each_is_written(
    client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which main sets
    (tmp_path / "te/transformer_engine").mkdir(parents=True)
    (tmp_path / "te/transformer_engine/__init__.py").touch()
    out = ["--out", str(tmp_path / "out.json"), "--te", str(tmp_path / "te")]
    rows = ["--rows", "stock-bf16,spec-fp8_delayed,spec-bf16,te-bf16", "--rounds", "2"]
    assert main([*arguments(client), *rows, *out]) == 1
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    found = {row["row"]: row for row in table["rows"]}
    assert list(found) == ["stock-bf16", "spec-bf16", "spec-fp8_delayed", "te-bf16"]
    assert found["spec-fp8_delayed"]["failed"] == "exit code 1: RuntimeError: no such kernel"
    assert "Traceback" in "".join(found["spec-fp8_delayed"]["runs"][0]["last_lines"])
    assert found["spec-bf16"]["rounds"] == [50.0, 50.0]
    assert found["spec-bf16"]["over_stock"] == 0.5
    assert found["spec-bf16"]["tokens_per_second"] == pytest.approx(2 * 128 / 50e-3)
    # in the second round, TransformerEngine's row began with the others on disk; only it could import the library
    before = json.loads((tmp_path / "te-seen").read_text())["tables"][0]["rows"]
    assert [len(row["runs"]) for row in before] == [2, 2, 2, 1]


def test_a_row_has_a_time_limit(client: Path, tmp_path: Path) -> None:
    (client / "pretrain_gpt.py").write_text("import time\nwhile True: time.sleep(60)\n")
    args = build_parser().parse_args([*arguments(client), "--limit", "0.2"])
    found = megatron_lm.Client("Megatron-LM", "0.19", client, client)
    result = megatron_lm.in_fresh_process(shapes.MODELS["smoke"], found, "spec-bf16", args, tmp_path)
    assert result["failed"].startswith("it ran for more than 0.2 s")


@pytest.mark.parametrize(
    ("windows", "says"),
    [
        ([900.0], "1 windows of 2"),
        ([900.0, 50.0, 60.0], "3 windows of 2"),
    ],
)
def test_a_log_that_ended_early_has_no_number(windows: list[float], says: str) -> None:
    text = "\n".join(WINDOW.format(ms=ms, loss=1.5) for ms in windows)
    found = megatron_lm.read_log(text, 1, 1)
    assert says in found["failed"]
    assert "ms" not in found


@pytest.mark.parametrize("spoiled", [WINDOW.format(ms=50.0, loss="nan"), WINDOW.replace("  0 |", "  1 |")])
def test_spoiled_updates_have_no_number(spoiled: str) -> None:
    text = "\n".join([WINDOW.format(ms=900.0, loss=1.5), spoiled.format(ms=50.0, loss=1.5)])
    assert "not finite, or an update was skipped" in megatron_lm.read_log(text, 1, 1)["failed"]


def test_time_is_the_median_behind_the_warm_up() -> None:
    first = WINDOW.replace("iteration 5/", "iteration 1/").format(ms=9000.0, loss=1.6)  # which some releases log
    text = "\n".join([first, *(WINDOW.format(ms=ms, loss=1.5) for ms in (900.0, 50.0, 70.0, 55.0))])
    found = megatron_lm.read_log(text, 1, 3)
    assert (found["ms"], found["low"], found["high"]) == (55.0, 50.0, 70.0)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--rows", "spec-fp4"], "--rows spec-fp4: fits none of stock-bf16, "),
        (["--warm-up", "3"], "multiples of 5"),
        (["--shapes", "70b"], "no config"),
    ],
)
def test_errors_are_named(
    client: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(arguments(client, *more)) == 2
    assert says in capsys.readouterr().err


def test_a_client_needs_the_helpers_of_its_release(client: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has Megatron-core 0\.19; name a folder with megatron-core 0\.19"):
        megatron_lm.unpacked(client, [tmp_path], tmp_path / "copy")
    with pytest.raises(UserError, match="must be a folder or tarball of Megatron-LM"):
        megatron_lm.unpacked(tmp_path / "nothing", [client], tmp_path / "other")


def test_rows_of_transformer_engine_need_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert megatron_lm.chosen_rows(["spec-bf16", "te-*"], None, Report({}, {})) == ["spec-bf16"]
    assert "without --te" in capsys.readouterr().out
    assert "te-fp8_delayed-params-graphs" in megatron_lm.chosen_rows(["*"], Path("te"), Report({}, {}))


@pytest.mark.parametrize(("series", "own"), [("0.16", True), ("0.19", False)])
def test_transformer_engine_has_its_cross_entropy_where_megatron_lm_takes_it(series: str, own: bool) -> None:
    args = argparse.Namespace(micro_batch=None, warm_up=5, iterations=5)
    client = megatron_lm.Client("a", series, Path("a"), None)
    flags = megatron_lm.flags_of(shapes.MODELS["345m"], client, "te-fp8_delayed-params-graphs", args, Path("run"))
    assert ("--cross-entropy-fusion-impl" in flags) == own
    assert "--cross-entropy-loss-fusion" in flags
    assert flags[-3:] == ["--fp8-param-gather", "--cuda-graph-impl", "transformer_engine"]


def test_weight_gradients_without_apex_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    added: dict[str, object] = {}

    def addmm(main_grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **options: object) -> None:
        added.update(options, shape=(a @ b).shape)

    monkeypatch.setattr(torch, "addmm", addmm)
    main_grad = torch.zeros(3, 2)
    wgrad_gemm_accum_fp32(torch.ones(5, 2), torch.ones(5, 3), main_grad)
    assert added == {"out_dtype": torch.float32, "out": main_grad, "shape": (3, 2)}
