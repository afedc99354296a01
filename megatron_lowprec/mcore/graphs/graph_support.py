"""Whether the layers of a Megatron-core config can be captured in CUDA graphs, under ``--spec``.

The driver has its own check of its own flags, before it loads torch: ``training/config/graph_options.py``.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.capture import why_not_captured
from megatron_lowprec.recipe.recipe import Recipe

_CHOOSE = "leave one of the two out"


def asks_for_graphs(config: TransformerConfig) -> bool:
    """Whether ``--cuda-graph-impl`` or an older name of it is given."""
    return getattr(config, "cuda_graph_impl", "none") != "none" or getattr(config, "enable_cuda_graph", False)


def check_graphs(config: TransformerConfig, recipe: Recipe, args: Any = None) -> None:
    """Check that layers can be captured whole, and replayed one microbatch after the other.

    Args:
        args: Megatron-LM's arguments, None elsewhere.

    Raises:
        UserError: they cannot.
    """
    found = _obstacle(config, recipe, args)
    if found is not None:
        raise UserError(f"--cuda-graph-impl {config.cuda_graph_impl} was given, but {found[0]}; {found[1]}")


def _obstacle(config: TransformerConfig, recipe: Recipe, args: Any) -> tuple[str, str] | None:
    """Why layers cannot be captured, and the remedy; None if they can."""
    if config.cuda_graph_impl != "local":
        return "layers of a recipe are captured one by one by this project", "give --cuda-graph-impl local"
    # of 0.19, and until 0.18
    parts = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or []
    if parts:
        names = " ".join(getattr(part, "name", str(part)) for part in parts)
        return f"layers of a recipe are captured whole, not in the parts {names}", "leave the parts out"
    given = {
        f"the sizes of --num-experts {config.num_moe_experts} follow the router": config.num_moe_experts,
        f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size} has several microbatches on their way, "
        "and graphs hold the activations of one": config.pipeline_model_parallel_size > 1,
        f"--recompute-granularity {config.recompute_granularity} runs layers twice": config.recompute_granularity,
        f"recipe {recipe.name} stores gradients in FP8": recipe.gradients.stored,
        "the length of sequences varies": config.variable_seq_lengths,
        "activations are offloaded": config.cpu_offloading
        or getattr(config, "fine_grained_activation_offloading", False),
        "weights are sharded by FSDP": any(
            getattr(args, name, False) for name in ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
        ),
    }
    for reason, holds in given.items():
        if holds:
            return reason, _CHOOSE
    unfused = config.attention_backend in (AttnBackend.local, AttnBackend.unfused)
    if unfused and getattr(args, "create_attention_mask_in_dataloader", False):
        return (
            f"--attention-backend {config.attention_backend.name} reads a mask of each microbatch",
            "add --no-create-attention-mask-in-dataloader",
        )
    if config.tensor_model_parallel_size > 1 and getattr(args, "distributed_backend", "nccl") == "gloo":
        return "--distributed-backend gloo runs tensor-parallel collectives on the host", "use nccl"
    found = why_not_captured(recipe, several_microbatches=True)
    if found is not None:
        return found[0], f"add {' '.join(found[1])} behind the recipe's name in --spec"
    return _obstacle_here()


def _obstacle_here() -> tuple[str, str] | None:
    if not torch.cuda.is_available():
        return "torch sees no GPU", "leave it out"
    if not getattr(get_cuda_rng_tracker(), "use_cudagraphable_rng", False):
        return (
            "torch's generators of the tensor-parallel ranks cannot be captured",
            "leave --te-rng-tracker out, or call model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=True)",
        )
    return None
