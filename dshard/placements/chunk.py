"""The one function that divides a size into chunks: all sharding in the library uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def chunk(size: int, n: int, i: int) -> range:
    """The indices of chunk `i` when `size` elements are split into `n` chunks, as `torch.chunk` splits.

    The first chunks are the largest; the last may be short or empty.

    >>> [len(chunk(10, 4, i)) for i in range(4)]
    [3, 3, 3, 1]
    >>> [len(chunk(2, 4, i)) for i in range(4)]
    [1, 1, 0, 0]
    """
    step = -(-size // n)
    return range(min(i * step, size), min((i + 1) * step, size))


def chunk_of(held: range, n: int, i: int) -> range:
    """Chunk `i` of a range split into `n` chunks.

    >>> chunk_of(range(10, 20), 4, 3)
    range(19, 20)
    """
    part = chunk(len(held), n, i)
    return held[part.start : part.stop]


def chunk_sizes(sizes: tuple[int, ...], counts: Iterable[int]) -> set[tuple[int, ...]]:
    """The sizes of the chunks of several dims that one rank holds, for all ranks along mesh axes of these `counts`.

    The axes split each of the dims, of these `sizes`, from major to minor.

    >>> sorted(chunk_sizes((10,), (2, 2))), sorted(chunk_sizes((3, 2), (4,)))
    ([(2,), (3,)], [(0, 0), (1, 0), (1, 1)])
    """
    chunks = {sizes}
    for n in counts:
        chunks = {tuple([len(chunk(size, n, i)) for size in each]) for each in chunks for i in _changes(each, n)}
    return chunks


def _changes(sizes: tuple[int, ...], n: int) -> set[int]:
    """The first of `n` places, and those at which the chunk of some dim has another size than before."""
    ends = [size // max(1, -(-size // n)) for size in sizes]
    return {0, *[min(place, n - 1) for end in ends for place in (end, end + 1)]}


def nested_chunk(
    size: int, axes: Iterable[int], sizes: Sequence[int], coordinate: Sequence[int] | Mapping[int, int]
) -> range:
    """The indices of a dim of this size that the rank at `coordinate` holds, sharded by mesh axes from major to minor.

    >>> nested_chunk(10, (1, 0), (2, 3), (1, 0))
    range(2, 4)
    """
    held = range(size)
    for axis in axes:
        held = chunk_of(held, sizes[axis], coordinate[axis])
    return held
