"""Every reader meets damaged and hostile files: a few here, hundreds under ``make test-fuzz``."""

from __future__ import annotations

import ast
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from tests.training.helpers import REPOSITORY
from tools.fuzz import __main__ as fuzz
from tools.fuzz import run as runs
from tools.fuzz.mutations import PICKLE, mutated
from tools.fuzz.run import FuzzedReader, Result, run

# FuzzedReader -> modules of the package that read files for it.
MODULES: dict[str, tuple[str, ...]] = {
    "model config": ("recipe.yaml_text", "training.config.arguments"),
    "recipe": ("recipe.parsing",),
    "claims": ("report.claims",),
    "sweep": ("sweep.spec",),
    "recipe overrides": (),
    "precision by module": ("te.precision_file",),
    "published results": ("report.published.ladder",),
    "wikitext": (),
    "report": ("report.curve", "report.operands", "report.runs", "training.config.run_config"),
    "status of a sweep": ("sweep.job_record", "sweep.jobs", "sweep.status", "training.monitoring.metrics_file"),
    "plots of a run": ("files",),
    "metrics at a resume": ("training.monitoring.log",),
    "archive": ("report.archives.container",),
    "archive, its content": (),
    "lock of a run": ("training.distributed.process_lock",),
    "checkpoint": ("training.checkpoint.checksums", "training.checkpoint.resume", "training.checkpoint.safe_load"),
    "checkpoint without checksums": (),
    "tracker": ("commands.inspect_checkpoint", "training.checkpoint.storage"),
    "extra state": (),
    "corpus": ("training.data.indexed_dataset",),
    "corpus without a note": (),
    "corpus, verified": (),
    "indices of samples": ("training.data.sample_index",),
    "JSON lines": ("training.data.jsonl",),
    "JSON lines.gz": (),
    "JSON lines.xz": (),
    "JSON lines.zst": (),
    "conversations": (),
    "conversations, tokenized": (),
    "manifest of shards": ("training.data.shards",),
    "unfinished shards": (),
    "Hugging Face model": ("commands.import_hf", "training.convert.hf_tokenizer"),
    "tokenizers": ("training.data.tokenizer",),
    "Megatron-LM's older format": ("training.convert.stock",),
    "vectors": ("conformance.vectors", "conformance.comparison"),
    "captured operands": ("linear.capture_file",),
    "tilings": ("kernels.tuning",),
    "numerics experiment": ("lab.page",),
    "record of verified data": (),
}
# Modules whose files have no reader of the fuzz, and why.
NOT_FUZZED = {
    "training.config.megatron_flags": "the package's own tables of Megatron-LM's flags",
    "conformance.own_adapter": "the fields of a recipe, in vectors that this project has written",
    "mcore.__init__": "the release of the installed Megatron-core",
    "training.distributed.process_start": "the kernel's account of a process",
    "report.archives.packing": "copies texts of runs, and rows by the readers of the report",
    "report.groups": "JSON that it has written itself, in memory",
    "sweep.view": "shows the end of a log",
    "training.checkpoint.write_results": "memory without a name",
    "training.data.wikipedia": "parquet, by pyarrow, and a position that the Hugging Face library has written",
    "training.monitoring.run_metadata": "takes one number from the record of the launch before",
}
_CALLS = """read_json parse_json read_yaml_file read_yaml_text read_run_config json_lines read_metrics read_text
read_bytes fromfile memmap open_memmap safe_open load_file ParquetFile DictReader pread from_buffer from_file loads
Unpickler decompressobj extractall readline"""
READS = frozenset(_CALLS.split())


@pytest.mark.parametrize("name", MODULES)
def test_a_reader_reads_or_refuses(known: dict[str, FuzzedReader], tmp_path: Path, name: str) -> None:
    result = run(known[name], tmp_path / "work", count=3, seed=0)
    assert result.faults == []
    assert result.read + result.refused == result.mutations == 3


def test_every_reader_is_fuzzed(known: dict[str, FuzzedReader]) -> None:
    assert set(known) == set(MODULES)
    found = set()
    for path in (REPOSITORY / "megatron_lowprec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in READS:
                    found.add(".".join(path.relative_to(REPOSITORY / "megatron_lowprec").with_suffix("").parts))
    fuzzed = {module for modules in MODULES.values() for module in modules}
    assert found - fuzzed - NOT_FUZZED.keys() == set(), "read files by no reader of the fuzz"
    assert (fuzzed | NOT_FUZZED.keys()) - found == set(), "read no files"


# ---- the fuzz itself


def reading(read: Callable[[bytes], object], exact: bool = False) -> FuzzedReader:
    def make() -> None:
        Path("f").write_bytes(b"whole")

    return FuzzedReader("r", ("f",), make, lambda: read(Path("f").read_bytes()), exact)


def refuse(words: str) -> None:
    raise UserError(words)


def crash() -> None:
    faulthandler.disable()  # pytest's would print a page
    os.kill(os.getpid(), signal.SIGSEGV)


FAULTS: dict[str, tuple[Callable[[bytes], object], str]] = {
    "an exception": (lambda content: {}["x"] if content != b"whole" else None, "KeyError at test_fuzz.py:"),
    "a crash": (lambda content: content != b"whole" and crash(), "ended with status 11"),
    "an exit": (lambda content: content != b"whole" and os._exit(3), "the process ended with status"),
    "a hang": (lambda content: content != b"whole" and time.sleep(60), "_TooLong"),
    "memory": (lambda content: content != b"whole" and bytes(2**40), "MemoryError"),
    "code": (lambda content: content != b"whole" and os.mkdir("it_ran"), "code of the file ran"),
    "an escape sequence": (lambda content: print("\x1b[2J" * (content != b"whole")), "prints '\\x1b'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(runs, "SECONDS", 1)
    read, said = FAULTS[name]
    result = run(reading(read), tmp_path / "work", count=2, seed=1)
    assert len(result.faults) == 2
    assert said in result.faults[0]
    assert result.faults[0].startswith("f, mutation 0: ")


def test_reads_and_refusals_are_counted(tmp_path: Path) -> None:
    def read(content: bytes) -> None:
        if content[:1] != b"w":
            refuse("no w")

    result = run(reading(read), tmp_path / "work", count=40, seed=1)
    assert result.faults == []
    assert result.read > 5
    assert result.refused > 5
    assert result.read + result.refused == 40
    exact = run(reading(read, exact=True), tmp_path / "work", count=40, seed=1)
    assert (len(exact.faults), exact.refused) == (result.read, result.refused)


def test_a_mutation_follows_from_its_generator_and_changes_something() -> None:
    for content in (b"", b"x", b'{"a": 12}\n[3]\n', bytes(range(256)) * 8):
        found = [mutated(content, Random(seed)) for seed in range(100)]
        assert found == [mutated(content, Random(seed)) for seed in range(100)]
        assert content not in found
        assert len(set(found)) > 20
    assert any(mutated(b"x", Random(seed)) == PICKLE for seed in range(2000))


def test_the_page_counts_and_names_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = [Result("a", 10, 4, 6), Result("b", 5, 1, 3, ["f, mutation 2: KeyError"])]
    page = fuzz.page(results, "python -m tools.fuzz").splitlines()
    assert "| a | 10 | 4 | 6 | 0 |" in page
    assert "| all | 15 | 5 | 9 | 1 |" in page
    assert "- b: f, mutation 2: KeyError" in page
