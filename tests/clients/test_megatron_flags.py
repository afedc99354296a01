"""The list of Megatron-LM's flags is that of the clients' parsers; needs MEGATRON_LM, see ``megatron_lm.obtain``."""

import os
from pathlib import Path

import pytest

from megatron_lowprec.training.config.megatron_flags import megatron_flags
from tools.megatron_flags import checkouts, flags_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("newest_only", [True, pytest.param(False, marks=pytest.mark.weekly)])
def test_the_list_has_every_flag_of_the_clients(newest_only: bool, tmp_path: Path) -> None:
    sources = [
        source for source in os.environ.get("MEGATRON_LM", "").split(os.pathsep) if source and Path(source).exists()
    ]
    if not sources:
        pytest.skip("MEGATRON_LM names no Megatron-LM; make test-clients clones it")
    sources = sorted(sources, key=lambda source: Path(source).name)
    chosen = sources[-1:] if newest_only else sources[:-1]
    if not chosen:
        pytest.skip("MEGATRON_LM names one Megatron-LM only, the newest")
    for checkout in checkouts(chosen, tmp_path):
        release, found = flags_of(checkout)
        listed = {name: flag for name, flag in megatron_flags().items() if release in flag.releases}
        assert found.keys() == listed.keys(), "run python tools/megatron_flags.py"
        newest = {name: flag for name, flag in listed.items() if flag.releases[-1] == release}
        assert {name: (flag.values, flag.default) for name, flag in newest.items()} == {
            name: found[name] for name in newest
        }
