"""What the ranks must agree on before a local tensor can be part of a global one."""

from __future__ import annotations

from functools import cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.comm import transport
from dshard.comm.events import emit
from dshard.comm.runtime import Group, LocalTensor, Runtime, runtime_of, simulated_ranks
from dshard.comm.scatter_shards import device_of
from dshard.comm.simulated import each, plain, unstack
from dshard.comm.timing import timed
from dshard.comm.traced_collectives import traced
from dshard.errors import CompileError, DtypeError, LayoutError, ShapeError
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import Replicate, Shard
from dshard.topology import Topology

MAX_DIMS = 16


def global_shape(local: Tensor, layout: Layout) -> Shape:
    """The shape of the tensor whose parts under `layout` are the ranks' local tensors: they tell each other.

    Raises:
        ShapeError: the local shapes are not the parts of one tensor.
        DtypeError, LayoutError: the ranks give different dtypes or placements.
    """
    mesh = layout.mesh
    if type(local) is LocalTensor:
        with plain():
            tensors = unstack(local)
            return _joined({mesh.coordinate(rank): _shape(tensors[rank]) for rank in mesh.ranks}, layout)
    if traced(local) and any(isinstance(placement, Shard) for placement in layout.placements):
        raise CompileError(
            f"from_local of local shape {_shape(local)} laid out [{layout}], within a compiled region: ranks cannot "
            "ask each other for their shapes there; pass the global shape, shape=(...)"
        )
    runtime = runtime_of(mesh)
    if runtime is None or not shape_exchange(local, layout):
        return _even(_shape(local), layout)
    return _joined(_gather_shapes(local, layout, runtime), layout)


def shape_exchange(local: Tensor, layout: Layout) -> list[tuple[str, tuple[str, ...], int]]:
    """The collective in which ranks tell each other their local shapes, with the bytes that each receives, if any."""
    mesh = layout.mesh
    runtime = runtime_of(mesh)
    if type(local) is LocalTensor or runtime is None or runtime.coordinate is None or traced(local):
        return []
    if mesh.size == 1 or runtime.group(mesh.names).backend == "fake":
        return []
    return [("all_gather", mesh.names, 8 * (MAX_DIMS + 3) * (mesh.size - 1))]


def checked_shape(local: Tensor, layout: Layout, shape: Shape) -> Shape:
    """`shape`, if the local tensor of this rank is its part under `layout`.

    Raises:
        ShapeError: it is not.
    """
    layout.check(shape)
    mesh = layout.mesh
    if type(local) is LocalTensor:
        found = {mesh.coordinate(rank): _shape(unstack(local)[rank]) for rank in mesh.ranks}
    else:
        runtime = runtime_of(mesh)
        coordinate = (0,) * mesh.ndim if runtime is None else runtime.coordinate
        found = {} if coordinate is None else {coordinate: _shape(local)}
    _check(found, layout, shape)
    return shape


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of a process group, or of the world, gives; alone, where there is none."""
    if not dist.is_initialized() or simulated_ranks() is not None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def group_rank(group: dist.ProcessGroup | None = None) -> int:
    """The number of this process in a process group, or in the world; 0 where there is none."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def share(x: Tensor | None, source: int, group: Group, device: torch.device) -> Tensor:
    """A number that the rank `source` has, as a double of no dim on all ranks of the group."""
    number = torch.zeros(1, dtype=torch.float64, device=device)
    if x is not None:
        number.fill_(x.detach().item())
    return transport.broadcast(number, group.ranks.index(source), group).squeeze(0)


def same_replicas(local: Tensor, layout: Layout) -> Tensor:
    """The local tensor of the first rank on each axis where the tensor is replicated, on all ranks of that axis."""
    for i, placement in enumerate(layout.placements):
        if placement == Replicate() and layout.mesh.shape[i] > 1:
            local = _from_first(local, layout.mesh, i)
    return local


