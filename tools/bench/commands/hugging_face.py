"""A training step of Hugging Face models: ``convert`` under each recipe and torchao, over bf16 of the same mode.

Each variant has a model of its own with the same random weights. "Compiled" is ``torch.compile`` of each decoder layer,
"graphs" the same with ``mode="reduce-overhead"``.
"""

import argparse
import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_lowprec.linear.convert import convert
from megatron_lowprec.text_tables import Column, Row, named
from tools.bench.kernels import kernels_of, profiled
from tools.bench.measure import Bench, errors, one_line
from tools.bench.peers.layers import absent
from tools.bench.report import Report, spread_columns

RECIPES = ("fp8_current", "fp8_rowwise", "fp8_blockwise", "mxfp4_rht_sr")
TORCHAO = ("tensorwise", "rowwise")
COLUMNS = (
    *named("model", "tokens", "variant"),
    *spread_columns(2),
    Column("over_bf16", "/bf16", ".3f"),
    Column("over_eager", "/eager bf16", ".3f"),
    Column("host_ms", "host ms", ".1f"),
    Column("kernel_ms", "kernels", ".1f"),
    Column("converted", "converted", "d"),
    Column("first_loss", "first loss", ".4f"),
)
_MODES = {"": None, ", compiled": "default", ", graphs": "reduce-overhead"}  # of torch.compile
_LONGEST = 40  # kernels that are kept by name
_NEARLY = 0.02  # relative distance of the first loss from bf16's, of random weights


