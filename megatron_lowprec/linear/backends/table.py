"""The table of backends, and the choice of one for each GEMM: pure functions, no torch.

A backend is a folder beside this file and a row of ``BACKENDS``. Its ``why_not.py`` imports no torch, because
``recipe/explain.py``, sweeps and the memory plan read the table. A backend's classes are loaded when a layer first
resolves to it.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from megatron_lowprec.linear.backends.blackwell_mx.why_not import WITH_BLOCK_SCALES, has_block_scales
from megatron_lowprec.linear.backends.blackwell_mx.why_not import why_not as why_not_blackwell_mx
from megatron_lowprec.linear.backends.emulated.why_not import why_not as why_not_emulated
from megatron_lowprec.linear.backends.hopper_fp8.why_not import WITH_FP8, has_fp32_scales
from megatron_lowprec.linear.backends.hopper_fp8.why_not import why_not as why_not_hopper_fp8
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.schema import GemmSpec, LinearRecipe


class Backend(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the folder; caches and headers use it.
        why_not: (GEMM's name, its spec, target) -> reason why this backend does not run it, or None.
        dense: class of the three GEMMs of a layer, as "<module>.<class>" within the folder.
        grouped: class of the GEMMs of all experts of a layer, likewise; None to run one expert after the other.
        multiplies_codes: native: operands are codes, one byte a value, for the device's low-precision units. Others
            have a format's numerics and not its speed.
        archs: GPUs that ``why_not`` may accept, oldest first.
        ran_on: those of ``archs`` on which the project has run its products. Without any they are checked at start, and
            --native off leaves them out.
        concerns: whether a GEMM has operands of the backend's kind; reasons against others are left out.
    """

    name: str
    why_not: Callable[[str, GemmSpec, Target], str | None]
    dense: str
    grouped: str | None = None
    multiplies_codes: bool = False
    archs: tuple[str, ...] = ()
    ran_on: tuple[str, ...] = ()
    concerns: Callable[[GemmSpec], bool] = lambda _: True

    def load(self, kind: str) -> Any:
        """The class ``dense`` or ``grouped``; imports torch."""
        module, _, name = kind.partition(".")
        return getattr(import_module(f"megatron_lowprec.linear.backends.{self.name}.{module}"), name)


BACKENDS = (
    Backend(
        "hopper_fp8",
        why_not_hopper_fp8,
        "dense.HopperFp8Gemms",
        "grouped.GroupedHopperFp8Gemms",
        multiplies_codes=True,
        archs=WITH_FP8,
        ran_on=("sm90",),
        concerns=has_fp32_scales,
    ),
    Backend(
        "blackwell_mx",
        why_not_blackwell_mx,
        "dense.BlackwellMxGemms",
        "grouped.GroupedBlackwellMxGemms",
        multiplies_codes=True,
        archs=WITH_BLOCK_SCALES,
        concerns=has_block_scales,
    ),
    Backend("emulated", why_not_emulated, "dense.EmulatedGemms", "grouped.GroupedEmulatedGemms"),
)
"""A GEMM runs on the first row without a reason against it. The last row runs all GEMMs on all devices."""

ROWS = {row.name: row for row in BACKENDS}

_LATER = "sm9999"
"""A GPU to come."""

_NO_SPEED = ", the format's numerics and not its speed"

FALLBACK = BACKENDS[-1].name

ARCHS = tuple(dict.fromkeys(arch for row in BACKENDS for arch in row.archs))
"""GPUs with a native backend."""


DEVICES = ("cpu", "sm80", *ARCHS)
"""Devices that --device knows: Ampere has no low-precision units that a backend uses."""

UNVERIFIED = frozenset(row.name for row in BACKENDS if row.archs and not row.ran_on)
"""Native backends whose products the project has run on no GPU."""


def unverified(backends: Iterable[str], arch: str) -> bool:
    """Whether the project has not run the products of one of these backends on a GPU of this kind."""
    return any(ROWS[name].archs and arch not in ROWS[name].ran_on for name in backends)


