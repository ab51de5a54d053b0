"""Process groups of meshes, and the coordinate of this process on each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as _init_device_mesh

from dshard.caches import Cache
from dshard.comm.backends import PLANNED, Backend, backend_of, default_backend
from dshard.comm.process_groups import (
    WORLDS,
    Group,
    backend_name,
    disconnect,
    group_with_shared_waits,
    hosts_of,
    process_group_of,
    this_world,
)
from dshard.comm.scoped import Scoped
from dshard.errors import MeshError
from dshard.mesh import DEVICE_TYPES, Coordinate, Mesh
from dshard.mesh import mesh_shape as sizes_of
from dshard.topology.sharing import groups_of
from dshard.torch_private import LocalTensor, disable_modes, late, local_tensor_mode, mesh_environment
from dshard.validate import as_tuple, of_wrong_type, shown


@dataclass(slots=True)
class Runtime:
    """A mesh with processes: its groups, and the caches of compiled plans that run on them."""

    mesh: Mesh
    device_mesh: DeviceMesh
    world: Any
    rank: int
    coordinate: Coordinate | None
    groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    runners: Cache = field(default_factory=lambda: Cache("runners"))

    def group(self, axes: tuple[str, ...]) -> Group:
        """This rank's group along `axes`, created at its first use by all its ranks together."""
        group = self.groups.get(axes)
        if group is None:
            group = self.groups[axes] = self._make(axes)
        return group

    @property
    def backend(self) -> Backend:
        """The backend of the mesh's process groups."""
        return self.group(self.mesh.names[:1]).backend

    def group_names(self) -> tuple[str, ...]:
        """Names of this mesh's process groups, by which graphs refer to them; they differ between worlds."""
        if self.coordinate is None:
            return ()
        count = WORLDS.of(self.world).count
        return (*(self.group((name,)).name for name in self.mesh.names), str(count))

    def _make(self, axes: tuple[str, ...]) -> Group:
        assert self.coordinate is not None
        ranks = self.mesh.group(axes, self.coordinate)
        if len(axes) == 1:
            process_group = self.device_mesh.get_group(self.mesh.axis(axes[0]))
        elif self.mesh.ndim == 1:
            process_group = self.device_mesh.get_group(0)
        else:
            process_group = process_group_of(tuple(sorted(ranks)), self.world)
        sorted_ranks = dist.get_process_group_ranks(process_group)
        slots = tuple(map(sorted_ranks.index, ranks))
        in_order = slots == tuple(range(len(ranks)))
        hosts = hosts_of(ranks, os.environ.get("LOCAL_WORLD_SIZE", ""))
        backend = backend_of(backend_name(process_group), self.mesh.device_type)
        return group_with_shared_waits(
            axes, ranks, self.rank, process_group, backend, None if in_order else slots, hosts
        )


_UNIONS: dict[tuple[tuple[int, ...], int], tuple[Any, Group]] = {}  # no cache: all ranks make a group together


def group_of(ranks: tuple[int, ...], runtime: Runtime, tag: int = 0) -> Group:
    """The group of `ranks`, in ascending order, in the world of `runtime`; created at its first use by all its ranks.

    On a backend without tags each tag has a group of its own, so that messages of one tag do not wait for those of
    another. On a backend with tags a new group replaces one that was broken off; it is never the group of all ranks,
    which has other users.
    """
    broken = WORLDS.of(runtime.world).broken
    backend = backend_of(backend_name(), runtime.mesh.device_type)
    tag = _OWN + broken[ranks] if backend.tags else tag
    cached_group = _UNIONS.get((ranks, tag))
    if cached_group is None or cached_group[0] is not runtime.world:
        process_group = process_group_of(ranks, runtime.world, tag)
        group = group_with_shared_waits((), ranks, runtime.rank, process_group, backend)
        if not backend.tags:
            gpu = [torch.cuda.current_device()] if runtime.mesh.device_type == "cuda" else None
            dist.barrier(group.process_group, device_ids=gpu)  # the first call must be one that all ranks make
        cached_group = _UNIONS[ranks, tag] = (runtime.world, group)
    return cached_group[1]


