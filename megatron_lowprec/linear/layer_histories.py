"""Amax histories of a layer outside Megatron: ended by optimizer steps, equal on all data-parallel ranks.

They are no buffers of the module. torch would average a buffer in ``AveragedModel(use_buffers=True)``, round it in
``model.bfloat16()`` and broadcast it in each forward pass under DDP, and a module cannot exempt one.
"""

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.optimizer_steps import call_after_steps, stepping
from megatron_lowprec.linear.sharding.dtensors import is_dtensor
from megatron_lowprec.linear.sharding.gathered_weight import GatheredWeight
from megatron_lowprec.quantization.amax_history import AmaxHistory, update_together
from megatron_lowprec.quantization.device_rng_step import capturing
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import in_backward_pass
from megatron_lowprec.recipe.schema import HistorySpec


class LayerHistories:
    """Amax histories of one layer, and the weight that they belong to.

    Args:
        device: of the weight; histories of a meta tensor begin on the CPU.

    Attributes:
        stale: whether no recorded amax is of the weight as it is: it changed without the end of a step, or its steps
            end without a record.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "meta" else device
        self._by_spec: dict[HistorySpec, AmaxHistory] = {}
        self._source: weakref.ref[LayerHistories] | None = None  # of a copy
        self._weight: weakref.ref[torch.Tensor] | None
        self._stepped = False  # a step with a pass in training has ended
        self._forget_weight()

    def of(self, spec: HistorySpec) -> AmaxHistory:
        """The history that the layer's tensors with this spec share."""
        return self._by_spec.setdefault(spec, AmaxHistory(spec, self._device))

    def __iter__(self) -> Iterator[AmaxHistory]:
        return iter(self._by_spec.values())

    @property
    def specs(self) -> list[HistorySpec]:
        """The specs of the histories."""
        return list(self._by_spec)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None, "_weight": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerHistories":
        copied = memo[id(self)] = copy(self)
        copied._by_spec, copied._source = deepcopy(self._by_spec, memo), weakref.ref(self)
        return copied

    def to(self, device: torch.device) -> None:
        """Move to the weight's device, unless that is meta."""
        if device not in (self._device, torch.device("meta")):
            self._device = device
            for history in self:
                history.to(device)

    # ---- the weight
    def belong_to(self, weight: torch.Tensor) -> None:
        """Note the weight from which the recorded amaxes are, and its version."""
        self._weight = weakref.ref(weight)
        self._version = -1 if weight.is_inference() else weight._version

    def follow(self, weight: torch.Tensor) -> None:
        """Before a read: take over the source's histories if this is a copy whose weight was changed in place.

        So an average of weights, whose copy is not trained, gets the histories of the model that it averages.
        """
        source = None if self._source is None else self._source()
        if source is not None and self._changed(weight):
            for spec, history in self._by_spec.items():
                history.copy_(source.of(spec))
            self.belong_to(weight)

    def _changed(self, weight: torch.Tensor) -> bool:
        # of another parameter, as under FSDP, the version says nothing
        same = self._weight is not None and self._weight() is weight
        return same and not weight.is_inference() and weight._version != self._version

    def _forget_weight(self) -> None:
        self._weight = None
        self._version, self._norm, self.stale = -1, math.nan, False

    def _stays_empty(self, weight: torch.Tensor) -> bool:
        """Whether no amax is in effect although a step has ended, or should have: the weight has other values.

        The version does not count a write to ``weight.data``, or of a copy that the loop keeps. A step ends without a
        record if a reentrant checkpoint is not recomputed. The device is waited for, in the first step only; ranks with
        shards of the weight compare its whole norm, so they agree.
        """
        if any(history.any_in_effect for history in self._by_spec.values()):
            return False
        if capturing() or weight.is_meta or isinstance(weight, (Fp8Weight, GatheredWeight)):
            return False
        if any(not history.is_empty(slot) for history in self for slot in range(history.newest.numel())):
            return False
        if self._stepped:
            return True
        norm, before = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64)), self._norm
        self._norm = norm if math.isnan(before) else before
        return norm != self._norm

    # ---- passes and steps
    def begin_pass(self, weight: torch.Tensor, training: bool, captured: bool) -> None:
        """Before a first pass: compare the weight with that of the step's other passes, and end a microbatch.

        Args:
            weight: the layer's parameter.
            training: ``is_training_pass``.
            captured: a CUDA graph, whose replays record amaxes, may hold a pass.
        """
        if not self._by_spec:
            return
        self.follow(weight)
        self.stale = self.stale or self._changed(weight) or (training and self._stays_empty(weight))
        if not training or self.stale:
            return
        self._source = None
        self.belong_to(weight)
        for spec, history in self._by_spec.items():
            if captured or history.recorded:
                history.drop_not_finite()
            if spec.update == "microbatch":
                with torch.cuda.device_of(history.newest):
                    history.update()

    def end_step(self) -> None:
        """Before the histories are updated at the end of a step."""
        self._stepped = self._stepped or self._weight is not None
        self._forget_weight()

    def loaded(self) -> None:
        """After ``load_state_dict``, whose histories belong to no pass of this process."""
        self._source, self._stepped = None, False
        self._forget_weight()


