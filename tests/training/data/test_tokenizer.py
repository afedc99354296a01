"""Ids of known text, text that round-trips, and vocabularies that are told apart."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.data.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from tests.refusal import refused

DATA = SHIPPED / "data"
TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading, trailing  \n\n\ttabs\r\n",
    "naïve Größe — “quotes” … 東京 😀👩\u200d👩\u200d👧 e\u0301",
    "line\u2028separator, nul \x00, private \ue000, \U0010ffff",
    "<|endoftext|> and a<|endoftext|>b <|endoftext|",
    "unbroken" * 5000,
]


def bpe(folder: Path) -> Tokenizer:
    vocab, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
    return build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return bpe(DATA / "gpt2")


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return bpe(DATA / "tiny_bpe")


@pytest.fixture
def saved(tmp_path: Path, tiny: Tokenizer) -> Path:
    """The tiny vocabulary as a tokenizer.json with its end token marked special and an unwanted truncation."""
    backend = pickle.loads(pickle.dumps(tiny))._backend
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    backend.encode_special_tokens = False
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return tmp_path


def test_gpt2_gives_openais_ids(gpt2: Tokenizer) -> None:
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)
    assert gpt2.tokenize("Hello world") == [15496, 995]
    assert gpt2.tokenize_batch(["Hello", " world", ""]) == [[15496], [995], []]
    assert gpt2.detokenize([15496, 995, 50256]) == "Hello world<|endoftext|>"


def test_tiny_has_512_entries(tiny: Tokenizer) -> None:
    assert (tiny.vocab_size, tiny.eod) == (512, 511)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("folder", ["gpt2", "tiny_bpe"])
def test_any_text_comes_back_and_never_holds_eod(folder: str, text: str) -> None:
    tokenizer = bpe(DATA / folder)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.eod not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("text", TEXTS)
def test_hugging_face_file_gives_the_ids_of_its_vocabulary(saved: Path, tiny: Tokenizer, text: str) -> None:
    same = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(saved))
    assert (same.vocab_size, same.eod) == (tiny.vocab_size, tiny.eod)
    assert same.tokenize(text) == tiny.tokenize(text)
    assert same.detokenize(same.tokenize(text)) == text
    worker = pickle.loads(pickle.dumps(same))
    assert worker.tokenize(text) == same.tokenize(text)


@pytest.mark.parametrize(
    ("files", "eod", "source"),
    [
        ({"tokenizer_config.json": {"eos_token": "!"}, "special_tokens_map.json": {"eos_token": '"'}}, 0, "tokenizer_"),
        ({"tokenizer_config.json": {"eos_token": {"content": "!"}}}, 0, "tokenizer_config.json"),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "!"}}, 0, "special_tokens_map.json"),
        ({"special_tokens_map.json": {"eos_token": {"content": '"'}}}, 1, "special_tokens_map.json"),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": 4}}, 3, "config.json"),
        ({"config.json": {"eos_token_id": [3, 4]}, "generation_config.json": {"eos_token_id": [4]}}, 4, "generation_"),
    ],
)
def test_hugging_face_end_token_is_the_tokenizer_s_own(
    saved: Path, files: dict[str, object], eod: int, source: str
) -> None:
    """Although the vocabulary has <|endoftext|>, another model's."""
    (saved / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (saved / name).write_text(json.dumps(content))
    for model in (saved, saved / "tokenizer.json"):
        tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(model))
        assert tokenizer.eod == eod
        assert tokenizer.eod_source.startswith(source)
        assert str(tokenizer).startswith(f"HuggingFaceTokenizer of 512 ids; end of a document: id {eod}, ")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "names one end-of-text token: name it as eos_token in tokenizer_config.json there"),
        ({"config.json": {"eos_token_id": [3, 4]}}, "names one end-of-text token"),
        ({"tokenizer_config.json": {"eos_token": "<nowhere>"}}, "a text '<nowhere>', which tokenizer.json does not"),
        ({"config.json": {"eos_token_id": 512}}, "config.json names the end of a text 512, which tokenizer.json does"),
        ({"config.json": {"eos_token_id": -1}}, "which tokenizer.json does not"),
        ({"config.json": {"eos_token_id": 2**70}}, "which tokenizer.json does not"),
        ({"special_tokens_map.json": []}, "not a JSON object but a list"),
    ],
)
def test_hugging_face_without_an_end_token_of_its_own_is_refused(
    saved: Path, files: dict[str, object], words: str
) -> None:
    (saved / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (saved / name).write_text(json.dumps(content))
    with refused(words):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(saved))


def test_ids_with_gaps_fit_the_vocabulary_size(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0, "</s>": 9}, "merges": []}}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)


def test_null_tokenizer_is_megatrons() -> None:
    null = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (null.vocab_size, null.eod) == (101, 100)
    assert null.tokenize("7 0 99") == [7, 0, 99]
    assert null.detokenize([7, 0, 99]) == "7 0 99"
    for text, message in (("7 seven", "seven"), ("100", "id 100"), ("-1", "id -1")):
        with pytest.raises(UserError, match=message):
            null.tokenize(text)


