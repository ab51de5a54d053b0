"""Events of collectives that run on a process group, with measured seconds where listeners ask for them."""

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
    """Call `send`, which runs a collective on `group`, and emit its event: before it, or after it with its seconds."""
    if not measuring():
        if LISTENERS:
            emit(collective, mesh, group.axes, nbytes)
        return send()
    transport.all_reduce(torch.zeros(1, device=device), "sum", group)  # all ranks begin together
    synchronize(device)
    begin = perf_counter()
    out = send()
    synchronize(device)
    emit(collective, mesh, group.axes, nbytes, perf_counter() - begin)
    return out


def synchronize(device: torch.device) -> None:
    """Wait for all work that was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
