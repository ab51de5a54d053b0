"""Which process groups belong to a mesh, and where on it this process sits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._local_tensor import LocalTensor, local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.device_mesh import init_device_mesh as _init_device_mesh

from dshard.caches import Cache
from dshard.comm.scoped import Scoped
from dshard.errors import MeshError
from dshard.mesh import Coordinate, Mesh

__all__ = [
    "DeviceMesh",
    "Group",
    "LocalTensor",
    "Runtime",
    "bind",
    "current_mesh",
    "device_mesh_of",
    "group_of",
    "init_device_mesh",
    "own_coordinate",
    "ranks_per_host",
    "runtime_of",
    "simulated_ranks",
]


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that a collective joins, in the order of the mesh, and the process group that joins them.

    torch sorts the ranks of a process group: `slots` are the places there of `ranks`, or None where both orders agree.
    `hosts` is on how many hosts it has ranks, one where nobody says. `backend` is torch's name of what carries the
    bytes: gloo, nccl, fake, ...
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup
    slots: tuple[int, ...] | None = None
    hosts: int = 1
    backend: str = ""

    @property
    def spread(self) -> bool:
        """Whether it has several ranks on one of several hosts, which then share a link."""
        return 1 < self.hosts < len(self.ranks)

    @property
    def name(self) -> str:
        """What torch's functional collectives call the process group."""
        return self.process_group.group_name


@dataclass(slots=True)
class Runtime:
    """A mesh with processes behind it: its groups, and what was prepared to run on them."""

    mesh: Mesh
    device_mesh: DeviceMesh
    world: Any
    rank: int
    coordinate: Coordinate | None
    groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    runners: Cache = field(default_factory=lambda: Cache("runners"))
    legs: Cache = field(default_factory=lambda: Cache("legs"))

    def group(self, axes: tuple[str, ...]) -> Group:
        """The group of this rank along `axes`; made on first use, by all its ranks together."""
        found = self.groups.get(axes)
        if found is None:
            found = self.groups[axes] = self._make(axes)
        return found

    def group_names(self) -> tuple[str, ...]:
        """What tells the process groups of this mesh from those of another process: graphs have them by name."""
        if self.coordinate is None:
            return ()
        count = _WORLDS.of(self.world).count
        return (*(self.group((name,)).name for name in self.mesh.names), str(count))

    def _make(self, axes: tuple[str, ...]) -> Group:
        assert self.coordinate is not None
        ranks = self.mesh.group(axes, self.coordinate)
        if len(axes) == 1:
            process_group = self.device_mesh.get_group(self.mesh.axis(axes[0]))
        elif self.mesh.ndim == 1:
            process_group = self.device_mesh.get_group(0)
        else:
            process_group = _joined(tuple(sorted(ranks)), self.world)
        found = dist.get_process_group_ranks(process_group)
        slots = tuple(map(found.index, ranks))
        in_order = slots == tuple(range(len(ranks)))
        hosts = _hosts(ranks, os.environ.get("LOCAL_WORLD_SIZE", ""))
        backend = dist.get_backend(process_group)
        return Group(axes, ranks, ranks.index(self.rank), process_group, None if in_order else slots, hosts, backend)


