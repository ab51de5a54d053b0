"""The fewest bytes that a rank receives in a block, forward, over all layouts of its tensors and foldings of the ranks.

Each tensor is stored so many times between operators: activations in a layout that divides among the ranks, weights in
any, so that they are gathered in closed form. Between them each of the four products has a loop for each mesh axis.
Moves have the bytes of their plans, bounded from below until the least choice asks for them, as in `dshard.planning`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.papers.traced import Sizes
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.planning.eliminate import NamedTable, elimination_order, solve
from dshard.planning.move_prices import MovePrices
from dshard.topology import BYTES

ITEMSIZE, STATISTICS = 2, 8
"""Bytes of an element, and of the two numbers in single precision that a norm adds for each token."""
LARGEST = 2**25
"""The most entries of a table that is summed."""
HOMES: dict[str, Placement] = {"b": Shard(0), "s": Shard(1), "f": Shard(2), "r": Replicate()}
READ: dict[str, Placement] = {"b": Shard(0), "s": Shard(1), "n": Replicate(), "k": Shard(2)}
MADE: dict[str, Placement] = {"b": Shard(0), "s": Shard(1), "n": Shard(2), "k": Partial()}
"""What a letter of a layout, or a loop of a product, is for an activation `[sequence, token, feature]`."""


class Best(NamedTuple):
    """Bytes that a rank receives, the mesh, and the layouts and loops of the block in their order."""

    nbytes: float
    mesh: tuple[int, ...]
    choice: tuple[str, ...]


def foldings(ranks: int, axes: int, most: int = 0) -> Iterator[tuple[int, ...]]:
    """The meshes of at most so many axes, of two ranks or more, the largest first; their order is of no account.

    >>> list(foldings(16, 3))
    [(16,), (8, 2), (4, 4), (4, 2, 2)]
    """
    for first in range(min(ranks, most or ranks), 1, -1):
        if first == ranks:
            yield (ranks,)
        elif ranks % first == 0 and axes > 1:
            yield from ((first, *rest) for rest in foldings(ranks // first, axes - 1, first))


def planned(block: Sizes, batch: int, ranks: int, *, copies: int = 1, axes: int = 4) -> Best:
    """The plan of the fewest bytes, of tensors that are stored at most `copies` times."""
    best = Best(inf, (), ())
    for shape in foldings(ranks, axes):
        best = min(best, _Search(block, batch, Mesh(shape), copies).run(best.nbytes), key=lambda each: each.nbytes)
    return best


class _Search:
    """The search on one mesh: what stands between products, their loops, and the tables of what moves."""

    def __init__(self, block: Sizes, batch: int, mesh: Mesh, copies: int) -> None:
        self.mesh, self.copies, self.rows = mesh, copies, (batch, block.tokens)
        hidden = block.hidden
        stream = self._letters("bsfr", {"b": batch, "s": block.tokens, "f": hidden, "r": copies})
        heads = self._letters("bfr", {"b": batch, "f": block.heads, "r": copies})
        inner = self._letters("bsfr", {"b": batch, "s": block.tokens, "f": 4 * hidden, "r": copies})
        self.domains, self.factors = [stream, heads, inner], [NamedTable("norm", (0,))]
        self.tables: dict[object, Tensor] = {"norm": torch.tensor([2 * self._norm(home) for home in stream])}
        self.prices: dict[int, MovePrices] = {}
        self.moves: dict[tuple[int, int], tuple[MovePrices, Tensor, Tensor]] = {}
        for ends, features in zip(((0, 1), (1, 0), (0, 2), (2, 0)), block.products, strict=True):
            self._add_product(*ends, *features)

    def _letters(self, letters: str, most: dict[str, int]) -> list[str]:
        """All choices of a letter for each axis, with at most so many ranks to each letter."""
        sizes = self.mesh.shape
        own = ("".join(each) for each in product(letters, repeat=len(sizes)))
        return [each for each in own if all(self._ways(each, letter) <= n for letter, n in most.items())]

    def _ways(self, letters: str, letter: str) -> int:
        return prod(size for size, own in zip(self.mesh.shape, letters, strict=True) if own == letter)

    def _norm(self, home: str) -> float:
        """Bytes of the sums of a norm's statistics over the ranks that share features."""
        ways = self._ways(home, "f")
        rows = prod(self.rows) / self._ways(home, "b") / self._ways(home, "s")
        return 2 * (ways - 1) / ways * rows * STATISTICS

    def _add_product(self, source: int, target: int, k: int, n: int) -> None:
        """Add a product's loops, the moves of its operand and its result, and the gathering of its weight."""
        loops = self._letters("bsnk", dict(zip("bsnk", (*self.rows, n, k), strict=True)))
        number = len(self.domains)
        self.domains.append(loops)
        stored = self.copies * n * k / self.mesh.size
        gathered = [max(0.0, n * k / self._ways(own, "n") / self._ways(own, "k") - stored) for own in loops]
        self.tables["weight", number] = ITEMSIZE * torch.tensor(gathered, dtype=torch.float64)
        self.factors.append(NamedTable(("weight", number), (number,)))
        self._add_moves(source, number, k, HOMES, READ)
        self._add_moves(number, target, n, MADE, HOMES)

    def _add_moves(
        self, source: int, target: int, features: int, made: dict[str, Placement], read: dict[str, Placement]
    ) -> None:
        if features not in self.prices:
            self.prices[features] = MovePrices(self.mesh, BYTES, (*self.rows, features), ITEMSIZE)
        prices = self.prices[features]
        numbers = [
            prices.add([Layout(self.mesh, tuple(letters[letter] for letter in own)) for own in self.domains[domain]])
            for domain, letters in ((source, made), (target, read))
        ]
        prices.ask(*numbers)
        prices.bound()
        self.moves[source, target] = prices, *numbers
        self.factors.append(NamedTable((source, target), (source, target)))

    def run(self, known: float) -> Best:
        """The least choice, with exact bytes; whatever was found first, if none is below those that are known."""
        order = elimination_order([len(domain) for domain in self.domains], self.factors, LARGEST)
        assert order.is_exact
        while True:
            tables = {name: prices.seconds[a][:, b] for name, (prices, a, b) in self.moves.items()}
            least = solve(order, self.tables | tables)
            at = least.choice
            new = [p.price(int(a[at[i]]), int(b[at[j]])) for (i, j), (p, a, b) in self.moves.items()]
            if least.bound >= known or not any(new):
                letters = tuple(domain[i] for domain, i in zip(self.domains, at, strict=True))
                return Best(max(least.bound, known) if any(new) else least.bound, self.mesh.shape, letters)
