"""`no_host_sync`: check that a step lets the host run ahead of its GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dshard.comm.user_code import user_line
from dshard.core.observe import OperatorMode
from dshard.ops.ragged import selects
from dshard.tools.nccl_contract.process_state import CURRENT

_READS = "it reads a number: keep it in a tensor, with torch.where and the like, and read it after the step"
_COUNTS = "the size of its result depends on values: use a mask, torch.where, or a fixed size"
_aten = torch.ops.aten
_WAITS: dict[Any, str] = {
    _aten._local_scalar_dense: _READS,
    _aten.equal: _READS,
    _aten.is_nonzero: _READS,
    _aten.nonzero: _COUNTS,
    _aten.masked_select: _COUNTS,
    _aten._unique2: _COUNTS,
    _aten.unique_dim: _COUNTS,
    _aten.unique_consecutive: _COUNTS,
    _aten.bincount: _COUNTS,
    _aten._linalg_check_errors: "it looks whether the factorisation succeeded: use the form with check_errors=False",
}
"""Operators at which the host waits for the device, each with the way out."""
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_COPIES = {_aten._to_copy, _aten.copy_}


class HostSyncError(AssertionError):
    """Something within `no_host_sync` makes the host wait."""


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise if a step within the block would make the host wait for its GPU; also on CPU tensors, without a GPU.

    Such operators are `.item()`, `bool(x)`, copies to the CPU, masks as indices and other results whose size depends on
    values, and under `nccl_contract` barriers and waits with a time limit. Run the step once before, as first calls,
    which plan and compile, may wait. Waits for collectives over gloo, which always block the host, are allowed.

        with no_host_sync():
            loss = step(model, batch)   # no loss.item() in it

    Raises:
        HostSyncError: naming the operator, its line, and the way out.
    """

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        why = _reason(func, args, kwargs)
        if why:
            raise HostSyncError(f"{func} at {user_line()} makes the host wait: {why}")
        return func(*args, **kwargs)

    before = CURRENT.state.usage.host_waits
    with OperatorMode(run):
        yield
    waits = CURRENT.state.usage.host_waits - before
    if waits:
        raise HostSyncError(
            f"the host has waited {waits} times for a collective: a barrier, or a wait with a time limit"
        )


def _reason(func: Any, args: Any, kwargs: Any) -> str:
    packet = getattr(func, "overloadpacket", func)
    if packet in _WAITS:
        return _WAITS[packet]
    if packet is _aten.repeat_interleave and kwargs.get("output_size") is None and isinstance(args[0], Tensor):
        return f"{_COUNTS}, output_size="
    if packet in _INDEXED and any(map(selects, args[1])):
        return f"a mask is an index, and {_COUNTS}"
    if packet in _COPIES and _leaves_the_device(packet, args, kwargs):
        return "it copies to the CPU: do it after the step, or to pinned memory with non_blocking=True"
    return ""


def _leaves_the_device(packet: Any, args: Any, kwargs: Any) -> bool:
    source = args[1] if packet is _aten.copy_ else args[0]
    target = args[0].device if packet is _aten.copy_ else torch.device(kwargs.get("device") or source.device)
    blocking = not (kwargs.get("non_blocking") or (packet is _aten.copy_ and len(args) > 2 and args[2]))
    return bool(source.device.type != "cpu" and target.type == "cpu" and blocking)
