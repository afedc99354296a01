"""tools/run_logs.py: steps and peaks from the logs of this driver and of Megatron-LM."""

import json
from pathlib import Path

import pytest

from tools.run_logs import main

LINE = (
    " iteration {:8d}/       3 | consumed samples: {:12d} | elapsed time per iteration (ms): {:.1f} | throughput per "
    "GPU (TFLOP/s/GPU): {:.1f} | learning rate: 1.5E-04 | global batch size:    32 | lm loss: 1.258E+01 | "
    "grad norm: 7.630 | number of skipped iterations:   0\n"
)


def log(folder: Path, name: str, ms: tuple[float, ...], *memory: str) -> None:
    folder.mkdir(exist_ok=True)
    lines = [LINE.format(at, 32 * at, each, 1e5 / each) for at, each in enumerate(ms, 1)]
    (folder / f"{name}.log").write_text("".join(lines) + "\n".join(memory))


def written(folder: Path, out: Path, *flags: str) -> dict[str, dict[str, object]]:
    assert (
        main([str(folder), "--sequence", "8192", "--gpus", "2", "--baseline", "bf16", "--out", str(out), *flags]) == 0
    )
    return {row["variant"]: row for row in json.loads(out.read_text())["tables"][0]["rows"]}


def test_rows_of_both_programs(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    log(
        folder,
        "bf16",
        (900.0, 210.0, 200.0),
        "memory: 60.5 GiB planned of 80.0 on a GPU",
        "memory: 64.0 GiB allocated at most",
    )
    log(folder, "Stock tensorwise", (800.0, 150.0, 170.0), "max allocated: 1024.00 | x", "max allocated: 32768.00 | x")
    (folder / "bf16").mkdir()
    (folder / "bf16/run.json").write_text('{"recipe": "bf16"}')
    rows = written(folder, tmp_path / "out.json")
    assert list(rows) == ["bf16", "Stock tensorwise"]
    stock, bf16 = rows["Stock tensorwise"], rows["bf16"]
    assert (stock["ms"], stock["low"], stock["high"]) == (160.0, 150.0, 170.0)
    assert stock["over_bf16"] == pytest.approx(160 / 205)
    assert stock["tokens_s"] == pytest.approx(32 * 8192 / 2 / 0.160)
    assert stock["tflops"] == pytest.approx((666.7 + 588.2) / 2)
    assert (stock["peak_gib"], stock["planned_gib"], stock["peak_over_bf16"]) == (32.0, None, 0.5)
    assert (bf16["peak_gib"], bf16["planned_gib"]) == (64.0, 60.5)
    assert json.loads((tmp_path / "out.json").read_text())["runs"] == {"bf16": {"recipe": "bf16"}}
    assert written(folder, tmp_path / "out.json", "--first", "3")["bf16"]["ms"] == 200.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--baseline", "bf17"], "--baseline bf17: {} has bf16"),
        (["--first", "4"], "bf16.log: has 3 iterations with a time, none from --first 4 on"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    log(tmp_path / "logs", "bf16", (900.0, 210.0, 200.0))
    required = ["--sequence", "8192", "--gpus", "2", "--baseline", "bf16", "--out", str(tmp_path / "out.json")]
    assert main([str(tmp_path / "logs"), *required, *flags]) == 2
    assert message.format(tmp_path / "logs") in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
