"""Casts of a layer, and products of an emulated one, as operators of torch.compile; functional.

The compiler sees a layer as these operators, torch's scaled products, and what lies between. An operator runs the
layer's backend as eager mode does, so codes and scales are equal. Their arguments are tensors and constants: a recipe
is the hash of its fields, which compiled code on disk holds for other processes.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.dispatch import load
from megatron_lowprec.linear.backends.planned_cast import give_lowering
from megatron_lowprec.linear.backends.protocol import (
    FIELDS,
    CastRequest,
    GemmBackend,
    KnownAmax,
    LayerContext,
    gemm_operands,
)
from megatron_lowprec.linear.backends.resolved import LayerBackends
from megatron_lowprec.linear.linear_id import SIDES, LayerAmax, LinearId
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import NO_DRAWS, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transforms
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, LinearRecipe, QuantSpec

_LIBRARY = torch.library.Library("megatron_lowprec", "FRAGMENT")


# ---- what the constants of a graph name
_recipes: dict[int, LinearRecipe] = {}
_numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = count()


def recipe_key(recipe: LinearRecipe) -> int:
    """The constant that names a recipe in a graph, equal in all processes."""
    key = int.from_bytes(hashlib.blake2b(repr(recipe).encode(), digest_size=8).digest(), "little") >> 1
    _recipes[key] = recipe
    return key


def recipe_of(key: int) -> LinearRecipe:
    """The recipe of ``recipe_key``."""
    return _recipes[key]


def number_of(state: Any) -> int:
    """A number within this process, for ``at`` of ``cast``: of a layer's backends, or of the GEMMs of its experts."""
    number = _numbers.get(state)
    if number is None:
        number = _numbers[state] = next(_next_number)
        _numbered[number] = state
    return number


def numbered(number: int) -> Any:
    """What ``number_of`` numbered."""
    return _numbered[number]


@lru_cache(maxsize=64)
def backends_of(key: int, device: torch.device) -> LayerBackends:
    """Backends of any layer of a recipe on a device, which caches fixed signs there; without draws and histories."""
    recipe = _recipes[key]
    linear_id = LinearId(0, "compiled")
    transforms = Transforms({name: gemm.hadamard for name, gemm in recipe.gemms.items()}, linear_id.sign_streams(0))
    layer_amax = LayerAmax(linear_id, {}, None)
    context = LayerContext(recipe, linear_id.rounding_streams(0), transforms, layer_amax)
    return LayerBackends(context, emulate=False)


class NamedCast(NamedTuple):
    """A cast as the constant of a graph names it, by one string: torch converts each argument in each call.

    Attributes:
        key: ``recipe_key``.
        backend: name of the backend's row in ``BACKENDS``.
    """

    key: int
    backend: str
    tensor: str
    request: CastRequest

    def __str__(self) -> str:
        bits = "".join("01"[each] for each in self.request)
        return f"{self.key} {self.backend} {self.tensor} {bits}"

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(name: str) -> NamedCast:
        """The cast of a ``str``."""
        key, backend, tensor, bits = name.split()
        return NamedCast(int(key), backend, tensor, CastRequest(*(each == "1" for each in bits)))


# ---- operators
def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any], *tags: str) -> Any:
    """An operator of this package, by a function on real tensors and one on fake ones.

    ``torch.library.custom_op`` does the same, with checks in each call that cost the host more than most launches.
    """
    found = tuple(getattr(torch.Tag, tag) for tag in ("needs_exact_strides", *tags) if hasattr(torch.Tag, tag))
    _LIBRARY.define(f"{name}{schema}", tags=found)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"megatron_lowprec::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.megatron_lowprec, name).default


def _fake_cast(matrix: Tensor, amax: Tensor | None, at: Tensor | None, name: str) -> list[Tensor]:
    key, backend, tensor, request = NamedCast.of(name)
    made = backends_of(key, matrix.device).built(backend).empty(tensor, matrix, request)
    assert made is not None
    found = [each for name in FIELDS if (each := getattr(made, name)) is not None]
    return [*found, matrix.new_empty(matrix.shape[1])] if request.sums else found


