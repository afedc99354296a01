"""Readers of corpora, tokenized or not."""

from __future__ import annotations

import gzip
import json
import lzma
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lowprec.shipped import SHIPPED
from tools.fuzz.run import FuzzedReader, copy, write
from tools.fuzz.template import TINY


def of_corpora() -> list[FuzzedReader]:
    texts = [f"{n} {n + 1} {n % 7} 250" for n in range(60)]
    lines = "".join(json.dumps({"text": text, "title": text}) + "\n" for text in texts).encode()

    def tokenizer() -> Any:
        from megatron_lowprec.training.data.tokenizer import build_tokenizer

        return build_tokenizer("NullTokenizer", vocab_size=255)

    def words() -> Any:
        from megatron_lowprec.training.data.tokenizer import build_tokenizer

        folder = SHIPPED / "data/tiny_bpe"
        vocab, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
        return build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)

    def make(noted: bool) -> None:
        from megatron_lowprec.training.data import corpus_writer

        write({"text.jsonl": lines})
        corpus_writer.write(["text.jsonl"], {"text": "c"}, tokenizer())
        if not noted:
            Path("c.json").unlink()

    def corpus() -> None:
        from megatron_lowprec.training.data import indexed_dataset
        from megatron_lowprec.training.data.sample_index import Corpus

        indexed_dataset.check_prefix("c", tokenizer())
        indexed_dataset.tokens_of("c", 256, (0.2, 0.9))
        indexed_dataset.unigram_entropy("c")
        found = Corpus("c", 256)
        ids = np.concatenate([found[at] for at in range(len(found))])
        if len(ids) and not 0 <= ids.min() <= ids.max() < 256:
            raise AssertionError("a bad id")

    def verify() -> None:
        from megatron_lowprec.training.data import indexed_dataset

        indexed_dataset.verify("c")

    def samples() -> None:
        from megatron_lowprec.training.config.arguments import parse
        from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
        from megatron_lowprec.training.data import batches

        flags = ["--data-path", "c", "--data-cache-path", "cache", "--split", "1,0,0"]
        config = resolve_run(resolve_model(parse([*TINY, *flags])[0]), 1, gpus=False)
        found = batches.build(config, tokenizer(), 0, 0)["train"]
        assert found is not None
        for at in range(found.epoch_samples):
            found.samples[at]

    def make_samples() -> None:
        make(True)
        samples()
        for path in list(Path("cache").glob("*-train-*_index.npy")):
            path.with_name(path.name.rpartition("-")[2]).symlink_to(path.name)

    def text(path: str) -> None:
        from megatron_lowprec.training.data import jsonl

        for batch in jsonl.batches([path]):
            for _ in jsonl.texts(batch, ("text",)):
                pass

    def chats() -> None:
        from megatron_lowprec.training.data import jsonl
        from megatron_lowprec.training.data.chat import ChatEncoder

        for batch in jsonl.batches(["chat.jsonl"]):
            ChatEncoder(known, np.uint16)(batch)

    def make_chat_corpus() -> None:
        from megatron_lowprec.training.data.chat_dataset import _write as tokenize

        copy(SHIPPED / "data/chat-sample.jsonl", "chat.jsonl")
        Path("chat.jsonl").write_bytes(b"".join(Path("chat.jsonl").read_bytes().splitlines(keepends=True)[:20]))
        tokenize("chat.jsonl", "chats", known, 1)

    def chat_corpus() -> None:
        from megatron_lowprec.training.data import indexed_dataset
        from megatron_lowprec.training.data.chat_dataset import ChatSamples

        indexed_dataset.check_prefix("chats", known)
        found = ChatSamples("chats", (0.0, 1.0), 64, known, "train", "chats")
        for at in range(len(found)):
            found[at]

    def make_shards() -> None:
        write({"text.jsonl": lines})
        shards()
        manifest = json.loads(Path("s.manifest.json").read_text(encoding="utf-8"))
        del manifest["data_path"]
        manifest["shards"] = manifest["shards"][:1]
        titles = np.arange(20, dtype=np.uint64)
        write({"p.partial.json": json.dumps({"state": {"rows": 20}, "titles": 20, **manifest})})
        write({"p.titles": titles.tobytes()})

    def shards(prefix: str = "s") -> None:
        from megatron_lowprec.training.data import shards as of_corpus
        from megatron_lowprec.training.data.wikipedia import Files

        source = Files(["text.jsonl"], "title", "text")
        of_corpus.prepare(source, prefix, tokenizer(), shard_documents=20)

    def manifest() -> None:
        from megatron_lowprec.training.data import shards as of_corpus

        print(*of_corpus.verify(Path("s.manifest.json")), sep="\n")

    def partial_shards() -> None:
        before = {name: Path(name).read_bytes() for name in ("p.partial.json", "p.titles")}
        try:
            shards("p")
        finally:
            for path in Path().glob("p[.-]*"):
                path.unlink()
            write(before)

    known = words()
    compressed: dict[str, bytes] = {".gz": gzip.compress(lines), ".xz": lzma.compress(lines), "": lines}
    try:
        import zstandard

        compressed[".zst"] = zstandard.ZstdCompressor().compress(lines)
    except ImportError:
        pass
    indices = tuple(f"cache/{name}_index.npy" for name in ("document", "sample", "shuffle"))
    return [
        FuzzedReader("corpus", ("c.idx", "c.bin", "c.json"), partial(make, True), corpus),
        FuzzedReader("corpus without a note", ("c.idx", "c.bin"), partial(make, False), corpus),
        FuzzedReader("corpus, verified", ("c.idx", "c.bin"), partial(make, True), verify, exact=True),
        FuzzedReader("indices of samples", indices, make_samples, samples),
        *(
            FuzzedReader(
                f"JSON lines{suffix}",
                (name := f"t.jsonl{suffix}",),
                partial(write, {name: content}),
                partial(text, name),
            )
            for suffix, content in compressed.items()
        ),
        FuzzedReader("conversations", ("chat.jsonl",), make_chat_corpus, chats),
        FuzzedReader(
            "conversations, tokenized", ("chats.idx", "chats.bin", "chats.json"), make_chat_corpus, chat_corpus
        ),
        FuzzedReader("manifest of shards", ("s.manifest.json",), make_shards, manifest),
        FuzzedReader("unfinished shards", ("p.partial.json", "p.titles"), make_shards, partial_shards),
    ]
