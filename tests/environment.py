"""What a test's processes are started with."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_path() -> dict[str, str]:
    """``PYTHONPATH`` with this repository before what is there: it may provide packages."""
    there = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(ROOT) if not there else f"{ROOT}{os.pathsep}{there}"}
