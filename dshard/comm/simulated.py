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
    return {rank: _received(request.transfer.collective, requests) for rank, request in requests.items()}


def _received(c: Collective, requests: Mapping[int, Request]) -> Tensor:
    """The buffer that the rank of this collective receives from all ranks of its group."""
    parts = [requests[peer].buffer for peer in c.ranks]
    if c.kind in ("all_to_all", "reduce_scatter"):
        send = [requests[peer].transfer.collective.send for peer in c.ranks]
        parts = [part.split(list(sizes))[c.index] for part, sizes in zip(parts, send, strict=True)]
    is_sum = c.op is not None and c.kind in ("all_reduce", "reduce_scatter")
    return reduce(torch.stack(parts), c.op) if is_sum else torch.cat(parts)  # type: ignore[arg-type]
