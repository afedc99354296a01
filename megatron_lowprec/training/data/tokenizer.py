"""Tokenizers by Megatron's names, with the interface that ``megatron.core`` datasets need.

Text is always encoded as text: a document that contains ``<|endoftext|>`` is encoded as those thirteen characters,
never as the end-of-document id, which only the corpus writer inserts.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import read_json
from megatron_lowprec.shipped import find

if TYPE_CHECKING:
    from argparse import Namespace

    from tokenizers import Tokenizer as BackendTokenizer

    from megatron_lowprec.training.config.options import Config

TOKENIZER_FILES: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "NullTokenizer": (),
}
"""Types of tokenizers, and the options of the files that they read."""
TOKENIZER_TYPES = tuple(TOKENIZER_FILES)
END_OF_TEXT = "<|endoftext|>"


class Tokenizer(ABC):
    """Text to token ids and back.

    ``vocab_size`` counts ids, including ``eod``: every id lies in ``[0, vocab_size)``. ``fingerprint`` is 16 hex digits
    that depend only on the type and the vocabulary's content, not on the location of its files. ``eod_source`` says
    where ``eod`` is from.
    """

    def __init__(self, type_name: str, vocab_size: int, eod: int, eod_source: str, content: bytes) -> None:
        self.type_name = type_name
        self.vocab_size = vocab_size
        self.eod = eod
        self.eod_source = eod_source
        self.fingerprint = hashlib.sha256(type_name.encode() + b"\0" + content).hexdigest()[:16]

    @property
    def unique_identifiers(self) -> "OrderedDict[str, str]":
        """Key of a dataset's cached index in ``megatron.core``."""
        return OrderedDict(type=self.type_name, vocab_size=str(self.vocab_size), fingerprint=self.fingerprint)

    def __str__(self) -> str:
        end = f"id {self.eod}, {self.detokenize([self.eod])!r}, by {self.eod_source}"
        return f"{self.type_name} of {self.vocab_size:,} ids; end of a document: {end}"

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``, without any begin or end token."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; ``eod`` becomes its name. Ids split inside a character give U+FFFD."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, on the calling thread.

        The backend's own batch call is not used: its thread pool gains nothing inside worker processes, and every later
        fork of this process would print a warning.
        """
        return [self.tokenize(text) for text in texts]


class _BackendTokenizer(Tokenizer):
    """A tokenizer run by the ``tokenizers`` library; picklable."""

    def __init__(
        self, type_name: str, backend: "BackendTokenizer", end_token: str, end_source: str, content: bytes
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        # Despite its name this treats special tokens in a document as ordinary text.
        backend.encode_special_tokens = True
        # Ids may have gaps, so the number of entries does not determine the embedding's size.
        ids = backend.get_vocab(with_added_tokens=True)
        content = end_token.encode() + b"\0" + content
        super().__init__(type_name, max(ids.values()) + 1, ids[end_token], end_source, content)
        self._backend = backend

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what the library leaves out of its pickles: worker processes would read special tokens in text."""
        self.__dict__.update(state)
        self._backend.encode_special_tokens = True

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


class SentencePieceTokenizer(Tokenizer):
    """A ``tokenizer.model`` run by the ``sentencepiece`` library; picklable.

    Raises:
        UserError: the package is missing, the file is no model, or its model has no end of a text.
    """

    def __init__(self, file: Path) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise UserError(
                "SentencePieceTokenizer needs the package sentencepiece: pip install 'megatron-lowprec[sentencepiece]'"
            ) from None
        content = file.read_bytes()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError) as error:
            raise UserError(f"--tokenizer-model {file} is not a model of SentencePiece: {_one_line(error)}") from None
        eod = self._processor.eos_id()
        if eod < 0:
            raise UserError(f"--tokenizer-model {file} has no end of a text (eos_id -1); train the model with one")
        super().__init__("SentencePieceTokenizer", self._processor.get_piece_size(), eod, file.name, content)

    def tokenize(self, text: str) -> list[int]:
        # the library reads no control symbol from text
        ids: list[int] = self._processor.encode(text)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        documents: list[list[int]] = [[]]
        for token in ids:
            if token == self.eod:
                documents.append([])
            else:
                documents[-1].append(int(token))
        end: str = self._processor.id_to_piece(self.eod)
        return end.join(self._processor.decode(document) for document in documents)


