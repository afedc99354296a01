"""Megatron-core integration. Importing any of it checks the release of Megatron-core and changes nothing."""

import re

from megatron.core.package_info import __version__

from megatron_lowprec.errors import UserError

SERIES = ("0.16", "0.17", "0.18", "0.19")
"""Supported releases: ``releases`` and ``patches`` have their differences, docs/results/megatron-core.md the tests."""


def check_release(release: str) -> None:
    """Check a release of Megatron-core.

    Raises:
        UserError: it is not supported.
    """
    if ".".join(re.findall(r"\d+", release)[:2]) not in SERIES:
        raise UserError(
            f"megatron-core {release} is not supported, {SERIES[0]} to {SERIES[-1]} are: "
            f'pip install "megatron-core<0.{int(SERIES[-1][2:]) + 1}"'
        )


check_release(__version__)
