"""Conditions of a measurement: machine, software versions, commit."""

import datetime
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megatron_lowprec.training.monitoring.run_metadata import commit

REPOSITORY = Path(__file__).resolve().parents[2]


def header(device: torch.device, argv: Sequence[str]) -> dict[str, Any]:
    """Hardware, versions, commit, date and command of this run; "unknown" if not available."""
    driver, name = None, f"CPU ({platform.machine()}), a smoke test"
    if device.type == "cuda":
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        name = torch.cuda.get_device_name(device)
    return {
        "command": " ".join(["python -m tools.bench", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": name,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else "unknown",
        "python": platform.python_version(),
        "commit": commit("tools") or "unknown",
    }


def header_lines(found: dict[str, Any]) -> list[str]:
    """The header as two lines above a table."""
    software = ", ".join(f"{name} {found[name]}" for name in ("driver", "cuda", "torch", "triton", "python"))
    return [
        f"{found['device']}; {software}",
        f"{found['date']}, commit {found['commit']}: {found['command']}",
    ]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=REPOSITORY, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"
