"""Frozen weights of converted layers as codes: of a base model under adapters, or of layers that are not trained."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import nn

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.linear.backends.protocol import COMPUTE_DTYPES
from megatron_lowprec.linear.layer_state import combined, parts_of
from megatron_lowprec.linear.lowprec_linear import LowPrecConv1D, LowPrecLayer
from megatron_lowprec.linear.opaque import StoredCodes, number_of_codes, opaque_linear
from megatron_lowprec.linear.sharding.dtensors import is_dtensor
from megatron_lowprec.quantization.amax_history import AMAX
from megatron_lowprec.quantization.frozen_weight import Codes, FrozenWeight, StoredSpecs, amax_of, stored_specs
from megatron_lowprec.recipe.quant_spec import QuantSpec

M = TypeVar("M", bound=nn.Module)

_FIELDS = tuple(f"weight_{side}_{field}" for side in ("rowwise", "columnwise") for field in Codes._fields)
_DATA = _FIELDS[0]
_AMAX = "weight_amax"
_SPEC = "weight_spec"  # in state dicts: what the codes are, as text

logger = logging.getLogger("megatron_lowprec")


def quantize_frozen_weights(model: M, storage: QuantSpec | None = None, dtype: torch.dtype | None = None) -> M:
    """Hold the frozen weights of converted layers as codes and scales, in place of parameters, and return the model.

    Without ``storage`` a layer keeps the operands of its recipe: its forward pass and its input gradient keep their
    bits. Under delayed scaling, which has scale 1 in the first step of training, this is from the second step on.
    Recipes that quantize the weight for fprop and for dgrad along different dimensions keep both. With ``storage`` the
    weight takes the values of these codes, and the recipe quantizes them in each pass.

    Call it after ``convert``, and before DistributedDataParallel and fully_shard. Codes and scales are buffers named
    ``weight_rowwise_data``, ``weight_rowwise_scale`` and so on; ``load_state_dict`` also takes an unquantized weight,
    which each rank needs: ``broadcast_from_rank0`` of ``torch.distributed.checkpoint`` sends only what layers hold.

    Args:
        model: its layers whose weight has ``requires_grad=False`` change, others stay.
        storage: format and scales of the weight [O, I], with current scaling and without draws.
        dtype: the dtype of the GEMMs, if not that of the weights: under torch.autocast.

    Raises:
        UserError: no converted layer has a frozen weight, or all are codes; the recipe needs an unquantized weight;
            FSDP2 has sharded it; a parametrization computes it; an argument of another type.
    """
    _check_arguments(model, storage, dtype)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LowPrecLayer)}
    frozen = {
        path: layer
        for path, layer in layers.items()
        if not isinstance(layer, FrozenLayer) and not layer.weight.requires_grad
    }
    if not frozen:
        if any(isinstance(layer, FrozenLayer) for layer in layers.values()):
            raise UserError(
                "quantize_frozen_weights was called on a model whose frozen weights are all codes already: call "
                "dequantize_frozen_weights first to change storage"
            )
        found = "no converted layer: call convert first" if not layers else "no converted layer with a frozen weight"
        raise UserError(f"quantize_frozen_weights found {found}; freeze weights by requires_grad_(False) or an adapter")
    specs = {path: _specs_of(path, layer, storage) for path, layer in frozen.items()}
    _warn_of_ties(model, frozen)
    before = sum(layer.weight.nbytes for layer in frozen.values())
    for path, layer in frozen.items():
        _hold(layer, specs[path], dtype or layer.weight.dtype)
    after = sum(buffer.nbytes for layer in frozen.values() for buffer in layer.buffers(recurse=False))
    logger.info("%d frozen weights are held as codes: %d bytes, before %d", len(frozen), after, before)
    return model


def dequantize_frozen_weights(model: M) -> M:
    """Give layers of ``quantize_frozen_weights`` a frozen parameter again, with the value of their codes, in place.

    The rounding of the codes stays in the weights. Merge adapters into such weights, or export them.
    """
    for module in model.modules():
        if isinstance(module, FrozenLayer):
            module.release()
    return model


class _Parameter(NamedTuple):
    """The parameter that codes replace: [O, I], or [I, O] if ``transposed``; ``dtype`` is that of its GEMMs."""

    shape_OI: tuple[int, int]  # noqa: N815 - a shape suffix
    dtype: torch.dtype
    transposed: bool
    original: torch.dtype


class FrozenLayer(LowPrecLayer):
    """Base of a converted layer whose frozen weight is held as codes, in buffers.

    Compiled, it is one operator; ``torch.compile`` breaks the graph if its recipe has random draws or delayed scales.
    """

    holds_codes = True
    _specs: StoredSpecs
    _replaced: _Parameter
    _weight: FrozenWeight | None
    _names: tuple[str, ...]
    _number: int | None

    @property
    def weight(self) -> FrozenWeight:  # type: ignore[override]
        """The weight, to read; in the layout of the replaced parameter."""
        weight = self._weight
        stored: list[torch.Tensor] = [self._buffers[name] for name in self._names]  # type: ignore[misc]
        # buffers may be replaced (torch.func.functional_call, assignment) or moved in place (fully_shard)
        if weight is None or not weight.holds(stored):
            shape_OI, dtype, transposed, _ = self._replaced
            amax = self._buffers.get(_AMAX)
            weight = FrozenWeight(self._specs, stored, shape_OI, dtype, amax, transposed)
            self._keep(weight)
        return weight

    def _keep(self, weight: FrozenWeight | None) -> None:
        self.__dict__["_weight"] = weight  # not by setattr, which takes tensors for buffers

    @property
    def weight_spec(self) -> torch.Tensor:
        """uint8, what the codes are as text; ``torch.distributed.checkpoint`` looks its key up here."""
        return torch.tensor(list(_text(self._specs).encode()), dtype=torch.uint8)

    @property
    def _held(self) -> dict[str, torch.Tensor]:
        """The buffers in place of the weight."""
        buffers: dict[str, Any] = self._buffers
        return {name: value for name, value in buffers.items() if name.startswith("weight_")}

    def release(self) -> None:
        """Make the weight a frozen parameter again, with the value of the codes."""
        value = nn.Parameter(self.weight.value().to(self._replaced.original).contiguous(), requires_grad=False)
        for name in self._held:
            del self._buffers[name]
        self.__class__ = combined(*parts_of(type(self))[1:])
        for name in ("_specs", "_replaced", "_weight", "_names", "_number"):
            del self.__dict__[name]
        self.register_parameter("weight", value)

    def _opaque_number(self) -> int | None:
        """Of the compiled layer; None if it is not a pure function, or another class wraps its forward pass."""
        wrapped = super(FrozenLayer, type(self)).forward is not LowPrecLayer.forward
        if wrapped or not self.linear_gemms.is_pure:
            return None
        return number_of_codes(StoredCodes(self._specs, self._replaced.shape_OI, self._replaced.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As ``LowPrecLayer``; UserError if autocast has another dtype than the weight."""
        kind, own = x.device.type, self._replaced.dtype
        if torch.is_autocast_enabled(kind) and (dtype := torch.get_autocast_dtype(kind)) != own:
            raise UserError(
                f"{self.linear_gemms.linear_id.name} holds codes of a weight in {own}, but runs under autocast "
                f"to {dtype}: call quantize_frozen_weights(model, dtype={dtype})"
            )
        if not torch.compiler.is_compiling():
            return super().forward(x)
        if self._number is None:
            return self._run_outside_graph(x)
        bias: torch.Tensor | None = self.bias
        if torch.is_autocast_enabled(kind):
            x, bias = x.to(own), None if bias is None else bias.to(own)
        self.check_dtypes(x, own)
        tensors = [getattr(self, name) for name in self._names]
        y = opaque_linear(x.reshape(-1, x.shape[-1]), tensors, bias, self.recipe_key, self._number)
        return y.view(*x.shape[:-1], y.shape[-1])

    @torch.compiler.disable(reason="random draws and amax histories of a frozen layer are state outside the graph")
    def _run_outside_graph(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def extra_repr(self) -> str:
        """Sizes, recipe and what is stored."""
        return f"{super().extra_repr()}, weight={self.weight!r}"

    # ---- state dict, copies and moves
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}{_SPEC}"] = self.weight_spec

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight, shape, errors = state_dict.pop(f"{prefix}weight", None), self.weight.shape, args[-1]
        text, own = state_dict.pop(f"{prefix}{_SPEC}", None), _text(self._specs)
        if weight is None and text is not None and (found := bytes(text.tolist()).decode()) != own:
            raise UserError(
                f"{prefix}weight holds codes of {own}, but the state dict has codes of {found}: load it into a model "
                "under that recipe or storage, or load an unquantized weight"
            )
        if weight is not None and weight.shape == shape:
            stored = _stored(weight, self._replaced, self._specs)
            state_dict.update({prefix + name: value for name, value in stored.items()})
        elif weight is not None:
            errors.append(  # as torch words it
                f"size mismatch for {prefix}weight: copying a param with shape {weight.shape} from checkpoint, the "
                f"shape in current model is {shape}."
            )
            state_dict.update({prefix + name: value for name, value in self._held.items()})  # none is missing
        if self._specs.rowwise.scaling != "delayed":
            state_dict.pop(f"{prefix}{_AMAX}", None)  # beside codes under delayed scaling
        data = state_dict.get(f"{prefix}{_DATA}")
        if data is not None and data is not self._buffers[_DATA]:
            self._follow_codes(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._keep(None)

    def _follow_codes(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Add the amax of other codes to a state dict without one; amax histories missing beside them start empty."""
        for tensor, (history, slot) in self.linear_gemms.histories.items():
            if f"{prefix}{AMAX}.{tensor}" not in state_dict:
                history.load_state(slot, None)
        held, (shape_OI, dtype, transposed, _) = self._held, self._replaced
        # set_model_state_dict puts the buffer of this layer where a full state dict has none
        if _AMAX not in held or state_dict.get(f"{prefix}{_AMAX}", held[_AMAX]) is not held[_AMAX]:
            return
        stored = [state_dict.get(prefix + name) for name in self._names]
        if all(value is not None and value.shape == held[name].shape for name, value in zip(self._names, stored)):
            weight = FrozenWeight(self._specs, stored, shape_OI, dtype, None, transposed)  # type: ignore[arg-type]
            state_dict[f"{prefix}{_AMAX}"] = amax_of(weight.value())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_weight": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = self._opaque_number()  # that of another process

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # a change of dtype would round scales, which are fp32 whatever the dtype of the weight
        buffers: dict[str, Any] = self._buffers
        scales = [name for name in buffers if name.startswith("weight_") and buffers[name].dtype == torch.float32]
        self._keep(None)
        device = buffers["weight_rowwise_data"].device
        dtype, original = (
            fn(torch.empty(0, dtype=each, device=device)).dtype
            for each in (self._replaced.dtype, self._replaced.original)
        )
        self._replaced = self._replaced._replace(dtype=dtype, original=original)
        buffers.update({name: buffers[name].view(torch.int32) for name in scales})
        super()._apply(fn, recurse)
        buffers.update({name: buffers[name].view(torch.float32) for name in scales})
        self._keep(None)
        self._number = self._opaque_number()
        return self


def _warn_of_ties(model: nn.Module, frozen: Mapping[str, LowPrecLayer]) -> None:
    weights = {id(layer.weight) for layer in frozen.values()}
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in weights:
                owners.setdefault(id(parameter), []).append(f"{path}.{name}".removeprefix("."))
    for names in owners.values():
        if len(names) > 1:
            warnings.warn(
                f"quantize_frozen_weights unties {', '.join(names)}, which are one parameter: each layer holds codes "
                "of its own, and a later change of one does not reach the others",
                stacklevel=3,
            )


def _hold(layer: LowPrecLayer, specs: StoredSpecs, dtype: torch.dtype) -> None:
    """Replace the parameter ``weight`` of a layer by buffers with its codes."""
    weight, transposed = layer.weight, isinstance(layer, LowPrecConv1D)
    out_features, in_features = weight.shape[::-1] if transposed else weight.shape
    replaced = _Parameter((out_features, in_features), dtype, transposed, weight.dtype)
    stored, kind = _stored(weight, replaced, specs), combined(FrozenLayer, type(layer))
    # from here on nothing raises: a layer has its parameter or its codes
    layer.__class__ = kind
    assert isinstance(layer, FrozenLayer)
    del layer._parameters["weight"]
    layer.__dict__.update(_specs=specs, _replaced=replaced, _weight=None)
    for name, value in stored.items():
        layer.register_buffer(name, value)
    layer._names = tuple(name for name in _FIELDS if name in layer._buffers)
    layer._number = layer._opaque_number()


def _stored(weight: torch.Tensor, replaced: _Parameter, specs: StoredSpecs) -> dict[str, torch.Tensor]:
    """Buffers of a weight in the layout of the replaced parameter."""
    w_OI = (weight.t() if replaced.transposed else weight).detach().to(replaced.dtype)
    sides = {"rowwise": (w_OI, specs.rowwise), "columnwise": (w_OI.t(), specs.columnwise)}
    found = {_AMAX: amax_of(w_OI)} if specs.rowwise.scaling == "delayed" else {}
    for side, (matrix, spec) in sides.items():
        fields = {} if spec is None else Codes.of(matrix, spec)._asdict()
        found |= {f"weight_{side}_{name}": value for name, value in fields.items() if value is not None}
    return found


def _text(specs: StoredSpecs) -> str:
    """What codes and scales are, by which others cannot be decoded."""
    sides = [spec for spec in (specs.rowwise, specs.columnwise) if spec is not None]
    return "; ".join(
        f"{spec.format} by {spec.granularity}, scales {spec.scale_format}"
        + ("" if spec.tensor_scale is None else " below those of the tensor")
        + ("" if spec.outer_block is None else f" in blocks of {spec.outer_block[0]}x{spec.outer_block[1]}")
        for spec in sides
    )


def _check_arguments(model: object, storage: object, dtype: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"quantize_frozen_weights was given {type_of(model)} as model: give a torch.nn.Module")
    if storage is not None and not isinstance(storage, QuantSpec):
        raise UserError(
            f"quantize_frozen_weights was given {type_of(storage)} as storage: give a QuantSpec, as in "
            'QuantSpec("e2m1", granularity="1x32", scale_format="e8m0", scale_rule="floor")'
        )
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise UserError(
            f"quantize_frozen_weights was given dtype={dtype!r}, but recipes compute in bfloat16 or float32: give "
            "torch.bfloat16 or torch.float32"
        )


def _specs_of(path: str, layer: LowPrecLayer, storage: QuantSpec | None) -> StoredSpecs:
    if "weight" not in layer._parameters:
        raise UserError(
            f"{path}.weight is computed by a parametrization: call torch.nn.utils.parametrize.remove_parametrizations "
            "before quantize_frozen_weights"
        )
    if layer.gathers_fp8 or is_dtensor(layer.weight.data):
        raise UserError(f"{path}.weight is sharded: call quantize_frozen_weights before fully_shard")
    if storage is not None:
        if storage.random or storage.scaling == "delayed" or storage.source == "fprop":
            raise UserError(
                "quantize_frozen_weights takes a storage spec with current scales of the original weight, rounded to "
                f"nearest, got rounding {storage.rounding}, scaling {storage.scaling} and source {storage.source}"
            )
        return StoredSpecs(storage, quantizes=frozenset({"fprop", "dgrad"}))
    if not layer.linear_gemms.recipe.quantized:
        raise UserError(f"recipe {layer.recipe.name} quantizes no weight: pass storage=QuantSpec(...)")
    try:
        return stored_specs(layer.linear_gemms.recipe)
    except UserError as reason:
        raise UserError(
            f"{path} under recipe {layer.recipe.name} cannot hold its frozen weight as codes: {reason}. Set "
            "fprop.weight, and dgrad.weight with source=fprop; or pass storage=QuantSpec(...), which rounds the weight"
        ) from None
