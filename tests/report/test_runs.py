"""What a folder holds is what the report believes; nothing in it is dropped."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.report.archives.packing import write_archive
from megatron_lowprec.report.curve import Curve, Status, how_it_ended
from megatron_lowprec.report.groups import group_runs
from megatron_lowprec.report.runs import Run, find_runs
from tests.report.synthetic import MXFP8_OPERANDS, add_cells, cell, write_run, write_sweep


def find(*paths: Path | str) -> list[Run]:
    return find_runs([str(path) for path in paths], 0.5)[0]


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    (run,) = find(write_run(tmp_path / "some_run", "mxfp4_rht_sr", seed=5, final=3.75))
    assert (run.label, run.seed, run.status, run.model) == ("mxfp4_rht_sr", 5, Status.FINISHED, "gpt_25m")
    assert run.curve is not None
    assert run.curve.final_validation == pytest.approx(3.75)
    assert run.tokens == 400 * 64 * 1024
    assert run.parameters == 51_000_000
    assert run.seconds == 0.1  # not the first ones, which compile
    assert run.tokens_a_second == pytest.approx(64 * 1024 / 0.1)
    assert run.peak_memory_gib == 7
    assert run.tokens_at(np.array([0, 100, 400])) == pytest.approx([0, 6_553_600, 26_214_400])


def test_a_folder_with_a_validation_only_does_not_stop_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"iteration": 0, "lm loss validation": 3.0}\n')
    (run,) = find(folder)
    assert (run.status, run.tokens) == (Status.UNFINISHED, 400 * 64 * 1024)
    assert math.isnan(run.tokens_a_second)
    assert len(group_runs([run], "bf16")[0]) == 1


def rewritten(folder: Path, consumed: Callable[[int], int], **options: Any) -> Run:
    """The run with other samples by iteration, and more in its config.yaml."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"consumed samples": consumed(row["iteration"])}) for row in found]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with (folder / "config.yaml").open("a") as config:
        config.write(yaml.safe_dump(options))
    (run,) = find(folder)
    return run


def test_tokens_of_a_batch_that_changed_are_those_consumed(tmp_path: Path) -> None:
    earlier = [{"until_iteration": 300, "global_batch_size": 16}]
    folder = write_run(tmp_path / "run")
    run = rewritten(folder, lambda i: 16 * min(i, 300) + 64 * max(0, i - 300), earlier_options=earlier)
    assert run.tokens == (300 * 16 + 100 * 64) * 1024
    assert run.tokens_a_second == pytest.approx((16 + 64) / 2 * 1024 / 0.1)
    part = rewritten(write_run(tmp_path / "part", ends_at=200), lambda i: 16 * i, earlier_options=earlier)
    assert part.tokens == (200 * 16 + 200 * 64) * 1024


def test_tokens_of_a_sequence_that_changed_are_those_consumed(tmp_path: Path) -> None:
    earlier = [{"until_iteration": 50, "lr": 1e-4}, {"until_iteration": 100, "seq_length": 512}]
    run = rewritten(write_run(tmp_path / "run"), lambda i: 64 * i, earlier_options=earlier)
    assert run.tokens == 64 * (100 * 512 + 300 * 1024)
    assert run.tokens_a_second == pytest.approx(64 * 1024 / 0.1)
    assert run.tokens_at(np.array([50, 200])) == pytest.approx([64 * 50 * 512, 64 * (100 * 512 + 100 * 1024)])


def test_recipes_of_one_name_that_differ_are_told_apart(tmp_path: Path) -> None:
    """As after an edit of a recipe's file between runs."""
    folders = [write_run(tmp_path / "first", "mxfp8"), write_run(tmp_path / "same", "mxfp8", seed=2)]
    folders.append(write_run(tmp_path / "other", "mxfp8", seed=3, overrides=("dgrad=bf16",)))
    config = folders[-1] / "config.yaml"
    config.write_text(re.sub("name: mxfp8.*", "name: mxfp8", config.read_text()))
    (group,), _ = group_runs(find(*folders), "bf16")
    assert [run.label for run in group.runs] == ["mxfp8", "mxfp8", "mxfp8 (2)"]
    assert group.runs[-1].full_label == "mxfp8, which differs from the first in dgrad"


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["d1/few_text_document", "d2/few_text_document"], ["d1/few", "d2/few"]),
        (["data-v1.0_text_document", "data-v1.5.jsonl.xz"], ["data-v1.0", "data-v1.5"]),
        (["a/x.txt", "b/y.jsonl"], ["x", "y"]),
    ],
)
def test_texts_of_one_name_are_told_apart(tmp_path: Path, paths: list[str], names: list[str]) -> None:
    folder = write_run(tmp_path / "run", "mxfp8")
    data = {path: {"loss": float(at)} for at, path in enumerate(paths)}
    (folder / "evaluation.json").write_text(json.dumps(score("mxfp8", data=data)))
    (run,) = find(folder)
    assert [(name, loss.nats) for name, loss in run.texts.items()] == list(zip(names, (0.0, 1.0), strict=True))


