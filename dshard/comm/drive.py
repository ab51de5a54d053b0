"""Programs: generators of a rank's work that begin collectives and wait for them later.

A program yields the request of each collective when it begins, and is sent the function that waits for its end. The
same program runs on ranks with processes, where collectives overlap with computation, on ranks simulated in one
process, and without data, to find the memory that it needs: `world` has who launches its requests in each case.

Design: docs/design/0014-one-communication-engine.md
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from dshard.comm.collectives import Factor, Wait
from dshard.comm.pieces import view_of
from dshard.comm.program_steps import Narrow, ProgramStep, Reshape, Transfer
from dshard.comm.workspace import Session
from dshard.mesh import Coordinate

T = TypeVar("T")


@dataclass(slots=True)
class Request:
    """A collective to begin: it sends `buffer` and receives in `out`, or in a new buffer for None.

    `loan` returns to the pool once it has ended. With a `factor` the collective is fused with a matmul, of which
    `buffer` is the left operand and `out` the result.
    """

    transfer: Transfer
    buffer: Tensor
    out: Tensor | None = None
    loan: Tensor | None = None
    factor: Factor | None = None


Program: TypeAlias = Generator[Request, Wait, T]
Results: TypeAlias = tuple[Tensor, ...]
Make: TypeAlias = Callable[[Coordinate, Session, Sequence[Tensor]], Program[Results]]
"""The program of the rank at a coordinate, of its local tensors."""


def begin(program: Program[T]) -> Program[Program[T]]:
    """Run a program up to its first collective, begin that, and return the program of the rest."""
    try:
        request = next(program)
    except StopIteration as stop:
        return program_of(stop.value)
    return _rest(program, (yield request))


def _rest(program: Program[T], wait: Wait) -> Program[T]:
    try:
        while True:
            wait = yield program.send(wait)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def program_of(value: T) -> Program[T]:
    """The program of a value that is there."""
    yield from ()
    return value


def request_alone(request: Request, space: Session) -> Program[Tensor]:
    """Run a collective of flat tensors alone."""
    arrived = (yield request)()
    if request.loan is not None:
        space.give(request.loan)
    return arrived.view(request.transfer.shape)


def redistributed(steps: Sequence[ProgramStep], x: Any, space: Session) -> Program[Any]:
    """Run the steps on `x` one after the other; the result may be a buffer of `space`.

    With new buffers it shares no memory with `x`. Steps of several tensors take a list, which they empty.
    """
    is_ours = False  # what is lent returns to its pool, what is new is freed or overwritten
    for step in steps:
        if isinstance(step, Transfer):
            collective, packed = step.collective, step.packed
            if space.lends:
                request = _request_of_loans(step, x, space)
                if is_ours:
                    _return_once_sent(x, request, space)
            else:  # a sum is of tensors of any shape
                as_it_is = packed is None and collective.kind == "all_reduce" and not space.traces
                buffer = x if as_it_is else x.reshape(-1) if packed is None else packed.pack(x, space)
                request = Request(step, buffer, space.to_receive(collective, buffer) if space.in_flight else None)
                del buffer
            del x  # which would stay in memory for as long as the collective runs
            wait = yield request
            loan = request.loan
            del request
            received = wait()
            del wait  # which holds what was sent: while the next is packed, that would stay in memory
            if loan is not None:
                space.give(loan)
            if step.terms and collective.op is not None:
                received = space.reduced(received.view(step.terms, -1), collective.op)
            if step.unpacked is not None:
                x = step.unpacked.unpack(received, space)
            else:
                x = received if received.shape == step.shape else received.view(step.shape)
            is_ours = True
            del received
        elif isinstance(step, Narrow):
            x = view_of(x, step.region)
            if is_ours and not space.lends:
                x = x.clone(memory_format=torch.contiguous_format)
        elif isinstance(step, Reshape):
            x = x.reshape(step.shape)  # a view, but of what is flattened across gaps: a copy, which another may follow
        else:
            x, is_ours = x.fill_(step.value) if is_ours and not space.lends else torch.full_like(x, step.value), True
    if is_ours or space.lends:
        return x
    return x.clone(memory_format=torch.contiguous_format if steps else torch.preserve_format)


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share a storage."""
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def _request_of_loans(step: Transfer, x: Tensor, space: Session) -> Request:
    collective = step.collective
    match collective.kind:
        case "all_gather":
            out = space.take((sum(collective.recv),), x)
            own_chunk = out.split(list(collective.recv))[collective.index]
            own_chunk.view(x.shape).copy_(x)
            return Request(step, own_chunk, out)
        case "all_reduce":
            out = space.take((x.numel(),), x)
            out.view(x.shape).copy_(x)
            return Request(step, out, out)
        case _:
            buffer = space.flat(x) if step.packed is None else step.packed.pack(x, space)  # type: ignore[arg-type]
            out = space.take((sum(collective.recv),), x)
            return Request(step, buffer, out, None if same_memory(buffer, x) else buffer)


def _return_once_sent(x: Tensor, request: Request, space: Session) -> None:
    """Return the buffer `x` to `space`: now if it was copied, else when the request completes."""
    if request.loan is None and same_memory(request.buffer, x):
        request.loan = x
    else:
        space.give(x)
