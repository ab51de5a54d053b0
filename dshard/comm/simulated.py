"""The collectives of all ranks of a mesh in one process, on torch's LocalTensor: one tensor for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from dshard.comm.collective import Collective, reduce
from dshard.comm.drive import Make, Program, Request, Results
from dshard.comm.events import emit
from dshard.comm.local_tensors import plain, stack, unstack
from dshard.comm.workspace import Session
from dshard.mesh import Mesh

T = TypeVar("T")


def run_in_step(mesh: Mesh, make: Make, tensors: Sequence[Tensor]) -> Results:
    """Run the programs of all ranks in step on the local tensors of each."""
    with plain():
        space = Session()
        locals_of = [unstack(x) for x in tensors]
        programs = {r: make(mesh.coordinate(r), space, [parts[r] for parts in locals_of]) for r in mesh.ranks}
        results = advance_in_step(programs, _run_requests)
        n = len(results[mesh.ranks[0]])
        return tuple(stack({rank: results[rank][i] for rank in mesh.ranks}) for i in range(n))


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


def _run_requests(requests: Mapping[int, Request]) -> dict[int, Tensor]:
    busiest = max((request.transfer for request in requests.values()), key=lambda transfer: transfer.elements)
    report = busiest.collective.report
    if report is not None:
        itemsize = next(iter(requests.values())).buffer.itemsize
        emit(report.collective, report.mesh, busiest.collective.axes, report.elements * itemsize)
    collectives = {rank: request.transfer.collective for rank, request in requests.items()}
    return exchange(collectives, {rank: request.buffer for rank, request in requests.items()})


def exchange(collectives: Mapping[int, Collective], buffers: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Run one collective of all ranks: each rank's received buffer, from the buffers that the ranks send."""
    out: dict[int, Tensor] = {}
    for rank, c in collectives.items():
        match c.kind:
            case "all_gather":
                out[rank] = torch.cat([buffers[peer] for peer in c.ranks])
            case "broadcast":
                out[rank] = buffers[c.ranks[c.root]]
            case "scatter":
                out[rank] = _piece(collectives, buffers, c.ranks[c.root], c.index)
            case "all_to_all":
                out[rank] = torch.cat([_piece(collectives, buffers, peer, c.index) for peer in c.ranks])
            case "reduce_scatter":
                assert c.op is not None
                out[rank] = reduce(torch.stack([_piece(collectives, buffers, peer, c.index) for peer in c.ranks]), c.op)
            case "all_reduce":
                assert c.op is not None
                out[rank] = reduce(torch.stack([buffers[peer] for peer in c.ranks]), c.op)
    return out


def _piece(collectives: Mapping[int, Collective], buffers: Mapping[int, Tensor], peer: int, index: int) -> Tensor:
    """The piece that `peer` sends to the rank number `index` of its group."""
    piece: Tensor = buffers[peer].split(list(collectives[peer].send))[index]
    return piece