_OWN = 2  # the first tag of groups whose tag counts how often they were replaced


def break_off(ranks: tuple[int, ...], runtime: Runtime) -> None:
    """Close this rank's gloo connections in the group that `group_of` returned: waits of its other ranks then fail."""
    cached_group = _UNIONS.get((ranks, _OWN + WORLDS.of(runtime.world).broken[ranks]))
    if (
        cached_group is None
        or cached_group[0] is not runtime.world
        or not cached_group[1].backend.waits_on_host
        or len(ranks) == 1
    ):
        return
    WORLDS.of(runtime.world).broken[ranks] += 1
    disconnect(cached_group[1])


_RUNTIMES: dict[Mesh, Runtime] = {}


def bind(device_mesh: DeviceMesh) -> Mesh:
    """The pure mesh of a torch DeviceMesh; its process groups are cached for `runtime_of`."""
    if not dist.is_initialized():
        raise MeshError(
            "a DeviceMesh needs a process group: call torch.distributed.init_process_group first, "
            "or plan without processes on a dshard.Mesh"
        )
    world = dist.group.WORLD
    bound: tuple[DeviceMesh, Runtime] | None = _BOUND.get(id(device_mesh))
    if bound is not None and bound[0] is device_mesh and bound[1].world is world:
        return bound[1].mesh
    real = getattr(device_mesh, "real_obj", None)
    if real is not None:  # a proxy of the mesh while torch.compile traces
        return bind(real)
    mesh = _mesh_of(device_mesh)
    existing = _RUNTIMES.get(mesh)
    runtime = (
        existing if existing is not None and existing.world is world else _create_runtime(mesh, device_mesh, world)
    )
    _BOUND.add(id(device_mesh), (device_mesh, runtime))
    return mesh


def _create_runtime(mesh: Mesh, device_mesh: DeviceMesh, world: object) -> Runtime:
    """Create the runtime of `mesh`; if it had other processes before, the caches made for those are cleared."""
    size = dist.get_world_size()
    if max(mesh.ranks) >= size:
        raise MeshError(
            f"the mesh ({mesh}) has rank {max(mesh.ranks)}, but the world has {size} ranks: "
            "start more processes or shrink the mesh"
        )
    if mesh in _RUNTIMES:
        for forget in FORGET:
            forget()
    late("torch._dynamo")
    rank = _own_rank()
    runtime = Runtime(mesh, device_mesh, world, rank, mesh.coordinate(rank) if rank in mesh else None)
    _RUNTIMES[mesh] = runtime
    return runtime


FORGET: list[Callable[[], None]] = []
"""Functions that clear caches when a mesh gets other processes than it had."""
_BOUND = Cache("device meshes", 1024)
"""The runtimes of torch's meshes, each kept with its mesh, by `id`."""


def init_device_mesh(
    device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """torch's `init_device_mesh`: a mesh of all ranks of the world, with a process group for each axis.

    A mesh of one rank in a process that nothing has started ranks for, such as a notebook, makes a world of one. The
    same arguments give the same mesh: an idle group of gloo wakes its thread a hundred times a second as long as it is.
    """
    mesh_shape = sizes_of(mesh_shape)
    device_type = _device_type(device_type)
    if mesh_dim_names is not None:
        names = as_tuple(mesh_dim_names, "mesh_dim_names", "give a name for each axis, as in ('dp', 'tp')", MeshError)
        mesh_dim_names = Mesh(mesh_shape, names, device_type=device_type).names
    if not dist.is_initialized() and "RANK" not in os.environ and prod(mesh_shape) == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo" if device_type == "cpu" else None, store=store, rank=0, world_size=1)
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
    late("torch._dynamo")  # the first operator needs it, and takes seconds to import it: here no other rank waits
    key = (device_type, mesh_shape, mesh_dim_names)
    existing = this_world().meshes.get(key) if dist.is_initialized() else None
    if existing is not None:
        return existing
    with disable_modes():  # in FakeTensorMode the numbers of the ranks could not be read
        made = _init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names)
    return this_world().meshes.setdefault(key, made)


