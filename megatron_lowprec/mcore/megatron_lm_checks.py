"""Which of Megatron-LM's arguments a recipe cannot have under ``--spec``."""

from typing import Any

import torch
from megatron.core import __version__

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.releases import IGNORES_RAMPS, LEAVES_MODEL_ON_CPU
from megatron_lowprec.recipe.recipe import Recipe


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
    if recipe.changes_training and args is not None:
        _check_training_state(recipe, args)


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
