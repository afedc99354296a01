"""Train the byte-level BPE of ``configs/models/gpt_tiny.yaml`` on the shipped enwiki-valid text.

Writes ``data/tiny_bpe/vocab.json`` and ``merges.txt``, the files of a GPT2BPETokenizer. The same input gives the same
bytes: pairs of equal count are merged in the order of their ids, whatever the number of threads.
"""

import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_lowprec.errors import Parser
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.paths import output_folder

CORPUS = SHIPPED / "data" / "enwiki-valid.jsonl.xz"
DESTINATION = SHIPPED / "data" / "tiny_bpe"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 512


def documents(path: Path) -> Iterator[str]:
    """The ``text`` of each line of a .jsonl.xz file."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train(path: Path = CORPUS, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE of ``vocab_size`` entries: 256 bytes, merges, ``<|endoftext|>`` as the last id, as in GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # leaves one id for <|endoftext|>
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(path), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def save(tokenizer: Tokenizer, destination: Path) -> None:
    """Write ``vocab.json`` (ordered by id, one entry a line) and ``merges.txt`` into the folder ``destination``."""
    destination.mkdir(parents=True, exist_ok=True)
    vocab = dict(sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda entry: entry[1]))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    with open(destination / "vocab.json", "w", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(vocab, ensure_ascii=False, indent=0, separators=(",", ":")) + "\n")
    with open(destination / "merges.txt", "w", encoding="utf-8", newline="\n") as file:
        file.write("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--output", type=output_folder, default=DESTINATION, help="output folder (default: data/tiny_bpe)"
    )
    output = parser.parse_args(argv).output
    tokenizer = train()
    save(tokenizer, output)
    print(f"{tokenizer.get_vocab_size()} entries trained on {CORPUS.name}, written to {output}")


if __name__ == "__main__":
    main()
