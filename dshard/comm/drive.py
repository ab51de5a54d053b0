"""Programs: generators of a rank's work that begin collectives and wait for them later.

A program yields the request of each collective when it begins, and is sent the function that waits for its end. The
same program runs on ranks with processes, where collectives overlap with computation, on ranks simulated in one
process, and without data, to find the memory that it needs: `advance` and `advance_in_step` take a function that
launches a request in each of these ways.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from dshard.comm.collectives import Factor, Wait
from dshard.comm.pieces import view_of
from dshard.comm.program_steps import Fill, Narrow, ProgramStep, Transfer
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


@dataclass(slots=True)
class InFlight:
    """A local tensor in flight: the begun request, the function that waits for it, and the remaining steps."""

    value: Any  # None while in flight
    request: Request | None = None
    wait: Wait | None = None
    rest: Sequence[ProgramStep] = ()


def begin(steps: Sequence[ProgramStep], x: Any, space: Session, is_new: bool = False) -> Program[InFlight]:
    """Run the local steps on the local tensor `x` up to the first collective, and begin that.

    Steps of joined plans take a list of tensors, which they empty. `is_new` says that `x` is of former steps alone.
    """
    for i, step in enumerate(steps):
        match step:
            case Transfer():
                request = _request(step, x, space)
                if is_new and space.lends:
                    _return_once_sent(x, request, space)
                del x  # which would stay in memory for as long as the collective runs
                wait = yield request
                return InFlight(request.buffer, request, wait, steps[i + 1 :])
            case Narrow(region):
                x = view_of(x, region)
                if is_new and not space.lends:  # which frees the rest
                    x = x.clone(memory_format=torch.contiguous_format)
            case Fill(value):
                x = x.fill_(value) if is_new and not space.lends else torch.full_like(x, value)
    return InFlight(x)


def finish(flight: InFlight, space: Session) -> Program[Tensor]:
    """Wait for the collective in flight and run the remaining steps; the result may be a buffer of `space`."""
    while flight.request is not None and flight.wait is not None:
        step, loan, wait, rest = flight.request.transfer, flight.request.loan, flight.wait, flight.rest
        flight.value = flight.request = flight.wait = None
        received = wait()
        del wait  # which holds what was sent: while the next is packed, that would stay in memory
        if loan is not None:
            space.give(loan)
        local, received = step.unpack(received, space), None  # type: ignore[assignment]
        if not rest:
            return local  # type: ignore[no-any-return]
        steps = begin(rest, local, space, is_new=True)
        del local
        flight = yield from steps
    return flight.value  # type: ignore[no-any-return]


def redistributed(steps: Sequence[ProgramStep], x: Any, space: Session) -> Program[Any]:
    """Run the steps on `x` one after the other; the result shares no memory with `x`."""
    flight = yield from begin(steps, x, space)
    if flight.request is None and all(isinstance(step, Narrow) for step in steps):
        return flight.value.clone(memory_format=torch.contiguous_format if steps else torch.preserve_format)
    del x
    return (yield from finish(flight, space))


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share a storage."""
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def _request(step: Transfer, x: Any, space: Session) -> Request:
    collective = step.collective
    if not space.lends:
        if collective.kind == "all_reduce" and step.packed is None and not space.traces:
            buffer = x  # of any shape
        else:
            buffer = space.flat(x) if step.packed is None else step.packed.pack(x, space)
        return Request(step, buffer, space.to_receive(collective, buffer))
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
            buffer = space.flat(x) if step.packed is None else step.packed.pack(x, space)
            out = space.take((sum(collective.recv),), x)
            return Request(step, buffer, out, None if same_memory(buffer, x) else buffer)


def _return_once_sent(x: Tensor, request: Request, space: Session) -> None:
    """Return the buffer `x` to `space`: now if it was copied, else when the request completes."""
    if request.loan is None and same_memory(request.buffer, x):
        request.loan = x
    else:
        space.give(x)
