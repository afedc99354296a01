"""--native: the check of products on GPUs that the project has not run, in the log and in run.json."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.dispatch import arch_of
from megatron_lowprec.linear.backends.blackwell_mx.start_check import CHECKS
from megatron_lowprec.linear.backends.blackwell_mx.why_not import WITH_BLOCK_SCALES
from megatron_lowprec.linear.backends.table import UNVERIFIED, Choice
from megatron_lowprec.training.distributed.rank_sync import on_any_rank
from megatron_lowprec.training.options.training_options import TrainingOptions


def prepare(native: str, backends: Mapping[Choice, Sequence[str]]) -> None:
    """Set what a failed check does.

    Args:
        native: the option.
        backends: of this stage's quantized GEMMs.

    Raises:
        UserError: native products are required, and a GEMM is emulated.
    """
    CHECKS.required = native == "require"
    emulated = [
        f"{', '.join(names)}: {choice.why}" for choice, names in backends.items() if not choice.multiplies_codes
    ]
    if CHECKS.required and emulated:
        raise UserError(
            f"--native require was asked, but GEMMs are emulated ({'; '.join(emulated)}): leave it out, or keep these "
            "GEMMs unquantized by --recipe-override"
        )


class NativeCheck:
    """Says the result of the check after the first iteration of a launch, which is when sizes are checked.

    Args:
        record: takes the checks, as JSON, and the backends that are emulated since.
    """

    def __init__(
        self,
        config: TrainingOptions,
        device: torch.device,
        say: Callable[..., None],
        record: Callable[[dict[str, Any], Collection[str]], None],
    ) -> None:
        checks = arch_of(device) in WITH_BLOCK_SCALES and config.native != "off"
        self._pending = checks and config.transformer_impl == "local"
        self._device, self._say, self._record = device, say, record

    def after_iteration(self) -> None:
        """Collective in the first call, on all ranks of such GPUs."""
        if not self._pending:
            return
        self._pending = False
        elsewhere, experts_elsewhere = (
            on_any_rank(bool(here), self._device) and not here for here in (CHECKS.fault, CHECKS.experts_fault)
        )
        if CHECKS.results:
            self._say(CHECKS.summary())
            self._record(CHECKS.as_json(), UNVERIFIED if CHECKS.fault or elsewhere else ())
        if elsewhere:
            self._say("native products FAILED their check on another rank, which emulates: see its warning")
        if experts_elsewhere:
            self._say("a grouped native product failed its check on another rank: its experts run one by one")
