"""A corpus is refused when its files are not whole, or not of the run's vocabulary."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data import corpus_writer, indexed_dataset
from megatron_lowprec.training.data.tokenizer import Tokenizer, build_tokenizer
from tests.refusal import refused
from tests.training.data.corpora import bpe, write_text


def cut(suffix: str, by: int) -> Callable[[str], None]:
    return lambda prefix: os.truncate(prefix + suffix, os.path.getsize(prefix + suffix) - by)


def replace(suffix: str, content: bytes) -> Callable[[str], None]:
    return lambda prefix: (Path(prefix + suffix).write_bytes(content), None)[1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda prefix: os.remove(f"{prefix}.bin"), r"no file .*made\.bin; prepare the text first"),
        (lambda prefix: os.remove(f"{prefix}.idx"), r"no file .*made\.idx; prepare the text first"),
        (cut(".bin", 2), r"made\.bin is truncated: \d+ bytes, but .*made\.idx describes \d+"),
        (cut(".bin", -2), r"made\.bin is too long"),
        (cut(".idx", 1), r"made\.idx is truncated: \d+ bytes of \d+"),
        (replace(".idx", b""), r"made\.idx is not an index"),
        (replace(".idx", b"MMIDIDX\x00\x00"), r"made\.idx is not an index"),
        (replace(".idx", b"PK" * 100), r"made\.idx is not an index"),
        (replace(".idx", b"MMIDIDX\x00\x00" + b"\x02" + bytes(90)), r"version 2 and type code 0"),
        (replace(".json", b"{"), r"made\.json: cannot be read"),
        (replace(".json", b'{"tokens": 1, "documents": 1}'), r"not of one corpus"),
    ],
)
def test_a_corpus_that_is_not_whole_is_refused(
    made: str, tiny: Tokenizer, damage: Callable[[str], None], message: str
) -> None:
    damage(made)
    with refused(match=message):
        indexed_dataset.check_prefix(made, tiny)


HEADER = 34  # bytes before the lengths


def patched(at: Callable[[int], int], value: int, size: int) -> Callable[[str], None]:
    """Another value of ``size`` bytes, at an offset that depends on the number of parts (of as many documents)."""

    def damage(prefix: str) -> None:
        content = bytearray(Path(f"{prefix}.idx").read_bytes())
        parts = int.from_bytes(content[18:26], "little")
        content[at(parts) : at(parts) + size] = value.to_bytes(size, "little", signed=True)
        Path(f"{prefix}.idx").write_bytes(content)

    return damage


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (patched(lambda parts: HEADER, -5, 4), "its part 0 has length -5"),
        (patched(lambda parts: HEADER + 4, -1, 4), "its part 1 has length -1"),
        (patched(lambda parts: HEADER + 4, 10**6, 4), "its part 2 begins at byte"),
        (patched(lambda parts: HEADER + 4 * parts, 2, 8), "its part 0 begins at byte 2, not 0"),
        (patched(lambda parts: HEADER + 4 * parts + 8, -2, 8), "its part 1 begins at byte -2"),
        (patched(lambda parts: HEADER + 12 * parts - 8, 2**60, 8), "its part 5 begins at byte 1152921504606846976"),
        (patched(lambda parts: HEADER + 12 * parts, 1, 8), "its first document begins at part 1"),
        (patched(lambda parts: HEADER + 12 * parts, -1, 8), "its document 0 begins at part -1"),
        (patched(lambda parts: HEADER + 12 * parts + 8, 5, 8), "its document 2 begins at part 2"),
        (patched(lambda parts: HEADER + 12 * parts + 8, 99, 8), "its document 1 begins at part 99 of 6"),
        (patched(lambda parts: HEADER + 20 * parts, 5, 8), "its documents end at part 5 of 6"),
        (patched(lambda parts: 26, 0, 8), "made.idx is too long"),
        (patched(lambda parts: 18, 2**62, 8), "made.idx is truncated"),
        (cut(".idx", -3), "made.idx is too long"),
    ],
)
def test_every_number_of_an_index_is_checked(
    made: str, tiny: Tokenizer, damage: Callable[[str], None], message: str, noted: bool
) -> None:
    """By Megatron-core none is: a bad one ends a run in the middle, or trains on other tokens."""
    if not noted:
        os.remove(f"{made}.json")
    damage(made)
    with refused(message, match=r"made\.idx is .*(; copy or prepare)"):
        indexed_dataset.check_prefix(made, tiny)


def test_an_index_is_checked_across_windows(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = indexed_dataset.read_index(made)
    monkeypatch.setattr(indexed_dataset, "_WINDOW", 2)
    assert indexed_dataset.read_index(made) == whole
    patched(lambda parts: HEADER + 12 * parts - 8, 0, 8)(made)
    with pytest.raises(UserError, match="its part 5 begins at byte 0"):
        indexed_dataset.read_index(made)


def test_a_suffix_is_not_part_of_a_prefix(made: str, tiny: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"name only the prefix: .*made "):
        indexed_dataset.check_prefix(f"{made}.bin", tiny)


def test_another_vocabulary_is_refused_even_if_its_ids_would_fit(made: str) -> None:
    with pytest.raises(UserError, match=r"GPT2BPETokenizer of 512 ids .* but the run's is GPT2BPETokenizer of 50257"):
        indexed_dataset.check_prefix(made, bpe("gpt2"))


def test_a_corpus_of_another_tool_is_judged_by_its_ids(made: str, tiny: Tokenizer) -> None:
    os.remove(f"{made}.json")
    indexed_dataset.check_prefix(made, tiny)
    indexed_dataset.check_prefix(made, bpe("gpt2"))
    with pytest.raises(UserError, match=r"holds id 511, but the vocabulary has 511 ids"):
        indexed_dataset.check_prefix(made, build_tokenizer("NullTokenizer", vocab_size=510))


def test_a_huge_corpus_is_judged_by_spread_windows(
    tmp_path: Path, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_dataset, "_WINDOW", 10)
    monkeypatch.setattr(indexed_dataset, "_MAX_WINDOWS", 3)
    prefix = str(tmp_path / "out")
    null = build_tokenizer("NullTokenizer", vocab_size=10)
    corpus_writer.write([write_text(tmp_path / "text.jsonl", [" ".join("1" * 499)])], {"text": prefix}, null)
    os.remove(f"{prefix}.json")
    with pytest.raises(UserError, match="holds id 10"):  # eod is the last of 500 ids, in the last window
        indexed_dataset.check_prefix(prefix, build_tokenizer("NullTokenizer", vocab_size=9))


def test_prefixes_survive_a_move(made: str, tmp_path: Path, tiny: Tokenizer) -> None:
    (tmp_path / "elsewhere").mkdir()
    for suffix in (".bin", ".idx", ".json"):
        shutil.move(made + suffix, tmp_path / "elsewhere")
    indexed_dataset.check_prefix(str(tmp_path / "elsewhere" / "made"), tiny)
