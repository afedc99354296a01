"""tools/harness: the pages that evaluate scores, and the figures of lm-evaluation-harness where it is installed."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_lowprec.commands import export_hf
from megatron_lowprec.shipped import find
from megatron_lowprec.training.data.wikitext import SHIPPED, detokenize, read
from megatron_lowprec.training.evaluation.windows import Text, Window, pack, windows
from tests.environment import PLACE_IN_LAUNCH, python_path
from tests.tools.conftest import MODEL, RAW, run
from tests.training.conftest import Drive
from tests.training.convert.models import LLAMA
from tests.training.helpers import REPOSITORY, argv
from tests.waiting import PATIENCE
from tools.harness import wikitext_shipped

TASK = REPOSITORY / "tools/harness/wikitext_shipped.yaml"
METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
MISSING = "lm-evaluation-harness is not installed: pip install 'megatron-lowprec[lm-eval]'"


def described() -> dict[str, Any]:
    """The task; its functions as ``("function", name)``."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: ("function", loader.construct_scalar(node)))
    found: dict[str, Any] = yaml.load(TASK.read_text(encoding="utf-8"), Loader)
    return found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The task's ``load``, with a list for the ``Dataset`` that the harness would bring."""
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=SimpleNamespace(from_list=list)))
    return lambda **kwargs: wikitext_shipped.load(**kwargs)["test"]


def test_the_task_names_existing_functions_and_metrics() -> None:
    task = described()
    assert task["task"] == TASK.stem
    functions = [value[1] for value in task.values() if isinstance(value, tuple)]
    assert len(functions) == 2
    for name in functions:
        module, _, function = name.rpartition(".")
        # The harness looks for the module beside the YAML file.
        assert TASK.with_name(f"{module}.py") == Path(wikitext_shipped.__file__)
        assert callable(getattr(wikitext_shipped, function))
    assert tuple(metric["metric"] for metric in task["metric_list"]) == METRICS


def test_its_pages_are_those_that_evaluate_scores(rows: Any) -> None:
    task, pages = described(), read(str(find(SHIPPED)))
    found = rows(version=task["metadata"]["version"], pretrained="my_model")
    assert task["test_split"] == "test"
    assert [row[task["doc_to_target"]] for row in found] == [page.text for page in pages]
    measured = [wikitext_shipped.measure(row, [-1.0]) for row in found]
    units = {metric: [page[metric][1] for page in measured] for metric in METRICS}
    assert units["word_perplexity"] == [page.words for page in pages]
    assert units["byte_perplexity"] == units["bits_per_byte"] == [page.size for page in pages]
    # As the harness's own task `wikitext` counts them.
    assert (sum(units["word_perplexity"]), sum(units["byte_perplexity"])) == (241335, 1290527)
    assert {page[metric][0] for page in measured for metric in METRICS} == {-1.0}


def test_text_is_put_back_together_by_the_harness_s_rules() -> None:
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext", reason=MISSING)
    raw = lzma.decompress((REPOSITORY / SHIPPED).read_bytes()).decode()
    assert detokenize(raw) == theirs.wikitext_detokenizer({"page": raw})


@pytest.mark.slow
def test_it_can_be_read_without_what_trains_a_model() -> None:
    code = "import sys; import tools.harness.wikitext_shipped; print({'torch', 'megatron'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **python_path()}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_another_file(trained: str, rows: Any) -> None:
    scored = run("--load", trained, "--wikitext", "wiki.raw")["wikitext"]
    found = rows(file="wiki.raw")
    assert (len(found), sum(row["words"] for row in found), sum(row["size"] for row in found)) == (
        *(scored["pages"], scored["words"], scored["bytes"]),
    )


@pytest.mark.parametrize("length", [1, 2, 7, 32])
def test_windows_are_the_harness_s(length: int) -> None:
    utils = pytest.importorskip("lm_eval.utils", reason=MISSING)

    def ours(text: Text, window: Window) -> tuple[list[int], list[int]]:
        inputs, labels, mask = (array[0] for array in pack([text], [window], 1, length, 0))
        count = window.end - window.first
        return inputs[:count].tolist(), labels[mask > 0].tolist()

    for size in range(1, 4 * length + 2):
        ids = list(range(100, 100 + size))
        text = Text(99, np.array(ids))
        theirs = []
        for pair in utils.get_rolling_token_windows(ids, 99, max_seq_len=length, context_len=1):
            # What a window is to score comes after its context; the model reads all of it but the last token.
            context, scored = utils.make_disjoint_window(pair)
            theirs.append((context + scored[:-1], scored))
        assert [ours(text, window) for window in windows([text], length, length)] == theirs, size


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["gpt2", "llama"])
def test_the_harness_finds_the_same(model: dict[str, Any], drive: Drive) -> None:
    pytest.importorskip("lm_eval", reason=MISSING)
    pytest.importorskip("transformers", reason=MISSING)
    Path("wiki.raw").write_text(RAW)
    drive(argv(**{**model, **MODEL}, save="run"))
    ours = run("--load", "run", "--wikitext", "wiki.raw")["wikitext"]
    assert export_hf.main(["--load", "run", "--out", "hf"]) == 0
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", "pretrained=hf,dtype=float32"]
    task = ["--include_path", str(TASK.parent), "--tasks", TASK.stem, "--metadata", '{"file": "wiki.raw"}']
    alone = {name: value for name, value in os.environ.items() if name not in PLACE_IN_LAUNCH}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *task, "--device", "cpu", "--output_path", "theirs.json"],
        env={**alone, **offline, **python_path()},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = Path().glob("theirs*.json")
    theirs = json.loads(written.read_text())["results"][TASK.stem]
    # 0.1 % is what the documentation promises; in fp32 nothing but the order of sums differs.
    for metric in METRICS:
        assert theirs[f"{metric},none"] == pytest.approx(ours[metric], rel=1e-5), metric