def _cast(matrix: Tensor, amax: Tensor | None, at: Tensor | None, name: str) -> list[Tensor]:
    """Tensors of ``GemmBackend.cast`` that are not None.

    Args:
        amax: for a current scale, if known.
        at: of ``begin_pass``: number of the layer's backends, step and microbatch; None for a recipe without state.
        name: of a ``NamedCast``.
    """
    key, backend, tensor, request = NamedCast.of(name)
    if at is None:
        backends, rng_step = backends_of(key, matrix.device), NO_DRAWS
    else:
        number, step, microbatch = at.tolist()
        backends, rng_step = _numbered[number], RngStep(step, microbatch)
    known = None if amax is None else KnownAmax(amax, reduced=True)
    one = backends.built(backend)
    if matrix.is_cuda and matrix.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(matrix):  # Triton launches on the current device, which Inductor has set
            found = one.cast(tensor, matrix, rng_step, request, known)
    else:
        found = one.cast(tensor, matrix, rng_step, request, known)
    return [each for each in found if each is not None]


_CAST = "(Tensor matrix, Tensor? amax, Tensor? at, str name)"
cast = define("cast", f"{_CAST} -> Tensor[]", _cast, _fake_cast)
cast_with_state = define("cast_with_state", f"{_CAST} -> Tensor[]", _cast, _fake_cast, "cudagraph_unsafe")
"""``cast`` with ``at``, which the host reads.

It raises newest amaxes of the layer's histories. A maximum does not depend on order or repetition, so the compiler need
not know; autograd refuses a backward pass that writes a tensor of its graph when another has written it.
"""


_SWITCH = "MEGATRON_LOWPREC_INDUCTOR_LAUNCHES"
_switched = os.environ.get(_SWITCH, "1")
if _switched not in ("0", "1"):
    raise UserError(f"{_SWITCH}={_switched}: wants 0 or 1")
INDUCTOR_LAUNCHES = _switched == "1"
"""Whether Inductor launches casts of an FP8 backend that have a plan, without this package; set before tracing."""


def _planned_rule(device: torch.device, name: str) -> tuple[Any, CastRequest]:
    key, backend, tensor, request = NamedCast.of(name)
    return backends_of(key, device).built(backend).planned_rule(tensor, request), request


planned_cast = define(
    "planned_cast",
    "(Tensor matrix, Tensor? amax, str name, str kernels) -> Tensor[]",
    lambda matrix, amax, name, _: _cast(matrix, amax, None, name),
    lambda matrix, amax, name, _: _fake_cast(matrix, amax, None, name),
)
"""``cast`` that Inductor lowers to launches; ``kernels`` is their digest, since compiled code on disk holds them."""


@cache
def _planned_kernels() -> str:
    give_lowering(planned_cast, _planned_rule)
    digest: str = load("cast_fp8").source_of_plans()
    return digest


def _fake_product(
    rows: int, a: list[Tensor], b: list[Tensor], bias: Any, key: int, backend: str, gemm: str, dtype: Any
) -> Tensor:
    return a[0].new_empty(rows, b[0].shape[0], dtype=dtype)


def _product(
    rows: int,
    a: list[Tensor | None],
    b: list[Tensor | None],
    bias: Tensor | None,
    key: int,
    backend: str,
    gemm: str,
    dtype: Any,
) -> Tensor:
    """``GemmBackend.gemm`` of operands by their data, scale and tensor scale; ``rows`` of the result."""
    assert a[0] is not None
    backends, operands = backends_of(key, a[0].device), []
    for (spec, names), side in zip(_operands(key, gemm), (a, b), strict=True):
        assert side[0] is not None
        fields: dict[str, Any] = dict(zip(names, side, strict=True))
        operands.append(QuantizedTensor(torch.Size((rows, rows)), side[0].dtype, spec, **fields))
    first, second = operands
    return backends.built(backend).gemm(gemm, first, second, dtype, bias=bias)


@lru_cache(maxsize=64)
def _operands(key: int, gemm: str) -> list[tuple[QuantSpec | None, tuple[str, ...]]]:
    """Spec of each operand of a GEMM, and its fields in a ``QuantizedTensor``."""
    ways = {tensor: "rowwise" if SIDES[tensor][0] == gemm else "columnwise" for tensor in GEMM_OPERANDS[gemm]}
    spec, parts = getattr(_recipes[key], gemm), ("data", "scale", "tensor_scale")
    return [(getattr(spec, tensor), tuple(f"{way}_{part}" for part in parts)) for tensor, way in ways.items()]


