"""Values that ranks compare or share: global shapes, replicas, topologies, objects."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ctypes import string_at
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dshard.caches import cached
from dshard.comm import transport
from dshard.comm.backends import backend_of
from dshard.comm.even_parts import take_as_even
from dshard.comm.events import emit
from dshard.comm.process_groups import backend_name, group_with_shared_waits, process_group_of
from dshard.comm.rank_tensors import are_simulated, by_rank, has_data, per_rank
from dshard.comm.runtime import DeviceMesh, Group, group_with_data, has_processes, runtime_of, taking_part
from dshard.comm.scatter_shards import device_of
from dshard.comm.scoped import Scoped
from dshard.comm.traced_collectives import traced
from dshard.errors import CompileError, DtypeError, LayoutError, ShapeError
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import Replicate, Shard
from dshard.topology import Topology
from dshard.torch_private import disable_modes

MAX_DIMS = 16


def even_shape(local: Tensor, layout: Layout, compared: bool = False) -> Shape:
    """The global shape if all local tensors under `layout` have the shape of `local`; nothing is sent.

    Local shapes are compared now if ranks are simulated, or if `compared`, in debug mode; else before the next
    collective.
    """
    shape = _even_global_shape(tuple(local.shape), layout)
    if are_simulated([local]) or (compared and local.ndim <= MAX_DIMS):
        shapes = _local_shapes(local, layout)
        if shapes is not None and len(set(shapes.values())) > 1:
            actual = _global_shape_of(shapes, layout)
            raise ShapeError(
                f"from_local of uneven local tensors {_shape_list(shapes)}: without shape= they count as even parts of "
                f"a tensor of shape {shape}, and nothing is sent; give the global shape, shape={actual}, or let the "
                "ranks tell each other, run_check=True"
            )
    elif has_data(local):
        take_as_even(tuple(local.shape), local.dtype, layout)
    return shape


def global_shape(local: Tensor, layout: Layout) -> Shape:
    """The global shape of the tensor with these local tensors under `layout`, by an all_gather of their shapes."""
    if traced(local) and any(isinstance(placement, Shard) for placement in layout.placements):
        raise CompileError(
            f"from_local of local shape {tuple(local.shape)} laid out [{layout}], within a compiled region: ranks "
            "cannot ask each other for their shapes there; pass the global shape, shape=(...)"
        )
    shapes = _local_shapes(local, layout)
    return _even_global_shape(tuple(local.shape), layout) if shapes is None else _global_shape_of(shapes, layout)


def _local_shapes(local: Tensor, layout: Layout) -> dict[Coordinate, Shape] | None:
    """The shapes of all ranks' local tensors, by an all_gather; None if no collective can run."""
    if are_simulated([local]):
        return _shapes_here(local, layout.mesh)
    group = _group_for_shapes(local, layout.mesh)
    return None if group is None else _gather_shapes(local, layout, group)


def _shapes_here(local: Tensor, mesh: Mesh) -> dict[Coordinate, Shape]:
    return {mesh.coordinate(rank): tuple(part.shape) for rank, part in by_rank(local, mesh).items()}


def shape_exchange(local: Tensor, layout: Layout) -> list[tuple[str, tuple[str, ...], int]]:
    """The collective that gathers the local shapes: its kind, axes and bytes received; an empty list if none runs."""
    mesh = layout.mesh
    if _group_for_shapes(local, mesh) is None:
        return []
    return [("all_gather", mesh.names, 8 * (MAX_DIMS + 3) * (mesh.size - 1))]


def _group_for_shapes(local: Tensor, mesh: Mesh) -> Group | None:
    return None if traced(local) else group_with_data(mesh)


def checked_shape(local: Tensor, layout: Layout, shape: Shape) -> Shape:
    """Check that this rank's local tensor has the shape that `layout` gives it for `shape`, and return `shape`."""
    layout.check(shape)
    local_shapes = _shapes_here(local, layout.mesh)
    _check(local_shapes, layout, shape)
    return shape


class MeshesOfRows(set[Mesh]):
    """The meshes on which a step asks how many rows each rank has: its ranks agree beforehand on how to run it."""

    def exchange(self, number: int) -> tuple[int, ...]:
        """The numbers of all ranks of these meshes, by an all_gather between their hosts."""
        numbers = list[int]()
        for mesh in sorted(self, key=str):
            group = group_of_hosts(mesh)
            if group is not None:
                own = torch.tensor([number], device="cpu")
                numbers += [number for (number,) in begin_rows(own, mesh, with_waits(group))().values()]
        return tuple(numbers)


NOTED_ROWS: Scoped[MeshesOfRows, tuple[MeshesOfRows, ...]] = Scoped("meshes of rows", tuple)
"""Values to which the meshes are added on which the ranks ask each other for their rows."""


