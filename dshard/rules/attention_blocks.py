"""Blocks of scores: which of a rank's queries see which of the keys that it holds, as products that need no mask.

Positions are those of single-device torch: with a causal mask query i sees the keys 0 to i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TILE_KEYS = 512
"""Keys of a tile of torch's kernel for CPUs, which computes a tile whole where a query of it sees a key."""


@dataclass(frozen=True, slots=True)
class Block:
    """A range of the local queries and one of the local keys, all of which they see; or, on the `diagonal`, a triangle.

    On the diagonal query i of the range sees the keys 0 to i of the range.
    """

    queries: range
    keys: range
    diagonal: bool = False

    @property
    def pairs(self) -> int:
        """The pairs of a query and a key that it sees."""
        rows, columns = len(self.queries), len(self.keys)
        if not self.diagonal:
            return rows * columns
        square = min(rows, columns)
        return square * (square + 1) // 2 + (rows - square) * columns

    @property
    def tiled_pairs(self) -> int:
        """The pairs that torch's kernel for CPUs computes: those of all tiles in which some pair is seen.

        >>> Block(range(1024), range(1024), diagonal=True).tiled_pairs / 1024**2
        0.75
        """
        rows, columns = len(self.queries), len(self.keys)
        if not self.diagonal:
            return rows * columns
        height = 256 if rows >= 768 else 64 if rows >= 192 else 32
        tiles = (range(first, min(first + height, rows)) for first in range(0, rows, height))
        return sum(len(tile) * min(columns, -(-tile.stop // TILE_KEYS) * TILE_KEYS) for tile in tiles)


def visible_blocks(queries: Sequence[range], keys: Sequence[range], causal: bool) -> tuple[Block, ...]:
    """The blocks of what a rank computes that has the queries at these positions, in order, and keys at those.

    >>> for block in visible_blocks([range(4, 8)], [range(6)], causal=True):
    ...     print(block)
    Block(queries=range(0, 4), keys=range(0, 4), diagonal=False)
    Block(queries=range(0, 4), keys=range(4, 6), diagonal=True)
    """
    if not causal:
        rows, columns = (sum(map(len, ranges)) for ranges in (queries, keys))
        return (Block(range(rows), range(columns)),) if rows and columns else ()
    blocks: list[Block] = []
    row = 0
    for q in queries:
        column = 0
        for k in keys:
            blocks += _causal_blocks(q, k, row, column)
            column += len(k)
        row += len(q)
    return tuple(blocks)


def visible_pairs(queries: Sequence[range], keys: Sequence[range], causal: bool) -> int:
    """The pairs of a query and a key that it sees, of queries and keys at these positions."""
    return sum(block.pairs for block in visible_blocks(queries, keys, causal))


def computed_pairs(blocks: Sequence[Block], backend: str) -> int:
    """The pairs that kernels compute for blocks: on CPUs, where gloo sends, those of whole tiles.

    Tiles of GPUs are so small that they are not counted.
    """
    return sum([block.tiled_pairs if backend == "gloo" else block.pairs for block in blocks])


def _causal_blocks(queries: range, keys: range, row: int, column: int) -> Iterator[Block]:
    """The blocks of two ranges of positions, whose first are at these local indices.

    Keys before all queries are seen by all; from the first query on, a key is seen by the query at its position and
    those after.
    """
    shared = max(queries.start, min(keys.start, queries.stop))
    seen = min(keys.stop, queries.start) - keys.start
    if len(queries) and seen > 0:
        yield Block(range(row, row + len(queries)), range(column, column + seen))
    rest = range(max(keys.start, shared), min(keys.stop, queries.stop))
    if len(rest) and shared < queries.stop:
        first = row + shared - queries.start
        start = column + rest.start - keys.start
        yield Block(range(first, row + len(queries)), range(start, start + len(rest)), diagonal=True)
