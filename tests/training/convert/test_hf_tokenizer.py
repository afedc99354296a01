"""Which tokenizer a Hugging Face model's folder has: its own ids and end of a document, or an error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megatron_lowprec.commands import export_hf, import_hf
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.convert.hf_tokenizer import tokenizer_options, write_tokenizer
from megatron_lowprec.training.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_of
from tests.refusal import refused
from tests.training.conftest import Drive
from tests.training.convert.models import GPT, arguments

VOCABULARY = SHIPPED / "data/tiny_bpe"
TEXT = "In 1999 and 2000, 12345 tokens: <|endoftext|> a    5; naïve café — ½."
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS: dict[str, Any] = {  # of the same vocabulary and merges
    "gpt2": BYTES,
    "single digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "no pattern": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
}


def two_files(folder: Path) -> Tokenizer:
    """GPT-2's tokenizer of a folder's vocab.json and merges.txt."""
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return build_tokenizer("GPT2BPETokenizer", **files)


def write(folder: Path, split: str = "gpt2", eos: str | None = "<|endoftext|>", extra: tuple[str, ...] = ()) -> Backend:
    """The tiny vocabulary as vocab.json and merges.txt, and as a tokenizer.json that splits text in its own way."""
    shutil.copytree(VOCABULARY, folder, dirs_exist_ok=True)
    backend = Backend(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer, backend.decoder = SPLITS[split], decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", *extra])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 511}))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return Backend.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("eos", ["<|endoftext|>", "<|im_end|>"])
@pytest.mark.parametrize("split", SPLITS)
def test_an_imported_model_goes_on_with_its_own_ids(split: str, eos: str, tmp_path: Path) -> None:
    theirs = write(tmp_path, split, eos, extra=() if eos == "<|endoftext|>" else (eos,))
    theirs.encode_special_tokens = True
    ours = tokenizer_of(Config(**tokenizer_options(tmp_path)))
    assert ours.tokenize(TEXT) == theirs.encode(TEXT, add_special_tokens=False).ids
    assert theirs.id_to_token(ours.eod) == eos
    # GPT-2's own keeps its fingerprint, by which a corpus is known; another one is not taken for it.
    gpt2 = two_files(VOCABULARY)
    same = (split, eos) == ("gpt2", "<|endoftext|>")
    assert (ours.unique_identifiers == gpt2.unique_identifiers) == same
    if split in ("single digits", "prefix space"):
        assert ours.tokenize(TEXT) != gpt2.tokenize(TEXT), "a case that no tokenizer gets wrong"


def test_a_vocabulary_and_merges_without_more_are_gpt_2_s(tmp_path: Path) -> None:
    write(tmp_path, eos=None)
    (tmp_path / "tokenizer.json").unlink()
    ours = tokenizer_of(Config(**tokenizer_options(tmp_path)))
    assert ours.unique_identifiers == two_files(VOCABULARY).unique_identifiers
    assert str(ours) == "GPT2BPETokenizer of 512 ids; end of a document: id 511, '<|endoftext|>', by vocab.json"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": {"model_type": "llama"}}, "how a llama tokenizer splits text is not in these files"),
        ({"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}}, "how a Qwen2Tokenizer tokenizer splits"),
        ({"tokenizer_config.json": {"add_prefix_space": True}}, "it adds a space in front of a text"),
        ({"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, "the end of a text '<|im_end|>'"),
        ({"config.json": {"model_type": "gpt2", "eos_token_id": 7}}, "config.json names the end of a text 7, which is"),
        ({"vocab.json": {"a": 0}}, "vocab.json has no <|endoftext|>"),
        ({"merges.txt": None}, "has vocab.json but no tokenizer.json, and GPT-2's would have merges.txt"),
        ({"vocab.json": None, "merges.txt": None, "tekken.json": {}}, "has tekken.json but no tokenizer.json"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_is_refused(
    files: dict[str, dict[str, Any] | None], words: str, tmp_path: Path
) -> None:
    write(tmp_path, eos=None)
    (tmp_path / "tokenizer.json").unlink()
    for name, content in files.items():
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_text(json.dumps(content))
    with refused(words, "save_pretrained"):
        tokenizer_options(tmp_path)


def test_an_exported_sentencepiece_model_is_imported(tmp_path: Path) -> None:
    (tmp_path / "theirs.model").write_bytes(b"a model")
    config = Config(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "theirs.model"))
    (tmp_path / "new").mkdir()
    assert write_tokenizer(config, 32, tmp_path / "new") == ["tokenizer.model"]
    named = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(tmp_path / "new/tokenizer.model")}
    assert tokenizer_options(tmp_path / "new") == named


@pytest.mark.parametrize("file", [False, True], ids=["a folder", "a file"])
def test_a_written_tokenizer_has_its_end_token(file: bool, tmp_path: Path) -> None:
    theirs, new = tmp_path / "theirs", tmp_path / "new"
    new.mkdir()
    write(theirs, "single digits", eos=None, extra=("<|im_end|>",))
    (theirs / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    source = theirs / "tokenizer.json" if file else theirs
    config = Config(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(source))
    written = write_tokenizer(config, 32, new)
    assert {"tokenizer.json", "special_tokens_map.json"} <= set(written) == {path.name for path in new.iterdir()}
    assert (new / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    again = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(new))
    assert again.unique_identifiers == tokenizer_of(config).unique_identifiers


def test_a_model_s_tokenizer_survives_import_and_export(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(arguments(GPT, save="out", train_iters=1, vocab_size=511))
    assert export_hf.main(["--load", "out", "--out", "hf"]) == 0
    capsys.readouterr()
    assert import_hf.main(["--load", "hf", "--save", "ids"]) == 0
    said = capsys.readouterr().out
    assert "the folder has no file of one, so samples are ids: NullTokenizer of 512 ids" in said
    # as SmolLM2's: another split than GPT-2's, another end, and all of GPT-2's files
    write(Path("theirs"), "single digits", "!")
    for name in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(f"theirs/{name}", f"hf/{name}")
    assert import_hf.main(["--load", "hf", "--save", "back"]) == 0
    assert "HuggingFaceTokenizer of 512 ids; end of a document: id 0, '!', by tokenizer_config.json" in (
        capsys.readouterr().out
    )
    assert export_hf.main(["--load", "back", "--out", "again"]) == 0
    assert Path("again/tokenizer.json").read_bytes() == Path("theirs/tokenizer.json").read_bytes()
    assert json.loads(Path("again/config.json").read_text())["eos_token_id"] == 0
    write(Path("hf"), "single digits", "<|im_end|>", extra=("<|im_end|>",))
    shutil.copyfile("again/config.json", "hf/config.json")
    assert import_hf.main(["--load", "hf", "--save", "larger"]) == 2
    assert "has 513 ids, and config.json's vocab_size is 512" in capsys.readouterr().err
    assert not Path("larger").exists()
