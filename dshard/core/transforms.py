"""torch.func transforms and forward-mode derivatives of distributed tensors.

A transform wraps the tensors that it follows, distributed ones, too, and decomposes functions into operators itself,
which then reach `dshard.dispatch` on the inner tensors. So it must see every call: no function is run as a composite
above it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_exporting
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from dshard.core.trees import tensors_in
from dshard.errors import CompileError, LayoutError, MixedError
from dshard.torch_private import (
    DispatchKey,
    functorch_unwrapped,
    is_functorch_wrapped,
    is_in_graph,
    is_key_excluded,
    is_legacy_batched,
    is_tracking_gradients,
    is_transforming,
    n_dispatch_modes,
    no_torch_function,
    outside_transforms,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")

_AUTOGRAD = DispatchKey.AutogradFunctionality


def is_differentiating_forward() -> bool:
    """Whether the call is within a level of forward-mode derivatives."""
    return forward_ad._current_level >= 0


def is_written_down() -> bool:
    """Whether torch.export or make_fx writes down operators on distributed tensors, and only those.

    torch.compile writes down those on local tensors.
    """
    return is_exporting() or _graph_of_make_fx() is not None


def _graph_of_make_fx() -> object | None:
    """What make_fx writes down, which torch.func.linearize runs, too; None outside of it, and within torch.compile."""
    mode = None if is_compiling() or not n_dispatch_modes() else get_proxy_mode()  # in an order that Dynamo can trace
    return None if mode is None else mode.tracer


def refuse_constants(operands: object, what: str, *, is_operator: bool) -> None:
    """Refuse what the graph of make_fx would hold as the constant that it is now.

    That is an operator on distributed tensors of which only some are of the graph, and, of any that is, what is no
    operator.
    """
    graph = _graph_of_make_fx()
    if graph is None:
        return
    tensors = tensors_in(operands)
    known = [x for x in tensors if is_in_graph(x, graph)]
    if known and not (is_operator and len(known) == len(tensors)):
        raise CompileError(
            f"{what} within make_fx, or torch.func.linearize: their graph has operators on distributed tensors that it "
            "got as inputs, and would hold another value as the constant that it is now; pass all tensors to the "
            "function that is written down, without redistributions in it, or use torch.compile, or torch.func.jvp"
        )


def is_below_autograd() -> bool:
    """Whether the call is below autograd, within an operator, or in inference mode."""
    return is_key_excluded(_AUTOGRAD)


def is_wrapped(x: Tensor) -> bool:
    """Whether a transform of torch.func wraps `x`."""
    return is_functorch_wrapped(x)


def unwrapped(x: Tensor) -> Tensor:
    """The tensor within all that transforms of torch.func have wrapped around it, or `x` itself."""
    while is_functorch_wrapped(x):
        x = functorch_unwrapped(x)
    return x


def has_tangent(x: Tensor) -> bool:
    """Whether the call is within a level of forward-mode derivatives in which `x` has a tangent."""
    return is_differentiating_forward() and forward_ad.unpack_dual(x).tangent is not None


def unfollowed(x: Tensor) -> Tensor:
    """The tensor that `torch.func.grad` or `vjp` has wrapped, by which they take no derivative; others as they are."""
    while is_tracking_gradients(x) and not (x.requires_grad or is_differentiating_forward()):
        x = functorch_unwrapped(x)
    return x


def refuse_wrapped(x: Tensor, what: str) -> None:
    """Refuse to make a distributed tensor of a tensor that a transform wraps: the transform would not follow it."""
    if is_wrapped(x):
        raise MixedError(
            f"{what} of a tensor that torch.func follows: transforms follow distributed tensors, but not into them; "
            "distribute it first and give the DTensor to the transformed function"
        )


def refuse_followed(x: Tensor, what: str) -> None:
    """Refuse to make a leaf of a tensor that a transform wraps, or that has a tangent."""
    refuse_wrapped(x, what)
    if has_tangent(x):
        raise LayoutError(
            f"{what} of a tensor with a tangent: the result is a leaf, and has none; distribute both, and make_dual of "
            "the DTensors, or use DTensor.from_local, which is differentiable"
        )


def constant(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, run outside the transforms of torch.func around a call: they do not follow what it makes."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not is_transforming():
            return function(*args, **kwargs)
        with outside_transforms():
            return function(*args, **kwargs)

    return run


def is_batched(x: Tensor) -> bool:
    """Whether `x` stands for several tensors: within vmap, or within torch.autograd.functional with vectorize=True."""
    return is_wrapped(x) or is_legacy_batched(x)


def refuse_batched(x: object, what: str) -> None:
    """Refuse a tensor that stands for several, where torch.func does not follow the call."""
    if isinstance(x, Tensor) and is_batched(x):
        raise MixedError(
            f"{what} of distributed tensors, batched by vmap or vectorize=True: it takes one tensor at a time; use "
            "vectorize=False, torch.autograd.grad(..., is_grads_batched=True), or torch.func.jacrev, jacfwd and vmap"
        )


def with_tangent(x: Tensor, linear: Callable[[Tensor], Tensor]) -> Any:
    """The dual tensor of `linear(x)` and `linear` of the tangent of `x`; None where `x` has no tangent."""
    if not is_differentiating_forward() or is_below_autograd():
        return None  # the operator runs primal and tangent apart
    with no_torch_function():
        primal, tangent = forward_ad.unpack_dual(x)
        if tangent is None:
            return None
        if is_legacy_batched(tangent):
            refuse_batched(tangent, "a forward-mode derivative")
        return forward_ad.make_dual(linear(primal), linear(tangent))
