"""Readers of checkpoints."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import torch

from tools.fuzz.run import FuzzedReader, copy, write


def of_checkpoints(made: Path) -> list[FuzzedReader]:
    inside = (".metadata", "common.pt", "metadata.json", "config.yaml", "__0_0.distcp")

    def make(sums: bool) -> None:
        copy(made / "run" / "iter_0000004", "run/iter_0000004")
        write({"run/latest_checkpointed_iteration.txt": "4\n"})
        if not sums:
            Path("run/iter_0000004/checksums.json").unlink()

    def find() -> None:
        from megatron_lowprec.training.checkpoint import checksums, loader

        checksums._compared.cache_clear()
        found = loader.find("run")
        print(found.progress, found.layout, found.schedule, found.tokenizer, found.recipe, *found.notes)

    def whole() -> None:
        from megatron_lowprec.commands.inspect_checkpoint import describe
        from megatron_lowprec.training.checkpoint import loader, safe_load
        from megatron_lowprec.training.convert.store import read_weights

        find()
        folder = loader.find("run").folder
        metadata = safe_load.examine(folder)
        safe_load.check_objects(folder, metadata, [key for key in metadata.state_dict_metadata if "random" in key])
        print(*describe(folder), sep="\n")
        loader.model_options(loader.find("run"))
        read_weights(folder)

    def tracker() -> None:
        from megatron_lowprec.training.checkpoint import storage
        from megatron_lowprec.training.checkpoint.resume import find_checkpoint
        from megatron_lowprec.training.config.options import Config

        storage.tracked("run")
        find_checkpoint(Config(load="run"))

    def extra_state() -> None:
        from megatron_lowprec.training.checkpoint.safe_load import checked_extra_state

        checked_extra_state(
            "layer", torch.frombuffer(bytearray(Path("state").read_bytes()) or b"\0", dtype=torch.uint8)
        )

    state = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.arange(6.0), "extra_fp8_variables": {"num_gemms": 1}}
    summed = tuple(f"run/iter_0000004/{name}" for name in inside)
    return [
        FuzzedReader("checkpoint", (*summed, "run/iter_0000004/checksums.json"), partial(make, True), find, exact=True),
        FuzzedReader("checkpoint without checksums", summed, partial(make, False), whole),
        FuzzedReader("tracker", ("run/latest_checkpointed_iteration.txt",), partial(make, True), tracker),
        FuzzedReader("extra state", ("state",), partial(write, {"state": pickle.dumps(state)}), extra_state),
    ]
