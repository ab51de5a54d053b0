"""A collective that runs on a process group is told to the listeners, and timed where they ask for it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from dshard.comm import transport
from dshard.comm.events import LISTENERS, emit, measuring
from dshard.comm.runtime import Group
from dshard.mesh import Mesh


def timed(
    collective: str, mesh: Mesh, nbytes: int, group: Group, device: torch.device, send: Callable[[], Tensor]
) -> Tensor:
    """What `send` returns, its collective on `group` told: before it runs, or with its seconds once it is over."""
    if not measuring():
        if LISTENERS:
            emit(collective, mesh, group.axes, nbytes)
        return send()
    transport.all_reduce(torch.zeros(1, device=device), "sum", group)  # nobody begins before all are here
    synchronize(device)
    begin = perf_counter()
    out = send()
    synchronize(device)
    emit(collective, mesh, group.axes, nbytes, perf_counter() - begin)
    return out


def synchronize(device: torch.device) -> None:
    """Wait for what was given to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