def gather_rows(row: Sequence[int], mesh: Mesh, is_check: bool = False) -> dict[Coordinate, tuple[int, ...]]:
    """The rows of numbers of all ranks of the mesh, of equal length, by one all_gather.

    Listeners are told, unless `is_check`. On simulated ranks, or without processes, all rows are equal, and nothing is
    sent.
    """
    group = group_with_data(mesh)
    if group is not None:
        for meshes in () if is_check else NOTED_ROWS.value():
            meshes.add(mesh)
        own = torch.tensor(row, dtype=torch.int64, device=device_of(mesh))
        if not traced(own):  # by FakeTensorMode, which has no values
            return begin_rows(own, mesh, group, None if is_check else mesh)()
    return dict.fromkeys(mesh.coordinates(), tuple(row))


def begin_rows(
    own: Tensor, mesh: Mesh, group: Group, listened: Mesh | None = None
) -> Callable[[], dict[Coordinate, tuple[int, ...]]]:
    """Begin an all_gather of rows of integers in a group; the function that waits for it returns them by coordinate."""
    wait = transport.begin_all_gather(own, [len(own)] * len(group.ranks), group, listened)
    places = dict(zip(mesh.ranks, mesh.coordinates(), strict=True))
    at = [places[rank] for rank in group.ranks]
    return lambda: dict(zip(at, map(tuple, wait().view(len(at), -1).tolist()), strict=True))


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of a process group, or of the world; `[value]` without processes."""
    if not has_processes():
        return [value]
    process_group: Any = group or dist.group.WORLD
    n, backend = dist.get_world_size(process_group), backend_of(backend_name(process_group), "cpu")
    if not backend.waits_on_host:
        values: list[object] = [None] * n
        dist.all_gather_object(values, value, group=process_group)
        return values
    waited = with_waits(process_group)
    with disable_modes():  # in FakeTensorMode no values could be read
        text = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = transport.all_gather(torch.tensor([len(text)], device="cpu"), [1] * n, waited).tolist()
        every = transport.all_gather(text, sizes, waited).split(sizes)
        return [pickle.loads(string_at(each.data_ptr(), each.numel())) for each in every]


def group_of_hosts(mesh: Mesh) -> dist.ProcessGroup | None:
    """A gloo group of the mesh's ranks for what hosts ask beside a step; None where this rank has nobody to ask."""
    runtime = taking_part(mesh) if mesh.size > 1 else None
    if runtime is None or not runtime.backend.carries_data:
        return None
    return process_group_of(tuple(sorted(mesh.ranks)), runtime.world, -1, "gloo")  # of a tag that no other group has


def with_waits(process_group: Any) -> Group:
    """The group whose waits are published; torch's own would not be, so that no deadlock with them could be found."""
    ranks, backend = ranks_in(process_group), backend_of(backend_name(process_group), "cpu")
    return group_with_shared_waits(("the process group",), ranks, dist.get_rank(), process_group, backend)


def group_rank(group: dist.ProcessGroup | None = None) -> int:
    """The number of this process in a process group, or in the world; 0 where there is none."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def ranks_of_group(args: Iterable[Any]) -> tuple[int, ...]:
    """The ranks of the process group among the arguments of a torch collective, else all; () without processes."""
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(arg))
        with suppress(TypeError, RuntimeError):  # it is something else, such as a reduction
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    return tuple(range(dist.get_world_size())) if dist.is_initialized() else ()


_COLLECTIVES = ("all_", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")
COLLECTIVES_OF_TORCH = [getattr(dist, name) for name in distributed_c10d.__all__ if name.startswith(_COLLECTIVES)]
"""The functions of torch.distributed that send tensors, or objects."""


def ranks_in(group: dist.ProcessGroup | DeviceMesh) -> tuple[int, ...]:
    """The ranks of a process group, or of a mesh of torch's."""
    if isinstance(group, DeviceMesh):
        return tuple(group.mesh.flatten().tolist())
    return tuple(dist.get_process_group_ranks(group))


def share(x: Tensor | None, source: int, group: Group, device: torch.device) -> Tensor:
    """Broadcast the number `x` of rank `source` to all ranks of the group, as a float64 tensor without dims."""
    number = torch.zeros(1, dtype=torch.float64, device=device)
    if x is not None:
        number.copy_(x.detach())  # on the device: the host waits for no number
    return transport.broadcast(number, group.ranks.index(source), group).squeeze(0)


def same_replicas(local: Tensor, layout: Layout) -> Tensor:
    """Broadcast the first rank's local tensor along each mesh axis on which the tensor is replicated."""
    for i, placement in enumerate(layout.placements):
        if placement == Replicate() and layout.mesh.shape[i] > 1:
            local = _from_first(local, layout.mesh, i)
    return local


def same_topology(topology: Topology, mesh: Mesh) -> Topology:
    """Broadcast the topology of the mesh's first rank to all its ranks, so that all choose the same plans."""
    return Topology.from_json(text_of_first(topology.to_json, mesh))


WAITED_FOR: Scoped[None, bool] = Scoped("waited for", bool)
"""Whether this rank computes what the others wait for: a collective that they are to join would wait for ever."""


