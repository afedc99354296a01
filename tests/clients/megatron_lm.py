"""An unmodified Megatron-LM for tests: where it comes from, and runs of its pretrain_gpt.py."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.environment import ROOT
from tests.waiting import PATIENCE

# Of these series the arguments are known: of the first patch release of 0.19 there is a tag, of later ones a wheel.
TAGS = {"0.16": "core_v0.16.1", "0.19": "core_v0.19.0"}
ADDRESS = "https://github.com/NVIDIA/Megatron-LM"
SERVER = Path(__file__).with_name("megatron_lm_server.py")


class NotAvailableError(Exception):
    """No Megatron-LM was found; the message says why."""


def obtain(folder: Path) -> Path:
    """The installed release's checkout in ``folder``, from the folder or tarball that ``MEGATRON_LM`` names.

    Of several with colons between it is the one with the release's tag in its name. "clone" clones it.

    Raises:
        NotAvailableError: it is not set, a clone fails, or another release of megatron-core is installed.
    """
    series = ".".join(version("megatron-core").split(".")[:2])
    if series not in TAGS:
        raise NotAvailableError(
            f"megatron-core {version('megatron-core')} is installed; this is for {' and '.join(TAGS)}"
        )
    tag = TAGS[series]
    given = os.environ.get("MEGATRON_LM")
    target = folder / "Megatron-LM"
    if given is not None and ":" in given:
        given = next((path for path in given.split(":") if tag in path), None)
    if given is None:
        raise NotAvailableError(f"MEGATRON_LM names no Megatron-LM {tag}; make test-clients clones it")
    if given == "clone":
        command = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, ADDRESS, str(target)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | {"GIT_TERMINAL_PROMPT": "0"}
        )
        if done.returncode:
            raise NotAvailableError(f"{tag} cannot be cloned from {ADDRESS}: {done.stderr.strip()[-200:]}")
    elif Path(given).is_dir():
        shutil.copytree(given, target)
    else:
        with tarfile.open(given) as tar:
            tar.extractall(folder / "unpacked", filter="data")
        (inside,) = (folder / "unpacked").iterdir()
        inside.rename(target)
    helper = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    assert helper is not None
    assert helper.origin is not None
    shutil.copy(helper.origin, target / "megatron/core/datasets")  # compiled, which a checkout's is not
    return target


@dataclass(frozen=True)
class Run:
    """One run: exit codes of its ranks, and all that they printed."""

    codes: list[int]
    output: str

    @property
    def losses(self) -> list[float]:
        """Training loss of each iteration, nats a token, to the last bit."""
        return [float.fromhex(value) for value in re.findall(r"exact lm loss: (\S+)", self.output)]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norm of each iteration, to the last bit."""
        return [float.fromhex(value) for value in re.findall(r"exact grad norm: (\S+)", self.output)]

    @property
    def parameters(self) -> list[int]:
        """Number of parameters of each pipeline and tensor-parallel rank."""
        return [int(count) for count in re.findall(r"number of parameters on .*: (\d+)", self.output)]


class MegatronLM:
    """Runs pretrain_gpt.py of a checkout, one run at a time."""

    def __init__(self, checkout: Path, logs: Path) -> None:
        paths = [str(checkout), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Megatron-core sets NVTE_*_ATTN when a test of this process builds a model, and refuses a second choice
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
        environment = {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # compiled functions round otherwise
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() then leaves CUDA to the forked ranks
            # for --deterministic-mode
            "NCCL_ALGO": "Ring",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        self._logs = logs
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER), str(checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=inherited | environment,
            cwd=logs,
        )

    def run(self, *arguments: str, ranks: int = 1) -> Run:
        """Run with these arguments on so many ranks."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        number = len(list(self._logs.iterdir()))
        log = self._logs / f"{number}"
        asked = {"arguments": arguments, "ranks": ranks, "log": str(log)}
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        codes = json.loads(self._server.stdout.readline())
        return Run(codes, "\n".join(Path(f"{log}.{rank}").read_text() for rank in range(ranks)))

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
