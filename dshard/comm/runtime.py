"""Which process groups belong to a mesh, and where on it this process sits."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._local_tensor import LocalTensor, local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.device_mesh import init_device_mesh as _init_device_mesh

from dshard.caches import Cache
from dshard.comm.scoped import Scoped
from dshard.errors import MeshError
from dshard.mesh import DEVICE_TYPES, Coordinate, Mesh
from dshard.mesh import mesh_shape as sizes_of
from dshard.validate import as_tuple, shown

__all__ = [
    "DeviceMesh",
    "Group",
    "LocalTensor",
    "Runtime",
    "bind",
    "break_off",
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
    bytes: gloo, nccl, fake, ... `waits` is how often this process has waited on the process group, in one place.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup
    slots: tuple[int, ...] | None = None
    hosts: int = 1
    backend: str = ""
    waits: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)

    @property
    def spread(self) -> bool:
        """Whether it has several ranks on one of several hosts, which then share a link."""
        return 1 < self.hosts < len(self.ranks)

    @property
    def name(self) -> str:
        """What torch's functional collectives call the process group."""
        return self.process_group.group_name

    @property
    def key(self) -> str:
        """What all its ranks call the process group."""
        return f"{self.name}/{','.join(map(str, sorted(self.ranks)))}"

    def __str__(self) -> str:
        along = f"along {', '.join(self.axes)}" if self.axes else "between meshes"
        return f"{along} of ranks {', '.join(map(str, self.ranks))}"


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
        return _counted(axes, ranks, self.rank, process_group, None if in_order else slots, hosts, backend)


def _hosts(ranks: Sequence[int], local: str) -> int:
    """On how many hosts with `local` ranks each there are some of `ranks`; one, where that is not said.

    >>> _hosts((0, 1, 2, 3), "2"), _hosts((0, 2), "2"), _hosts((0, 1), "2"), _hosts((0, 1), "")
    (2, 2, 1, 1)
    """
    return len({rank // int(local) for rank in ranks}) if local.isdecimal() and int(local) else 1


@dataclass(slots=True)
class _Worlds:
    """The process group of all ranks, how many there have been, and of the last what this process has done on it.

    These are the groups of its ranks by their tag, how often it has waited on each, by `Group.key`, how many of those
    that meshes send by were broken off, how many errors it has told the others of, and which of them they
    have raised because they were told.
    """

    world: Any = None
    count: int = 0
    groups: dict[tuple[tuple[int, ...], int], dist.ProcessGroup] = field(default_factory=dict)
    waits: dict[str, list[int]] = field(default_factory=dict)
    broken: Counter[tuple[int, ...]] = field(default_factory=Counter)
    failures: int = 0
    strayed: str | None = None

    def of(self, world: Any) -> _Worlds:
        """The same for this world, the last of all."""
        if world is not self.world:
            self.world, self.count, self.groups, self.waits = world, self.count + 1, {}, {}
            self.broken, self.failures, self.strayed = Counter(), 0, None
        return self


_WORLDS = _Worlds()


def _counted(
    axes: tuple[str, ...],
    ranks: tuple[int, ...],
    rank: int,
    process_group: dist.ProcessGroup,
    slots: tuple[int, ...] | None,
    hosts: int,
    backend: str,
) -> Group:
    """The group, which counts its waits together with the groups of other meshes that have its process group."""
    group = Group(axes, ranks, ranks.index(rank), process_group, slots, hosts, backend)
    return replace(group, waits=this_world().waits.setdefault(group.key, group.waits))


def this_world() -> _Worlds:
    """The process group of all ranks as it is now."""
    return _WORLDS.of(dist.group.WORLD)


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

    Where the backend knows no tags, each has a group of its own, so that what has one does not wait for another. Where
    it does, a group that was broken off is followed by a new one: it is never that of all ranks, which others use.
    """
    broken = _WORLDS.of(runtime.world).broken
    tag = tag if dist.get_backend() == "nccl" else _OWN + broken[ranks]
    found = _UNIONS.get((ranks, tag))
    if found is None or found[0] is not runtime.world:
        process_group = _joined(ranks, runtime.world, tag)
        backend = dist.get_backend(process_group)
        group = _counted((), ranks, runtime.rank, process_group, None, 1, backend)
        if group.backend == "nccl":
            dist.barrier(group.process_group)  # its first call must be one that all ranks make
        found = _UNIONS[ranks, tag] = (runtime.world, group)
    return found[1]


_OWN = 2  # how the tags of groups begin where they tell those that follow each other


def break_off(ranks: tuple[int, ...], runtime: Runtime) -> None:
    """Close what connects this rank to the others of `group_of`, if gloo does: what they wait for there is an error."""
    found = _UNIONS.get((ranks, _OWN + _WORLDS.of(runtime.world).broken[ranks]))
    if found is None or found[0] is not runtime.world or found[1].backend != "gloo" or len(ranks) == 1:
        return
    _WORLDS.of(runtime.world).broken[ranks] += 1
    disconnect(found[1])


def disconnect(group: Group) -> None:
    """Close what connects this rank to the others of a group that is out of step: what they wait for is an error."""
    here = group.process_group.rank()
    for peer in range(len(group.ranks)):
        if peer != here:
            with contextlib.suppress(RuntimeError):  # what comes too late makes gloo close all connections of the group
                group.process_group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


_NEVER_SENT = 2**25  # the tag of no message


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
        MeshError: there are no processes, or the mesh has not as many ranks as the world; no such type of device.
    """
    mesh_shape = sizes_of(mesh_shape)
    device_type = _device_type(device_type)
    if mesh_dim_names is not None:
        names = as_tuple(mesh_dim_names, "mesh_dim_names", "give a name for each axis, as in ('dp', 'tp')", MeshError)
        mesh_dim_names = Mesh(mesh_shape, names, device_type=device_type).names
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


def _device_type(name: object) -> str:
    """A type of device that torch knows, a backend of one's own included.

    Raises:
        MeshError: it knows none of this name, or the name has an index.
    """
    try:
        known = torch.device(name) if isinstance(name, str) else None
    except RuntimeError:
        known = None
    if known is None or known.index is not None:
        raise MeshError(
            f"{shown(name)} is no type of device: use one of torch's, without an index, such as 'cpu' or 'cuda'"
        )
    DEVICE_TYPES.add(known.type)
    return known.type


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
    device_type = _device_type(device_mesh.device_type)
    return Mesh(tuple(ranks.shape), names, tuple(ranks.flatten().tolist()), device_type)


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
