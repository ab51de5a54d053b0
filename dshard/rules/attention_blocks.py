"""Blocks of scores: the ranges of a rank's queries and keys that see each other, as matmuls that need no mask.

Positions are those of single-device torch: with a causal mask query i sees the keys 0 to i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

TILE_KEYS = 512
"""Keys of a tile of torch's kernel for CPUs, which computes all of a tile in which some query sees a key."""

Join: TypeAlias = Literal["taken", "copied", "merged"]
"""How a block's result joins the result of the blocks before: taken as the result, or copied or merged into it."""
FILLING, COPYING, MERGING = 2, 2, 5
"""Operators that fill a result before the first copy to it, copy a block's, and merge one: with the log-sum-exps."""
FILLED, COPIED, MERGED, WIDENED = 1.0, 2.0, 3.0, 1.5
"""How often a fill, a copy, a merge, and a conversion to single precision read or write an element of the rows."""
ADDED = 3.0
"""How often the one operator that adds a gradient of a block to the sum reads or writes an element."""
PREPARING, PRODUCT = 2, 2
"""Operators before the blocks of a backward pass, which fills a sum for each gradient: one pair finds the rows without
weights, one multiplies the result and its gradient."""
STANDING_IN = 11
"""Operators that make a substitute for the result in a backward pass which does not hold it."""
HELD = "held"
"""In place of a backend: blocks are computed by single operators, which hold their scores in memory."""
HELD_OPERATORS, HELD_PASSES = 12, 12.0
"""Operators of a block whose scores are held in memory, and how often they read or write each of its scores."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The keys that queries may see: for each block of `block` queries a range, as first key and end."""

    block: int
    keys: tuple[tuple[int, int], ...]

    def of(self, queries: range) -> range:
        """The keys from the first to the last that some of these queries may see."""
        blocks = self.keys[queries.start // self.block : -(-queries.stop // self.block)] if queries else ()
        seen = [(first, stop) for first, stop in blocks if first < stop]
        return range(min(first for first, _ in seen), max(stop for _, stop in seen)) if seen else range(0)

    def part(self, queries: range, keys: range) -> tuple[range, range]:
        """The queries from the first to the last that may see some of these keys, and the keys that they may see.

        >>> Reach(2, ((0, 2), (0, 4), (2, 6))).part(range(1, 6), range(1, 2))
        (range(1, 4), range(1, 2))
        """
        first, end = queries.start // self.block, -(-queries.stop // self.block) if queries else 0
        seeing = [i for i in range(first, end) if max(self.keys[i][0], keys.start) < min(self.keys[i][1], keys.stop)]
        if not seeing:
            return range(0), range(0)
        rows = range(max(queries.start, seeing[0] * self.block), min(queries.stop, (seeing[-1] + 1) * self.block))
        seen = self.of(rows)
        return rows, range(max(seen.start, keys.start), min(seen.stop, keys.stop))


@dataclass(frozen=True, slots=True)
class Block:
    """A range of local queries that see all of a range of local keys; or, on the `diagonal`, a triangle of them.

    On the diagonal query i of the range sees the keys 0 to i of the range.
    """

    queries: range
    keys: range
    diagonal: bool = False

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that it sees."""
        rows, columns = len(self.queries), len(self.keys)
        if not self.diagonal:
            return rows * columns
        square = min(rows, columns)
        return square * (square + 1) // 2 + (rows - square) * columns

    @property
    def tiled_pairs(self) -> int:
        """The number of pairs that torch's kernel for CPUs computes: all of each tile in which some pair is seen.

        >>> Block(range(1024), range(1024), diagonal=True).tiled_pairs / 1024**2
        0.75
        """
        rows, columns = len(self.queries), len(self.keys)
        if not self.diagonal:
            return rows * columns
        height = 256 if rows >= 768 else 64 if rows >= 192 else 32
        tiles = (range(first, min(first + height, rows)) for first in range(0, rows, height))
        return sum(len(tile) * min(columns, -(-tile.stop // TILE_KEYS) * TILE_KEYS) for tile in tiles)


def visible_blocks(
    queries: Sequence[range], keys: Sequence[range], causal: bool, reach: Reach | None = None
) -> tuple[Block, ...]:
    """The blocks that a rank with queries and keys at these positions, in order, computes.

    Without a causal mask `reach` may say which keys queries see.

    >>> for block in visible_blocks([range(4, 8)], [range(6)], causal=True):
    ...     print(block)
    Block(queries=range(0, 4), keys=range(0, 4), diagonal=False)
    Block(queries=range(0, 4), keys=range(4, 6), diagonal=True)
    """
    if not causal and reach is None:
        rows, columns = (sum(map(len, ranges)) for ranges in (queries, keys))
        return (Block(range(rows), range(columns)),) if rows and columns else ()
    blocks: list[Block] = []
    row = 0
    for q in queries:
        column = 0
        for k in keys:
            blocks += _causal_blocks(q, k, row, column) if reach is None else _reached_blocks(q, k, row, column, reach)
            column += len(k)
        row += len(q)
    joined: list[Block] = []
    for block in blocks:
        union = next(((i, both) for i, each in enumerate(joined) if (both := _union(each, block))), None)
        if union is None:
            joined.append(block)
        else:
            joined[union[0]] = union[1]
    return tuple(joined)


def _union(a: Block, b: Block) -> Block | None:
    """Two adjacent blocks as one, which takes one kernel and is merged once; None if they are not adjacent."""
    if a.diagonal or b.diagonal:
        return None
    if a.queries == b.queries and a.keys.stop == b.keys.start:
        return Block(a.queries, range(a.keys.start, b.keys.stop))
    if a.keys == b.keys and a.queries.stop == b.queries.start:
        return Block(range(a.queries.start, b.queries.stop), a.keys)
    return None


def square_diagonals(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks, with queries of a diagonal that come after its last key, and see all keys, as blocks of their own.

    Of causal masks with more queries than keys torch's kernels for GPUs have two meanings, of square ones one.

    >>> square_diagonals([Block(range(5), range(3), diagonal=True)])[1]
    Block(queries=range(3, 5), keys=range(0, 3), diagonal=False)
    """
    parts: list[Block] = []
    for block in blocks:
        square, rest = block.queries[: len(block.keys)], block.queries[len(block.keys) :]
        is_cut = block.diagonal and rest
        parts += (Block(square, block.keys, True), Block(rest, block.keys)) if is_cut else (block,)
    return tuple(parts)


def computed_pairs(blocks: Sequence[Block], backend: str) -> int:
    """The number of pairs that kernels compute for blocks: on CPUs, where gloo sends, all pairs of their tiles.

    Tiles of GPUs are so small that they are not counted. For the backend "held" it is all pairs of the blocks.
    """
    if backend == HELD:
        return sum([len(block.queries) * len(block.keys) for block in blocks])
    return sum([block.tiled_pairs if backend == "gloo" else block.pairs for block in blocks])


def join_of(block: Block, reached: Sequence[range], rows: int) -> Join:
    """How a block joins a result of `rows` rows, of which earlier blocks have written the ranges `reached`.

    >>> join_of(Block(range(2, 4), range(2)), [range(2)], 4), join_of(Block(range(4), range(2)), [range(2)], 4)
    ('copied', 'merged')
    """
    if any(max(each.start, block.queries.start) < min(each.stop, block.queries.stop) for each in reached):
        return "merged"
    return "copied" if reached or len(block.queries) < rows else "taken"


def reach(reached: list[range], queries: range) -> None:
    """Add a range of queries to the written ranges `reached`, unless it lies within one of them."""
    if not any(each.start <= queries.start and queries.stop <= each.stop for each in reached):
        reached.append(queries)


class Work(NamedTuple):
    """A rank's work for a number of `blocks`: computed pairs, operators, and rows touched beside the kernels.

    `operators` include the kernels. `rows` are rows of the result, in single precision at least. `queries` and `keys`
    are summed over the blocks.
    """

    pairs: int
    operators: int
    rows: float
    blocks: int
    queries: int
    keys: int


def work_of(steps: Sequence[Sequence[Block]], rows: int, backend: str, narrow: bool) -> tuple[Work, ...]:
    """The work of the blocks of each step, which join one result of `rows` rows, `narrow` in half precision.

    >>> work_of([visible_blocks([range(4, 8)], [range(6)], True)], 4, "nccl", False)
    (Work(pairs=23, operators=13, rows=12.0, blocks=3, queries=8, keys=8),)
    """
    reached: list[range] = []
    works: list[Work] = []
    is_narrow = narrow  # until the result has been converted
    for blocks in steps if backend in ("gloo", HELD) else map(square_diagonals, steps):
        operators, touched = len(blocks), 0.0
        for block in blocks:
            join, n = join_of(block, reached, rows), len(block.queries)
            if join == "copied":
                operators += COPYING + (0 if reached else FILLING)
                touched += COPIED * n + (0 if reached else FILLED * rows)
                is_narrow = False
            elif join == "merged":
                operators += MERGING + narrow + is_narrow
                touched += MERGED * n + WIDENED * (narrow * n + is_narrow * rows)
                is_narrow = False
            reach(reached, block.queries)
        queries, keys = (sum(map(len, each)) for each in ([b.queries for b in blocks], [b.keys for b in blocks]))
        works.append(Work(computed_pairs(blocks, backend), operators, touched, len(blocks), queries, keys))
    return tuple(works)


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


def _reached_blocks(queries: range, keys: range, row: int, column: int, reach: Reach) -> Iterator[Block]:
    """The block of two ranges of positions, whose first are at these local indices, that queries reach."""
    rows, columns = reach.part(queries, keys)
    if rows and columns:
        row, column = row + rows.start - queries.start, column + columns.start - keys.start
        yield Block(range(row, row + len(rows)), range(column, column + len(columns)))
