"""Sizes of a run's weights at each of its checkpoints, by tensor and layer, as JSON.

    python tools/weight_norms.py --load runs/my_run --out norms.json

``rms`` and ``max`` are of the fp32 weights (bf16 ones if the checkpoint has no optimizer state). ``update`` is the rms
of Adam's direction exp_avg / (sqrt(exp_avg_sq) + 1e-8), without bias correction. The gain of a norm is the tensor
``...layer_norm_weight`` or ``...layernorm.weight``. Tensors with a layer axis give a value per layer; those with
a layer's number in their name, as where layers differ, one value. No code of a checkpoint is run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.training.checkpoint import safe_load, storage
from megatron_lowprec.training.config.paths import output_file

_MAIN, _MEAN, _SQUARE = (f"optimizer.state.{name}." for name in ("fp32_param", "exp_avg", "exp_avg_sq"))
_STACKED = re.compile(r"decoder\.layers\.(?!\d)")


def norms(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Tensor's name -> rms, max and update, each a list over layers, or of one value.

    Raises:
        Damaged, UserError: as ``safe_load.examine``.
    """
    stored = safe_load.examine(folder).state_dict_metadata
    tensors = {
        key: torch.empty(found.size, dtype=found.properties.dtype)
        for key, found in stored.items()
        if isinstance(found, TensorStorageMetadata) and found.properties.dtype.is_floating_point
    }
    dcp.load(tensors, storage_reader=safe_load.RestrictedReader(folder), no_dist=True)
    sizes = {}
    for name in (key for key in tensors if not key.startswith("optimizer.")):
        weight = _rows(name, tensors.get(_MAIN + name, tensors[name]))
        sizes[name] = {"rms": _rms(weight), "max": weight.abs().amax(1).tolist()}
        if _MEAN + name in tensors:
            direction = tensors[_MEAN + name] / (tensors[_SQUARE + name].sqrt() + 1e-8)
            sizes[name]["update"] = _rms(_rows(name, direction))
    return sizes


def _rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A row per layer, or one."""
    return tensor.double().reshape(len(tensor) if _STACKED.match(name) else 1, -1)


def _rms(rows: torch.Tensor) -> list[float]:
    found: list[float] = rows.square().mean(1).sqrt().tolist()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a UserError."""
    parser = Parser(description=__doc__)
    parser.add_argument("--load", type=Path, required=True, metavar="FOLDER", help="a run's folder or a --save folder")
    parser.add_argument("--out", type=output_file, required=True, metavar="FILE", help="where the JSON goes")
    arguments = parser.parse_args(argv)

    def measure() -> int:
        present = storage.whole(str(storage.checkpoints_of(arguments.load)))
        if not present:
            raise UserError(f"{arguments.load}: no checkpoint there; name a run's folder or a --save folder")
        try:
            found: dict[int, Any] = {iteration: norms(present[iteration]) for iteration in sorted(present)}
        except safe_load.Damaged as error:
            raise UserError(f"{arguments.load}: {error}; remove that checkpoint") from None
        arguments.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
        return 0

    return run_tool("weight_norms.py", measure)


if __name__ == "__main__":
    sys.exit(main())
