"""What a model really holds, to compare a memory plan with: its weights, and what a forward pass saves for backward.

python -m torch.distributed.run … -m tests.training.memory.memory_worker FOLDER '{"tensor": {…}, …}'

measures one model after the other, changed by these options, and writes FOLDER/NAME-RANK.json of each.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lowprec.training.distributed import startup
from tests.training.helpers import argv
from tests.training.many_runs import Meetings

VOCABULARY = 256
# Wide and long enough that what the plan leaves out (a loss's masks, ids of tokens) is small.
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 64,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "bf16": True,
    # Fused on a GPU, and on a CPU with other masks.
    "hidden_dropout": 0,
    "attention_dropout": 0,
}


@dataclass(frozen=True)
class Held:
    """Numbers of weights, and bytes saved for the backward pass of one microbatch, logits included."""

    weights: int
    saved: int


def measure(changes: dict[str, Any], ranks: startup.Ranks, forward: bool = True) -> Held:
    """Build the model as the driver does; the caller takes the process groups down."""
    import torch

    from megatron_lowprec.recipe.parsing import load_recipe
    from megatron_lowprec.training import model
    from megatron_lowprec.training.config.arguments import parse
    from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
    from megatron_lowprec.training.schedule import plan

    config = resolve_run(resolve_model(parse(argv(**{**SIZES, **changes}))[0]), ranks.world_size, gpus=False)
    startup.initialize(config, ranks)
    schedule, _ = plan(config, config.steps.global_batch_size, config.steps.samples)
    trainer = model.build(config, load_recipe(config.recipe, config.recipe_override), schedule, VOCABULARY)
    (chunk,) = trainer.chunks
    weights = sum(weight.numel() for weight in chunk.parameters())
    if not forward:
        return Held(weights, 0)
    owned = {weight.untyped_storage().data_ptr() for weight in chunk.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()  # a node that holds its own output is never freed, nor are its process groups
        address = tensor.untyped_storage().data_ptr()
        if address not in owned:
            saved.setdefault(address, tensor)  # holds it, so that no other one gets its address
        return tensor

    # without a backward pass Megatron-core's token dispatcher keeps the graphs of earlier models
    earlier = _saved_by_attention() if config.recipe_override else []
    trainer.runtime.begin_step(0)
    trainer.runtime.begin_microbatch(0)
    shape = (config.micro_batch_size, config.seq_length)
    ids = torch.randint(0, VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = chunk(ids, positions, None, labels=ids)
    for each in _saved_by_attention() if config.recipe_override else ():
        if not any(each is other for other in earlier):
            for tensor in each.tensors():
                pack(tensor)
    del loss
    return Held(weights, sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))


def _saved_by_attention() -> list[Any]:
    """What attention with hooks of its own saves, unseen by other hooks."""
    from megatron_lowprec.mcore.layers.cached_attention import SavedTensor

    return [each for each in gc.get_objects() if type(each) is SavedTensor]


if __name__ == "__main__":
    here = startup.prepare_environment()
    folder, cases = sys.argv[1:]
    meetings = Meetings(here.rank)
    for name, changes in json.loads(cases).items():
        meetings.arrange(name)
        held = measure(changes, here, forward="pipeline_model_parallel_size" not in changes)
        Path(folder, f"{name}-{here.rank}.json").write_text(json.dumps(asdict(held)))
        startup.finalize()
