"""Placements: how a tensor is laid out on each axis of a mesh.

Design: docs/design/0001-values-below-processes-above.md
"""

from dshard.placements.chunk import chunk, chunk_of, chunk_sizes, nested_chunk
from dshard.placements.torch_like import from_torch, own_placement
from dshard.placements.types import (
    REDUCE_OPS,
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Shard,
    cotangent,
    format_placements,
    parse_placement,
    parse_placements,
)
