"""A lower bound on the communication of a distributed matmul."""

from __future__ import annotations


def matmul_lower_bound(m: int, k: int, n: int, ranks: int) -> float:
    """Elements that some rank must receive to multiply m x k by k x n on `ranks` ranks, each tensor stored once.

    The memory-independent bound of Al Daas, Ballard, Grigori, Kumar and Rouse (2022), whose constants are tight: what a
    rank must touch less what it holds. Which of three cases applies depends on how many ranks there are for the shape.

    >>> round(matmul_lower_bound(4096, 4096, 4096, 8) / 2**20, 6)
    6.0
    """
    small, middle, large = sorted((m, k, n))
    own = (m * k + k * n + m * n) / ranks
    if ranks * middle <= large:
        touched = middle * small + (large * small + large * middle) / ranks
    elif ranks * small**2 <= large * middle:
        touched = 2 * (large * middle * small**2 / ranks) ** 0.5 + large * middle / ranks
    else:
        touched = 3 * (m * n * k / ranks) ** (2 / 3)
    return max(0.0, touched - own)
