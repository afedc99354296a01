"""Readers of models and tokenizers of others, and of the tools' own files."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch

from megatron_lowprec.shipped import SHIPPED
from tools.fuzz.run import FuzzedReader, copy, write

_END = 511  # <|endoftext|> of data/tiny_bpe


def of_models(made: Path) -> list[FuzzedReader]:
    def make_hf() -> None:
        copy(made / "hf", "hf")
        for name in ("vocab.json", "merges.txt"):
            copy(SHIPPED / "data/tiny_bpe" / name, f"hf/{name}")
        # the end of a text of this vocabulary, not of the run's tokenizer
        about = json.loads(Path("hf/config.json").read_text(encoding="utf-8")) | {"eos_token_id": _END}
        write({"hf/config.json": json.dumps(about)})
        index = {"weight_map": {"wte.weight": "model.safetensors"}}
        write({"hf/model.safetensors.index.json": json.dumps(index)})

    def hugging_face() -> None:
        from megatron_lowprec.commands.import_hf import _config, _tensors
        from megatron_lowprec.training.config.options import Config
        from megatron_lowprec.training.config.resolve import resolve_model
        from megatron_lowprec.training.convert.hf_config import from_hf_config
        from megatron_lowprec.training.convert.hf_tokenizer import tokenizer_options

        about = _config(Path("hf"))
        options = from_hf_config(about)
        named = tokenizer_options(Path("hf"))
        resolve_model(Config(**{**options, **named}))
        _tensors(Path("hf"))

    def make_tokenizers() -> None:
        from tokenizers import Tokenizer, models

        files = [str(SHIPPED / "data/tiny_bpe" / name) for name in ("vocab.json", "merges.txt")]
        write({"bpe/x": "", "hf/x": ""})
        for name, source in zip(("vocab.json", "merges.txt"), files, strict=True):
            copy(Path(source), f"bpe/{name}")
        Tokenizer(models.BPE.from_file(*files)).save("hf/tokenizer.json")
        write({"hf/tokenizer_config.json": json.dumps({"eos_token": {"content": "<|endoftext|>"}})})

    def tokenizers() -> None:
        from megatron_lowprec.training.data.tokenizer import build_tokenizer

        build_tokenizer("HuggingFaceTokenizer", tokenizer_model="hf").tokenize("a b")
        build_tokenizer("GPT2BPETokenizer", vocab_file="bpe/vocab.json", merge_file="bpe/merges.txt").tokenize("a b")

    def make_megatron() -> None:
        from megatron_lowprec.training.checkpoint.loader import find
        from megatron_lowprec.training.convert.store import read_weights

        folder = find(str(made / "run")).folder
        options = dict(find(str(made / "run")).content["options"])
        args = Namespace(**options, add_bias_linear=True, bias_gelu_fusion=True)
        Path("m/iter_0000004/mp_rank_00").mkdir(parents=True)
        torch.save({"args": args, "model": read_weights(folder)}, "m/iter_0000004/mp_rank_00/model_optim_rng.pt")
        write({"m/latest_checkpointed_iteration.txt": "4"})

    def megatron() -> None:
        from megatron_lowprec.training.convert import stock

        stock.options(stock.read("m").args)

    return [
        FuzzedReader(
            "Hugging Face model",
            ("hf/config.json", "hf/model.safetensors", "hf/model.safetensors.index.json", "hf/vocab.json"),
            make_hf,
            hugging_face,
        ),
        FuzzedReader(
            "tokenizers",
            ("hf/tokenizer.json", "hf/tokenizer_config.json", "bpe/vocab.json", "bpe/merges.txt"),
            make_tokenizers,
            tokenizers,
        ),
        FuzzedReader(
            "Megatron-LM's older format",
            ("m/iter_0000004/mp_rank_00/model_optim_rng.pt", "m/latest_checkpointed_iteration.txt"),
            make_megatron,
            megatron,
        ),
    ]


def of_tools(made: Path) -> list[FuzzedReader]:
    def make_capture() -> None:
        copy(min((made / "run").rglob("*fc1*.safetensors")), "c.safetensors")

    def capture() -> None:
        from megatron_lowprec.linear.capture_file import read_capture

        read_capture(Path("c.safetensors"))

    def tilings() -> None:
        from megatron_lowprec.kernels.tuning import _read

        _read(Path("tilings.json"))

    def make_experiment() -> None:
        copy(min((SHIPPED.parent / "docs/results/numerics").glob("*.json")), "e/e.json")

    def experiment() -> None:
        from megatron_lowprec.lab.page import experiments

        for _ in experiments(Path("e")):
            pass

    def verified() -> None:
        from megatron_lowprec.training.data import indexed_dataset

        indexed_dataset.verify_once("c", 256, Path("cache"))

    def make_vectors() -> None:
        from safetensors.torch import save_file

        codes = torch.zeros(2, 16, dtype=torch.uint8)
        arrays = {"x.codes": codes, "x.dequant": torch.ones(2, 32), "x.quirk_blocks": torch.zeros(2, 1)}
        save_file({"x": torch.ones(2, 32)}, "inputs.safetensors")
        save_file(arrays, "case.safetensors", {"format": "e2m1", "tolerance": '{"dequant": 0.1}'})

    def vectors() -> None:
        from megatron_lowprec.conformance.check import check
        from megatron_lowprec.conformance.vectors import read_cases

        cases = list(read_cases(Path()))
        known = {(case.name, group.name): group.results for case in cases for group in case.groups}
        check(cases, lambda case, group, *_: known[case, group])

    def make_verified() -> None:
        from megatron_lowprec.training.data import corpus_writer
        from megatron_lowprec.training.data.tokenizer import build_tokenizer

        write({"text.jsonl": json.dumps({"text": "1 2 3"}) + "\n"})
        corpus_writer.write(["text.jsonl"], {"text": "c"}, build_tokenizer("NullTokenizer", vocab_size=255))
        verified()

    return [
        FuzzedReader("vectors", ("inputs.safetensors", "case.safetensors"), make_vectors, vectors),
        FuzzedReader("captured operands", ("c.safetensors",), make_capture, capture),
        FuzzedReader("tilings", ("tilings.json",), partial(write, {"tilings.json": '{"gemm of [1, 2]": 1}'}), tilings),
        FuzzedReader("numerics experiment", ("e/e.json",), make_experiment, experiment),
        FuzzedReader("record of verified data", ("cache/verified.json",), make_verified, verified),
    ]
