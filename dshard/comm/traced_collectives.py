"""Collectives while torch.compile or torch.export traces: functional ones alone, on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.fx.traceback
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dshard.errors import CompileError
from dshard.torch_private import FakeTensor, FunctionalTensor

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


def depending_on(outs: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """`outs`, made without operands on a rank without data, with the graph dependency on them that other ranks have.

    Else torch would eliminate a collective of a result on this rank, or merge those of two equal ones: also of two
    results of one call, such as a loss and the number of its targets, so each depends on the operands in its own way.
    """
    terms = [x.reshape(-1)[:0].sum() for x in operands] if any(map(traced, operands)) else []
    made = list(outs)
    for i in range(len(made)):
        for term in terms:
            made[i] = torch.add(made[i], term.to(made[i].dtype), alpha=i + 1)
    return made


def outside_graphs(what: str) -> None:
    """Refuse a block within a region that torch.compile traces, where it would apply to tracing, not to running."""
    if is_dynamo_compiling():
        raise CompileError(
            f"{what} within a compiled region: choices are made when the region is compiled; "
            "enter it around the call of the compiled function, which then compiles anew"
        )