def _device_type(name: object) -> str:
    """The device type called `name`: any that torch knows, including those of custom backends."""
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


def _mesh_of(device_mesh: DeviceMesh) -> Mesh:
    with disable_modes():  # those of simulated ranks and of FakeTensorMode, which do not read numbers
        ranks: Any = device_mesh.mesh
        names = tuple(device_mesh.mesh_dim_names or ())
        device_type = _device_type(device_mesh.device_type)
        return Mesh(tuple(ranks.shape), names, tuple(ranks.flatten().tolist()), device_type)


def runtime_of(mesh: Mesh) -> Runtime | None:
    """The runtime of `mesh`, or None for a mesh without processes, or whose process groups have been destroyed."""
    return None if is_planning() else _with_processes(mesh)


def _with_processes(mesh: Mesh) -> Runtime | None:
    runtime = _RUNTIMES.get(mesh)  # warm paths ask: the property is that of `dist.group.WORLD`, by fewer calls
    return None if runtime is None or runtime.world is not distributed_c10d._world.default_pg else runtime


def check_world(mesh: Mesh) -> None:
    """Refuse a mesh that has had processes, if their world has been destroyed and no mesh of the next one equals it."""
    if mesh in _RUNTIMES and _with_processes(mesh) is None:
        raise MeshError(
            f"the process groups of the mesh ({mesh}) have been destroyed, so nothing can be sent: after "
            "init_process_group make the mesh again, by init_device_mesh with the same arguments"
        )


def planned_backend(mesh: Mesh) -> Backend:
    """The backend for which plans on the mesh are made: that of its processes, or else of its type of device.

    Where another one is planned for, its ranks share no memory.
    """
    if _with_processes(mesh) is None:
        own = default_backend(mesh.device_type)
        name = next(filter(None, reversed(_PLANNING.value())), own.name) if _PLANNING.anywhere else own.name
        return own if name == own.name else PLANNED[name]
    return backend_of(backend_name(), mesh.device_type)


def own_runtime(mesh: Mesh) -> tuple[Runtime, Coordinate]:
    """The runtime of `mesh`, and the coordinate of this process on it."""
    runtime = runtime_of(mesh)
    if runtime is None or runtime.coordinate is None:
        why = "has no processes" if runtime is None else f"does not contain this rank, {runtime.rank}"
        raise MeshError(f"the mesh ({mesh}) {why}: nothing can be sent; use init_device_mesh under torchrun")
    return runtime, runtime.coordinate


def has_processes() -> bool:
    """Whether this process is one of several ranks, or of one, and simulates none."""
    return dist.is_initialized() and simulated_ranks() is None


def taking_part(mesh: Mesh) -> Runtime | None:
    """The runtime of `mesh` where this process is one of its ranks, and simulates none; else None."""
    runtime = runtime_of(mesh)
    return None if runtime is None or runtime.coordinate is None or simulated_ranks() is not None else runtime


def group_with_data(mesh: Mesh) -> Group | None:
    """The group of all ranks of the mesh, if this rank is one of several that can send each other values."""
    runtime = taking_part(mesh) if mesh.size > 1 else None
    group = None if runtime is None else runtime.group(mesh.names)
    return group if group is not None and group.backend.carries_data else None


def is_outside(mesh: Mesh) -> bool:
    """Whether this process is a rank outside the mesh: tensors on the mesh have no data here, and send nothing."""
    runtime = runtime_of(mesh)
    return runtime is not None and runtime.coordinate is None and simulated_ranks() is None


def is_first_rank(mesh: Mesh) -> bool:
    """Whether this process is the first rank of the mesh, or simulates or plans for all ranks."""
    runtime = _with_processes(mesh)
    if runtime is None or local_tensor_mode() is not None:
        return True
    return runtime.coordinate is not None and not any(runtime.coordinate)


