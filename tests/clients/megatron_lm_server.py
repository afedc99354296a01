"""Runs pretrain_gpt.py of an unmodified Megatron-LM, also without CUDA, nvcc and make; a process forks each rank.

    python megatron_lm_server.py FOLDER

Reads one JSON object a line: ``arguments``, ``ranks``, ``log``. Each rank's output goes to LOG.RANK, and
answers with a line of the ranks' exit codes. Without CUDA, forking saves the imports, which take longer than a small
run.
"""

import argparse
import importlib
import inspect
import json
import multiprocessing.spawn
import os
import runpy
import sys
import types
import typing
from functools import partial
from typing import Any

import torch
import typing_extensions

from tools.bench.commands.megatron_lm_worker import skip_compilers


def main() -> None:
    """Serve; without CUDA, import Megatron-LM once. With CUDA each rank imports it: a fork cannot use CUDA again."""
    folder = sys.argv[1]
    training = None if torch.cuda.is_available() else _import_megatron_lm(folder)
    for line in sys.stdin:
        asked = json.loads(line)
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        children = [_fork(folder, asked, rank, store.port, training) for rank in range(asked["ranks"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _import_megatron_lm(folder: str) -> Any:
    """``megatron.training.training``, made ready for runs; pretrain_gpt.py starts only as __main__."""
    if not torch.cuda.is_available():
        from megatron_lowprec.mcore import cpu_compat

        cpu_compat.install(package="megatron")
    if sys.version_info < (3, 12):  # for which Megatron-LM is written from 0.17 on; the rest of it parses
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    training: Any = importlib.import_module("megatron.training.training")
    skip_compilers()
    _start_helpers_without_main()
    _print_exact_losses(training)
    _fuse_adamw(training)
    _read_options_once()
    runpy.run_path(f"{folder}/pretrain_gpt.py")
    return training


def _read_options_once() -> None:
    """Megatron-LM parses the source of its dataclasses for its options' help, three times a run."""
    factory = importlib.import_module("megatron.training.argument_utils").ArgumentGroupFactory
    read, known = factory._get_field_docstrings, dict[type, dict[str, str]]()

    def remembered(self: Any, cls: type) -> dict[str, str]:
        if cls not in known:
            known[cls] = read(self, cls)
        return dict(known[cls])

    factory._get_field_docstrings = remembered
    arguments: Any = importlib.import_module("megatron.training.arguments")
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _fork(folder: str, asked: dict[str, Any], rank: int, port: int, training: Any | None) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(f"{asked['log']}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(asked["ranks"]),
            "MASTER_ADDR": "127.0.0.1",
            # the store is this process's, as torchrun has it: a port chosen here may be taken when a rank opens it
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        training = training or _import_megatron_lm(folder)
        if not torch.cuda.is_available():
            _run_without_cuda(training)
            if "--cuda-graph-impl" in asked["arguments"]:
                _rerun_graphs()
        script = f"{folder}/pretrain_gpt.py"
        sys.argv = [script, *asked["arguments"]]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever ended the run is printed, and its exit code says so
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for helper in multiprocessing.active_children():  # Megatron-core's checkpoint writer would outlive the run
            helper.kill()
        os._exit(code)


def _start_helpers_without_main() -> None:
    """The checkpoint writer's helper imports pretrain_gpt.py again, which fails under Python 3.11 from 0.17 on."""
    prepare = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main_from")}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def _print_exact_losses(training: Any) -> None:
    """Print each iteration's loss and gradient norm in full: Megatron-LM prints seven digits of the loss."""
    log = training.training_log
    names = list(inspect.signature(log).parameters)

    def training_log(loss_dict: dict[str, torch.Tensor], *args: Any, **options: Any) -> Any:
        norm = (dict(zip(names[1:], args, strict=False)) | options)["grad_norm"]
        for name, value in (*loss_dict.items(), ("grad norm", norm)):
            print(f"exact {name}: {float(value).hex()}", flush=True)
        return log(loss_dict, *args, **options)

    training.training_log = training_log


def _fuse_adamw(training: Any) -> None:
    """AdamW by torch's fused kernel, as this project's driver has it: the other one rounds otherwise."""
    setup = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **options: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **options)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for group in [part.optimizer.defaults, *part.optimizer.param_groups]:
                group["fused"], group["foreach"] = True, False
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = setup_model_and_optimizer


def _run_without_cuda(training: Any) -> None:
    cuda = training.torch.cuda
    cuda.device_count = lambda: 1
    cuda.device_memory_used = lambda *_: 0
    cuda.memory_stats = lambda *_: {}
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
    training.set_jit_fusion_options = lambda **_: None
    _keep_pipeline_outputs()
    torch.distributed.init_process_group("gloo")
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)


def _rerun_graphs() -> None:
    """Recordings that run their Python again stand for CUDA graphs."""
    import pytest

    from tests.training.rerun_recorder import rerun_under_spec

    rerun_under_spec(pytest.MonkeyPatch())  # never undone: the process ends with the run


def _keep_pipeline_outputs() -> None:
    """A stage's output is freed before gloo has sent it, and other bytes arrive."""
    arguments: Any = importlib.import_module("megatron.training.arguments")
    of = arguments.core_transformer_config_from_args

    def core_transformer_config_from_args(*args: Any, **options: Any) -> Any:
        config = of(*args, **options)
        config.deallocate_pipeline_outputs = False
        return config

    arguments.core_transformer_config_from_args = core_transformer_config_from_args


if __name__ == "__main__":
    main()
