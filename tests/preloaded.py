"""Modules of the process that ranks are forked from (``launch.py``)."""

import gc
import os
import warnings
from importlib import import_module
from pathlib import Path

gc.disable()  # during the imports
# asks for GPUs without CUDA's driver, whose threads would be in the way (torch's CUDA builds)
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in ("megatron_lowprec.training.run", "megatron_lowprec.training.loop", "tests.training.helpers"):
        import_module(name)
gc.collect()
gc.freeze()  # collections of the ranks skip these objects
gc.enable()
if Path("/proc/self/task").exists():
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