def score(recipe: str, trained: str = "mxfp8", **texts: Any) -> dict[str, Any]:
    """An evaluation of a checkpoint, as megatron-lowprec eval writes it."""
    return {"recipe": recipe, "trained_under": trained, "data": {}, **texts}


def test_losses_by_text_are_those_under_the_own_recipe(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "mxfp8")
    data = {"FOLDER1/docs-test.jsonl.xz": {"loss": 3.5}, "a/wiki_text_document": {"loss": 4.2, "bits_per_byte": 1.3}}
    own = score("mxfp8", data=data, wikitext={"loss": 4.4, "bits_per_byte": 1.4})
    for content in ({"evaluations": [score("bf16", data={"docs-test": {"loss": 9}}), own]}, own):
        (folder / "evaluation.json").write_text(json.dumps(content))
        (run,) = find(folder)
        assert list(run.texts) == ["docs-test", "wiki", "WikiText"]
        assert [loss.nats for loss in run.texts.values()] == [3.5, 4.2, 4.4]
        assert [loss.bits for loss in run.texts.values()] == pytest.approx([math.nan, 1.3, 1.4], nan_ok=True)


def scored(folder: Path, paths: Sequence[str], **how: Any) -> None:
    content = score("mxfp8", data={path: {"loss": 3.0, "tokens": 99} for path in paths}, **how)
    (write_run(folder, "mxfp8") / "evaluation.json").write_text(json.dumps(content))


def test_texts_are_told_apart_over_all_runs(tmp_path: Path) -> None:
    """By their paths, and by windows and strides; a run scored on one of two texts has the names of the others."""
    scored(tmp_path / "a", ["/d/news/test.jsonl", "/d/wiki/test.jsonl"], window=1024, stride=1024)
    scored(tmp_path / "b", ["/d/news/test.jsonl"], window=1024, stride=64)
    scored(tmp_path / "c", ["/d/wiki/test.jsonl"], window=1024, stride=1024)
    found = find_runs([str(tmp_path / "*")], 0.5)[0]
    assert [list(run.texts) for run in found] == [
        ["news/test, stride 1024", "wiki/test"],
        ["news/test, stride 64"],
        ["wiki/test"],
    ]


def test_texts_of_several_archives_are_equal_if_the_rest_of_a_path_is(tmp_path: Path) -> None:
    archives = [str(tmp_path / f"{name}.safetensors.xz") for name in "abc"]
    for archive, paths in zip(archives, (["/d/x.jsonl"], ["/e/y.jsonl", "/d/x.jsonl"], ["/d/x.jsonl", "/e/x.jsonl"])):
        scored(tmp_path / Path(archive).name[0], paths)
        write_archive(Path(archive), find(tmp_path / Path(archive).name[0]), print)
    first, second = find_runs(archives[:2], 0.5, new(tmp_path / "1"))[0]
    assert (list(first.texts), list(second.texts)) == (["x"], ["y", "x"])
    first, third = find_runs(archives[::2], 0.5, new(tmp_path / "2"))[0]
    assert (list(first.texts), list(third.texts)) == (["FOLDER/x"], ["FOLDER1/x", "FOLDER2/x"])


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_scores_of_another_iteration_are_named_and_dropped(tmp_path: Path) -> None:
    scored(tmp_path / "old", ["a"], iteration=100)
    scored(tmp_path / "last", ["a"], iteration=400)
    runs, notes = find_runs([str(tmp_path / "*")], 0.5)
    assert [list(run.texts) for run in runs] == [["a"], []]
    assert len(notes) == 1
    words = "dropped, scores of iteration 100: the run ended at 400; score that checkpoint"
    assert notes[0].endswith(f"old/evaluation.json: {words}")


