"""Programs: generators of a rank's work that begin collectives and wait for them later.

A program yields the request of each collective when it begins, and is sent the function that waits for its end. The
same program runs on ranks with processes, where collectives overlap with computation, on ranks simulated in one
process, and without data, to find the memory that it needs: `advance` and `advance_in_step` take a function that
launches a request in each of these ways.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from dshard.comm.backends import sum_dtype
from dshard.comm.collective import reduce
from dshard.comm.collectives import Factor, Wait
from dshard.comm.pieces import view_of
from dshard.comm.program_steps import Fill, Narrow, ProgramStep, Transfer
from dshard.comm.traced_collectives import traced
from dshard.comm.workspace import FreshBuffers, Session
from dshard.mesh import Coordinate
from dshard.placements import ReduceOp

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
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

    value: Tensor
    request: Request | None = None
    wait: Wait | None = None
    rest: Sequence[ProgramStep] = ()


def begin(steps: Sequence[ProgramStep], x: Tensor, space: Session) -> Program[InFlight]:
    """Run the local steps on the local tensor `x` up to the first collective, and begin that."""
    for i, step in enumerate(steps):
        match step:
            case Transfer():
                request = _pack(step, x, space)
                wait = yield request
                return InFlight(request.buffer, request, wait, steps[i + 1 :])
            case Narrow(region):
                x = view_of(x, region)
            case Fill(value):
                x = torch.full_like(x, value)
    return InFlight(x)


def finish(flight: InFlight, space: Session) -> Program[Tensor]:
    """Wait for the collective in flight and run the remaining steps; the result may be a buffer of `space`."""
    while flight.request is not None and flight.wait is not None:
        local = _unpack(flight.request, flight.wait(), space)
        flight = yield from begin(flight.rest, local, space)
        if flight.request is not None:
            flight.request = _with_returned_buffer(flight.request, local, space)
    return flight.value


def redistributed(steps: Sequence[ProgramStep], x: Tensor, space: Session) -> Program[Tensor]:
    """Run the steps on `x` one after the other; the result shares no memory with `x`."""
    out = yield from finish((yield from begin(steps, x, space)), space)
    return out.clone() if out is x else without_buffer(steps, out)


def without_buffer(steps: Sequence[ProgramStep], out: Tensor) -> Tensor:
    """The result `out` of the steps; copied where it is a view of a larger tensor."""
    return out.clone(memory_format=torch.contiguous_format) if isinstance(steps[-1], Narrow) else out


def advance(program: Program[T], launch: Callable[[Request], Wait]) -> T:
    """Run a program to its end, and return its value; `launch` begins each collective."""
    try:
        request = next(program)
        while True:
            request = program.send(launch(request))
    except StopIteration as stop:
        value: T = stop.value
        return value


def begun(program: Program[T], launch: Callable[[Request], Wait]) -> Callable[[], T]:
    """Begin the first collective of a program that has one; the function returned runs the program to its end."""
    waits = [launch(next(program))]

    def wait() -> Tensor:
        return waits.pop()()  # which holds what was sent: while the next is packed, that would stay in memory

    def rest() -> T:
        try:
            while True:
                waits.append(launch(program.send(wait)))
        except StopIteration as stop:
            value: T = stop.value
            return value

    return rest


def advance_in_step(
    programs: Mapping[int, Program[T]], run: Callable[[Mapping[int, Request]], Mapping[int, Tensor]]
) -> dict[int, T]:
    """Run the programs of all ranks in step, and return their values; `run` runs the collective that all request.

    All programs begin the same collectives in the same order. `run` returns the buffer that each rank receives.
    """
    results: dict[int, T] = {}
    received: Mapping[int, Tensor] = {}
    while len(results) < len(programs):
        requests: dict[int, Request] = {}
        for rank, program in programs.items():
            wait = partial(received.__getitem__, rank)
            try:
                requests[rank] = program.send(wait) if received else next(program)
            except StopIteration as stop:
                results[rank] = stop.value
        assert not (results and requests), "programs of all ranks have the same collectives"
        received = run(requests) if requests else {}
    return results


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share a storage."""
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def flat(x: Tensor, space: Session) -> Tensor:
    """The elements of `x`, flat: a view where it is contiguous."""
    if x.is_contiguous():
        return x.view(-1)
    out = space.take((x.numel(),), x)
    out.view(x.shape).copy_(x)
    return out


def _pack(step: Transfer, x: Tensor, space: Session) -> Request:
    collective = step.collective
    if isinstance(space, FreshBuffers):
        gathers = collective.kind == "all_gather" and not traced(x)  # in place: copies to send would stay in flight
        return Request(step, step.packer()(x), x.new_empty(sum(collective.recv)) if gathers else None)
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
            buffer = flat(x, space) if step.packed is None else step.packed.pack(x, space)
            out = space.take((sum(collective.recv),), x)
            return Request(step, buffer, out, None if same_memory(buffer, x) else buffer)


def _unpack(request: Request, result: Tensor, space: Session) -> Tensor:
    step = request.transfer
    if isinstance(space, FreshBuffers):
        for call in step.unpackers():
            result = call(result)
        return result
    if request.loan is not None:
        space.give(request.loan)
    if step.terms:
        assert step.collective.op is not None
        result = _reduced(result.view(step.terms, -1), step.collective.op, space)
    return result.view(step.shape) if step.unpacked is None else step.unpacked.unpack(result, space)


def _reduced(terms: Tensor, op: ReduceOp, space: Session) -> Tensor:
    """Reduce the rows of a buffer of `space` into another, and return the first; half precision is summed in single."""
    wide = sum_dtype(terms.dtype)
    total = space.take((terms.shape[1],), terms, wide)
    if op in ("sum", "avg") and (wide.is_floating_point or wide.is_complex):
        torch.sum(terms, 0, dtype=wide, out=total)
        if op == "avg":
            total.div_(len(terms))
    else:
        total.copy_(reduce(terms, op))
    out = total
    if wide != terms.dtype:
        out = space.take((terms.shape[1],), terms)
        out.copy_(total)
        space.give(total)
    space.give(terms)
    return out


def _with_returned_buffer(request: Request, x: Tensor, space: Session) -> Request:
    """Return the buffer `x` to `space`: now if it was copied, else when the request completes."""
    if request.loan is None and same_memory(request.buffer, x):
        return replace(request, loan=x)
    space.give(x)
    return request