def text_of_first(text: Callable[[], str], mesh: Mesh) -> str:
    """Broadcast a text that the first rank of the mesh alone makes.

    Two broadcasts: the size of the text, then the text. Without processes, or with one rank, nothing is sent.
    """
    group = group_with_data(mesh)
    if group is None:
        return text()
    with WAITED_FOR.entered(None):
        device, own = device_of(mesh), text().encode() if group.index == 0 else b""
    length = torch.tensor([len(own)], device=device)
    size = int(transport.broadcast(length, 0, group, mesh).item())
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device) if own else length.new_empty(size).byte()
    agreed = transport.broadcast(mine, 0, group, mesh).cpu()
    return string_at(agreed.data_ptr(), size).decode()


def _from_first(local: Tensor, mesh: Mesh, axis: int) -> Tensor:
    name = mesh.names[axis]
    if are_simulated([local]):
        tensors = by_rank(local, mesh)
        first = {rank: mesh.group([name], mesh.coordinate(rank))[0] for rank in mesh.ranks}
        emit("broadcast", mesh, (name,), next(iter(tensors.values())).nbytes)
        return per_rank(mesh, lambda rank: tensors[first[rank]].clone())
    runtime = runtime_of(mesh)
    if runtime is None or runtime.coordinate is None:
        return local
    flat = local.detach().contiguous().reshape(-1)
    return transport.broadcast(flat, 0, runtime.group((name,)), mesh).view(local.shape)


def _gather_shapes(local: Tensor, layout: Layout, group: Group) -> dict[Coordinate, Shape]:
    if local.ndim > MAX_DIMS:
        raise ShapeError(
            f"from_local takes tensors of at most {MAX_DIMS} dims unless shape= is given, got {local.ndim}"
        )
    mesh = layout.mesh
    header = [_dtypes().index(local.dtype), crc32(str(layout).encode()), local.ndim]
    own_row = torch.tensor([*header, *local.shape, *([0] * (MAX_DIMS - local.ndim))], device=local.device)
    gathered = transport.all_gather(own_row, [own_row.numel()] * mesh.size, group, mesh)
    rows = dict(zip(mesh.coordinates(), gathered.view(mesh.size, -1).tolist(), strict=True))
    _check_same_kind(rows, layout)
    return {at: tuple(row[3 : 3 + row[2]]) for at, row in rows.items()}


@cached("dtypes", 1)
def _dtypes() -> list[torch.dtype]:
    """All dtypes of torch, in the same order in every process."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(dtypes, key=str)


def _check_same_kind(rows: dict[Coordinate, list[int]], layout: Layout) -> None:
    """Refuse local tensors of different dtypes or layouts, by the gathered rows of all ranks."""
    dtypes = {at: _dtypes()[row[0]] for at, row in rows.items()}
    if len(set(dtypes.values())) > 1:
        first = {dtype: at for at, dtype in reversed(dtypes.items())}
        listed = " and ".join(f"{dtype} at {at}" for dtype, at in sorted(first.items(), key=lambda pair: pair[1]))
        raise DtypeError(f"from_local: the ranks give local tensors of {listed}: convert them to one, with .to(dtype)")
    if len({row[1] for row in rows.values()}) > 1:
        raise LayoutError(f"from_local: the ranks give different placements, this one [{layout}]: give the same on all")


def _global_shape_of(shapes: dict[Coordinate, Shape], layout: Layout) -> Shape:
    """The global shape of the tensor with local tensors of these shapes."""
    origin = (0,) * layout.mesh.ndim
    first = shapes[origin]
    if any(len(shape) != len(first) for shape in shapes.values()):
        raise ShapeError(
            f"the local tensors {_shape_list(shapes)} have different numbers of dims: "
            "each rank must give a part of one tensor"
        )
    sizes = []
    for dim in range(len(first)):
        peers = layout.mesh.peers(layout.names_of(dim), origin)
        sizes.append(sum(shapes[peer][dim] for peer in peers))
    _check(shapes, layout, tuple(sizes))
    return tuple(sizes)


def _check(shapes: dict[Coordinate, Shape], layout: Layout, shape: Shape) -> None:
    expected_shapes = {at: layout.local_shape(shape, at) for at in shapes}
    wrong = {at: local_shape for at, local_shape in shapes.items() if local_shape != expected_shapes[at]}
    if wrong:
        expected = _shape_list({at: expected_shapes[at] for at in wrong})
        raise ShapeError(
            f"local tensors {_shape_list(wrong)} cannot be the parts of a tensor of shape {shape} laid out [{layout}], "
            f"whose parts are {expected}: split it as torch.chunk does, or use distribute_tensor"
        )


def _shape_list(shapes: dict[Coordinate, Shape]) -> str:
    shown = [f"{shape} at {at}" for at, shape in list(shapes.items())[:4]]
    return ", ".join(shown) + (", ..." if len(shapes) > 4 else "")


def _even_global_shape(local: Shape, layout: Layout) -> Shape:
    sizes = list(local)
    for i, placement in enumerate(layout.placements):
        if isinstance(placement, Shard):
            sizes[placement.dim] *= layout.mesh.shape[i]
    return tuple(sizes)
