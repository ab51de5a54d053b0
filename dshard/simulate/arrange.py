"""Orders of the ranks of a mesh in which neighbours on every axis share hosts."""

from __future__ import annotations

from math import isqrt

from dshard.errors import MeshError
from dshard.validate import as_int


def host_tiles(rows: int, columns: int, per_host: int) -> tuple[int, ...]:
    """The ranks of a mesh (rows, columns) in which each host has a block, as square as the sizes allow.

    With rows of hosts instead, the columns of the mesh would cross as many hosts as there are rows; in blocks, both
    directions cross few (Optimus figure 8).

    >>> host_tiles(4, 4, 4)
    (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)
    """
    for name, number in ("rows", rows), ("columns", columns), ("per_host", per_host):
        as_int(number, name, MeshError, least=1)
    high = next((h for h in range(isqrt(per_host), 0, -1) if _tiles(rows, columns, h, per_host)), None)
    if high is None:
        raise MeshError(
            f"hosts of {per_host} ranks do not tile a mesh of ({rows}, {columns}): no block of that size does"
        )
    wide = per_host // high

    def rank(row: int, column: int) -> int:
        host = (row // high) * (columns // wide) + column // wide
        return host * per_host + (row % high) * wide + column % wide

    return tuple(rank(row, column) for row in range(rows) for column in range(columns))


def _tiles(rows: int, columns: int, high: int, per_host: int) -> bool:
    return per_host % high == 0 and rows % high == 0 and columns % (per_host // high) == 0
