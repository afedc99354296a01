"""Options of optimizer and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowprec.optimizer.optimizers import OPTIMIZERS
from megatron_lowprec.training.options.declaration import Group, Part, arg


@dataclass(frozen=True)
class OptimizerOptions(Group):
    """optimizer and schedule"""

    PART = Part.SCHEDULE

    optimizer: Literal["adam", "muon", "sgd"] = arg(
        "adam",
        "; ".join(f"{name}: {row.summary}" for name, row in OPTIMIZERS.items()),
        Part.UPDATE,
        optimizer_state=True,
    )
    lr: float | None = arg(None, "peak learning rate", least=0)
    min_lr: float = arg(0.0, "learning rate at the end of the decay", least=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = arg(
        "linear", "shape of the decay"
    )
    lr_decay_iters: int | None = arg(
        None, "horizon of the learning rate; default --train-iters", least=1, one_of="lr horizon"
    )
    lr_decay_samples: int | None = arg(
        None, "the same in samples; default --train-samples", least=1, one_of="lr horizon"
    )
    lr_warmup_fraction: float | None = arg(None, "warm-up as a share of the horizon", least=0, most=1, one_of="warm-up")
    lr_warmup_iters: int = arg(0, "warm-up in iterations", least=0, one_of="warm-up")
    lr_warmup_samples: int = arg(0, "warm-up in samples", least=0, one_of="warm-up")
    lr_warmup_init: float = arg(
        0.0,
        "learning rate that the warm-up starts from",
        least=0,
        needs="lr_warmup_iters|lr_warmup_samples|lr_warmup_fraction",
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = arg(
        "exponential", "WSD's last phase", needs="lr_decay_style=WSD"
    )
    lr_wsd_decay_iters: int | None = arg(None, "length of WSD's last phase", least=1, needs="lr_decay_style=WSD")
    weight_decay: float = arg(0.01, "weight decay, decoupled but for SGD", least=0)
    start_weight_decay: float | None = arg(
        None,
        "weight decay at the start of --weight-decay-incr-style",
        least=0,
        needs="weight_decay_incr_style=linear|cosine",
    )
    end_weight_decay: float | None = arg(
        None, "weight decay at the end of it", least=0, needs="weight_decay_incr_style=linear|cosine"
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = arg(
        "constant", "how weight decay grows over the run"
    )
    clip_grad: float = arg(1.0, "largest gradient norm; 0 for no clipping", Part.UPDATE, least=0)
    adam_beta1: float = arg(0.9, "decay of the first moment", Part.UPDATE, least=0, below=1)
    adam_beta2: float = arg(0.999, "decay of the second moment", Part.UPDATE, least=0, below=1)
    adam_eps: float = arg(1e-8, "added to the root of the second moment", Part.UPDATE, least=0)
    sgd_momentum: float = arg(0.9, "momentum of SGD", Part.UPDATE, needs="optimizer=sgd", least=0, below=1)
    override_opt_param_scheduler: bool = arg(
        False, "take the whole schedule from these options, not from the checkpoint", Part.RESUME
    )
    use_checkpoint_opt_param_scheduler: bool = arg(
        False, "take the whole schedule from the checkpoint and ignore these options", Part.RESUME
    )


@dataclass(frozen=True)
class MuonOptions(Group):
    """Muon (--optimizer muon)"""

    PART = Part.UPDATE
    NEEDS = "optimizer=muon"

    muon_lr: float | None = arg(
        None,
        "peak learning rate of matrices, which follows the schedule of --lr; default --lr (ours)",
        needs="lr",
        least=0,
    )
    muon_momentum: float = arg(
        0.95,
        "decay of the average of a matrix's gradients (ours: torch's default, Megatron's is 0.9)",
        least=0,
        below=1,
    )
    muon_nesterov: bool = arg(True, "Nesterov's momentum (ours: on, as in torch, unless --no-muon-nesterov)")
    muon_num_ns_steps: int = arg(5, "steps of the Newton-Schulz iteration", least=1, most=99)
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] = arg(
        "match_rms_adamw",
        "factor of a matrix's learning rate, by torch's names: match_rms_adamw, 0.2 sqrt(max(rows, columns)), takes "
        "rates and weight decay tuned for AdamW; original is sqrt(max(1, rows / columns)) (ours)",
    )
    muon_no_split_qkv: bool = arg(False, "take queries, keys and values of a fused projection as one matrix, not three")
