"""Which of Megatron-LM's arguments a recipe cannot have under ``--spec``."""

from typing import Any, NamedTuple

import torch
from megatron.core import __version__

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.releases import IGNORES_RAMPS, LEAVES_MODEL_ON_CPU
from megatron_lowprec.recipe.recipe import Recipe


class _Stock(NamedTuple):
    """A flag for quantization by TransformerEngine, which layers of a recipe do not read."""

    flag: str  # as given, with {} for its value
    default: Any
    instead: str
    of_histories: bool = False  # has a meaning for recipes with amax histories only


_FOR_OPERANDS = "after the recipe's name in --spec, and the same for the other operands"
_AFTER_NAME = "after the recipe's name in --spec"
_STOCK_QUANTIZATION = {
    "fp8_recipe": _Stock("--fp8-recipe {}", "delayed", "name a recipe with such scales in --spec"),
    "fp8_margin": _Stock("--fp8-margin {}", 0, f"write fprop.input.margin={{}} {_FOR_OPERANDS}", True),
    "fp8_interval": _Stock("--fp8-interval {}", 1, "scales are computed at every step"),
    "fp8_amax_history_len": _Stock(
        "--fp8-amax-history-len {}", 1, f"write fprop.input.history={{}} {_FOR_OPERANDS}", True
    ),
    "fp8_amax_compute_algo": _Stock(
        "--fp8-amax-compute-algo {}", "most_recent", f"write fprop.input.history_rule={{}} {_FOR_OPERANDS}", True
    ),
    "fp8_wgrad": _Stock("--no-fp8-wgrad", True, f"write wgrad.input=null wgrad.grad_output=null {_AFTER_NAME}"),
    "fp8_quantizer_factory": _Stock("--fp8-quantizer-factory {}", None, "name a YAML file of a recipe in --spec"),
    "fp4_recipe": _Stock("--fp4-recipe {}", "nvfp4", "name a recipe with FP4 in --spec"),
    "fp4_quantizer_factory": _Stock("--fp4-quantizer-factory {}", None, "name a YAML file of a recipe in --spec"),
    "num_layers_at_start_in_bf16": _Stock(
        "--num-layers-at-start-in-bf16 {}", 1, f"write keep_bf16.first_layers={{}} {_AFTER_NAME}"
    ),
    "num_layers_at_end_in_bf16": _Stock(
        "--num-layers-at-end-in-bf16 {}", 1, f"write keep_bf16.last_layers={{}} {_AFTER_NAME}"
    ),
}
_GATHER = "--fp8-sequence-parallel-gather"


def check_arguments(recipe: Recipe, args: Any) -> None:
    """Check Megatron-LM's arguments.

    Args:
        args: None outside of Megatron-LM, where nothing is refused.

    Raises:
        UserError: the recipe cannot run with one of them.
    """
    if getattr(args, "optimizer_cuda_graph", False):
        raise UserError(
            "--optimizer-cuda-graph cannot hold the update under a recipe: its replays would repeat the learning "
            "rate and the step of the capture, and end no step of the recipe; leave it out"
        )
    if IGNORES_RAMPS and getattr(args, "rampup_batch_size", None) is not None:
        raise UserError(
            f"--rampup-batch-size is ignored by megatron-core {__version__}: give Megatron-LM "
            "--step-batch-size-schedule instead, or use this project's pretrain_gpt.py"
        )
    if LEAVES_MODEL_ON_CPU and torch.cuda.is_available() and getattr(args, "use_cpu_initialization", False):
        raise UserError(
            f"--use-cpu-initialization leaves the model on the CPU under Megatron-LM {__version__}, whose optimizer "
            "refuses it: leave it out"
        )
    if args is not None:
        _check_quantization(recipe, args)
        if recipe.changes_training:
            _check_training_state(recipe, args)


def _check_quantization(recipe: Recipe, args: Any) -> None:
    """Only the recipe quantizes; Megatron-LM would accept these flags silently."""
    if getattr(args, "first_last_layers_bf16", False):
        first, last = (getattr(args, f"num_layers_at_{end}_in_bf16", 1) for end in ("start", "end"))
        raise UserError(
            f"--first-last-layers-bf16 has no effect under --spec: leave it out, with its numbers of layers, and write "
            f"keep_bf16.first_layers={first} keep_bf16.last_layers={last} {_AFTER_NAME}"
        )
    for name, stock in _STOCK_QUANTIZATION.items():
        value = getattr(args, name, stock.default)
        if value != stock.default:
            instead = stock.instead.format(value)
            if stock.of_histories and not recipe.delayed_operands():
                instead = f"recipe {recipe.name} keeps no amax history"
            raise UserError(f"{stock.flag.format(value)} has no effect under --spec: leave it out; {instead}")
    words = " ".join(getattr(args, "spec", None) or ()).split()
    if _GATHER in words and not getattr(args, "sequence_parallel", False):
        raise UserError(
            f"{_GATHER} in --spec does nothing without --sequence-parallel, which Megatron-LM switches off at "
            "--tensor-model-parallel-size 1: add it with a size above 1, or leave the gather out"
        )


def _check_training_state(recipe: Recipe, args: Any) -> None:
    """Optimizer state, gradients and FP8 weights live in Megatron-core's distributed optimizer around Adam."""
    sharded = getattr(args, "ckpt_format", "torch_dist") == "torch_dist"
    saves = bool(getattr(args, "save", None))
    needed = {
        "--use-distributed-optimizer": True,
        "--bf16": recipe.fp8_weights,
        # Megatron-core's other way takes all of a weight's state to have its size, and scales do not
        "--dist-ckpt-optim-fully-reshardable": recipe.optimizer.quantized and saves and sharded,
    }
    missing = [flag for flag, wanted in needed.items() if wanted and not getattr(args, _name(flag), False)]
    if missing:
        raise UserError(
            f"recipe {recipe.name} quantizes optimizer state, gradients or weights, which needs "
            f"{' and '.join(missing)}: add it"
        )
    on_gpu = torch.cuda.is_available()
    refused = {
        "--use-precision-aware-optimizer": True,
        "--optimizer-cpu-offload": True,
        "--overlap-param-gather-with-optimizer-step": True,
        "--use-torch-fsdp2": True,
        "--use-megatron-fsdp": True,
        "--init-model-with-meta-device": recipe.fp8_weights,
        "--use-cpu-initialization": recipe.fp8_weights and on_gpu,
    }
    given = [flag for flag, holds in refused.items() if holds and getattr(args, _name(flag), False)]
    only: dict[str, Any] = {"--optimizer": "adam", "--num-distributed-optimizer-instances": 1}
    if recipe.fp8_weights and (saves or getattr(args, "load", None)):
        only["--ckpt-format"] = "torch_dist"  # others would pickle the weights
    for flag, wanted in only.items():
        value = getattr(args, _name(flag), wanted)
        given += [] if value == wanted else [f"{flag} {value}"]
    if given:
        raise UserError(
            f"recipe {recipe.name} quantizes optimizer state, gradients or weights, which does not work with "
            f"{', '.join(given)}: leave it out, or choose a recipe of only GEMMs such as fp8_delayed"
        )


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
