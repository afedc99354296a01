"""Endless, resumable batches on this rank's device from data paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.datasets.utils import Split

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.releases import batch_on_this_cp_rank
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.data import indexed_dataset
from megatron_lowprec.training.data.blend import all_paths, data_paths, parse_blend, same_file
from megatron_lowprec.training.data.chat_dataset import ChatSamples, prepare_chats
from megatron_lowprec.training.data.corpus_writer import prepare
from megatron_lowprec.training.data.sample_index import Corpus, DocumentSamples, DocumentsConfig
from megatron_lowprec.training.data.sampler import Blend, Epochs, Phases, Positions, Samples
from megatron_lowprec.training.data.tokenizer import Tokenizer
from megatron_lowprec.training.distributed.rank_sync import long_timeout_group, rank0_first
from megatron_lowprec.training.distributed.subprocesses import helpers
from megatron_lowprec.training.options.dataset_options import DataOptions

_FIELDS = ("tokens", "labels", "position_ids", "loss_mask")
_SPLITS = (Split.train, Split.valid, Split.test)
_MOCK_SAMPLES = 4096
_EVALUATION_SEED = 1234
"""Seed of validation's and test's order in place of --seed: runs of all seeds evaluate the same samples."""


@dataclass(frozen=True)
class SplitData:
    """One of train, validation and test: samples by position, the size of an epoch, the token that ends documents, and
    notes.
    """

    samples: Blend | Phases
    epoch_samples: int
    epoch_tokens: int
    eod: int
    notes: tuple[str, ...] = ()


Data = Mapping[str, SplitData | None]


def build(config: Config, tokenizer: Tokenizer, world_rank: int, local_rank: int) -> Data:
    """The three splits, None for a split without data; a collective call.

    Raises:
        UserError: on every rank if raised on one: paths, vocabularies, a split without a whole sample.
    """
    shared = {s: _documents_config(config, tokenizer, s) for s in _SPLITS}
    if config.mock_data:
        return {s.name: _split_data([MockSamples(own, s.value)], [1.0], own) for s, own in shared.items()}
    with long_timeout_group() as group:
        prefixes = rank0_first(local_rank == 0, lambda: _prepared_texts(config, tokenizer), group)
        # The first rank writes the indices, the others read them.
        return rank0_first(
            world_rank == 0,
            lambda: {
                s.name: _build_split(config, own, prefixes, s) if s is Split.train or config.eval_iters else None
                for s, own in shared.items()
            },
            group,
        )


def _documents_config(config: Config, tokenizer: Tokenizer, split: Split) -> DocumentsConfig:
    """What all samples of a split depend on, whatever its documents."""
    return DocumentsConfig(
        random_seed=config.seed if split is Split.train else _EVALUATION_SEED,
        sequence_length=config.shape.seq_length,
        # Datasets are built one by one; without a blend Megatron-core's config assumes mock data.
        blend=([""], None),
        split="1",
        path_to_cache=config.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=config.eod_mask_loss,
        create_attention_mask=False,  # Batches makes it on the device
    )


def _prepared_texts(config: DataOptions, tokenizer: Tokenizer) -> dict[str, str]:
    """Data path -> prefix of its .bin/.idx; the first rank of each node tokenizes text once."""
    assert config.data_cache_path is not None
    cache = config.data_cache_path
    tokenized = prepare_chats if config.sft else prepare
    workers = max(1, torch.get_num_threads())
    prefixes = {path: tokenized(path, tokenizer, cache, workers=workers) for path in all_paths(config)}
    for prefix in prefixes.values() if config.verify_data else ():
        indexed_dataset.verify_once(prefix, tokenizer.vocab_size, Path(cache))
    return prefixes


def _build_split(
    config: DataOptions, shared: DocumentsConfig, prefixes: Mapping[str, str], split: Split
) -> SplitData | None:
    paths = data_paths(config, split.name)
    if not paths:
        return None
    share: tuple[float, float] | None = (0.0, 1.0)
    if config.data_path is not None:
        share = convert_split_vector_to_split_matrix(parse_and_normalize_split(config.split))[split.value]
    if share is None:
        if split is Split.train:
            raise UserError(f"--split {config.split} has no part to train on; its first number must be above 0")
        return None
    documents = share

    def samples_of(path: str) -> Samples:
        if config.sft:
            return ChatSamples(prefixes[path], documents, shared.sequence_length, shared.tokenizer, split.name, path)
        return _build_dataset(shared, prefixes[path], documents, split, path)

    def blend_of(items: Sequence[str]) -> tuple[list[str], list[Samples], list[float]]:
        blend = parse_blend(items)
        datasets = [samples_of(path) for path, _ in blend]
        weights = [float(len(d)) if weight is None else weight for d, (_, weight) in zip(datasets, blend, strict=True)]
        return [path for path, _ in blend], datasets, weights

    named, datasets, weights = blend_of(paths)
    found = _split_data(datasets, weights, shared)
    if split.name != "train" or config.data_phase_path is None:
        return found
    switch, first = config.data_phase_switch_samples, found.samples
    assert switch is not None
    assert isinstance(first, Blend)
    # The second blend continues each shared path where the first stopped: no sample repeats before all were seen.
    taken = dict(zip(map(same_file, named), first.taken(switch), strict=True))
    named, datasets, weights = blend_of(config.data_phase_path)
    begins = [taken.get(same_file(path), 0) for path in named]
    second = Blend([Epochs(d, shared.random_seed) for d in datasets], weights, begins)
    return replace(found, samples=Phases(first, second, switch), notes=found.notes + _notes(datasets))


def _notes(datasets: Sequence[Samples]) -> tuple[str, ...]:
    return tuple(dataset.summary for dataset in datasets if isinstance(dataset, ChatSamples))


def _build_dataset(
    shared: DocumentsConfig, prefix: str, share: tuple[float, float], split: Split, path: str
) -> DocumentSamples:
    """One epoch of the documents in ``share`` of one prefix."""
    indexed = Corpus(prefix, shared.tokenizer.vocab_size)
    documents = len(indexed)
    first, last = (round(documents * end) for end in share)
    tokens = int(indexed.sequence_lengths[first:last].sum())
    if tokens <= shared.sequence_length:
        raise UserError(
            f"{path}: its {split.name} part has {tokens} tokens in {last - first} documents, less than one sample of "
            f"{shared.sequence_length} + 1; give more data, a shorter --seq-length or another --split"
        )
    config = replace(shared, documents=(first, last), tokens=tokens)
    return DocumentSamples(indexed, prefix, np.arange(first, last, dtype=np.int32), None, split, config)


def _split_data(datasets: Sequence[Samples], weights: Sequence[float], shared: DocumentsConfig) -> SplitData:
    samples = sum(len(d) for d in datasets)
    return SplitData(
        Blend([Epochs(d, shared.random_seed) for d in datasets], weights),
        samples,
        samples * shared.sequence_length,
        shared.tokenizer.eod,
        _notes(datasets),
    )


class MockSamples:
    """Learnable samples without data files: arithmetic sequences modulo the vocabulary."""

    def __init__(self, config: DocumentsConfig, stream: int) -> None:
        self._config, self._seed = config, [config.random_seed, stream]

    def __len__(self) -> int:
        return _MOCK_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        config, vocab_size = self._config, self._config.tokenizer.vocab_size
        start, step = np.random.default_rng([*self._seed, index]).integers(1, vocab_size, size=2)
        text = torch.from_numpy((start + (step % 7 + 1) * np.arange(config.sequence_length + 1)) % vocab_size)
        _, loss_mask, positions = _get_ltor_masks_and_position_ids(
            text[:-1], config.tokenizer.eod, config.reset_position_ids, False, config.eod_mask_loss, False
        )
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": positions, "loss_mask": loss_mask}


def document_mask(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """Mask [b, 1, s, s] of causal attention within documents, True where a query must not see a key.

    A document ends with its ``eod``. Megatron-core's dataset makes the same mask on the CPU.

    Args:
        tokens: int64 [b, s].
    """
    ends = (tokens == eod).long()
    document = ends.cumsum(-1) - ends
    other = document.unsqueeze(-1) != document.unsqueeze(-2)
    later = torch.ones(tokens.shape[-1], tokens.shape[-1], dtype=torch.bool, device=tokens.device).triu(1)
    return (other | later).unsqueeze(1)


class Batches:
    """Microbatches of this rank from position ``start`` on, as a dict of (micro-batch, sequence) tensors on ``device``.

    A context-parallel rank gets its share of each sequence. Tensor-parallel rank 0 loads and broadcasts. Middle
    pipeline stages get no data, unless their routers weigh auxiliary losses by tokens with a loss, or attention has the
    documents' mask, which --reset-attention-mask adds.

    Attributes:
        micro_batch_size, seq_length: of whole sequences, before context-parallel ranks take their shares.
    """

    def __init__(self, split: SplitData, start: int, config: Config, device: torch.device) -> None:
        self.device = device
        self.micro_batch_size, self.seq_length = config.steps.micro_batch_size, config.shape.seq_length
        weighs = config.calculate_per_token_loss and config.num_experts is not None
        self._mask_of = split.eod if config.reset_attention_mask else None
        self._needed = (
            weighs or config.reset_attention_mask or mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
        )
        self._loader: Iterator[torch.Tensor] | None = None
        self._ahead: dict[str, torch.Tensor | None] | None = None
        if self._needed and mpu.get_tensor_model_parallel_rank() == 0:
            positions = Positions(
                start,
                self.micro_batch_size,
                mpu.get_data_parallel_rank(),
                mpu.get_data_parallel_world_size(),
            )
            loader: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(
                split.samples,  # type: ignore[arg-type]
                batch_sampler=positions,
                collate_fn=_pack,
                num_workers=config.num_workers,
                pin_memory=device.type == "cuda",
                # The loader draws a seed at each start, which must not change dropout's random state.
                generator=torch.Generator(),
            )
            with helpers():
                self._loader = iter(loader)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, torch.Tensor | None]:
        ready, self._ahead = self._ahead, None
        return self._load() if ready is None else ready

    def prefetch(self) -> None:
        """Load the next microbatch while the device is busy; all ranks call it at the same place."""
        if self._ahead is None:
            self._ahead = self._load()

    def _load(self) -> dict[str, torch.Tensor | None]:
        if not self._needed:
            return dict.fromkeys((*_FIELDS, "attention_mask"))
        if self._loader is not None:
            packed = _next(self._loader).to(self.device, non_blocking=True)
        else:
            shape = len(_FIELDS), self.micro_batch_size, self.seq_length
            packed = torch.empty(shape, dtype=torch.int64, device=self.device)
        if mpu.get_tensor_model_parallel_world_size() > 1:
            # One broadcast per microbatch: a mask of ones and zeros is exact as integers.
            dist.broadcast(packed, mpu.get_tensor_model_parallel_src_rank(), mpu.get_tensor_model_parallel_group())
        fields: dict[str, torch.Tensor | None] = dict(zip(_FIELDS, packed.unbind(0), strict=True))
        fields["loss_mask"] = packed[-1].float()
        # A context-parallel rank takes two chunks of each sequence, one from its first and one from its second half.
        fields = batch_on_this_cp_rank(fields)
        eod = self._mask_of
        fields["attention_mask"] = None if eod is None else document_mask(packed[_FIELDS.index("tokens")], eod)
        return fields


def _next(loader: Iterator[torch.Tensor]) -> torch.Tensor:
    """The next of a loader; a worker's UserError in its own words, without torch's traceback around it."""
    try:
        return next(loader)
    except UserError as error:
        raise UserError(str(error).rpartition("UserError: ")[2].removesuffix(r"\n")) from None


def _pack(samples: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Integers [field, sample, sequence]: one tensor to pin, copy and broadcast."""
    return torch.stack([torch.stack([sample[name].to(torch.int64) for sample in samples]) for name in _FIELDS])
