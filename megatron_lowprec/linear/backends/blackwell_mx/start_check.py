"""Check at start: native operands and products beside emulated ones, on hardware that the project has not run.

The first product of each size and kind is computed twice, of the real operands. A sum of K terms in fp32 is off by at
most K 2^-24 of the sum S of magnitudes; a tensor core may drop what is below 2^-23 of a partial sum, at each term. Both
results are then rounded to the output's dtype. Operands must have the bits of the quantizer's reference, and
stochastic rounding the frequencies of its fractions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.quantization.device_rng_step import capturing

Key = tuple[Hashable, ...]

_A_TERM = 2.0**-23 + 2.0**-24
_ROUNDED = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}  # two roundings to the output's dtype, of a result
_DEVIATIONS = 6.0
_WRONG = 1e30  # an error that JSON can hold
_ENDS = "training would go wrong, and --native require does not go on by emulation"


class NativeCheckWarning(UserWarning):
    """A native backend failed its check; GEMMs are emulated from there on."""


class Check(NamedTuple):
    """Result of one comparison.

    Attributes:
        what: the product or operand, with its sizes.
        error: the largest difference over its bound; for frequencies, in standard deviations.
        fault: what is wrong; "" if nothing is.
    """

    what: str
    error: float
    fault: str = ""


class StartChecks:
    """The checks of a process; the hardware is the process's.

    Attributes:
        required: a fault ends the run, instead of emulation from there on.
        checks: by what was compared.
        fault: the first fault; "" without one.
        operand_fault: whether an operand was wrong.
        experts_fault: that of a grouped product, after which experts are multiplied one after the other; "" without.
    """

    def __init__(self) -> None:
        self.required = False
        self.reset()

    def reset(self) -> None:
        """Forget all checks, so that they are made again."""
        self.fault, self.experts_fault, self.operand_fault, self.results = "", "", False, dict[Key, Check]()

    def is_due(self, key: Key, device: torch.device) -> bool:
        """Whether a product or operand is to be checked; False if it was, under graph capture, or without a GPU."""
        return key not in self.results and self.applies(device)

    @staticmethod
    def applies(device: torch.device) -> bool:
        """Whether products on a device are to be checked now."""
        return device.type == "cuda" and not capturing()

    def product(
        self,
        key: Key,
        what: str,
        product: Callable[[], torch.Tensor],
        compare: Callable[[torch.Tensor], Check],
        *,
        of_experts: bool = False,
    ) -> torch.Tensor | None:
        """A product that passes its check; None for one that does not, or that a library refuses."""
        got: torch.Tensor | None = None
        try:
            got = product()
        except torch.OutOfMemoryError:
            raise  # says nothing about the product
        except Exception as error:  # noqa: BLE001 - of torch, cuBLAS or Triton, whose errors have no common class
            reason = str(error).strip().splitlines()
            check = Check(what, _WRONG, f"the product was refused: {reason[0][:200] if reason else type(error)}")
        else:
            check = compare(got)
        return got if self.record(key, check, of_experts=of_experts) else None

    def record(self, key: Key, check: Check, *, of_operand: bool = False, of_experts: bool = False) -> bool:
        """Keep a check of a product, of an operand or of a grouped product; returns whether it passed.

        Raises:
            UserError: it did not, and native products are required.
        """
        self.results[key] = check
        self.operand_fault |= of_operand and bool(check.fault)
        if check.fault and of_experts:
            self.experts_fault = f"{check.what}: {check.fault}"
            warnings.warn(
                f"a grouped native product failed its check, {self.experts_fault}: experts run one after the other",
                NativeCheckWarning,
                stacklevel=2,
            )
        elif check.fault and not self.fault:
            self.fault = f"{check.what}: {check.fault}"
            if self.required:
                raise UserError(f"native products failed their check, {self.fault}: {_ENDS}")
            warnings.warn(
                f"NATIVE PRODUCTS FAILED THEIR CHECK, {self.fault}: all MX and NVFP4 GEMMs are emulated from here on",
                NativeCheckWarning,
                stacklevel=2,
            )
        return not check.fault

    def summary(self) -> str:
        """One line for the log; "" if nothing was checked."""
        if not self.results:
            return ""
        if self.fault:
            return f"native products FAILED their check, and GEMMs are emulated: {self.fault}"
        worst = max((check.error for check in self.results.values() if not check.fault), default=0.0)
        loop = f"; experts run one after the other, {self.experts_fault}" if self.experts_fault else ""
        return (
            f"native products checked at start: {len(self.results)} comparisons, the worst at {worst:.2g} of its bound"
            f"{loop}"
        )

    def as_json(self) -> dict[str, object]:
        """The record that is kept with a run."""
        checks = [check._asdict() for check in self.results.values()]
        return {"fault": self.fault, "experts_fault": self.experts_fault, "checks": checks}


CHECKS = StartChecks()
"""The checks of this process."""


def of_product(
    what: str, got: torch.Tensor, want: torch.Tensor, magnitudes: torch.Tensor, terms: int, addend: float = 0.0
) -> Check:
    """A native product beside the emulated one.

    Args:
        got, want: of the output's dtype.
        magnitudes: fp32, the emulated product of the operands' magnitudes.
        terms: K.
        addend: largest magnitude of what the products were added to.
    """
    got_, want_ = got.float(), want.float()
    finite = want_.isfinite()
    bound = terms * _A_TERM * magnitudes + _ROUNDED[want.dtype] * (want_.abs() + addend) + torch.finfo(want.dtype).tiny
    relative = torch.where(finite, (got_ - want_).abs() / bound, 0.0).nan_to_num(nan=_WRONG).clamp(max=_WRONG)
    error = float(relative.max())
    if error > 1.0:
        wrong = float((relative > 1.0).float().mean())
        zeros = ", all of it is 0" if not bool(got_.any()) else ""
        return Check(what, error, f"{wrong:.1%} of the product is out of its bound, by up to {error:.3g} times{zeros}")
    lost = bool((got_.isfinite() & ~finite).any())
    return Check(what, error, "an Inf or a NaN of the emulated product is missing" if lost else "")


def of_operand(what: str, got: torch.Tensor, want: torch.Tensor) -> Check:
    """Decoded codes beside the quantizer's reference, bit for bit."""
    differ = int(((got != want) & ~(got.isnan() & want.isnan())).sum())
    zeros = ", all of it is 0" if not bool(got.any()) else ""
    fault = f"{differ} of {want.numel()} entries differ from the quantizer's reference{zeros}" if differ else ""
    return Check(what, float(differ > 0) * 2.0, fault)


def of_frequencies(what: str, rounded: torch.Tensor, exact: torch.Tensor, step: torch.Tensor, bits: int) -> Check:
    """Stochastic rounding: the sum of errors, in steps, of entries that do not saturate.

    An error has mean 0 and at most a variance of 1/4; draws of ``bits`` bits move its mean by up to 2^-bits / 2.

    Args:
        rounded, exact, step: fp32 of one shape.
    """
    between = (step > 0) & exact.isfinite()
    errors = torch.where(between, (rounded - exact) / step, 0.0)
    count = int(between.sum())
    allowed = _DEVIATIONS * (count / 4) ** 0.5 + count * 2.0 ** -(bits + 1) + 1.0
    error = float(errors.sum().abs()) / allowed
    far = int((errors.abs() > 1.0 + 2.0**-10).sum())
    if far:
        return Check(what, max(error, 2.0), f"{far} of {count} entries are rounded by more than a step")
    fault = f"stochastic rounding is biased, {error:.2f} times what chance allows over {count} entries"
    return Check(what, error, fault if error > 1.0 else "")
