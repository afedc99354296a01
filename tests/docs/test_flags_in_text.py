"""Flags that the pages speak of in running text exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.sweep.cli import _parser as sweep_parser
from megatron_lowprec.training.config import arguments
from megatron_lowprec.training.config.megatron_flags import megatron_flags
from tests.docs.markdown import PAGES, ROOT, fences, name_of, spans
from tests.docs.other_programs import SLURM

_FLAG = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9_-]*")
# Other programs' flags that the pages speak of, besides Megatron-LM's.
_FOREIGN = {
    *("--nproc-per-node", "--nnodes", "--node-rank", "--standalone", "--shutdown-timeout", "--signals-to-handle"),
    *(
        "--signal",
        "--requeue",
        "--kill-on-bad-exit",
        "--help",
        "--no-build-isolation",
        "--no-deps",
        "--nodes",
        "--gpus-per-node",
    ),
    *("--generate-hashes", "--universal", "--python-version", "--no-annotate", "--no-header"),  # of uv
    *("--nv", "--container-image", "--container-mounts", "--container-workdir"),  # of apptainer and srun's plugins
    *("--module", "--override", "--compile", "--training"),  # of torchtitan, before a dot
    *SLURM,
}


def known_flags() -> set[str]:
    """Of the driver and of every tool."""
    found = {*_FOREIGN, *megatron_flags()}
    parsers = [arguments.build_parser(), sweep_parser("sweep.py")]
    found |= {option for parser in parsers for action in parser._actions for option in action.option_strings}
    for file in [*(ROOT / "tools").rglob("*.py"), *SHIPPED.glob("commands/*.py"), *SHIPPED.glob("conformance/*.py")]:
        found |= set(re.findall(r'add_argument\(\s*"(--[a-z0-9-]+)"', file.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_in_the_text_exist(page: Path) -> None:
    known = known_flags()
    outputs = [fence.body for fence in fences(page) if fence.language == "text"]
    assert [flag for text in spans(page) + outputs for flag in _FLAG.findall(text) if flag not in known] == []
