"""A model on a layout, built once as the driver builds it, and restored to its checkpoint for each recipe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import update_num_microbatches

from megatron_lowprec.recipe.coverage import check_sizes
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.training import model, schedule
from megatron_lowprec.training.calibrate import calibrate
from megatron_lowprec.training.checkpoint import checkpoint, optimizer_state, resume
from megatron_lowprec.training.checkpoint.checkpoint import RunProgress
from megatron_lowprec.training.checkpoint.writer import CheckpointWriter
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import layout_of, resolve_model, resolve_run
from megatron_lowprec.training.data import batches as data
from megatron_lowprec.training.data.batches import Batches, SplitData
from megatron_lowprec.training.data.tokenizer import padded_vocab_size, tokenizer_of
from megatron_lowprec.training.distributed.startup import Ranks
from megatron_lowprec.training.models.sizes import linear_sites, tensor_ranks
from megatron_lowprec.training.step import train_step


def configured(flags: Sequence[str], ranks: Ranks) -> Config:
    """The driver's options; raises UserError as the driver does."""
    config, _, _ = parse(flags)
    return resolve_run(resolve_model(config), ranks.world_size, gpus=torch.cuda.is_available())


class Shuffled:
    """The same samples in each iteration, in another order: other microbatches, other random draws, the same mean."""

    def __init__(self, samples: Any, batch: int, seed: int) -> None:
        self._samples, self._batch = samples, batch
        self._order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed)).tolist()

    def __getitem__(self, position: int) -> Any:
        iteration, place = divmod(position, self._batch)
        return self._samples[iteration * self._batch + self._order[place]]


class Snapshot:
    """A copy of weights, buffers, main weights and optimizer state."""

    def __init__(self, trainer: model.Trainer) -> None:
        self._trainer = trainer
        self._kept = [tensor.detach().clone() for tensor in _tensors(trainer)]
        # apex and TransformerEngine count steps here.
        self._groups = [dict(group) for group in _groups(trainer)]
        self._steps = trainer.scheduler.num_steps

    @torch.no_grad()
    def restore(self) -> None:
        """Copy everything back."""
        # In place, and by position: loading a checkpoint replaces some tensors.
        for tensor, kept in zip(_tensors(self._trainer), self._kept, strict=True):
            tensor.copy_(kept)
        for group, kept_group in zip(_groups(self._trainer), self._groups, strict=True):
            group.update({name: value for name, value in kept_group.items() if name != "params"})
        self._trainer.scheduler.num_steps = self._steps

    @torch.no_grad()
    def spoil(self) -> None:
        """Overwrite everything, so that only a checkpoint can restore it."""
        for tensor in _tensors(self._trainer):
            tensor.fill_(0.5)
        self._trainer.scheduler.num_steps = 0


def _groups(trainer: model.Trainer) -> list[dict[str, Any]]:
    return [group for inner in model.torch_optimizers(trainer.optimizer) for group in inner.param_groups]


def _tensors(trainer: model.Trainer) -> Iterator[torch.Tensor]:
    for chunk in trainer.chunks:
        yield from (weight.data for weight in chunk.parameters())
        for module in chunk.modules():  # the balancing bias of experts
            held = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            yield from (held[name] for name in held if name not in module._non_persistent_buffers_set)
    for inner in model.torch_optimizers(trainer.optimizer):
        for group in inner.param_groups:
            for weight in group["params"]:
                yield weight.data
                yield from (value for _, value in sorted(inner.state[weight].items()) if torch.is_tensor(value))


