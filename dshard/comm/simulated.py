"""The collectives of all ranks of a mesh in one process, on torch's LocalTensor: one tensor for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dshard.comm.collective import Collective, reduce
from dshard.comm.drive import Make, Request, Results
from dshard.comm.events import emit
from dshard.comm.rank_tensors import plain, stack, unstack
from dshard.comm.workspace import Session
from dshard.mesh import Mesh


def run_in_step(mesh: Mesh, make: Make, tensors: Sequence[Tensor]) -> Results:
    """Run the programs of all ranks on the local tensors of each, in step: they begin the same collectives in order."""
    results: dict[int, Results] = {}
    received: Mapping[int, Tensor] = {}
    with plain():
        locals_of, space = [unstack(x) for x in tensors], Session()
        programs = {r: make(mesh.coordinate(r), space, [parts[r] for parts in locals_of]) for r in mesh.ranks}
        while len(results) < len(programs):
            requests: dict[int, Request] = {}
            for rank, program in programs.items():
                wait = partial(received.__getitem__, rank)
                try:
                    requests[rank] = program.send(wait) if received else next(program)
                except StopIteration as stop:
                    results[rank] = stop.value
            assert not (results and requests), "programs of all ranks have the same collectives"
            received = _run_requests(requests) if requests else {}
        return tuple(
            stack(dict(zip(mesh.ranks, of_ranks, strict=True)))
            for of_ranks in zip(*map(results.__getitem__, mesh.ranks), strict=True)
        )


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
