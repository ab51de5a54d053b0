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

__all__ = [
    "REDUCE_OPS",
    "Partial",
    "Placement",
    "ReduceOp",
    "Replicate",
    "Shard",
    "chunk",
    "chunk_of",
    "chunk_sizes",
    "cotangent",
    "format_placements",
    "from_torch",
    "nested_chunk",
    "own_placement",
    "parse_placement",
    "parse_placements",
]
