"""The table of all recipes, at the smallest size."""

import json
from pathlib import Path

import pytest

from tools.train_recipes import main

TINY = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 --mock-data "
    "--global-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 1 --lr 1e-3"
)


@pytest.mark.slow
def test_a_table_with_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text("bf16: true\n")
    out = tmp_path / "out.json"
    options = ["--recipes", "mxfp8,nonesuch", "--steps", "2", "--config", str(config), "--out", str(out)]
    assert main([*options, "--", *TINY.split()]) == 1
    good, bad = json.loads(out.read_text())
    assert (good["recipe"], good["processes"], good["error"]) == ("mxfp8", 1, None)
    assert all(4.0 < good[name] < 7.0 for name in ("first", "last", "validation"))  # log(256) is 5.5
    assert "there is no recipe 'nonesuch'" in bad["error"]
    printed = capsys.readouterr()
    assert f"| `mxfp8` | 1 | {good['first']:.4f} |" in printed.out
    assert "nonesuch" in printed.err


def test_sizes_that_are_none_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for sizes in ("x", "0", "1,,2"):
        with pytest.raises(SystemExit) as stop:
            main(["--processes", sizes])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{sizes}: wants numbers such as 1,2" in error
