"""Collectives of compiled graphs over gloo, run and waited for by the functions of eager mode.

A graph calls torch's functional collectives. Their own wait, in C++, blocks for ever if another rank has failed. So on
CPU tensors, and on process groups of meshes, the collectives that dshard puts into graphs are run by the functions of
eager mode; the graphs do not change, and other process groups, devices and operators have torch's kernels. Waits are in
the order in which the collectives were begun, which is the same on all ranks: compilers move waits, on each rank in
another way, and deadlocks are detected by the order of waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import local
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from dshard.comm import collectives
from dshard.comm.backends import waits_on_host
from dshard.comm.collectives import Wait
from dshard.comm.process_groups import Group, backend_name, this_world
from dshard.placements import ReduceOp
from dshard.torch_private import DispatchKey

_NAMESPACE = "_c10d_functional"


class _InFlight(local):
    """The collectives that graphs of this thread have begun and not waited for, in this order.

    Each is identified by the memory that it receives in, and by the world and its number of failures: a collective that
    was begun before this rank failed is not waited for.
    """

    def __init__(self) -> None:
        self.waits: dict[int, tuple[tuple[int, int], Wait]] = {}

    def add(self, out: Tensor, wait: Wait) -> Tensor:
        self.waits[_memory(out)] = _now(), wait
        return out

    def end(self, out: Tensor) -> None:
        """Wait for the collective that receives in `out`, and for those begun before it."""
        last, now = _memory(out), _now()
        for memory in list(self.waits):
            begun, wait = self.waits.pop(memory)
            if begun == now:
                wait()
            if memory == last:
                return


_IN_FLIGHT = _InFlight()


def wait_in_graphs_as_in_eager() -> None:
    """Register the kernels of this module with torch, unless no wait of this world's collectives stops the host.

    torch's own graphs call them, too, in some microseconds more for each collective and wait. Graphs that were compiled
    in one world run in the next.
    """
    if _LIBRARY or this_world().count == _ASKED[0]:
        return
    _ASKED[0] = this_world().count
    if not dist.is_initialized() or not waits_on_host(backend_name()):
        return
    _LIBRARY.append(torch.library.Library(_NAMESPACE, "IMPL"))
    for name, kernel in _KERNELS.items():
        _LIBRARY[0].impl(name, kernel, "CPU")


_LIBRARY: list[Any] = []  # the kernels end with torch's library, so it is kept
_ASKED = [-1]
"""The number of the world that was asked last whether its waits stop the host."""


def _group_called(name: object) -> Group | None:
    """The group of a mesh whose process group has this name, if its waits block the host."""
    group = this_world().named.get(name) if isinstance(name, str) else None
    return group if group is not None and group.backend.waits_on_host else None


def _all_reduce(kernel: str, x: Tensor, op: ReduceOp, name: object) -> Tensor:
    group, writes = _group_called(name), kernel.endswith("_")
    if group is None or op not in collectives.REDUCTIONS or x.is_complex() or (writes and not x.is_contiguous()):
        return _torchs(kernel, x, op, name)
    out = x if writes else x.clone(memory_format=torch.contiguous_format)
    return _IN_FLIGHT.add(out, collectives.reduce(op, group, out, out))


def _all_gather(x: Tensor, n: int, name: object) -> Tensor:
    group = _group_called(name)
    if group is None or x.is_complex() or not x.dim():
        return _torchs("all_gather_into_tensor", x, n, name)
    out = x.new_empty((n * x.shape[0], *x.shape[1:]))
    return _IN_FLIGHT.add(out, collectives.gather(n, group, x, out))


def _all_to_all(x: Tensor, recv: list[int], send: list[int], name: object) -> Tensor:
    group = _group_called(name)
    if group is None or x.is_complex() or not x.dim():
        return _torchs("all_to_all_single", x, recv, send, name)
    out = x.new_empty((sum(recv), *x.shape[1:]))
    return _IN_FLIGHT.add(out, collectives.swap(send, recv, group, x, out))


def _broadcast(kernel: str, x: Tensor, source: int, name: object) -> Tensor:
    group, writes = _group_called(name), kernel.endswith("_")
    if group is None or x.is_complex() or (writes and not x.is_contiguous()):
        return _torchs(kernel, x, source, name)
    out = x if writes else torch.empty_like(x, memory_format=torch.contiguous_format)
    return _IN_FLIGHT.add(out, collectives.broadcast(source, group, x, out))


def wait_in_graph(x: Tensor) -> Tensor:
    """Wait for the collective of a graph that receives in `x`; errors say that it is in a compiled graph."""
    if _memory(x) not in _IN_FLIGHT.waits:
        return _torchs("wait_tensor", x)
    _IN_FLIGHT.end(x)
    return x


def _torchs(name: str, *args: object) -> Tensor:
    """Run torch's kernel without the GIL, which gloo's threads take to free the tensors of ended collectives."""
    out: Tensor = getattr(getattr(torch.ops, _NAMESPACE), name).default._op_dk(
        DispatchKey.CompositeExplicitAutograd, *args
    )
    return out


def _memory(x: Tensor) -> int:
    memory: int = x.untyped_storage()._cdata
    return memory


def _now() -> tuple[int, int]:
    world = this_world()
    return world.count, world.failures


_KERNELS: dict[str, Any] = {
    **{kernel: partial(_all_reduce, kernel) for kernel in ("all_reduce", "all_reduce_")},
    "all_gather_into_tensor": _all_gather,
    "all_to_all_single": _all_to_all,
    **{kernel: partial(_broadcast, kernel) for kernel in ("broadcast", "broadcast_")},
    "wait_tensor": wait_in_graph,
}
"""Kernels of the collectives in graphs; over gloo no graph has a reduce_scatter."""


# -- splitting a module into a graph of submodules, with torch's own tracing


def split_graph(module: nn.Module, example: Sequence[Tensor], at: Sequence[str]) -> fx.GraphModule:
    """A graph that calls a module's stages in order; a stage begins at each of the submodules named in `at`."""
    from torch.distributed.pipelining import SplitPoint, pipeline  # noqa: PLC0415  # slow: few split a model

    points = dict.fromkeys(at, SplitPoint.BEGINNING)
    graph: fx.GraphModule = pipeline(module, tuple(example), split_spec=points).split_gm
    return graph
