"""Register of what this project binds again in Megatron-core, and in torch for a CPU: nothing else is replaced.

``bind`` applies a row. It checks that this release has the names, with the parameters that the replacement takes.
``tools/doc_tables.py`` makes the guide's table of it.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore import RELEASE

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """A change of Megatron-core.

    Attributes:
        targets: full names of what is bound again, ``package.module:name``, or ``package.module:Class.name`` of single
            objects. Parentheses hold all parameters of a function whose replacement depends on them.
        change: what is bound, and why.
        by: the call that applies it.
        seen: releases that need it and have the targets.
        unbound: Megatron-core uses the names without binding them.
    """

    targets: tuple[str, ...]
    change: str
    by: str
    seen: str = "0.16.1 to 0.19.2"
    unbound: bool = False


_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_DDP = "megatron.core.distributed.distributed_data_parallel"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_HALF = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
_FP8 = "megatron.core.fp8_utils"
_CPU = "`cpu_compat.install()`, only without CUDA"

PATCHES: dict[str, Patch] = {
    "router_gemm": Patch(
        ("megatron.core.transformer.moe.moe_utils:te_general_gemm",),
        "the router's GEMM uses a name that is not bound without TransformerEngine; it becomes `None`",
        "`layer_spec`; `cpu_compat.install()`, also with CUDA",
        "0.16.1",
        unbound=True,
    ),
    "latent_projection": Patch(
        ("megatron.core.transformer.multi_latent_attention:HAVE_TE",),
        "is true only with TransformerEngine; with Megatron-core's stub, building latent attention fails",
        "specs of latent attention (`layer_spec`, `gpt_block_spec`, `low_precision`)",
        "0.16.1",
    ),
    "final_norm": Patch(
        ("megatron.core.transformer.transformer_block:LayerNormImpl",),
        "the norm behind the last layer is this project's, where it would be apex's or torch's: those know no RMSNorm, "
        "and torch's no sequence parallelism",
        "`layer_spec`",
    ),
    "fused_loss": Patch(
        ("megatron.core.models.gpt.gpt_model:GPTModel.compute_language_model_loss(labels, logits)",),
        "with `--cross-entropy-loss-fusion`, the loss is this project's kernel, which saves no softmax",
        "models of `layer_spec`",
    ),
    "spec_optimizer": Patch(
        (
            "megatron.training.training:get_megatron_optimizer",
            "megatron.training.training:get_megatron_muon_optimizer",
        ),
        "Megatron-LM's optimizer is the recipe's, or has the next two changes if it is torch's AdamW on a GPU",
        "`layer_spec`, in Megatron-LM",
    ),
    "spec_update": Patch(
        ("megatron.core.optimizer.optimizer:ChainedOptimizer.step()",),
        "norm, clipping and the update are a few launches; an update that is not finite is skipped",
        "`layer_spec`, in Megatron-LM",
    ),
    "model_weights": Patch(
        (f"{_HALF}._copy_main_params_to_model_params()", f"{_DISTRIBUTED}._copy_main_params_to_model_params()"),
        "copies all main weights to the model's weights in one call, with the same result",
        "the driver, `build_optimizer` (`copy_weights_at_once`); `layer_spec`, in Megatron-LM",
    ),
    "fp8_weights": Patch(
        (
            f"{_FP8}:HAVE_TE_FP8_TENSOR_CLASS",
            f"{_FP8}:FP8_TENSOR_CLASS",
            f"{_FP8}:_modify_underlying_storage_impl",
            f"{_FP8}:te_post_all_gather_processing",
            f"{_FP8}:dequantize_fp8_tensor(fp8_tensor)",
            "megatron.core.optimizer.distrib_optimizer:dequantize_fp8_tensor(fp8_tensor)",
        ),
        "FP8 weights are this project's instead of TransformerEngine's",
        "`use_primary_weights`; the driver, with `--fp8-param-gather`",
    ),
    "bucket_groups": Patch(
        (f"{_DDP}:partition_buckets",),
        "a group of buckets has one dtype: gloo gathers it in the dtype of the first",
        "`use_primary_weights`, only with gloo",
    ),
    "optimizer_state": Patch(
        (f"{_DISTRIBUTED}.optimizer", f"{_DISTRIBUTED}._copy_model_params_to_main_params(state_dict)"),
        "is `ScaledAdamW` instead of AdamW, and reads its main weights from the model's",
        "`build_optimizer`, with recipes that set `optimizer`, such as `fp8_lm`",
    ),
    "inner_optimizer": Patch(
        ("megatron.core.optimizer.optimizer:MegatronOptimizer.optimizer",),
        "is another optimizer than AdamW, with Megatron-core's groups of weights",
        "`build_optimizer` with `inner`; the driver's `--optimizer muon` and `sgd`",
    ),
    "gradient_reduction": Patch(
        (f"{_BUCKETS}:_ParamAndGradBucketGroup.start_grad_sync(force_all_reduce)",),
        "gradients are reduced in the recipe's format",
        "`build_optimizer`, with recipes that set `gradients`, such as `fp8_lm`",
    ),
    "gradient_storage": Patch(
        (
            f"{_BUCKETS}:_ParamAndGradBuffer.reset()",
            f"{_BUCKETS}:_ParamAndGradBuffer.scale_gradients(scaling_factor)",
            f"{_BUCKETS}:_ParamAndGradBuffer.grad_data",
            f"{_BUCKETS}:_ParamAndGradBucket.grad_data",
            f"{_DDP}:DistributedDataParallel.finish_grad_sync(force_all_reduce)",
            f"{_DISTRIBUTED}._copy_model_grads_to_main_grads()",
            f"{_DISTRIBUTED}.step_with_ready_grads()",
        ),
        "gradients are stored as FP8 codes, and decoded for the update",
        "`build_optimizer`, with recipes whose `gradients` are stored",
    ),
    "layer_graphs": Patch(
        (
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            f"{_BUCKETS}:_ParamAndGradBuffer.reset()",
        ),
        "replay CUDA graphs of layers, which write the first gradients of a step",
        "the driver and `layer_spec`, with `--cuda-graph-impl local`; the second only the driver",
    ),
    "token_dispatcher": Patch(
        ("megatron.core.transformer.moe.moe_layer:MoELayer.token_dispatcher",),
        "sends tokens to experts in FP8",
        "`--moe-fp8-dispatch`",
    ),
    "aux_losses": Patch(
        (
            "megatron.core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss",
            "megatron.core.transformer.moe.router:TopKRouter.apply_z_loss(logits, padding_mask)",
        ),
        "multiply auxiliary losses by the microbatch's [tokens with a loss](finetuning.md#token-weights)",
        "the driver, with `--calculate-per-token-loss` (`weigh_aux_losses`)",
    ),
    "adam_steps": Patch(
        (f"{_DISTRIBUTED}._set_main_param_and_optimizer_states(model_param, tensors)",),
        "keeps torch's count of updates, which a checkpoint holds once for all weights, and reads states of one moment",
        "the driver, while it loads a checkpoint",
    ),
    "single_moment": Patch(
        (f"{_DISTRIBUTED}._get_main_param_and_optimizer_states(model_param)",),
        "saves a state of one moment as two, the second of zeros",
        "the driver, while it saves a checkpoint of `--optimizer muon` or `sgd`",
    ),
    "count_of_a_chain": Patch(
        (f"{_DISTRIBUTED}.state_dict()",),
        "gives the count of updates of the other optimizers to one whose weights, experts, other ranks have",
        "the driver, while it saves or loads a checkpoint of such a rank",
    ),
    "padded_buckets": Patch(
        (f"{_DISTRIBUTED}.get_parameter_state_dp_zero",),
        "gathers the padding between buckets; otherwise main weights and moments are shifted in the checkpoint",
        "the driver, while it saves a checkpoint",
    ),
    "file_sums": Patch(
        ("megatron.core.dist_checkpointing.strategies.filesystem_async:open",),
        "computes checksums of a checkpoint's files while it writes them",
        "the driver, while it saves a checkpoint",
        unbound=True,
    ),
    "write_results": Patch(
        ("megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue",),
        "is shared memory instead of a process that outlives a killed rank",
        "the driver, before it saves a checkpoint",
    ),
    "cpu_random": Patch(
        (
            "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
            "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        ),
        "use the CPU's generator",
        _CPU,
    ),
    "cpu_splits": Patch(
        ("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)",),
        "converts the split sizes of an all-to-all from CPU tensors as well",
        _CPU,
    ),
    "cpu_tensors": Patch(
        ("torch:Tensor.cuda", "torch:Tensor.type", "torch:Tensor.record_stream"),
        "accept CPU tensors; for callers in `megatron.core`, `type` reports CUDA types",
        _CPU,
    ),
    "cpu_groups": Patch(
        ("torch.distributed:ProcessGroupGloo.__init__",),
        "process groups share one gloo device, because each device has a polling thread",
        _CPU,
    ),
    "cpu_torch": Patch(
        ("megatron.core.parallel_state:torch",),
        "is a facade with the CPU in place of CUDA devices, in all modules under `megatron.core`",
        _CPU,
    ),
}


def bind(row: str, of: Any = None, **values: Any) -> None:
    """Bind the names of a row of ``PATCHES`` to these values.

    Args:
        row: the row's name.
        of: the object whose attributes are bound; None for names of modules and classes, in all targets with the name.
        values: by the last part of a target's name.

    Raises:
        UserError: this release of Megatron-core does not have a name, or its function has other parameters.
    """
    for name, value in values.items():
        targets = [target for target in PATCHES[row].targets if name_of(target) == name]
        assert targets, f"mcore/patches.py has no {name} in {row}"
        for target in targets:
            differs = difference(row, target, of)
            if differs is not None:
                raise UserError(
                    f"megatron-core {RELEASE} {differs}, which {row} of mcore/patches.py binds again; it was seen "
                    f"in {PATCHES[row].seen}: install one of these"
                )
            setattr(_owner(target) if of is None else of, name, value)


def difference(row: str, target: str, of: Any = None) -> str | None:
    """How this release of Megatron-core differs from a target; None if it does not.

    Args:
        of: as ``bind``.
    """
    name, full = name_of(target), target.partition("(")[0].replace(":", ".")
    owner = _owner(target) if of is None else of
    # the class has the original of what is bound on an object
    found: Any = getattr(owner, name, _MISSING) if of is None else getattr(type(of), name, getattr(of, name, _MISSING))
    if PATCHES[row].unbound:
        return None if owner is not _MISSING and name in inspect.getsource(owner) else f"does not use {full}"
    if found is _MISSING and not _sets(owner, name):
        return f"has no {full}"
    _, bracket, listed = target.partition("(")
    if not bracket:
        return None
    expected = [parameter for parameter in listed.rstrip(")").split(", ") if parameter]
    parameters = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
    return None if parameters == expected else f"has other parameters of {full}: {', '.join(parameters) or 'none'}"


def _sets(owner: Any, name: str) -> bool:
    """Whether objects of a class get an attribute when they are built."""
    bases = inspect.getmro(owner)[:-1] if isinstance(owner, type) else ()
    return any(f"self.{name} = " in inspect.getsource(base) for base in bases if base.__module__.startswith("megatron"))


def name_of(target: str) -> str:
    """The last part of a target's name."""
    return target.partition("(")[0].rpartition(":")[2].rpartition(".")[2]


def _owner(target: str) -> Any:
    """The module or class that has a target's name; ``_MISSING`` if this release has none."""
    module, _, inside = target.partition("(")[0].partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return _MISSING
    for part in inside.split(".")[:-1]:
        owner = getattr(owner, part, _MISSING)
    return owner
