"""FP8 casts as launches that Inductor writes into its code, without a call of this package.

Their operator stays functional until Inductor lowers it, so casts of one tensor for several layers become one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.kernels.dispatch import load
from megatron_lowprec.linear.backends.protocol import CastRequest

RuleOf = Callable[[torch.device, str], tuple[Fp8Rule, CastRequest]]
"""Rule and request of a cast, by device and name of a ``NamedCast``."""


def give_lowering(operator: Any, rule_of: RuleOf) -> None:
    """Let Inductor lower ``traced.planned_cast``."""
    from torch._inductor.lowering import fallback_handler, register_lowering

    operator_itself = fallback_handler(operator, add_to_fallback_set=False)

    @register_lowering(operator, type_promotion_kind=None)
    def lower(matrix: Any, amax: Any, name: str, kernels: str) -> list[Any]:
        from torch._inductor.virtualized import V

        node: Any = V.graph.current_node
        x: Tensor = node.args[0].meta["val"]
        if not x.is_cuda:
            found: list[Any] = operator_itself(matrix, amax, name, kernels)
            return found
        return _launch(matrix, amax, x, *rule_of(x.device, name), node.meta["val"])


def _launch(matrix: Any, amax: Any, x: Tensor, rule: Fp8Rule, request: CastRequest, results: list[Tensor]) -> list[Any]:
    """Inductor's buffers of ``results``, filled by the launches of a plan; ``x`` is the matrix without data."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor import ir
    from torch._inductor.lowering import empty_strided, full
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    rows, columns, sums = request.rowwise, request.columnwise, request.sums
    with unset_fake_temporarily():  # tilings are measured
        plan = load("cast_fp8").plan(x, rule, (rows, columns, sums), _hint(x.shape[0]), statically_known_true)
    fp32, device = torch.float32, x.device
    buffers = {"x": ir.ExternKernel.require_exact_strides(matrix, list(x.stride())), "amax": amax}
    names = ["rowwise_data", "rowwise_scale"] * rows + ["columnwise_data", "columnwise_scale"] * columns
    for name, each in zip([*names, *["sums"] * sums], results, strict=True):
        sizes = _expressions(each.shape), _expressions(each.stride())
        buffers[name] = empty_strided(*sizes, dtype=each.dtype, device=device)
    for name, shape in plan.empty.items():
        buffers[name] = empty_strided(_expressions(shape), None, dtype=fp32, device=device)
    for name, shape in plan.zeros.items():
        buffers[name] = full(_expressions(shape), 0.0, dtype=fp32, device=device)
    for kernel, programs, arguments in plan.launches:
        given = {
            name: buffers[each] if isinstance(each, str) else _expression(each) for name, each in arguments.items()
        }
        ir.UserDefinedTritonKernel(
            kernel_idx=kernel_side_table.add_kernel(kernel),
            grid=[tuple(_expressions(programs))],
            tma_descriptor_metadata={},
            kernel_args=given,
        )
    return [buffers[name] for name in (*names, *["sums"] * sums)]


def _expressions(sizes: Any) -> list[Any]:
    return [_expression(each) for each in sizes]


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _hint(size: Any) -> int:
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.hint or 1  # None where only data decide