@dataclass(frozen=True)
class ModelCase:
    """A causal language model with random weights.

    Attributes:
        architecture: ``llama``, ``gpt2`` or ``qwen3_moe``.
        sequences: of a step, each as long as the model takes.
        experts, topk: of each layer of ``qwen3_moe``, each expert with ``ffn``; the experts of a token.
    """

    architecture: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    length: int
    sequences: int
    experts: int = 0
    topk: int = 0

    def build(self, device: torch.device) -> Any:
        """The model in bf16, the same weights in each call."""
        import transformers

        torch.manual_seed(1)
        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.length,
        }
        if self.architecture == "llama":
            config: Any = transformers.LlamaConfig(**sizes, intermediate_size=self.ffn)
            model: Any = transformers.LlamaForCausalLM(config)
        elif self.architecture == "qwen3_moe":
            config = transformers.Qwen3MoeConfig(
                **sizes, moe_intermediate_size=self.ffn, num_experts=self.experts, num_experts_per_tok=self.topk
            )
            model = transformers.Qwen3MoeForCausalLM(config)
        else:
            config = transformers.GPT2Config(
                vocab_size=self.vocabulary,
                n_embd=self.hidden,
                n_inner=self.ffn,
                n_layer=self.layers,
                n_head=self.heads,
                n_positions=self.length,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
            model = transformers.GPT2LMHeadModel(config)
        model.config.use_cache = False
        return model.to(device, torch.bfloat16)

    def blocks(self, model: Any) -> Any:
        """The decoder layers."""
        return model.transformer.h if self.architecture == "gpt2" else model.model.layers


CASES = {
    "llama": ModelCase("llama", 2048, 8192, 32, 8, 8, 32000, 2048, 4),  # layers of Llama 3.2 1B
    "llama_8b": ModelCase("llama", 4096, 14336, 32, 8, 4, 32000, 2048, 4),  # 4 layers of Llama 3 8B
    "gpt2": ModelCase("gpt2", 2048, 8192, 32, 32, 8, 50304, 1024, 8),  # layers of gpt_1.3b
    # layers of deepseek_16b's sizes, with Qwen3's attention
    "qwen3_moe": ModelCase("qwen3_moe", 2048, 1408, 16, 4, 2, 32000, 2048, 4, experts=64, topk=6),
    "smoke": ModelCase("llama", 128, 256, 4, 2, 2, 128, 32, 2),
    "smoke_experts": ModelCase("qwen3_moe", 128, 128, 4, 2, 1, 128, 32, 1, experts=4, topk=2),
}


class ModelStep:
    """Forward pass, backward pass and update of a model that subclasses build; calls run one step."""

    _model: Any
    _tokens: torch.Tensor
    _optimizer: torch.optim.Optimizer

    def __call__(self) -> torch.Tensor:
        """The loss."""
        torch.compiler.cudagraph_mark_step_begin()
        loss: torch.Tensor = self._model(input_ids=self._tokens, labels=self._tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


class Step(ModelStep):
    """AdamW of one variant.

    Args:
        change: converts the model's layers and returns their number.
        mode: of ``torch.compile`` of each decoder layer; None for eager mode.
    """

    def __init__(
        self, case: ModelCase, tokens: torch.Tensor, change: Callable[[Any], int], mode: str | None, pristine: Any
    ) -> None:
        self._model, self._tokens = copy.deepcopy(pristine), tokens
        self.converted = change(self._model)
        if mode is not None:
            for block in case.blocks(self._model):
                block.compile(dynamic=False, mode=mode)
        fused = tokens.is_cuda
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=fused)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Every chosen model under every recipe, eager and compiled, and in torchao."""
    # the layers of all variants have one code object; beyond the limit they would run eagerly
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        _run(args, bench, report)


def _run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    rows: list[Row] = []
    missing = absent("torchao", bench.device) if "torchao" in args.peers else None
    for name in args.shapes or ("llama", "gpt2"):
        with torch.autograd.set_multithreading_enabled(True):  # as in a loop of one's own
            rows += _rows(name, args, bench, report, missing is None and "torchao" in args.peers)
    report.note(
        *([f"peer torchao is missing: {missing}"] if missing else []),
        "ms: forward, backward and fused AdamW on bf16 weights, including the host where it is slower",
        "compiled: torch.compile of each decoder layer, graphs: with mode reduce-overhead; /bf16: over bf16 of the "
        "same mode",
        *([] if bench.on_gpu else ["nothing is compiled on a CPU"]),
        "all linear layers but the head and 3-D weights of experts are converted (skip_slower=False); "
        "'converted' counts them",
        "host ms: until the step's calls return, device idle before it; kernels: sum of their times in a step",
        f"{args.rounds} rounds in turn; 'rounds': the largest difference between their medians",
    )
    report.table(f"Hugging Face models, training step: {args.device}", rows, COLUMNS)


def _rows(name: str, args: argparse.Namespace, bench: Bench, report: Report, torchao: bool) -> Iterator[Row]:
    case = CASES[name]
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(case.vocabulary, (case.sequences, case.length), generator=generator).to(bench.device)
    named = {"model": name, "tokens": f"{case.sequences}x{case.length}"}
    pristine = case.build(bench.device)
    steps: dict[str, Step] = {}
    losses: dict[str, float] = {}
    modes = _modes(args, bench)
    for variant, (change, mode) in _variants(args, torchao and case.architecture == "llama", modes).items():
        try:
            step = Step(case, tokens, change, mode, pristine)
            losses[variant] = float(step())
            plain = next(iter(losses.values()))  # bf16's, if it did not fail
            if not abs(losses[variant] / plain - 1.0) < _NEARLY:
                raise ValueError(f"the first loss is {losses[variant]:.4f}, bf16's {plain:.4f}")
            steps[variant] = step
        except errors() as error:
            yield {**named, "variant": variant, "failed": one_line(error)}
        report.progress(f"{name} {variant}: {'ready' if variant in steps else 'failed'}")
    gc.collect()
    gc.freeze()  # a step's collections do not visit the other variants
    try:
        timings = bench.compare(steps, args.rounds)
        for variant, timing in timings.items():
            same_mode = timings.get("".join(("bf16", *variant.partition(",")[1:])))
            kernels = kernels_of(profiled(steps[variant])) if bench.on_gpu else []
            yield {
                **named,
                "variant": variant,
                **timing.row(),
                "over_bf16": timing.ms / same_mode.ms if same_mode else None,
                "over_eager": timing.ms / timings["bf16"].ms if "bf16" in timings else None,
                "host_ms": bench.host_microseconds(steps[variant]) / 1e3,
                "kernel_ms": sum(kernel["ms"] for kernel in kernels) if kernels else None,
                "kernels": kernels[:_LONGEST],
                "converted": steps[variant].converted,
                "first_loss": losses[variant],
            }
    finally:
        gc.unfreeze()


def _modes(args: argparse.Namespace, bench: Bench) -> dict[str, str | None]:
    """End of a row's name -> mode; nothing is compiled on a CPU."""
    left_out = {"": args.no_eager, ", compiled": False, ", graphs": not args.cuda_graphs}
    return {end: mode for end, mode in _MODES.items() if not left_out[end]} if bench.on_gpu else {"": None}


def _variants(
    args: argparse.Namespace, torchao: bool, modes: dict[str, str | None]
) -> dict[str, tuple[Callable[[Any], int], str | None]]:
    """Row -> function that converts a model, and the mode of its layers."""
    changes: dict[str, Callable[[Any], int]] = {"bf16": lambda model: 0}
    changes |= {recipe: partial(_ours, recipe) for recipe in args.recipes or RECIPES if recipe != "bf16"}
    peers = {f"torchao {name}": partial(_torchao, name) for name in TORCHAO} if torchao else {}
    found = {name + end: (change, mode) for name, change in changes.items() for end, mode in modes.items()}
    compiled = {end: mode for end, mode in modes.items() if mode is not None}
    return found | {name + end: (change, mode) for name, change in peers.items() for end, mode in compiled.items()}


def _ours(recipe: str, model: Any) -> int:
    from megatron_lowprec.linear.layer_state import StatefulLayer

    convert(model, recipe, skip_slower=False)
    return sum(isinstance(module, StatefulLayer) for module in model.modules())


def _torchao(name: str, model: Any) -> int:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(name)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path != "lm_head")
    return sum(isinstance(module, Float8Linear) for module in model.modules())