product = define(
    "product",
    "(SymInt rows, Tensor?[] a, Tensor?[] b, Tensor? bias, int key, str backend, str gemm, ScalarType dtype) -> Tensor",
    _product,
    _fake_product,
)

sum_tokens = define(
    "sum_tokens", "(Tensor dy) -> Tensor", lambda dy: dy.sum(dim=0), lambda dy: dy.new_empty(dy.shape[1])
)


class TracedGemms(GemmBackend):
    """A backend while the compiler traces: calls operators, and takes ``at`` of ``cast`` in place of an RNG step.

    Args:
        backend: whose operators they are.
        key: ``recipe_key``.
    """

    def __init__(self, backend: GemmBackend, key: int) -> None:
        self._backend, self._key, self.name = backend, key, backend.name
        self.fuses_producer, self.one_cast = backend.fuses_producer, backend.one_cast
        self._recipe = _recipes[key]

    def quantize(
        self,
        tensor: str,
        matrix: Tensor | CastPrologue,
        rng_step: Any,
        request: CastRequest,
        amax: KnownAmax | None = None,
    ) -> tuple[QuantizedTensor, Tensor | None]:
        """As ``GemmBackend``."""
        assert isinstance(matrix, Tensor)
        request = request._replace(sums=request.sums and self.fuses_producer)
        made = self._backend.empty(tensor, matrix, request)
        if made is None:
            return self._backend.quantize(tensor, matrix, NO_DRAWS, request)
        spec, known = getattr(self._recipe.gemms[SIDES[tensor][not request.rowwise]], tensor), None
        if self.fuses_producer and (spec.granularity, spec.scaling) == ("tensor", "current"):
            known = _amax(matrix) if amax is None else amax.value
        name = str(NamedCast(self._key, self.name, tensor, request))
        if INDUCTOR_LAUNCHES and self._backend.planned_rule(tensor, request) is not None:
            matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
            found = planned_cast(matrix, known, name, _planned_kernels())
        else:
            operator = cast if rng_step is None else cast_with_state
            found = operator(matrix, known, rng_step, name)
        sums = found.pop() if request.sums else None
        names = [name for name in FIELDS if getattr(made, name) is not None]
        return replace(made, **dict(zip(names, found, strict=True))), sums

    def sum_tokens(self, dy_TO: Tensor) -> Tensor:
        """As ``GemmBackend``: the compiler would sum in another order."""
        summed: Tensor = sum_tokens(dy_TO)
        return summed

    def empty(self, tensor: str, matrix: Tensor, request: CastRequest) -> QuantizedTensor | None:
        """As ``GemmBackend``."""
        return self._backend.empty(tensor, matrix, request)

    def weight_amax(self, w_OI: Tensor) -> Tensor | None:
        """As ``GemmBackend``, by torch: the compiler may compute it with the weight's producer."""
        return _amax(w_OI) if self._backend.one_weight_amax else None

    def fuses_directions(self, tensor: str, matrix: Tensor | CastPrologue, rng_step: Any) -> bool:
        """As ``GemmBackend``; draws have no effect."""
        return self._backend.fuses_directions(tensor, matrix, NO_DRAWS)

    def gemm(
        self,
        name: str,
        a: QuantizedTensor,
        b: QuantizedTensor,
        out_dtype: torch.dtype,
        *,
        accumulate_into: Tensor | None = None,
        overwrite: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """As ``GemmBackend``."""
        assert accumulate_into is None
        if self._backend.traces_gemm(name):
            return self._backend.gemm(name, a, b, out_dtype, bias=bias)
        a_data, a_scale, b_data, b_scale = gemm_operands(name, a, b)
        a_above = a.columnwise_tensor_scale if name == "wgrad" else a.rowwise_tensor_scale
        b_above = b.rowwise_tensor_scale if name == "fprop" else b.columnwise_tensor_scale
        sides = [a_data, a_scale, a_above], [b_data, b_scale, b_above]
        rows = a.shape[name == "wgrad"]
        made: Tensor = product(rows, *sides, bias, self._key, self.name, name, out_dtype)
        return made

    def from_codes(self, quantized: QuantizedTensor, *, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """Not in a graph."""
        raise NotImplementedError

    def primary_weight(self, gemm: str, weight: Fp8Weight) -> QuantizedTensor:
        """Not in a graph."""
        raise NotImplementedError


def _amax(matrix: Tensor) -> Tensor:
    return matrix.detach().abs().amax().float().view(1)