def test_fingerprint_follows_the_content_and_not_the_place(tmp_path: Path, tiny: Tokenizer) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DATA / "tiny_bpe", copy)
    assert bpe(copy).unique_identifiers == tiny.unique_identifiers

    lines = (copy / "merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    lines[1], lines[2] = lines[2], lines[1]
    (copy / "merges.txt").write_text("".join(lines), encoding="utf-8")
    changed = bpe(copy)
    assert changed.vocab_size == tiny.vocab_size
    assert changed.fingerprint != tiny.fingerprint
    assert json.dumps(changed.unique_identifiers) != json.dumps(tiny.unique_identifiers)


def test_fingerprints_of_all_types_differ(saved: Path, tiny: Tokenizer, gpt2: Tokenizer) -> None:
    others = [
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(saved)),
        build_tokenizer("NullTokenizer", vocab_size=4095),
        build_tokenizer("NullTokenizer", vocab_size=4096),
    ]
    assert len({t.fingerprint for t in (tiny, gpt2, *others)}) == 5


def test_survives_pickling_with_its_behaviour(tiny: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tiny))
    assert copy.tokenize(TEXTS[6]) == tiny.tokenize(TEXTS[6])
    assert copy.unique_identifiers == tiny.unique_identifiers


@pytest.mark.parametrize(
    ("size", "divisor", "ranks", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (4096, 128, 2, 4096), (1, 128, 1, 128), (7, 1, 1, 7)],
)
def test_padded_size_is_megatrons(size: int, divisor: int, ranks: int, padded: int) -> None:
    assert padded_vocab_size(size, divisor, ranks) == padded


def test_unusable_arguments_name_the_flag(tmp_path: Path) -> None:
    vocab, merges = str(DATA / "tiny_bpe" / "vocab.json"), str(DATA / "tiny_bpe" / "merges.txt")
    gpt2_merges = str(DATA / "gpt2" / "merges.txt")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    no_end = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    cases: list[tuple[str, dict[str, str | int], str]] = [
        ("TikTokenizer", {}, "known: GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, NullTokenizer"),
        ("GPT2BPETokenizer", {"merge_file": merges}, "--vocab-file, which was not given"),
        ("GPT2BPETokenizer", {"vocab_file": vocab}, "--merge-file, which was not given"),
        ("GPT2BPETokenizer", {"vocab_file": "nowhere.json", "merge_file": merges}, "nowhere.json: no such file"),
        ("GPT2BPETokenizer", {"vocab_file": merges, "merge_file": merges}, "no byte-pair vocabulary"),
        ("GPT2BPETokenizer", {"vocab_file": vocab, "merge_file": gpt2_merges}, "of the same tokenizer"),
        ("GPT2BPETokenizer", no_end, "no <|endoftext|> entry"),
        ("GPT2BPETokenizer", {"vocab_file": vocab, "merge_file": merges, "vocab_size": 50257}, "files hold 512 ids"),
        ("HuggingFaceTokenizer", {}, "--tokenizer-model, which was not given"),
        ("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)}, "holds no tokenizer.json"),
        ("HuggingFaceTokenizer", {"tokenizer_model": merges}, "is not a tokenizer.json"),
        ("NullTokenizer", {}, "--vocab-size of at least 1"),
    ]
    for kind, arguments, message in cases:
        with refused(message):
            build_tokenizer(kind, **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
def test_importing_loads_neither_megatron_nor_the_backend() -> None:
    code = (
        "import sys, megatron_lowprec.training.data.corpus_writer; print({'megatron', 'tokenizers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_backend_agrees_that_the_saved_file_would_parse_the_end_token(saved: Path, tiny: Tokenizer) -> None:
    """Guards the guard: read plainly, the file does turn the spelled-out token into eod."""
    plain = Backend.from_file(str(saved / "tokenizer.json"))
    assert tiny.eod in plain.encode("a<|endoftext|>b").ids


# ---- SentencePiece
@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 300 pieces, trained here."""
    library = pytest.importorskip("sentencepiece", reason="sentencepiece (extra 'sentencepiece') is not installed")
    file = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    text = [f"the {word} of a small model, number {n}" for n in range(40) for word in ("loss", "scale", "gradient")]
    with file.open("wb") as out:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=out, vocab_size=300, model_type="bpe", byte_fallback=True
        )
    return file


def test_a_sentencepiece_model_gives_its_library_s_ids(model_file: Path) -> None:
    import sentencepiece

    ours = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(model_file))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    assert (ours.vocab_size, ours.eod) == (300, theirs.eos_id())
    for text in ("the loss of a model", "größer 東京 </s> <s>", ""):
        ids = ours.tokenize(text)
        assert ids == theirs.encode(text)
        assert ours.eod not in ids
        assert ours.detokenize(ids) == text
        assert pickle.loads(pickle.dumps(ours)).tokenize(text) == ids
    assert ours.detokenize([*ours.tokenize("a model"), ours.eod, *ours.tokenize("loss")]) == "a model</s>loss"
    with pytest.raises(UserError, match="--vocab-size 299 was asked"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(model_file), vocab_size=299)


def test_files_of_another_kind_are_refused_as_sentencepiece_model(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="sentencepiece (extra 'sentencepiece') is not installed")
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(UserError, match="is not a model of SentencePiece"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.model"))


def test_sentencepiece_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"model")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'megatron-lowprec\[sentencepiece\]'"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.model"))