Emulate = bool | frozenset[str]
"""Native backends that are left out: all, or those of these names."""


def emulated_rows(emulate: bool, native: str) -> Emulate:
    """The backends that --emulate and --native leave out."""
    return True if emulate else UNVERIFIED if native == "off" else False


class Choice(NamedTuple):
    """The backend of a GEMM.

    Attributes:
        backend: its name.
        multiplies_codes: as ``Backend``.
        passed_over: the rows before it, and each one's reason.
    """

    backend: str
    multiplies_codes: bool
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def why(self) -> str:
        """Reasons against the rows before, or "asked" under --emulate."""
        return "; ".join(f"{name}: {reason}" if name else reason for name, reason in self.passed_over)

    def describe(self, arch: str = "") -> str:
        """The backend, the device it runs on, and the reasons against others."""
        device = f" on {arch}" if arch else ""
        return f"{self.backend}{device}" + (f" ({self.why})" if self.passed_over else "")

    @property
    def verification(self) -> str:
        """What a line about a backend adds if the project has run it on no GPU; else ""."""
        return ", unverified hardware, checked at start" if self.backend in UNVERIFIED else ""

    def header(self, gemms: Sequence[str], arch: str) -> str:
        """Header line about GEMMs, or layers' GEMMs, on this backend."""
        speed = "" if self.multiplies_codes else _NO_SPEED
        return f"{', '.join(gemms)}: {self.describe(arch)}{self.verification}{speed}"


def choose(name: str, gemm: GemmSpec, target: Target, emulate: Emulate = False) -> Choice:
    """The backend of one GEMM of a layer.

    Args:
        emulate: native backends to leave out (--emulate, --native off).
    """
    passed_over: list[tuple[str, str]] = [("", "asked")] if emulate is True else []
    for row in BACKENDS:
        if emulate is True and row.multiplies_codes:
            continue
        reason = row.why_not(name, gemm, target)
        if reason is None and not isinstance(emulate, bool) and row.name in emulate:
            reason = "--native off"
        if reason is None:
            return Choice(row.name, row.multiplies_codes, tuple(passed_over))
        if row.concerns(gemm):
            passed_over.append((row.name, reason))
    raise AssertionError(f"no backend runs {name}: the last row has no conditions")


def choose_without_gpu(name: str, gemm: GemmSpec, target: Target) -> Choice:
    """As ``choose`` on "cpu"; its reason names the GPUs whose native backends would run the GEMM, or theirs."""
    here = choose(name, gemm, target._replace(arch="cpu"))
    if not gemm.quantized:
        return here
    passed_over, reasons = dict(here.passed_over), []
    for row in (row for row in BACKENDS if row.name in passed_over):
        found = {arch: row.why_not(name, gemm, target._replace(arch=arch)) for arch in row.archs}
        runs = [arch for arch, reason in found.items() if reason is None]
        if runs:
            later = row.why_not(name, gemm, target._replace(arch=_LATER)) is None
            named = f"{runs[0]} and later" if later else ", ".join(runs)
            unverified = ", unverified" if row.name in UNVERIFIED else ""
            return here._replace(passed_over=(("", f"no GPU here; {row.name} on {named}{unverified}"),))
        if found:
            reasons.append(f"{row.name}: {found.get('sm90', found[row.archs[-1]])}")
    return here._replace(passed_over=(("", f"on GPUs as well: {'; '.join(reasons)}"),)) if reasons else here


def resolve(recipe: LinearRecipe, target: Target, emulate: Emulate = False) -> dict[str, str]:
    """GEMM -> name of its backend, for a layer; an unquantized GEMM's is that of the last row."""
    return {name: choose(name, gemm, target, emulate).backend for name, gemm in recipe.gemms.items()}


def native_gemms(recipe: LinearRecipe, target: Target, emulate: Emulate = False) -> frozenset[str]:
    """The GEMMs of a layer that run on a native backend."""
    chosen = {name: choose(name, gemm, target, emulate) for name, gemm in recipe.gemms.items()}
    return frozenset(name for name, choice in chosen.items() if choice.multiplies_codes)
