"""Install the peers from a folder, without a network: ``python3 -m tools.bench.peers.install WHEELS TARGET``.

To be run by the Python that has the CUDA build of torch; TARGET then goes onto PYTHONPATH. TransformerEngine's binding
to torch is built from its source in WHEELS with that Python's torch and the host's C++ compiler (103 s on 16 cores with
2.20.2, torch 2.11 and CUDA 13.0) and copied to KEEP, if one is given; a copy of it found in WHEELS is taken instead.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

BINDING = "transformer_engine_torch"
# Always ours; of the others only those that this Python lacks.
PEERS = ("transformer_engine", "transformer_engine_cu13", "torchao")


def missing(wheels: Sequence[Path]) -> list[Path]:
    """The wheels to install."""
    found = []
    for wheel in wheels:
        name = wheel.name.split("-")[0]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if name in PEERS or version is None:
            found.append(wheel)
        else:
            print(f"{name} {version} is there already")
    return found


def cuda_home() -> Path:
    """The CUDA toolkit: $CUDA_HOME, or where nvcc is.

    Raises:
        SystemExit: neither.
    """
    named = os.environ.get("CUDA_HOME")
    compiler = shutil.which("nvcc")
    home = Path(named) if named else Path(compiler).resolve().parents[1] if compiler else Path("/usr/local/cuda")
    if not (home / "include" / "cuda_runtime.h").exists():
        sys.exit(f"{home}: no CUDA toolkit there; set CUDA_HOME")
    return home


def build_environment(target: Path) -> dict[str, str]:
    """What the source's setup.py reads."""
    # Headers come with torch's own CUDA libraries, packages below nvidia.
    spec = importlib.util.find_spec("nvidia")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("this Python has no package nvidia: install the CUDA build of torch")
    home, libraries = cuda_home(), Path(next(iter(spec.submodule_search_locations)))
    includes = [*sorted(libraries.glob("*/include")), home / "include"]
    return {
        **os.environ,
        "PYTHONPATH": str(target),
        "CPATH": os.pathsep.join(map(str, includes)),
        "CUDA_HOME": str(home),
        "CUDNN_PATH": str(libraries / "cudnn"),
        "NVTE_CUDA_INCLUDE_PATH": str(home / "include"),
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0)))),
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0"),
    }


def build(archive: Path, target: Path) -> Path:
    """The binding, built from its source distribution and put into ``target``.

    Raises:
        SystemExit: the build failed; its last lines were printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        log = source / "build.log"
        with log.open("w") as out:
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            done = subprocess.run(
                command, cwd=source, env=build_environment(target), stdout=out, stderr=subprocess.STDOUT, check=False
            )
        built = next(source.rglob(f"{BINDING}*.so"), None)
        if done.returncode or built is None:
            print(*log.read_text(errors="replace").splitlines()[-40:], sep="\n")
            sys.exit(f"{archive.name} was not built: exit code {done.returncode}")
        if shutil.which("strip"):
            subprocess.run(["strip", "--strip-unneeded", str(built)], check=False)  # for size alone
        return Path(shutil.copy(built, target))


def works(package: str, target: Path) -> bool:
    """Whether a fresh Python can import it from there."""
    return not subprocess.run(
        [sys.executable, "-c", f"import {package}"], env={**os.environ, "PYTHONPATH": str(target)}, check=False
    ).returncode


def main(argv: Sequence[str] | None = None) -> None:
    """Install, then import each peer; exit code 1 where one cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for a copy of the built binding")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    target = args.target.resolve()
    target.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    chosen = [str(wheel) for wheel in missing(sorted(args.wheels.glob("*.whl")))]
    subprocess.run([*pip, "--upgrade", "--target", str(target), *chosen], check=True)
    ready = next(args.wheels.glob(f"{BINDING}*{sysconfig.get_config_var('EXT_SUFFIX')}"), None)
    source = next(args.wheels.glob(f"{BINDING}*.tar.gz"), None)
    if ready is not None:
        shutil.copy(ready, target)
    elif source is not None:
        built = build(source, target)
        print(f"built {built.name}, {built.stat().st_size / 2**20:.1f} MiB")
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(built, args.keep)
    broken = [name for name in ("transformer_engine.pytorch", "torchao.float8") if not works(name, target)]
    print(f"{time.perf_counter() - started:.0f} s; put {target} onto PYTHONPATH")
    if broken:
        sys.exit(f"cannot be imported: {', '.join(broken)}")


if __name__ == "__main__":
    main()