def own_coordinate(mesh: Mesh) -> Coordinate:
    """The coordinate of this process on the mesh; the first one without processes, and on ranks outside the mesh."""
    runtime = runtime_of(mesh)
    coordinate = None if runtime is None else runtime.coordinate
    return (0,) * mesh.ndim if coordinate is None else coordinate


def ranks_of_root(mesh: Mesh) -> frozenset[int]:
    """The ranks of the mesh that `mesh` is a slice of, each of which has such a slice of its own."""
    runtime = _with_processes(mesh)
    return frozenset((mesh if runtime is None else _mesh_of(runtime.device_mesh._get_root_mesh())).ranks)


_PLANNING: Scoped[str, tuple[str, ...]] = Scoped("planning", tuple)


def is_planning() -> bool:
    """Whether the call is within `planning`."""
    return bool(_PLANNING.anywhere) and bool(_PLANNING.value())


@contextmanager
def planning(backend: str = "") -> Iterator[None]:
    """Within the block every mesh is without processes, so that all ranks plan as the first rank would.

    Steps are those that a `backend` runs, of a topology for example, by default that of the mesh's type of device.
    """
    with _PLANNING.entered(backend):
        yield


def current_mesh() -> DeviceMesh:
    """torch's mesh of the innermost `with mesh:` block around the call."""
    try:
        device_mesh: DeviceMesh = mesh_environment.get_current_mesh()
    except RuntimeError as error:
        raise MeshError("no mesh was given: pass a DeviceMesh, or call within `with mesh:`") from error
    return device_mesh


def as_mesh(mesh: DeviceMesh | Mesh | None) -> Mesh:
    """The pure mesh of `mesh`, or without one of the `with mesh:` block around the call."""
    if isinstance(mesh, Mesh):
        return mesh
    mesh = current_mesh() if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise of_wrong_type(MeshError)(
            f"{mesh!r} is no mesh: give a DeviceMesh from init_device_mesh, or a dshard.Mesh to plan without processes"
        )
    return bind(mesh)


def ranks_per_host(mesh: Mesh) -> int | None:
    """The number of ranks on each host, from torchrun's LOCAL_WORLD_SIZE, where the world has several hosts.

    None without processes, on one host, or where the hosts have not all the same number of ranks.
    """
    runtime, local_size = _with_processes(mesh), os.environ.get("LOCAL_WORLD_SIZE", "")
    if runtime is None or not local_size.isdecimal():
        return None
    local, world = int(local_size), dist.get_world_size(runtime.world)
    hosts = os.environ.get("GROUP_WORLD_SIZE", "")
    uneven = hosts.isdecimal() and int(hosts) * local != world
    return None if local in (0, world) or world % local or uneven else local


def on_one_host(mesh: Mesh, axis: str) -> bool:
    """Whether no group along a mesh axis spans several hosts, as far as torchrun's LOCAL_WORLD_SIZE tells."""
    runtime, per_host = _with_processes(mesh), ranks_per_host(mesh)
    if runtime is None:
        return True
    if per_host is None:  # one host, or several with different numbers of ranks
        world = str(dist.get_world_size(runtime.world))
        return os.environ.get("LOCAL_WORLD_SIZE", world) == world
    return all(hosts_of(ranks, str(per_host)) == 1 for ranks in groups_of(mesh, (axis,)))


def device_mesh_of(mesh: Mesh) -> DeviceMesh | Mesh:
    """torch's DeviceMesh from which `mesh` was made, or `mesh` itself where there is none."""
    runtime = _with_processes(mesh)
    return mesh if runtime is None else runtime.device_mesh


def simulated_ranks() -> frozenset[int] | None:
    """The ranks that torch's LocalTensorMode simulates in this process; None without it, and within `planning`."""
    mode = None if is_planning() else local_tensor_mode()
    return None if mode is None else mode.ranks
