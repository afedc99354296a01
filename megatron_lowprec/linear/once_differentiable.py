"""Autograd functions that have the gradient of a backward pass, and no other derivative.

Autograd would take rounding for a step of slope 0, and does not see what a kernel reads. Its second derivatives would
be 0 or wrong without a word.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch

from megatron_lowprec.errors import UserError

F = TypeVar("F", bound=type[torch.autograd.Function])


def once_differentiable(what: str | Callable[[Any], str | None]) -> Callable[[F], F]:
    """Class decorator of an autograd function whose backward pass cannot be differentiated, and without forward mode.

    It refuses a gradient with ``create_graph=True`` at once. torch's decorator of this name refuses the derivative of
    that gradient, unless it is taken of some inputs only, as ``torch.autograd.functional.hessian`` does: that gives 0.

    Args:
        what: the function's name in errors; or that name from a ctx, None to let autograd differentiate ``backward``.

    Raises:
        UserError: in a backward pass with ``create_graph=True``, or in forward mode.
    """

    def name_of(ctx: Any) -> str | None:
        return what if isinstance(what, str) else what(ctx)

    def decorate(function: F) -> F:
        backward = function.backward

        @wraps(backward)
        def first_gradient(ctx: Any, *grads: torch.Tensor | None) -> Any:
            if torch.is_grad_enabled() and (name := name_of(ctx)) is not None:  # which create_graph enables
                refuse(name, "create_graph=True")
            return backward(ctx, *grads)

        def jvp(ctx: Any, *_: Any) -> NoReturn:
            refuse(name_of(ctx) or "a linear layer of this package", "forward-mode differentiation")

        function.backward, function.jvp = staticmethod(first_gradient), staticmethod(jvp)  # type: ignore[method-assign]
        return function

    return decorate


def refuse(what: str, asked: str) -> NoReturn:
    """Raise the UserError of a derivative that ``what`` does not have."""
    raise UserError(
        f"{asked} reached {what}, which has only the gradient of a backward pass: leave it out, or use torch's own "
        "layers there, as keep_bf16=[...] of convert does"
    )
