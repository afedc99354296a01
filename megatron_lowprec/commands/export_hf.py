"""Write a checkpoint as a Hugging Face model: config.json, model.safetensors and the tokenizer's files.

    megatron-lowprec export --load runs/my_run --out my_model

A GPT with learned positions and LayerNorm becomes a GPT-2 (GPT2LMHeadModel), one with rope, RMSNorm and SwiGLU a Llama
(LlamaForCausalLM). The weights are those of the forward pass in training, without quantization: a Hugging Face model
has no recipe. Checkpoints of any parallel layout are read, by one process without a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.files import default_mode, whole_folder
from megatron_lowprec.training.checkpoint import loader
from megatron_lowprec.training.checkpoint.resume import check_tokenizer
from megatron_lowprec.training.checkpoint.tokenizer_flags import add_tokenizer_flags, moved_tokenizer
from megatron_lowprec.training.config.paths import check_folder
from megatron_lowprec.training.convert.hf_config import to_hf_config
from megatron_lowprec.training.convert.hf_tokenizer import write_tokenizer
from megatron_lowprec.training.convert.hf_weights import to_hf_weights
from megatron_lowprec.training.convert.store import read_weights, whole_or_nothing
from megatron_lowprec.training.data.tokenizer import tokenizer_of

DTYPES = ("bfloat16", "float16", "float32")


def parse_arguments(arguments: Sequence[str] | None, program: str) -> argparse.Namespace:
    """Flags."""
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument("--load", required=True, metavar="FOLDER", help="a run's folder, a --save folder, or an iter_…")
    parser.add_argument("--iteration", type=int, help="which checkpoint (default: the newest)")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write, new or empty")
    add_tokenizer_flags(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights (default: the checkpoint's)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, program: str = "export_hf.py") -> int:
    """Exit code: 0, or 2 for a UserError."""
    args = parse_arguments(arguments, program)
    return run_tool(program, lambda: print(*export(args), sep="\n"))


def export(args: argparse.Namespace) -> list[str]:
    """Write the model; returns a summary."""
    out, dtype = Path(args.out), args.dtype
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists already; name a new folder or an empty one")
    check_folder(out, "--out")
    found = loader.at_iteration(loader.find(args.load), args.iteration)
    config = loader.reopen(found, 1, gpus=False, **moved_tokenizer(args)).config
    tokenizer = tokenizer_of(config)
    check_tokenizer(found, tokenizer)
    name = dtype or ("bfloat16" if config.bf16 else "float32")
    about = to_hf_config(config, tokenizer.vocab_size, tokenizer.eod, name)
    tensors = to_hf_weights(config, read_weights(found.folder), tokenizer.vocab_size, getattr(torch, name))
    with whole_folder(out) as partial, whole_or_nothing(partial, f"--out {out}"):
        weights = partial / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        default_mode(weights)
        (partial / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        files = write_tokenizer(config, config.shape.max_position_embeddings, partial)
    count = sum(tensor.numel() for tensor in tensors.values())
    lines = [f"{found.folder} -> {out}: {about['architectures'][0]}, {count:,} weights in {name}"]
    return [*found.notes, *lines, f"tokenizer: {tokenizer}; {', '.join(files) or 'no files'}"]