@pytest.mark.parametrize(
    "content",
    [
        {"evaluations": 5},
        {"evaluations": ["bf16"]},
        score("mxfp8", data=[1]),
        score("mxfp8", data={"a": {"loss": "much"}}),
        score("mxfp8", wikitext={}),
    ],
)
def test_scores_of_another_form_are_named_and_dropped(tmp_path: Path, content: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "run", "mxfp8")
    (folder / "evaluation.json").write_text(json.dumps(content))
    (run,), notes = find_runs([str(folder)], 0.5)
    assert (run.status, run.texts) == (Status.FINISHED, {})
    assert re.fullmatch(r".*/run/evaluation\.json: dropped, no scores of megatron-lowprec eval \(\w+\)", notes[0])


def test_a_run_under_two_recipes_is_no_run_of_either(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "mxfp8")
    with (folder / "config.yaml").open("a") as config:
        config.write("earlier_recipes: [bf16, mxfp4]\n")
    (run,) = find(folder)
    assert run.label == "bf16 then mxfp4 then mxfp8"
    (group,) = group_runs([run], "bf16")[0]
    assert group.find("mxfp8") is None
    plain = find(write_run(tmp_path / "plain", "mxfp8"))
    (group,) = group_runs([run, *plain], "bf16")[0]
    assert group.find("mxfp8") == "mxfp8"


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ({"nan_from": 300}, Status.DIVERGED, "training loss not finite from iteration 300; ended at iteration 400 of"),
        ({"nan_from": 300, "ends_at": 310}, Status.DIVERGED, "ended at iteration 310 of 400"),
        ({"blows_up_from": 250}, Status.DIVERGED, "nats above its lowest"),
        ({"ends_at": 200}, Status.UNFINISHED, "ended at iteration 200 of 400"),
        ({}, Status.FINISHED, "400 iterations"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, how: dict[str, int], status: Status, words: str) -> None:
    (run,) = find(write_run(tmp_path / "run", **how))  # type: ignore[arg-type]
    assert run.status is status
    assert words in run.why


def test_a_run_without_a_last_validation_is_unfinished() -> None:
    iterations = np.arange(1, 101)
    losses = np.linspace(5, 4, 100)
    curve = Curve((iterations, losses), (iterations[:50], losses[:50]))
    assert how_it_ended(curve, 100, 0.5) == (Status.UNFINISHED, "no validation loss at its end")


def test_a_run_that_only_validated_is_unfinished() -> None:
    nothing = np.array([], np.int64), np.array([])
    curve = Curve(nothing, (np.array([100]), np.array([4.0])))
    assert how_it_ended(curve, 100, 0.5) == (
        Status.UNFINISHED,
        "no training loss logged: it only validated a checkpoint, or ended too early",
    )


def test_only_the_validation_may_be_not_finite() -> None:
    iterations = np.arange(1, 101)
    losses = np.linspace(5, 4, 100)
    curve = Curve((iterations, losses), (np.array([50, 100]), np.array([4.5, math.inf])))
    status, why = how_it_ended(curve, 100, 0.5)
    assert (status, why.split(";")[0]) == (Status.DIVERGED, "validation loss not finite from iteration 100")


def test_skipped_iterations_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text().replace('"skipped iterations": 0', '"skipped iterations": 3')
    (folder / "metrics.jsonl").write_text(text)
    assert "3 iterations skipped" in find(folder)[0].why


def test_a_sweep_lists_every_cell_whatever_became_of_it(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7}, seeds=2)
    for name in ("empty", "no_config"):
        (sweep / name).mkdir()
    (sweep / "empty/cell.json").write_text(json.dumps({"exit_code": 137}))
    (sweep / "no_config/metrics.jsonl").write_text('{"iteration": 1, "lm loss": 5.0}\n')
    cells = [
        cell("mxfp4", 1),
        cell("mxfp4", 2, run="empty"),
        cell("mxfp8", 1, run="no_config", model="a/gpt_1.3b.yaml"),
    ]
    add_cells(sweep, "mine", cells)
    runs = find(sweep)
    assert [run.status.value for run in runs] == ["finished", "finished", "not started", "failed", "failed"]
    assert [run.why for run in runs[2:]] == [
        "there is no folder",
        "has no metrics.jsonl; its process ended with exit code 137",
        "has no config.yaml that says what was trained",
    ]
    assert [(run.label, run.seed, run.sweep) for run in runs[2:4]] == [("mxfp4", 1, "mine"), ("mxfp4", 2, "mine")]
    assert runs[4].model == "gpt_1.3b"