def _hosts(ranks: Sequence[int], local: str) -> int:
    """On how many hosts with `local` ranks each there are some of `ranks`; one, where that is not said.

    >>> _hosts((0, 1, 2, 3), "2"), _hosts((0, 2), "2"), _hosts((0, 1), "2"), _hosts((0, 1), "")
    (2, 2, 1, 1)
    """
    return len({rank // int(local) for rank in ranks}) if local.isdecimal() and int(local) else 1


@dataclass(slots=True)
class _Worlds:
    """The process group of all ranks, how many there have been, and the groups of its ranks by their tag."""

    world: Any = None
    count: int = 0
    groups: dict[tuple[tuple[int, ...], int], dist.ProcessGroup] = field(default_factory=dict)

    def of(self, world: Any) -> _Worlds:
        """The same for this world, the last of all."""
        if world is not self.world:
            self.world, self.count, self.groups = world, self.count + 1, {}
        return self


_WORLDS = _Worlds()


def _joined(ranks: tuple[int, ...], world: Any, tag: int = 0) -> dist.ProcessGroup:
    """The process group of these ranks, which alone make it, all together, when they first need it.

    torch would name it after the number of groups that this process is in, and the ranks wait forever where they differ
    in that: so it is named after its ranks. Compiled graphs, which are kept on disk, know it by that name.
    """
    if not tag and len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    worlds = _WORLDS.of(world)
    found = worlds.groups.get((ranks, tag))
    if found is None:
        found = worlds.groups[ranks, tag] = _new_group(ranks, f"{worlds.count}{f'.{tag}' if tag else ''}")
    return found


def _new_group(ranks: tuple[int, ...], which: str) -> dist.ProcessGroup:
    name = f"dshard:{','.join(map(str, ranks))}:{which}"
    c10d: Any = distributed_c10d
    named = c10d._process_group_name
    c10d._process_group_name = lambda *args, **kwargs: name
    try:
        made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
        return made
    finally:
        c10d._process_group_name = named


_UNIONS: dict[tuple[tuple[int, ...], int], tuple[Any, Group]] = {}


def group_of(ranks: tuple[int, ...], runtime: Runtime, tag: int = 0) -> Group:
    """The group of these ranks, in ascending order, in the world of `runtime`; made on first use, by all its ranks.

    Where the backend knows no tags, each has a group of its own, so that what has one does not wait for another.
    """
    tag = tag if dist.get_backend() == "nccl" else 0
    found = _UNIONS.get((ranks, tag))
    if found is None or found[0] is not runtime.world:
        process_group = _joined(ranks, runtime.world, tag)
        backend = dist.get_backend(process_group)
        group = Group((), ranks, ranks.index(runtime.rank), process_group, backend=backend)
        if group.backend == "nccl":
            dist.barrier(group.process_group)  # its first call must be one that all ranks make
        found = _UNIONS[ranks, tag] = (runtime.world, group)
    return found[1]


_RUNTIMES: dict[Mesh, Runtime] = {}


def bind(device_mesh: DeviceMesh) -> Mesh:
    """The pure mesh of a torch DeviceMesh, whose process groups it remembers.

    Raises:
        MeshError: there is no process group, or the mesh has ranks beyond the world.
    """
    if not dist.is_initialized():
        raise MeshError(
            "a DeviceMesh needs a process group: call torch.distributed.init_process_group first, "
            "or plan without processes on a dshard.Mesh"
        )
    world = dist.group.WORLD
    found = _BOUND.get(id(device_mesh))
    if found is not None and found[0] is device_mesh and found[1].world is world:
        return found[1].mesh
    real = getattr(device_mesh, "real_obj", None)
    if real is not None:  # what stands for the mesh while torch.compile traces
        return bind(real)
    mesh = _pure(device_mesh)
    known = _RUNTIMES.get(mesh)
    runtime = known if known is not None and known.world is world else _start(mesh, device_mesh, world)
    _BOUND[id(device_mesh)] = (device_mesh, runtime)
    return mesh


def _start(mesh: Mesh, device_mesh: DeviceMesh, world: Any) -> Runtime:
    """The processes of `mesh`; where it had others before, all that was prepared for those is forgotten."""
    size = dist.get_world_size()
    if max(mesh.ranks) >= size:
        raise MeshError(
            f"the mesh ({mesh}) has rank {max(mesh.ranks)}, but the world has {size} ranks: "
            "start more processes or shrink the mesh"
        )
    if mesh in _RUNTIMES:
        for forget in FORGET:
            forget()
    rank = _own_rank()
    runtime = Runtime(mesh, device_mesh, world, rank, mesh.coordinate(rank) if rank in mesh else None)
    _RUNTIMES[mesh] = runtime
    return runtime


FORGET: list[Callable[[], None]] = []
"""What is called when a mesh gets other processes than it had."""
_BOUND: dict[int, tuple[DeviceMesh, Runtime]] = {}


def init_device_mesh(
    device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """torch's `init_device_mesh`: a mesh of all ranks of the world, with a process group for each axis.

    Raises:
        MeshError: there are no processes, or the mesh has not as many ranks as the world.
    """
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise MeshError(
            f"a mesh of {mesh_shape} needs processes: start it with torchrun --nproc-per-node {prod(mesh_shape)}, "
            "or call torch.distributed.init_process_group; to plan without processes use dshard.Mesh"
        )
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if prod(mesh_shape) > world:
        raise MeshError(
            f"a mesh of {mesh_shape} has {prod(mesh_shape)} ranks, but the world has {world}: "
            "start more processes or shrink the mesh"
        )
    return _init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names)


def _own_rank() -> int:
    mode = local_tensor_mode()
    if mode is None:
        return dist.get_rank()
    with mode.disable():
        return dist.get_rank()


def _pure(device_mesh: DeviceMesh) -> Mesh:
    ranks: Any = device_mesh.mesh
    mode = local_tensor_mode()
    if mode is not None:
        with mode.disable():
            return _pure_of(device_mesh, ranks)
    return _pure_of(device_mesh, ranks)


def _pure_of(device_mesh: DeviceMesh, ranks: Any) -> Mesh:
    names = tuple(device_mesh.mesh_dim_names or ())
    return Mesh(tuple(ranks.shape), names, tuple(ranks.flatten().tolist()), device_mesh.device_type)


def runtime_of(mesh: Mesh) -> Runtime | None:
    """The processes behind `mesh`, or None for a mesh that only plans."""
    return None if _is_planning() else _RUNTIMES.get(mesh)


def own_coordinate(mesh: Mesh) -> Coordinate:
    """Where this process sits on the mesh: the first place without processes, or outside of it."""
    runtime = runtime_of(mesh)
    found = None if runtime is None else runtime.coordinate
    return (0,) * mesh.ndim if found is None else found


_PLANNING: Scoped[None, bool] = Scoped("planning", bool)


def _is_planning() -> bool:
    return bool(_PLANNING.anywhere) and _PLANNING.value()


@contextmanager
def planning() -> Iterator[None]:
    """Within the block every mesh only plans, as if it had no processes: so all ranks see what the first would."""
    with _PLANNING.entered(None):
        yield


def current_mesh() -> DeviceMesh:
    """torch's mesh whose `with mesh:` block this call is in.

    Raises:
        MeshError: it is in none.
    """
    try:
        found: DeviceMesh = _mesh_resources.get_current_mesh()
    except RuntimeError as error:
        raise MeshError("no mesh was given: pass a DeviceMesh, or call within `with mesh:`") from error
    return found


def ranks_per_host(mesh: Mesh) -> int | None:
    """How many ranks each host has, as torchrun tells in LOCAL_WORLD_SIZE, where the world has several hosts.

    None without processes, on one host, or where the hosts have not all the same number of ranks.
    """
    runtime, told = _RUNTIMES.get(mesh), os.environ.get("LOCAL_WORLD_SIZE", "")
    if runtime is None or not told.isdecimal():
        return None
    local, world = int(told), dist.get_world_size(runtime.world)
    hosts = os.environ.get("GROUP_WORLD_SIZE", "")
    uneven = hosts.isdecimal() and int(hosts) * local != world
    return None if local in (0, world) or world % local or uneven else local


def device_mesh_of(mesh: Mesh) -> DeviceMesh | Mesh:
    """torch's mesh behind `mesh`, or `mesh` itself where there is none."""
    runtime = _RUNTIMES.get(mesh)
    return mesh if runtime is None else runtime.device_mesh


def simulated_ranks() -> frozenset[int] | None:
    """The ranks that torch's LocalTensorMode simulates in this process, or None, as where it only plans."""
    mode = None if _is_planning() else local_tensor_mode()
    return None if mode is None else mode.ranks