def same_topology(topology: Topology, mesh: Mesh) -> Topology:
    """The topology of the mesh's first rank, on all its ranks: they price alike only on the same one.

    Two broadcasts: of the size of its JSON, and of that. Without processes, or with one rank, there is nothing to send.
    """
    runtime = runtime_of(mesh)
    if simulated_ranks() is not None or runtime is None or runtime.coordinate is None or mesh.size == 1:
        return topology
    group = runtime.group(mesh.names)
    if group.backend == "fake":
        return topology
    device, first = device_of(mesh), group.index == 0
    text = torch.frombuffer(bytearray(topology.to_json().encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([len(text)], device=device)
    size = timed("broadcast", mesh, 0 if first else 8, group, device, lambda: transport.broadcast(length, 0, group))
    mine = text if first else text.new_empty(int(size.item()))
    received = 0 if first else mine.nbytes
    agreed = timed("broadcast", mesh, received, group, device, lambda: transport.broadcast(mine, 0, group))
    return Topology.from_json(bytes(agreed.cpu().tolist()).decode())


def _from_first(local: Tensor, mesh: Mesh, axis: int) -> Tensor:
    name = mesh.names[axis]
    if type(local) is LocalTensor:
        tensors = unstack(local)
        first = {rank: mesh.group([name], mesh.coordinate(rank))[0] for rank in mesh.ranks}
        emit("broadcast", mesh, (name,), next(iter(tensors.values())).nbytes)
        return each(lambda rank, x: tensors[first[rank]].clone(), local)
    runtime = runtime_of(mesh)
    if runtime is None or runtime.coordinate is None:
        return local
    flat = local.detach().contiguous().reshape(-1)
    group, received = runtime.group((name,)), 0 if runtime.coordinate[axis] == 0 else flat.nbytes
    out = timed("broadcast", mesh, received, group, flat.device, lambda: transport.broadcast(flat, 0, group))
    return out.view(local.shape)


def _gather_shapes(local: Tensor, layout: Layout, runtime: Runtime) -> dict[Coordinate, Shape]:
    if local.ndim > MAX_DIMS:
        raise ShapeError(
            f"from_local takes tensors of at most {MAX_DIMS} dims unless shape= is given, got {local.ndim}"
        )
    mesh = layout.mesh
    told_too = [_dtypes().index(local.dtype), crc32(str(layout).encode()), local.ndim]
    mine = torch.tensor([*told_too, *local.shape, *([0] * (MAX_DIMS - local.ndim))], device=local.device)
    group = runtime.group(mesh.names)
    ((_, _, received),) = shape_exchange(local, layout)
    parts = [mine.numel()] * mesh.size
    found = timed("all_gather", mesh, received, group, mine.device, lambda: transport.all_gather(mine, parts, group))
    rows = dict(zip(mesh.coordinates(), found.view(mesh.size, -1).tolist(), strict=True))
    _check_alike(rows, layout)
    return {at: tuple(row[3 : 3 + row[2]]) for at, row in rows.items()}


@cache
def _dtypes() -> list[torch.dtype]:
    """All dtypes, in an order that is the same in every process."""
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(known, key=str)


def _check_alike(rows: dict[Coordinate, list[int]], layout: Layout) -> None:
    """Refuse parts of different dtypes or layouts: all ranks know those of all.

    Raises:
        DtypeError: the local tensors have different dtypes.
        LayoutError: the ranks gave different placements.
    """
    dtypes = {at: _dtypes()[row[0]] for at, row in rows.items()}
    if len(set(dtypes.values())) > 1:
        first = {dtype: at for at, dtype in reversed(dtypes.items())}
        listed = " and ".join(f"{dtype} at {at}" for dtype, at in sorted(first.items(), key=lambda pair: pair[1]))
        raise DtypeError(f"from_local: the ranks give local tensors of {listed}: convert them to one, with .to(dtype)")
    if len({row[1] for row in rows.values()}) > 1:
        raise LayoutError(f"from_local: the ranks give different placements, this one [{layout}]: give the same on all")


def _joined(shapes: dict[Coordinate, Shape], layout: Layout) -> Shape:
    """The shape whose parts have these shapes."""
    origin = (0,) * layout.mesh.ndim
    first = shapes[origin]
    if any(len(shape) != len(first) for shape in shapes.values()):
        raise ShapeError(
            f"the local tensors {_listed(shapes)} have different numbers of dims: "
            "each rank must give a part of one tensor"
        )
    sizes = []
    for dim in range(len(first)):
        peers = layout.mesh.peers(layout.names_of(dim), origin)
        sizes.append(sum(shapes[peer][dim] for peer in peers))
    _check(shapes, layout, tuple(sizes))
    return tuple(sizes)


def _check(shapes: dict[Coordinate, Shape], layout: Layout, shape: Shape) -> None:
    right = {at: layout.local_shape(shape, at) for at in shapes}
    wrong = {at: found for at, found in shapes.items() if found != right[at]}
    if wrong:
        expected = _listed({at: right[at] for at in wrong})
        raise ShapeError(
            f"local tensors {_listed(wrong)} cannot be the parts of a tensor of shape {shape} laid out [{layout}], "
            f"whose parts are {expected}: split it as torch.chunk does, or use distribute_tensor"
        )


def _listed(shapes: dict[Coordinate, Shape]) -> str:
    shown = [f"{shape} at {at}" for at, shape in list(shapes.items())[:4]]
    return ", ".join(shown) + (", ..." if len(shapes) > 4 else "")


def _even(local: Shape, layout: Layout) -> Shape:
    sizes = list(local)
    for i, placement in enumerate(layout.placements):
        if isinstance(placement, Shard):
            sizes[placement.dim] *= layout.mesh.shape[i]
    return tuple(sizes)


def _shape(x: Tensor) -> Shape:
    return tuple(x.shape)
