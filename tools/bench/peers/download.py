"""Fetch the peers' wheels for another machine: ``python -m tools.bench.peers.download FOLDER [--python 3.12]``.

Wheels come by ``pip download``. A source distribution cannot: to read its metadata pip runs its build, and that of
transformer-engine-torch wants CUDA there and then; so pip is stopped once it has the archive.
"""

import argparse
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

PACKAGES = Path(__file__).with_name("packages.txt")
# pip takes a platform literally, so that a newer one does not include the older.
PLATFORMS = ["manylinux1_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 40))]


def packages() -> tuple[list[str], list[str]]:
    """Pinned wheels and pinned sources of packages.txt."""
    lines = [line.strip() for line in PACKAGES.read_text(encoding="utf-8").splitlines()]
    named = [line for line in lines if line and not line.startswith("#")]
    sources = [line.split("#")[0].strip() for line in named if line.endswith("# source")]
    return [line for line in named if not line.endswith("# source")], sources


def fetch_wheels(requirements: Sequence[str], folder: Path, python: str) -> None:
    """Wheels for CPython ``python`` on x86-64 Linux, none of their dependencies.

    Raises:
        subprocess.CalledProcessError: pip found none; it has said which.
    """
    target = ["--python-version", python, "--implementation", "cp", *(w for p in PLATFORMS for w in ("--platform", p))]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *target]
    for requirement in requirements:
        print(requirement, flush=True)
        subprocess.run([*command, "-d", str(folder), requirement], check=True)


def fetch_source(requirement: str, folder: Path) -> Path:
    """The archive of a source distribution, not built, not even asked for its metadata.

    Raises:
        SystemExit: pip has no source distribution of it.
    """
    from pip._internal.cli.main import main as pip
    from pip._internal.exceptions import InstallationError
    from pip._internal.req.req_install import InstallRequirement

    kept: list[Path] = []

    def keep_archive(self: InstallRequirement) -> None:
        kept.append(Path(shutil.copy(str(self.local_file_path), folder)))
        raise InstallationError("its archive is all that is wanted")

    print(requirement, "(source)", flush=True)
    InstallRequirement.prepare_metadata = keep_archive  # type: ignore[method-assign]
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-binary=:all:", "-d", str(folder)]
    with redirect_stderr(io.StringIO()) as said:
        pip(["download", *options, requirement])
    if not kept:
        sys.exit(f"no source distribution of {requirement}: {said.getvalue()}")
    return kept[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Fetch everything; prints each file's size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine that they are for (default: %(default)s)")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    wheels, sources = packages()
    fetch_wheels(wheels, args.folder, args.python)
    for source in sources:
        fetch_source(source, args.folder)
    for path in sorted(args.folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:8.1f} MiB  {path.name}")


if __name__ == "__main__":
    main()
