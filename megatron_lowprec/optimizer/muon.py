"""Muon for matrices and AdamW for all other weights, as one torch optimizer; arXiv 2502.16982.

torch's own Muon orthogonalizes. It takes whole matrices; a ``Matrix`` says how they are had where ranks hold parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.adamw import adamw

from megatron_lowprec.errors import UserError

_AT_ONCE = 2**24
"""Entries of matrices from which one call of torch's Muon makes the changes: each costs a tenth of a millisecond."""
_OF_MATRIX, _OF_OTHER = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")  # the state, beside "step"


class Matrix:
    """A matrix of a model, whole on this rank.

    Args:
        weight: what the optimizer updates: the matrix, this rank's part of it, or None for no part.
        split: rows of each matrix in a group of rows: of the queries, keys and values of a fused projection's query
            group. All rows of a kind are one matrix. Empty: all rows are.
    """

    def __init__(self, weight: torch.Tensor | None, split: tuple[int, ...] = ()) -> None:
        self.weight, self.split = weight, split

    def whole(self, update: torch.Tensor | None) -> torch.Tensor | None:
        """The whole update, from this rank's part; None where ``weight`` is None. Collective for a matrix in parts."""
        return update

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, in the shape of ``weight``."""
        return whole


class _Transposed(Matrix):
    """A matrix whose weight is stored as [in, out]."""

    def whole(self, update: torch.Tensor | None) -> torch.Tensor | None:
        return None if update is None else update.t()

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.t()


class _Update(NamedTuple):
    """Of a matrix that is in ``weight``, whole, before it is orthogonalized."""

    matrix: Matrix
    weight: torch.Tensor
    whole: torch.Tensor
    rate: float


def matrices_of_linears(model: nn.Module, others: Collection[nn.Parameter] = ()) -> list[Matrix]:
    """Trained weights of a model's linear layers, converted or not, but of those tied to an embedding.

    ``Conv1D`` of transformers is a linear layer. A weight of several layers is one matrix. A weight that is
    computed from others, as by ``weight_norm``, is none, with a warning.

    Args:
        others: weights that AdamW is to update, such as the output layer's.

    Raises:
        UserError: there is no such weight, or ranks hold parts of one, as under FSDP.
    """
    # not layer.weight, which a parametrization would compute
    embeddings = {layer._parameters.get("weight") for layer in model.modules() if isinstance(layer, nn.Embedding)}
    left, computed, found = embeddings | set(others), list[str](), dict[torch.Tensor, Matrix]()
    for name, layer in model.named_modules():
        kind = _kind_of(layer)
        if kind is None:
            continue
        weight = layer._parameters.get("weight")
        if weight is None:
            if any(each.requires_grad for of, each in layer.named_parameters() if of != "bias"):
                computed.append(name)
        elif weight.requires_grad and weight not in left:
            _check_whole(weight, f"{name}.weight")
            found.setdefault(weight, kind(weight))
    if not found:
        raise UserError(
            "the model has no linear layer with a trained weight of its own, so AdamW would update all weights: "
            "use torch.optim.AdamW, or pass Muon a list of Matrix(weight)"
        )
    if computed:
        warnings.warn(
            f"AdamW, not Muon, updates what weights of {len(computed)} linear layers are computed from, as by "
            f"weight_norm; the first layer is {computed[0]!r}",
            stacklevel=2,
        )
    return list(found.values())


def _check_whole(weight: torch.Tensor | None, name: str) -> None:
    """Raise UserError for what is no weight of two dimensions that is whole on this rank."""
    if weight is None:
        return
    if hasattr(weight, "device_mesh"):
        found = "is a DTensor"
    elif not weight.is_leaf:
        found = "is computed from other weights"
    elif weight.dim() != 2:
        found = f"has shape {tuple(weight.shape)}"  # one dimension for FSDP's flat shards
    else:
        return
    raise UserError(
        f"{name} {found}, and Muon updates whole matrices: train with replicated weights (DistributedDataParallel, not "
        "FSDP), or leave it to AdamW"
    )


def _kind_of(layer: nn.Module) -> type[Matrix] | None:
    """Of a linear layer's weight; None for another layer."""
    if isinstance(layer, nn.Linear):
        return Matrix
    kinds = ((kind.__module__, kind.__name__) for kind in type(layer).__mro__)  # a converted layer has several
    return _Transposed if ("transformers.pytorch_utils", "Conv1D") in kinds else None


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` of ``matrices``, ``torch.optim.AdamW`` of the other weights.

    ``state[weight]["step"]`` counts a weight's updates.

    Args:
        params: all weights, as for any optimizer of torch.
        matrices: those that Muon updates, in an order that is the same on all ranks. Others are not to change.
        lr: of AdamW, and with ``lr_ratio`` of Muon: schedules set this one.
        lr_ratio: Muon's learning rate over ``lr``.
        momentum, nesterov, ns_steps, adjust_lr_fn: as ``torch.optim.Muon``.

    Raises:
        UserError: a matrix is not whole.
        ValueError: torch's AdamW or Muon refuses an option.
    """

    def __init__(
        self,
        params: Iterable[Any],
        matrices: Sequence[Matrix],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        lr_ratio: float = 1.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        nothing = [nn.Parameter(torch.zeros(1, 1))]
        torch.optim.AdamW(nothing, lr, betas, eps, weight_decay)  # for its checks alone
        for matrix in matrices:
            # another kind joins parts, and a DTensor is computed with as a whole
            if type(matrix) in (Matrix, _Transposed) and not hasattr(matrix.weight, "device_mesh"):
                _check_whole(matrix.weight, "a matrix")
        self.matrices = {matrix.weight for matrix in matrices if matrix.weight is not None}
        self._matrices, self._lr_ratio, self._momentum, self._nesterov = matrices, lr_ratio, momentum, nesterov
        # its weights are set at each call: its step subtracts the orthogonalized gradient from zeros
        self._torch = torch.optim.Muon(
            nothing,
            lr * lr_ratio,
            weight_decay=0.0,
            momentum=momentum,
            nesterov=False,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        self._torch.param_groups[0]["momentum"] = 0.0  # given for torch's checks

    @torch.compiler.disable(reason="Dynamo drops updates of weights that a step makes and sets")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights with gradients; collective where ranks hold parts of a matrix.

        Args:
            closure: computes the gradients and returns the loss, as for any optimizer of torch.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            UserError: a matrix with a gradient is not among the weights, or a gradient is sparse. Nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = {weight: group for group in self.param_groups for weight in group["params"]}
        foreign = next((each for each in self.matrices if each.grad is not None and each not in groups), None)
        if foreign is not None:
            raise UserError(
                f"a matrix of shape {tuple(foreign.shape)} has a gradient and is not in Muon's params: pass params "
                "that hold all matrices, such as model.parameters(), and not by way of ZeroRedundancyOptimizer, which "
                "gives each rank some of them"
            )
        sparse = next((p for p in groups if p.grad is not None and p.grad.layout != torch.strided), None)
        if sparse is not None:
            raise UserError(
                f"a weight of shape {tuple(sparse.shape)} has a sparse gradient, which Muon and its AdamW do not take: "
                "build the embedding without sparse=True, or give it an optimizer of its own such as SparseAdam"
            )
        for group in self.param_groups:
            # as TransformerEngine's optimizers count; Megatron-core saves it
            group["step"] = group.get("step", 0) + 1
            self._update_others(group)
        updates, entries = list[_Update](), 0
        for matrix in self._matrices:
            weight, update = matrix.weight, None
            if weight is not None:
                if weight.grad is None:
                    continue
                (buffer,) = self._state(weight, _OF_MATRIX)
                self.state[weight]["step"] += 1
                buffer.lerp_(weight.grad, 1 - self._momentum)
                update = weight.grad.lerp(buffer, self._momentum) if self._nesterov else buffer
            whole = matrix.whole(update)
            if weight is None or whole is None:
                continue
            group = groups[weight]
            rate = float(group["lr"]) * self._lr_ratio
            weight.mul_(1 - rate * group["weight_decay"])
            updates.append(_Update(matrix, weight, whole, rate))
            entries += whole.numel()
            if entries >= _AT_ONCE:
                self._change(updates)
                updates, entries = [], 0
        self._change(updates)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        own = "matrices", "_matrices", "_lr_ratio", "_momentum", "_nesterov", "_torch"
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, and of ``load_state_dict``.

        A weight without updates takes its group's count, the only one that Megatron-core's distributed optimizer sets
        where TransformerEngine is installed.

        Raises:
            UserError: the state is that of other matrices. Nothing has changed.
        """
        matrices = (self.__dict__ | state)["matrices"]
        weights = [(p, group) for group in state["param_groups"] for p in group["params"] if state["state"].get(p)]
        for weight, _ in weights:
            found, needed = state["state"][weight], _OF_MATRIX if weight in matrices else _OF_OTHER
            if not found.keys() >= set(needed):
                raise UserError(
                    f"the state to load has {', '.join(found)} of a weight of shape {tuple(weight.shape)}, and Muon "
                    f"needs {', '.join(needed)}: load what a Muon with the same matrices saved"
                )
        super().__setstate__(state)
        for weight, group in weights:
            count = float(self.state[weight].get("step", 0.0)) or float(group.get("step", 0))
            self.state[weight]["step"] = torch.tensor(count, dtype=torch.float32, device=weight.device)

    def _update_others(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p.grad is not None and p not in self.matrices]
        own = [[weight, weight.grad, *self._state(weight, _OF_OTHER)] for weight in weights]
        alike = [_alike(tensors) for tensors in own]
        updated, grads, firsts, seconds = ([tensors[part] for tensors in alike] for part in range(4))
        beta1, beta2 = group["betas"]
        adamw(
            updated,
            grads,
            firsts,
            seconds,
            [],
            [self.state[weight]["step"] for weight in weights],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for tensors, values in zip(own, alike, strict=True):
            if values is not tensors:
                torch._foreach_copy_(tensors, values)

    def _state(self, weight: torch.Tensor, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Tensors of a weight's state, zeros before its first update."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state |= {name: torch.zeros_like(weight) for name in names}
        return [state[name] for name in names]

    def _change(self, updates: Sequence[_Update]) -> None:
        """Add what torch's Muon makes of whole updates, without weight decay, to their matrices."""
        options, by_rate = self._torch.param_groups[0], dict[float, list[nn.Parameter]]()
        made = [[_at_zero(kind) for kind in _kinds(update.whole, update.matrix.split)] for update in updates]
        for update, steps in zip(updates, made, strict=True):
            by_rate.setdefault(update.rate, []).extend(steps)
        self._torch.param_groups = [options | {"params": steps, "lr": rate} for rate, steps in by_rate.items()]
        self._torch.step()
        self._torch.param_groups = [options | {"params": []}]
        self._torch.state.clear()
        for update, steps in zip(updates, made, strict=True):
            change = _joined([step.data for step in steps], update.matrix.split)
            update.weight.add_(update.matrix.part(change))


def _alike(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Themselves, or all contiguous: AdamW's kernel on a CPU takes them for stored in one order, whatever it is."""
    return tensors if len({each.stride() for each in tensors}) == 1 else [each.contiguous() for each in tensors]


def _at_zero(update: torch.Tensor) -> nn.Parameter:
    """What becomes the change: fp32 zeros with this gradient."""
    step = nn.Parameter(torch.zeros_like(update, dtype=torch.float32))
    step.grad = update.float()
    return step


def _kinds(whole: torch.Tensor, split: tuple[int, ...]) -> list[torch.Tensor]:
    """The matrices of one: all rows of a kind."""
    if not split:
        return [whole]
    return [kind.flatten(0, 1) for kind in whole.unflatten(0, (-1, sum(split))).split(split, dim=1)]


def _joined(kinds: list[torch.Tensor], split: tuple[int, ...]) -> torch.Tensor:
    """The inverse of ``_kinds``."""
    if not split:
        return kinds[0]
    groups = [kind.unflatten(0, (-1, rows)) for kind, rows in zip(kinds, split, strict=True)]
    return torch.cat(groups, dim=1).flatten(0, 1)
