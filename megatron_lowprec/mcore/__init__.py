"""Megatron-core integration. Importing any of it checks the release, filters some warnings, and changes nothing else.

Megatron-core warns at import, up to six times, that TransformerEngine and apex are not installed. That does not apply:
these layers replace what falls back.
"""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path

from megatron_lowprec.errors import UserError

# The beginnings of the messages, nothing wider.
for _message in (
    r"Transformer Engine and Apex are not installed",
    r"transformer_engine is not installed",
    r"apex is not installed",
    r"Apex is not installed",
):
    warnings.filterwarnings("ignore", message=_message)

SERIES = ("0.16", "0.17", "0.18", "0.19")
"""Supported releases: ``releases`` and ``patches`` have their differences, docs/results/megatron-core.md the tests."""

_INSTALL = f'pip install "megatron-core>={SERIES[0]},<0.{int(SERIES[-1][2:]) + 1}"'


def check_release(release: str) -> None:
    """Check a release of Megatron-core.

    Raises:
        UserError: it is not supported.
    """
    if ".".join(re.findall(r"\d+", release)[:2]) not in SERIES:
        raise UserError(f"megatron-core {release} is not supported, {SERIES[0]} to {SERIES[-1]} are: {_INSTALL}")


def _release() -> str:
    """Megatron-core's release, read without importing it: that takes seconds, and reads the environment."""
    found = find_spec("megatron.core") if find_spec("megatron") else None
    places = found and found.submodule_search_locations
    if not places:
        raise UserError(f"megatron-core is not installed: {_INSTALL}")
    text = Path(places[0], "package_info.py").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)) or "of an unknown release"


RELEASE = _release()
"""The installed release of Megatron-core."""
check_release(RELEASE)
