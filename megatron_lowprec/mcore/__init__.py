"""Megatron-core integration. Importing any of it checks the release of Megatron-core and changes nothing."""

import re

from megatron.core.package_info import __version__

from megatron_lowprec.errors import UserError

# Whose differences mcore/releases.py and mcore/patches.py have; docs/results/megatron-core.md.
_RELEASES = ("0.16", "0.17", "0.18", "0.19")


def check_release(release: str) -> None:
    """Check a release of Megatron-core.

    Raises:
        UserError: it is not supported.
    """
    if ".".join(re.findall(r"\d+", release)[:2]) not in _RELEASES:
        raise UserError(
            f"megatron-core {release} is not supported, {_RELEASES[0]} to {_RELEASES[-1]} are: "
            f'pip install "megatron-core<0.{int(_RELEASES[-1][2:]) + 1}"'
        )


check_release(__version__)