class NullTokenizer(Tokenizer):
    """Token ids as decimal numbers separated by spaces; ids ``0 .. size - 1`` and ``eod = size``, as in Megatron."""

    def __init__(self, size: int) -> None:
        super().__init__("NullTokenizer", size + 1, size, "definition", str(size).encode())

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise UserError(f"NullTokenizer reads numbers between spaces, but found text: {error}") from None
        wrong = next((i for i in ids if not 0 <= i < self.eod), None)
        if wrong is not None:
            raise UserError(f"NullTokenizer of --vocab-size {self.eod} cannot hold id {wrong}; raise --vocab-size")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """The tokenizer that Megatron's flags describe.

    ``GPT2BPETokenizer`` needs ``vocab_file`` and ``merge_file`` (byte-level BPE without a prefix space; the entry
    ``<|endoftext|>`` is eod), ``HuggingFaceTokenizer`` a ``tokenizer_model`` (a tokenizer.json or its folder; eod is
    the eos_token of the files beside it), ``SentencePieceTokenizer`` one (a tokenizer.model; eod is its end of a
    text), ``NullTokenizer`` a ``vocab_size``. For all others ``vocab_size`` is only checked against the files.

    Raises:
        UserError: unknown type, missing argument, missing or unreadable file, no file that names an end token, or
            another vocabulary size.
    """
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise UserError(f"NullTokenizer needs --vocab-size of at least 1, got {vocab_size}; give the number of ids")
        return NullTokenizer(vocab_size)
    if tokenizer_type == "GPT2BPETokenizer":
        tokenizer = _gpt2_bpe(
            _existing(vocab_file, tokenizer_type, "--vocab-file"), _existing(merge_file, tokenizer_type, "--merge-file")
        )
    elif tokenizer_type == "HuggingFaceTokenizer":
        tokenizer = _hugging_face(_existing(tokenizer_model, tokenizer_type, "--tokenizer-model"))
    elif tokenizer_type == "SentencePieceTokenizer":
        tokenizer = SentencePieceTokenizer(_existing(tokenizer_model, tokenizer_type, "--tokenizer-model"))
    else:
        raise UserError(f"unknown --tokenizer-type {tokenizer_type!r}; known: {', '.join(TOKENIZER_TYPES)}")
    if vocab_size is not None and vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size} was asked, but the {tokenizer_type}'s files hold {tokenizer.vocab_size} ids; "
            "drop --vocab-size or give the files that belong to it"
        )
    return tokenizer


def tokenizer_of(options: "Config | Namespace") -> Tokenizer:
    """``build_tokenizer`` from the five options that the driver and its tools have in common.

    Raises:
        UserError: as ``build_tokenizer``.
    """
    return build_tokenizer(
        options.tokenizer_type,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        tokenizer_model=options.tokenizer_model,
        vocab_size=options.vocab_size,
    )


def padded_vocab_size(tokenizer_vocab_size: int, make_divisible_by: int, tensor_parallel: int) -> int:
    """Rows of the embedding: the vocabulary rounded up so that each tensor-parallel rank holds a multiple of
    ``make_divisible_by``.
    """
    multiple = make_divisible_by * tensor_parallel
    return -(-tokenizer_vocab_size // multiple) * multiple


def _existing(path: str | None, tokenizer_type: str, flag: str) -> Path:
    if path is None:
        raise UserError(f"{tokenizer_type} needs {flag}, which was not given")
    found = find(path)
    if not found.exists():
        raise UserError(f"{flag} {path}: no such file; check the path (relative ones start at the current folder)")
    return found


def _gpt2_bpe(vocab_file: Path, merge_file: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    try:
        backend = Backend(models.BPE.from_file(str(vocab_file), str(merge_file)))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any parse error
        raise UserError(
            f"--vocab-file {vocab_file} and --merge-file {merge_file} are no byte-pair vocabulary: {_one_line(error)}; "
            "give vocab.json and merges.txt of the same tokenizer"
        ) from None
    if backend.token_to_id(END_OF_TEXT) is None:
        raise UserError(f"--vocab-file {vocab_file} has no {END_OF_TEXT} entry, which GPT2BPETokenizer needs as eod")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    content = vocab_file.read_bytes() + b"\0" + merge_file.read_bytes()
    return _BackendTokenizer("GPT2BPETokenizer", backend, END_OF_TEXT, vocab_file.name, content)


def _hugging_face(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--tokenizer-model {path}: the folder holds no tokenizer.json; save the tokenizer there first")
    content = file.read_bytes()
    try:
        backend = Backend.from_buffer(content)
    except Exception as error:  # noqa: BLE001 - as above
        raise UserError(f"--tokenizer-model {file} is not a tokenizer.json: {_one_line(error)}") from None
    return _BackendTokenizer("HuggingFaceTokenizer", backend, *_end_token(file, backend), content)


def _end_token(file: Path, backend: "BackendTokenizer") -> tuple[str, str]:
    """The end-of-text token of a tokenizer.json, and the file beside it that names the token."""
    for name, named in end_tokens(file.parent):
        if isinstance(named, str):
            token = named if backend.token_to_id(named) is not None else None
        else:
            token = backend.id_to_token(named) if 0 <= named < 2**31 else None
        if token is None:
            raise UserError(
                f"{file.with_name(name)} names the end of a text {named!r}, which {file.name} does not have"
            )
        return token, name
    raise UserError(
        f"no file beside {file} names one end-of-text token: name it as eos_token in tokenizer_config.json there"
    )


def end_tokens(folder: Path) -> list[tuple[str, str | int]]:
    """Files of a model's folder that name one end of a text, with its token or id; the first one decides."""
    found: list[tuple[str, str | int]] = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = json_object(folder / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        found += [(name, token)] if isinstance(token, str) else []
    for name in ("config.json", "generation_config.json"):
        ids = json_object(folder / name).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        found += [(name, ids[0])] if len(ids) == 1 and type(ids[0]) is int else []
    return found


def json_object(file: Path) -> dict[str, Any]:
    """Content of a Hugging Face folder's JSON file, empty without the file.

    Raises:
        UserError: no object, or not readable.
    """
    try:
        return read_json(file, "save the model again", len)  # a vocabulary has tokens of any characters
    except FileNotFoundError:
        return {}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
