"""Options of checkpoints, evaluation and logs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lowprec.training.options.declaration import Group, Part, arg


@dataclass(frozen=True)
class CheckpointOptions(Group):
    """checkpoints"""

    PART = Part.OUTPUT

    save: str | None = arg(None, "folder for checkpoints; default runs/CONFIG-RECIPE/checkpoints", sweep="--out")
    no_save: bool = arg(False, "write no checkpoint (ours)")
    save_interval: int | None = arg(None, "iterations between checkpoints; the last one is always saved", least=1)
    keep_last: int | None = arg(None, "number of newest checkpoints to keep; older ones are removed (ours)", least=1)
    async_save: bool = arg(False, "write checkpoints in background processes while training continues")
    load: str | None = arg(
        None,
        "folder to continue from; may be --save's, empty or not; default --save's if it holds a checkpoint",
        Part.RESUME,
        sweep="--out",
        by_rank=True,
    )
    ckpt_step: int | None = arg(
        None,
        "iteration of the checkpoint to take; default the newest",
        Part.RESUME,
        begins=True,
        needs="load|pretrained_checkpoint",
    )
    pretrained_checkpoint: str | None = arg(
        None,
        "folder whose weights a new run begins with; of no effect where --save or --load holds a checkpoint",
        Part.START,
        grouped=False,
        by_rank=True,
    )
    finetune: bool = arg(
        False,
        "take only the weights and start at iteration 0",
        Part.START,
        begins=True,
        grouped=False,
        needs="load|pretrained_checkpoint",
    )
    no_save_optim: bool = arg(False, "save no optimizer state; such a checkpoint needs --no-load-optim")
    no_load_optim: bool = arg(False, "do not load the optimizer and the schedule's position", Part.RESUME, begins=True)
    no_load_rng: bool = arg(False, "do not load the random state", Part.RESUME, begins=True)


@dataclass(frozen=True)
class EvaluationOptions(Group):
    """evaluation"""

    PART = Part.EXECUTION

    eval_interval: int = arg(1000, "iterations between validations", least=1)
    eval_iters: int = arg(100, "iterations of one validation or test; 0 for none anywhere", Part.EVALUATION, least=0)


@dataclass(frozen=True)
class LoggingOptions(Group):
    """logging"""

    PART = Part.OUTPUT

    log_interval: int = arg(100, "iterations between log lines", least=1)
    log_params_norm: bool = arg(False, "log the norm of the weights")
    log_quantization_interval: int | None = arg(
        None,
        "iterations between snapshots of every quantized operand (SNR, bias, underflow, saturation, amax), which go to "
        "quantization.jsonl; default never",
        least=1,
        needs="transformer_impl=local",
    )
    log_quantization_also: list[str] = arg(
        [],
        "recipes (names or YAML files) whose quantizers are applied to the same tensors in each snapshot, as in "
        "mxfp8,fp8_blockwise; without delayed scaling",
        needs="log_quantization_interval",
        by_rank=True,
    )
    capture_step: list[int] = arg(
        [],
        "iterations whose first microbatch's operands are written to captures/ in the run's folder; default none",
        needs="capture_layers transformer_impl=local !no_lowprec_linears",
    )
    capture_layers: list[str] = arg(
        [], "linear layers whose operands are written, as in layers.3.mlp.linear_fc1; globs", needs="capture_step"
    )
    log_num_zeros_in_grad: bool = arg(False, "log how many gradient values are zero")
    tensorboard_dir: str | None = arg(None, "default: tensorboard in the run's folder", sweep="--out")
    wandb_project: str | None = arg(None, "also log to Weights & Biases")
    wandb_entity: str | None = arg(
        None, "W&B's team or user that owns the project; default yours", needs="wandb_project"
    )
    wandb_exp_name: str | None = arg(None, "name of the W&B run; default the run's folder")
    wandb_save_dir: str | None = arg(None, "W&B's own files; default the run's folder")