def test_many_overrides_are_counted_in_the_label(tmp_path: Path) -> None:
    overrides = tuple(f"{gemm}.{operand}.scale_rule=floor" for gemm, operand in MXFP8_OPERANDS)
    (few,) = find(write_run(tmp_path / "few", "mxfp8", overrides=overrides[:1]))
    (many,) = find(write_run(tmp_path / "many", "mxfp8", overrides=overrides))
    (other,) = find(write_run(tmp_path / "other", "mxfp8", overrides=overrides[:4]))
    assert few.label == few.full_label == f"mxfp8+{overrides[0]}"
    assert many.full_label == "+".join(["mxfp8", *overrides])
    assert re.fullmatch(r"mxfp8\+6 overrides-[0-9a-f]{8}", many.label)
    assert other.label.startswith("mxfp8+4 overrides-")


def test_patterns_and_repetitions(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7}, seeds=2)
    write_run(tmp_path / "alone-1")
    write_run(tmp_path / "alone-2", seed=2)
    paths = [str(tmp_path / "alone-*"), str(tmp_path / "alone-1"), str(sweep / "bf16-s1"), str(sweep)]
    runs, notes = find_runs(paths, 0.5)
    assert [run.cell for run in runs] == ["alone-1", "alone-2", "bf16-s1", "bf16-s2"]
    assert [run.sweep for run in runs] == [None, None, "synthetic", "synthetic"]
    assert len(notes) == 2
    assert notes[0].endswith("alone-1 was named twice and counts once")
    assert notes[1].endswith("named twice and counts once, as bf16 of sweep synthetic")


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        find(tmp_path / "nothing")
    with pytest.raises(UserError, match="no such folder"):
        find(tmp_path / "nothing*")


CELL = '{"id": 1, "label": "a", "run": "a"'


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"name": "s", "cells": [{"id": 1}]}',
        '{"name": "s", "cells": 3}',
        '{"name": "s", "cells": [3]}',
        f'{{"name": "s", "cells": [{CELL}, "seed": [1]}}]}}',
        f'{{"name": "\\ud800", "cells": [{CELL}}}]}}',
        "\xff",
    ],
)
def test_a_broken_sweep_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"sweep\.json: (not a sweep|cannot be read)"):
        find(tmp_path)


@pytest.mark.parametrize("line", [b"nothing", b"\xff", b'{"iteration": 1e400, "lm loss": 1}', b'{"lm loss": 1}'])
def test_a_damaged_row_of_metrics_is_dropped_with_a_note(tmp_path: Path, line: bytes) -> None:
    folder = write_run(tmp_path / "run")
    rows = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([rows[0], line, b"\n", *rows[1:]]))
    (run,), notes = find_runs([str(folder)], 0.5)
    assert run.status is Status.FINISHED
    assert len(notes) == 1
    assert "metrics.jsonl: dropped, as no row of such a file: line 2 (" in notes[0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "run.json",
            '{"parameters": "many", "versions": 3, "commit": "c"}',
            "values of another type: parameters, versions",
        ),
        ("run.json", "[", "run.json: cannot be read"),
        ("config.yaml", "options: {train_iters: 2024-13-45}\n", "options: train_iters: wants a whole number"),
        ("config.yaml", "a: &b [*b]\n", "more than 100,000 values"),
        ("cell.json", '{"exit_code": "\\u001b[2J"}', "cell.json: cannot be read"),
    ],
)
def test_a_damaged_file_of_a_run_is_dropped_with_a_note(tmp_path: Path, name: str, content: str, said: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(content)
    (run,), notes = find_runs([str(folder)], 0.5)
    assert run.curve is not None or name == "config.yaml"
    assert any("dropped" in note and said in note for note in notes)


def test_an_older_run_without_a_record_is_read_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "run.json").unlink()
    (run,) = find(folder)
    assert run.status is Status.FINISHED
    assert math.isnan(run.parameters)
    assert math.isnan(run.peak_memory_gib)
