"""One process of ``megatron_lm``: a pretrain_gpt.py of Megatron-LM, or this project's, as its only rank.

Takes one argument, JSON with folder (of pretrain_gpt.py), client (whether it is Megatron-LM's), te (whether
TransformerEngine is there), flags, and result (the file that gets the memory peaks).
"""

import importlib
import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from typing import Any


def main(asked: dict[str, Any]) -> int:
    """Exit code of the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if asked["te"]:
        stand_in_for_apex()
    if asked["client"]:
        skip_compilers()
    script = str(Path(asked["folder"], "pretrain_gpt.py"))
    sys.argv = [script, *asked["flags"]]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            print(end.code if isinstance(end.code, str) else f"exit code {end.code}", file=sys.stderr)
            return 1
    except Exception:  # noqa: BLE001 - the row fails, whatever ended it
        traceback.print_exc()
        return 1
    torch: Any = sys.modules.get("torch")  # which the run has imported
    on_gpu = torch is not None and torch.cuda.is_available()
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if on_gpu else [0, 0]
    result = {name: peak / 2**30 for name, peak in zip(("peak_gib", "reserved_gib"), peaks, strict=True)}
    Path(asked["result"]).write_text(json.dumps(result), encoding="utf-8")
    return 0


def stand_in_for_apex() -> None:
    """Let Megatron-LM import the module in ``apex`` where none is installed that fits."""
    try:
        importlib.import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        sys.path.insert(0, str(Path(__file__).parent / "apex"))


def skip_compilers() -> None:
    """Megatron-LM compiles a helper that is there, and CUDA kernels that no row runs."""
    datasets: Any = importlib.import_module("megatron.core.datasets.utils")
    datasets.compile_helpers = lambda: None
    initialize: Any = importlib.import_module("megatron.training.initialize")
    if hasattr(initialize, "fused_kernels"):  # until 0.18
        initialize.fused_kernels.load = lambda args: None


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for NCCL and workers of the data
