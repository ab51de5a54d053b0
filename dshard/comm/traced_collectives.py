"""Collectives while torch.compile or torch.export traces: functional ones alone, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dshard.errors import CompileError
from dshard.torch_private import FakeTensor, FunctionalTensor, late, pytree

_TRACED = frozenset({FakeTensor, FunctionalTensor})


def traced(x: Tensor) -> bool:
    """Whether torch traces the operators on `x`, to run them later and more than once.

    While torch traces, nothing may be sent, measured or emitted, and no buffer cached: only traced operators run later.
    """
    return type(x) in _TRACED


def is_any_traced(tensors: Iterable[Tensor]) -> bool:
    """Whether torch traces the operators on some of these tensors."""
    return not _TRACED.isdisjoint(map(type, tensors))


@contextmanager
def sent_in_its_pass() -> Iterator[None]:
    """Within the block, traced operators of a backward pass are marked to stay in the backward graph.

    torch moves operators that depend on no incoming gradient to the forward graph. On a rank without data that may be a
    zero gradient, whose collective would then run before those of the other ranks.
    """
    meta = torch.fx.traceback.current_meta
    tag = meta.get(_TAG)
    if tag != "is_backward":
        yield
        return
    meta[_TAG] = "must_be_in_backward"
    try:
        yield
    finally:
        meta[_TAG] = tag


_TAG = "partitioner_tag"


def begin_backward(gradient: Tensor) -> None:
    """Write a use of the incoming gradient that has effects, and does nothing, at the beginning of a backward graph.

    torch drops what stands before the first use and is not used after it. On a rank without data inductor leaves out
    the operators on the gradient, for they have no elements.
    """
    if type(gradient) is FunctionalTensor:
        torch.ops.aten._assert_tensor_metadata.default(gradient)


def depending_on(out: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """`out`, made without operands on a rank without data, with the graph dependency on them that other ranks have.

    Else torch would eliminate, or move, a collective of `out` on this rank.
    """
    for x in operands if any(map(traced, operands)) else ():
        out = out + x.reshape(-1)[:0].sum().to(out.dtype)
    return out


def keep_collectives_apart() -> None:
    """Let torch merge no two collectives of a graph, as it merges no two random operators.

    Two that are equal on one rank, such as exchanges in which it sends nothing, are two on the others. torch has no
    function to add to its list. Its waits, which have effects, keep collectives from being eliminated. What all ranks
    may merge is merged by `moved_once`.
    """
    known = late("torch._functorch.compile_utils.rand_ops")
    if _COLLECTIVES[0] not in known:
        known += _COLLECTIVES


def keep_moves(local: Tensor) -> None:
    """Let later redistributions of a traced local tensor reuse the results of equal ones: see `moved_once`."""
    if type(local) is FunctionalTensor:
        setattr(local, _MOVES, {})


def with_results_apart(operator: Callable[..., Any], first: Tensor) -> Callable[..., Any]:
    """The local operator, whose results in a trace `moved_once` knows: the operator itself if `first` is not traced.

    A result that is an operand, as it may be on one rank alone, is an alias of it.
    """
    if type(first) is not FunctionalTensor:
        return operator

    def run(*operands: object, **kwargs: object) -> Any:
        def apart(x: object) -> object:
            if isinstance(x, Tensor):
                x = x.view_as(x) if any(x is each for each in operands) else x
                keep_moves(x)
            return x

        return pytree.tree_map(apart, operator(*operands, **kwargs))

    return run


_MOVES = "_dshard_moves"


def moved_once(x: Any, key: object, move: Callable[[], Tensor]) -> Tensor:
    """The result of `move`, or that of an earlier one of the local tensor `x` with this key, if `x` has not changed.

    Each distributed tensor has a local tensor of its own on every rank, by `with_results_apart`, so all ranks decide
    alike. The values of a trace are compared: after a write to `x` it has another one.
    """
    moves = getattr(x, _MOVES, None)
    if moves is None:
        return move()
    value = x.from_functional()
    if key not in moves or moves[key][0] is not value:
        moved: Any = move()
        moves[key] = value, moved.from_functional()
    out: Tensor = FunctionalTensor.to_functional(moves[key][1])
    return out


_c10d = torch.ops._c10d_functional
_COLLECTIVES = [
    _c10d.all_reduce,
    _c10d.all_gather_into_tensor,
    _c10d.all_to_all_single,
    _c10d.reduce_scatter_tensor,
    _c10d.broadcast,
]


def outside_graphs(what: str) -> None:
    """Refuse a block within a region that torch.compile traces, where it would apply to tracing, not to running."""
    if is_dynamo_compiling():
        raise CompileError(
            f"{what} within a compiled region: choices are made when the region is compiled; "
            "enter it around the call of the compiled function, which then compiles anew"
        )
