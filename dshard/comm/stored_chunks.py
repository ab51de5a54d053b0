"""Chunks of a distributed tensor in a checkpoint, by the protocol of torch.distributed.checkpoint.

Each rank's local tensor is a box of the global tensor, whatever the layout: nested and uneven shards, any order of mesh
axes; of dims that are sharded in blocks it is a box of each block. A box that several ranks hold has one name, and
torch's planner writes it once. Empty boxes are left out, but a tensor without elements has one empty box, so that its
name is in the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dshard.comm.pieces import view_of
from dshard.comm.runtime import runtime_of
from dshard.errors import LayoutError, MeshError
from dshard.layout import Layout, Region, Shape


def _torch() -> tuple[Any, Any]:
    """torch's modules for plans and metadata of checkpoints."""
    from torch.distributed.checkpoint import metadata, planner  # noqa: PLC0415  # slow: only who saves waits for it

    return planner, metadata


def boxes(layout: Layout, shape: Shape) -> list[tuple[Region, Region]]:
    """The boxes that this rank holds, each with its region of the local tensor: one, one of each block, or none."""
    _check_values(layout)
    runtime = runtime_of(layout.mesh)
    if runtime is None:
        raise MeshError(f"the mesh ({layout.mesh}) has no processes: there is nothing to save or to load")
    if runtime.coordinate is None:
        return []
    if 0 in shape:
        return [(tuple(map(range, shape)),) * 2]
    held, within = (of(shape, runtime.coordinate) for of in (layout.regions, layout.local_regions))
    return [pair for pair in zip(held, within, strict=True) if all(pair[0])]


def _check_values(layout: Layout) -> None:
    if layout.partial_axes():
        raise LayoutError(
            f"a tensor laid out [{layout}] is partial, and a checkpoint holds values: redistribute it to "
            "Shard or Replicate first, or save with dshard.checkpoint.save, which does"
        )


def write_items(name: str, local: Tensor, layout: Layout, shape: Shape) -> list[Any]:
    """The write items of this rank's chunks of a tensor."""
    planner, metadata = _torch()
    properties = metadata.TensorProperties.create_from_tensor(local)
    size = torch.Size(shape)
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(name, chunk.offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in chunks(layout, shape)
    ]


def chunks(layout: Layout, shape: Shape) -> list[Any]:
    """The chunks of a tensor that this rank holds, and reads."""
    _, metadata = _torch()
    return [
        metadata.ChunkStorageMetadata(
            offsets=torch.Size(indices.start for indices in box), sizes=torch.Size(len(indices) for indices in box)
        )
        for box, _ in boxes(layout, shape)
    ]


def part(local: Tensor, layout: Layout, shape: Shape, index: Any) -> Tensor:
    """The elements of this rank's box at `index`, in its local tensor; of no elements one of the global shape."""
    _check_values(layout)
    if 0 in shape:
        return local.new_empty(shape)
    if not layout.blocks:
        return local.detach()
    offset = tuple(index.offset)
    (within,) = [within for box, within in boxes(layout, shape) if tuple(r.start for r in box) == offset]
    return view_of(local.detach(), within)
