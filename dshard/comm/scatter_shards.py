"""Local tensors of a global tensor: scattered from one rank, or sliced on ranks that all have the tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from dshard.comm import transport
from dshard.comm.even_parts import take_as_even
from dshard.comm.events import run_pending
from dshard.comm.pieces import view_of
from dshard.comm.rank_tensors import are_simulated, has_only_shape, is_absent, of_rank, per_rank
from dshard.comm.runtime import own_runtime, runtime_of, simulated_ranks, taking_part
from dshard.comm.traced_collectives import traced
from dshard.errors import CompileError, MeshError
from dshard.layout import Layout, Region
from dshard.mesh import Coordinate, Mesh
from dshard.redistribute.blocks import unflattened_shape
from dshard.torch_private import TracingContext


def local_shard(x: Tensor, region: Region, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """A dense copy of the elements of `x` within `region`."""
    return view_of(x, region).clone(memory_format=memory_format)


def local_part(
    x: Tensor, layout: Layout, at: Coordinate, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """A dense copy of the elements of the global tensor `x` that the rank at `at` holds under `layout`."""
    shape, cuts = tuple(x.shape), layout.blocks
    if not cuts:
        return local_shard(x, layout.region(shape, at), memory_format)
    layout.check(shape)
    whole = unflattened_shape(shape, cuts)
    part = local_shard(x.reshape(whole), layout.unflattened(cuts).region(whole, at))
    return part.view(layout.local_shape(shape, at))


def scatter_shards(x: Tensor, layout: Layout, source: int | None) -> Tensor:
    """This rank's local tensor, under `layout`, of the global tensor `x`.

    The rank number `source` of the mesh sends each rank its local tensor; with None each rank slices its own `x`, and
    nothing is sent. A slice has the memory order of `x`; what is sent is contiguous, as ranks may differ in that order.
    A rank outside the mesh gets a tensor without data, as all do without processes.
    """
    mesh = layout.mesh
    if source is not None and (not isinstance(source, int) or isinstance(source, bool) or not 0 <= source < mesh.size):
        raise MeshError(
            f"src_data_rank {source!r}: the mesh ({mesh}) has ranks number 0 to {mesh.size - 1}; "
            "or give None to send nothing"
        )

    def shard(at: Coordinate, device: torch.device) -> Tensor:
        if device.type == "meta":
            return x.new_empty(layout.local_shape(x.shape, at), device=device)
        if not is_simulated:
            return on_device_of(mesh, local_part(x, layout, at, memory_format))
        tensor = of_rank(mesh.rank(at) if source is None else mesh.ranks[source], x)
        return local_part(tensor, layout, at, memory_format)

    is_simulated = are_simulated([x])
    memory_format = torch.preserve_format if source is None else torch.contiguous_format
    with torch.no_grad():
        if source is None or not _meets(x, layout, source):
            return local_of(layout, shard)
        if not traced(x):
            take_as_even(tuple(x.shape), x.dtype, layout, "distribute_tensor")
            if x.numel():
                return _scatter(on_device_of(mesh, x), layout, source)
            run_pending()  # with nothing to send, too, a rank compares what all give
            return local_of(layout, shard)
        if TracingContext.try_get() is None:  # in FakeTensorMode: any rank's part looks like this
            return local_of(layout, shard)
        raise CompileError(
            f"distribute_tensor from rank {source} within a compiled region: a graph sends no whole tensors; "
            "pass src_data_rank=None, so that each rank cuts its own part, or distribute it before"
        )


def scatters(x: Tensor, layout: Layout, source: int | None) -> bool:
    """Whether `scatter_shards` sends anything for these arguments: a broadcast of replicas, or a scatter."""
    return _meets(x, layout, source) and x.numel() > 0


def _meets(x: Tensor, layout: Layout, source: int | None) -> bool:
    """Whether the ranks of the mesh meet in `scatter_shards`, if there is anything to send."""
    if source is None or taking_part(layout.mesh) is None:
        return False
    return layout.mesh.size > 1 and not has_only_shape(x)


def _scatter(x: Tensor, layout: Layout, source: int) -> Tensor:
    mesh = layout.mesh
    group = own_runtime(mesh)[0].group(mesh.names)
    if not layout.sharded_dims():  # pieces would be a copy of the tensor for each rank
        return transport.broadcast(x.reshape(-1), source, group, mesh).view(x.shape)
    shapes = [layout.local_shape(x.shape, peer) for peer in mesh.coordinates()]
    flat = x.new_empty(0)
    if group.index == source:
        flat = torch.cat([local_part(x, layout, peer).reshape(-1) for peer in mesh.coordinates()])
    return transport.scatter(flat, [prod(shape) for shape in shapes], source, group, mesh).view(shapes[group.index])


def local_of(layout: Layout, make: Callable[[Coordinate, torch.device], Tensor]) -> Tensor:
    """The tensor `make(coordinate, device)` of this rank, or of all ranks if they are simulated.

    Without processes, and on a rank outside the mesh, the first rank's on the meta device.
    """
    mesh = layout.mesh
    runtime = runtime_of(mesh)
    if simulated_ranks() is not None:
        return per_rank(mesh, lambda rank: make(mesh.coordinate(rank), device_of(mesh)))
    if runtime is None or runtime.coordinate is None:
        return make((0,) * mesh.ndim, torch.device("meta"))
    return make(runtime.coordinate, device_of(mesh))


def device_of_result(local: Tensor, mesh: Mesh) -> torch.device:
    """The device of a tensor with the computed local tensor `local`: the mesh's device if `local` has no data."""
    return device_of(mesh) if is_absent(local, mesh) else local.device


def on_device_of(mesh: Mesh, x: Tensor) -> Tensor:
    """A tensor on the type of device of the mesh, as torch has it: `x`, or a copy; one without data stays as it is."""
    is_there = x.device.type in (mesh.device_type, "meta") or taking_part(mesh) is None
    return x if is_there else x.to(device_of(mesh))


def device_of(mesh: Mesh) -> torch.device:
    """The device on which this process computes for `mesh`."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
