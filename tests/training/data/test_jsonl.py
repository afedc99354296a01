"""Lines keep their place, whatever the compression; faults name file and line."""

import gzip
import lzma
import re
import sys
from pathlib import Path

import pytest
import zstandard

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data import jsonl
from tests.refusal import refused

COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
LINES = [b'{"text": "%d", "title": "t%d"}\n' % (i, i) for i in range(1000)]


def write(folder: Path, suffix: str, content: bytes) -> str:
    path = folder / f"text.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](content))
    return str(path)


def read(*paths: str, keys: tuple[str, ...] = ("text",)) -> list[tuple[str, ...]]:
    return [texts for batch in jsonl.batches(paths) for texts in jsonl.texts(batch, keys)]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_batches_hold_every_line_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(jsonl, "_BATCH_BYTES", 1000)
    path = write(tmp_path, suffix, b"".join(LINES))
    batches = list(jsonl.batches([path, path]))
    assert [line for batch in batches for line in batch.lines] == LINES * 2
    assert len(batches) > 20
    assert batches[1].first_line == 1 + len(batches[0].lines)
    positions = [batch.bytes_read for batch in batches]
    assert positions == sorted(positions)
    assert positions[-1] == 2 * Path(path).stat().st_size


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, zstandard.ZstdCompressor().compress])
def test_files_put_together_from_several_streams_are_read_whole(tmp_path: Path, compress) -> None:  # type: ignore[no-untyped-def]
    suffix = {gzip.compress: ".gz", lzma.compress: ".xz"}.get(compress, ".zst")
    path = tmp_path / f"text.jsonl{suffix}"
    path.write_bytes(compress(LINES[0]) + compress(LINES[1]))
    assert read(str(path)) == [("0",), ("1",)]


def test_several_keys_blank_lines_and_a_missing_last_newline(tmp_path: Path) -> None:
    path = write(tmp_path, "", LINES[0] + b"\n  \r\n" + LINES[1].rstrip())
    assert read(path, keys=("title", "text")) == [("t0", "0"), ("t1", "1")]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    assert read(write(tmp_path, "", '{"text": "a\u2028b\u0085c"}\n'.encode())) == [("a\u2028b\u0085c",)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "not a JSON object"),
        (b'["text"]', "not a JSON object but a list"),
        (b'{"body": "x", "title": "y"}', "no key 'text'; found: 'body', 'title'"),
        (b"{}", "no key 'text'; found: none; name the right one with megatron-lowprec preprocess --json-keys"),
        (b'{"messages": []}', "preprocess --json-keys, or train on the conversations with --sft"),
        (b'{"text": 3}', "'text' holds an int, not text"),
        (b'{"text": null}', "'text' holds nothing, not text"),
        (b'{"text": "\xff"}', "not a JSON object"),
        (rb'{"text": "ab\ud800"}', "not Unicode (surrogates not allowed at 2)"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"1" * 5000 + b"}", "a number of 5,000 digits"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, message: str) -> None:
    monkeypatch.setattr(jsonl, "_BATCH_BYTES", 1000)  # the line stands in a later batch
    path = write(tmp_path, ".gz", b"".join(LINES[:99]) + b"\n" + line + b"\n" + LINES[0])
    with refused(message, match=f"^{re.escape(path)}, line 101: "):
        read(path)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_a_line_without_an_end_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 10_000)
    path = write(tmp_path, suffix, LINES[0] + b"0" * 10**6)
    with pytest.raises(UserError, match="line 2: longer than 10,000 bytes; split the document"):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("fault", ["truncated", "garbage"])
def test_a_damaged_file_is_an_error_and_not_an_end(tmp_path: Path, suffix: str, fault: str) -> None:
    path = Path(write(tmp_path, suffix, b"".join(LINES)))
    path.write_bytes(path.read_bytes()[:-20] if fault == "truncated" else b"no such format" * 9)
    with refused(match="cannot be read beyond line"):
        read(str(path))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl\.xz: no such file"):
        read("nowhere.jsonl.xz")


def test_zst_without_zstandard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, ".zst", LINES[0])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"pip install 'megatron-lowprec\[zstd\]'"):
        read(path)


def test_text_files_are_known_by_name() -> None:
    assert all(jsonl.is_text_file(f"a/b.jsonl{suffix}") for suffix in COMPRESS)
    assert not any(map(jsonl.is_text_file, ("a/b", "a/b.bin", "a/jsonl", "a/b.jsonl.bz2", "a/b.jsonl/")))