@dataclass
class Setup:
    """The state that all checks of a group share."""

    config: Config
    ranks: Ranks
    device: torch.device
    trainer: model.Trainer
    split: SplitData
    schedule: schedule.Schedule
    vocabulary: int
    progress: RunProgress
    snapshot: Snapshot

    @staticmethod
    def of(config: Config, ranks: Ranks, device: torch.device) -> Setup:
        """Build the model and load --load; the process groups must exist."""
        tokenizer = tokenizer_of(config)
        vocabulary = padded_vocab_size(
            tokenizer.vocab_size, config.make_vocab_size_divisible_by, config.tensor_model_parallel_size
        )
        plan, _ = schedule.plan(config, config.steps.global_batch_size, config.steps.samples)
        split = data.build(config, tokenizer, ranks.rank, ranks.local_rank)["train"]
        assert split is not None
        trainer = model.build(config, load_recipe("bf16", []), plan, vocabulary)
        progress = RunProgress()
        if config.load is not None:
            found, _ = resume.find_checkpoint(config)
            assert found is not None
            resume.check_model(found, config, vocabulary)
            if not config.no_load_optim:
                resume.check_optimizer(found, config)
            progress = checkpoint.load(found, trainer, config, layout_of(config, ranks.world_size)).progress
        optimizer_state.prime(trainer)  # the snapshot includes moments that no step has created yet
        return Setup(config, ranks, device, trainer, split, plan, vocabulary, progress, Snapshot(trainer))

    def enter(self, recipe: str) -> None:
        """The model as loaded, under a recipe without history; raises UserError if its blocks do not fit the sizes."""
        spec = load_recipe(recipe, [])
        sites, layers = linear_sites(self.config), self.config.shape.num_layers
        check_sizes(spec, sites, layers, tensor_ranks(self.config))
        self.snapshot.restore()
        if not self.config.no_lowprec_linears:
            self.trainer.runtime = model.bind(self.config, spec, self.trainer.chunks)

    def calibrate(self) -> None:
        """Fill the amax histories of delayed scaling, which the checkpoint lacks, as the driver does."""
        if self.trainer.runtime.recipe.delayed_operands():
            update_num_microbatches(self.progress.consumed_samples)
            calibrate(self.trainer, lambda: self._batches(self.progress), self.progress.iteration)

    def train(self, steps: int, progress: RunProgress | None = None, order: int | None = None) -> list[float]:
        """Losses of the next steps; ``order`` is the seed of another order of each iteration's samples."""
        progress = replace(self.progress) if progress is None else progress
        batch, losses = self.config.steps.global_batch_size, []
        batches = self._batches(progress, order)
        for _ in range(steps):
            update_num_microbatches(progress.consumed_samples)
            result = train_step(self.trainer, batches, self.config, progress.iteration)
            assert result.updated, f"a step was skipped: loss {result.loss}, gradient norm {result.grad_norm}"
            self.trainer.scheduler.step(increment=batch)
            progress.iteration += 1
            progress.consumed_samples += batch
            losses.append(result.loss)
        return losses

    def save(self, folder: Path, progress: RunProgress) -> None:
        """Write a checkpoint as the driver does."""
        config = replace(self.config, save=str(folder))
        recipe, layout = self.trainer.runtime.recipe, layout_of(config, self.ranks.world_size)
        content = resume.content(config, recipe, self.schedule, self.vocabulary, layout, None)
        CheckpointWriter(config, content, lambda line: None).save(self.trainer, progress)

    def load(self, folder: Path) -> RunProgress:
        """Load a checkpoint, amax histories included."""
        config = replace(self.config, load=str(folder))
        found, _ = resume.find_checkpoint(config)
        assert found is not None
        loaded = checkpoint.load(found, self.trainer, config, layout_of(config, self.ranks.world_size))
        assert not loaded.uncalibrated
        return loaded.progress

    def weights(self) -> str:
        """Digest of this rank's weights."""
        total = hashlib.sha256()
        for chunk in self.trainer.chunks:
            for weight in chunk.parameters():
                total.update(weight.detach().float().cpu().numpy().tobytes())
        return total.hexdigest()[:16]

    @torch.no_grad()
    def perturb(self, seed: int) -> None:
        """Move every embedding weight by one unit in the last place, up or down; one process, plain optimizer."""
        assert dist.get_world_size() == 1
        (weight,) = (
            weight
            for name, weight in self.trainer.chunks[0].named_parameters()
            if name.endswith("word_embeddings.weight")
        )
        bits = weight.detach().view(torch.int16 if weight.dtype == torch.bfloat16 else torch.int32)
        generator = torch.Generator().manual_seed(seed)
        up = 2 * torch.randint(0, 2, weight.shape, generator=generator, dtype=bits.dtype).to(weight.device) - 1
        moved = (bits + up * (weight != 0)).view(weight.dtype)
        main = getattr(weight, "main_param", None)
        if main is not None:  # of a bf16 model, and moved by as much
            main += moved.float() - weight.float()
        weight.copy_(moved)

    def _batches(self, progress: RunProgress, order: int | None = None) -> list[Batches]:
        split = self.split
        if order is not None:
            shuffled: Any = Shuffled(split.samples, self.config.steps.global_batch_size, order)
            split = replace(split, samples=shuffled)
        return [Batches(split, progress.consumed_samples, self.config, self.device) for _ in self.trainer.chunks]