class LayerGroup:
    """The layers of a model whose steps end together, with equal state on data-parallel ranks.

    A step of an optimizer that holds a parameter of the layers ends theirs; if all are frozen, a step of any optimizer.
    On several ranks this is a collective: each rank must step the same optimizers, and run at least one forward pass in
    training before each step.

    Args:
        ranks: the ranks that hold the same layers; None for all ranks.
        distributed: False for layers of this process only.
        rank: the data-parallel rank of the layers' draws; None for that of the process in ``ranks``.
        whole: refuse passes on several ranks once layers were removed: each stage of a pipeline holds others, and would
            wait for the rest in the collectives of its first pass.

    Attributes:
        pending: whether a pass in training may have run since the last step; always, if ``captured``.
        captured: whether a CUDA graph holds a pass in training.
        loaded: whether ``load_state_dict`` has run since the last pass in training; None before the first one, when it
            may have run on other ranks.
    """

    def __init__(
        self,
        ranks: dist.ProcessGroup | None = None,
        *,
        distributed: bool = True,
        rank: int | None = None,
        whole: bool = False,
    ) -> None:
        self.ranks, self._distributed, self._whole = ranks, distributed, whole
        self._rank = rank if distributed else 0
        self._begin()

    def _begin(self) -> None:
        self.loaded: bool | None = None
        self._layers: list[weakref.ref[Any]] = []
        self.pending = self._deferred = self._followed = self.captured = self._copied = False
        self._said: set[str] = set()
        _groups.append(weakref.ref(self))
        call_after_steps(_after_optimizer_step)

    def __getstate__(self) -> dict[str, Any]:
        names = "ranks", "_distributed", "_rank", "_whole", "pending", "_deferred"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        self.__dict__.update(state)
        self._copied = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerGroup":
        # a process group cannot be copied; copies of the layers join
        copied = memo[id(self)] = LayerGroup.__new__(LayerGroup)
        copied.__setstate__(self.__getstate__())
        return copied

    @property
    def given_rank(self) -> bool:
        """Whether the caller chose the data-parallel rank of the layers' draws."""
        return self._rank is not None

    @property
    def rank(self) -> int | None:
        """The data-parallel rank of the layers' draws; None before there are any ranks."""
        if self._rank is None and dist.is_available() and dist.is_initialized():
            return dist.get_rank(self.ranks)
        return self._rank

    def check_common_step(self, specs: Iterable[HistorySpec]) -> None:
        """Raise UserError for histories that several ranks cannot share, because they have no common step."""
        if self._spans_ranks and any(spec.update == "microbatch" for spec in specs):
            raise UserError(
                "history_update=microbatch is not reduced over data-parallel ranks, whose scales would differ: "
                "use history_update=step"
            )

    def add(self, layer: Any) -> None:
        """Let a ``LowPrecLayer`` join; in the same order on all ranks."""
        self._layers.append(weakref.ref(layer))

    @property
    def layers(self) -> list[Any]:
        """The layers that still exist."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    def begin_pass(self, training: bool) -> None:
        """Before a first pass: end a step that no backward pass could end, and make loaded state equal on all ranks."""
        self._followed = False  # of a backward pass that raised
        self.catch_up(collective=training)  # one rank may evaluate alone
        if training:
            stepping.clear()  # of steps that raised
            self._synchronize()
            self.pending, self.captured, self._copied = True, self.captured or capturing(), False

    def follows(self, parameters: set[int]) -> bool:
        """Whether an optimizer with parameters of these ``id`` ends the step."""

        own = [parameter for layer in self.layers for parameter in layer.parameters()]
        # a frozen copy, such as an average of weights on one rank, takes no part in the steps of its model
        return any(id(p) in parameters for p in own) or not (self._copied or any(p.requires_grad for p in own))

    def optimizer_stepped(self, parameters: set[int]) -> None:
        """End the step if it is pending; in a backward pass, behind that, when all gradients exist."""
        if not (self._deferred or self.follows(parameters)):
            return
        if in_backward_pass():
            self._deferred = True
            self.follow_backward_pass()
        else:
            self.end_step()

    def follow_backward_pass(self) -> None:
        """In a backward pass: let its end be that of a step whose optimizers step within.

        The first call counts. A reentrant checkpoint runs a backward pass within, whose end is too early. Its
        recomputation comes before that, so recomputations make this call as well.
        """
        if not self._followed:
            self._followed = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_pass_ended)

    def _backward_pass_ended(self) -> None:
        self._followed = False
        self.catch_up()

    def catch_up(self, collective: bool = True) -> None:
        """End a step whose optimizers stepped in the backward pass, unless it has ended with that.

        Args:
            collective: whether all ranks make this call; else a step that spans ranks does not end.
        """
        if self._deferred and (collective or not self._spans_ranks):
            self.end_step()

    def end_step(self) -> None:
        """Update all histories, with the maximum over the ranks; collective if these are several.

        A tensor without records keeps its history. Amaxes that are not finite are left out: the loop has skipped their
        update, and an Inf would pin the scale for a whole window.
        """
        self.pending, self._deferred = self.captured, False
        histories = [layer.histories for layer in self.layers]
        specs = [spec for one in histories for spec in one.specs]
        if specs and self._spans_ranks:
            self.check_common_step(specs)
            for one in histories:
                for history in one:
                    history.drop_not_finite()
            self._reduce([history.newest for one in histories for history in one])
        for one in histories:
            one.end_step()
        update_together(history for one in histories for history in one)

    def say_once(self, message: str) -> None:
        """A warning, once for the model."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=2)

    @property
    def _spans_ranks(self) -> bool:
        return bool(self._groups)

    @property
    def _groups(self) -> list[dist.ProcessGroup]:
        """The data-parallel ranks, and those with shards of a weight unless they are among these."""
        if not (dist.is_available() and dist.is_initialized()):
            return []
        replicas = self.ranks or dist.distributed_c10d._get_default_group()
        weights = [layer.stored_weight for layer in self.layers]
        meshes = [weight.device_mesh for weight in weights if is_dtensor(weight)]
        shards = [group for mesh in dict.fromkeys(meshes) for group in mesh.get_all_groups()]
        groups: list[dist.ProcessGroup] = []
        for group in ([replicas] if self._distributed else []) + shards:
            ranks = set(dist.get_process_group_ranks(group))
            if len(ranks) > 1 and not any(ranks <= set(dist.get_process_group_ranks(other)) for other in groups):
                groups.append(group)
        return groups

    def _synchronize(self) -> None:
        """Give loaded state its maximum over the ranks; then collective, and with histories at first.

        A broadcast from rank 0 may have left out the state of others. Before the first pass some ranks may load
        histories alone, as under DistributedDataParallel, which broadcasts weights. Else all call ``load_state_dict``:
        layers with draws only may be stages of a pipeline, which have their first passes one after the other.
        """
        loaded, self.loaded = self.loaded, False
        if loaded is False or not self._spans_ranks:
            return
        layers = self.layers
        if self._whole and len(layers) < len(self._layers):
            raise UserError(
                f"a recipe with delayed scaling or random draws found {len(layers)} of a model's {len(self._layers)} "
                "layers in this process: stages of a pipeline cannot share amax histories and counts of draws; leave "
                "out pipeline parallelism, or use a recipe without them such as fp8_current"
            )
        histories = [history for layer in layers for history in layer.histories]
        if histories:
            self._reduce([state for history in histories for state in (history.in_effect, history.window)])
        if histories or loaded:
            device = layers[0].stored_weight.device
            counts = [torch.tensor(layer.passes.count, dtype=torch.float64, device=device) for layer in layers]
            self._reduce(counts)
            for layer, count in zip(layers, counts, strict=True):
                layer.passes.count = int(count)

    def _reduce(self, amaxes: list[torch.Tensor]) -> None:
        """Replace tensors of one dtype by their maxima over the ranks, in one collective."""
        device = max((amax.device for amax in amaxes), key=lambda device: device.type != "cpu")
        reduced = max_over(torch.cat([amax.flatten().to(device) for amax in amaxes]), *self._groups)
        for amax, part in zip(amaxes, reduced.split([amax.numel() for amax in amaxes])):
            amax.copy_(part.view(amax.shape))


_groups: list[weakref.ref[LayerGroup]] = []  # in order of creation, equal on all ranks


def _after_optimizer_step(optimizer: Optimizer) -> None:
    groups = [group for reference in _groups if (group := reference()) is not None]
    if len(groups) < len(_groups):
        _groups[:] = map(weakref.ref, groups)
    pending = [group for group in groups if group.pending]
    parameters = {id(p) for each in optimizer.param_groups for p in each["params"]} if pending else set()
    for group in pending:
        # here, not in the next forward pass: a checkpoint may be written by one rank only
        group.optimizer_stepped(parameters)
