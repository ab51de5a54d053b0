"""The strategies of the demo: a name, a mesh for any number of ranks, and a plan of `parallelize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, prod

from dshard.errors import DShardError
from dshard.mesh import Mesh
from dshard.parallel.strategies import axes_of
from dshard.tools.demo.vit import HEADS

REST = 0  # as the size of a mesh axis: all ranks that the other axes leave over


class UnknownStrategy(DShardError, ValueError):
    """Raised for a name that no strategy of the demo has."""


@dataclass(frozen=True, slots=True)
class DemoLayout:
    """A strategy of `dshard.parallelize`, and a mesh for it.

    `mesh` gives the size of each named axis; without a mesh it is one device, with plain tensors. On fewer ranks than
    `least` the mesh is that of another row, so this one is left out unless it is asked for.
    """

    name: str
    plan: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    least: int = 1

    def on(self, ranks: int) -> Mesh | None:
        """Return the mesh over `ranks` ranks, on which axes shrink to sizes that divide them; None for one device.

        >>> str(find("data x tensor").on(8)), str(find("data x tensor").on(3)), str(find("tesseract").on(8))
        ('dp=2 tp=4', 'dp=1 tp=3', 'd=2 r=2 c=2')
        """
        if not self.mesh:
            return None
        sizes: list[int] = []
        for size in self.mesh.values():
            sizes.append(1 if size == REST else gcd(size, ranks // prod(sizes)))
        left = ranks // prod(sizes)
        sizes = [left if size == REST else fixed for size, fixed in zip(self.mesh.values(), sizes, strict=True)]
        return Mesh(tuple(sizes), tuple(self.mesh))

    def suits(self, ranks: int) -> bool:
        """Whether the strategy is worth training on `ranks` ranks: no other row has its mesh, no rank lacks a head."""
        mesh = self.on(ranks)
        if mesh is None:
            return True
        axes = zip(axes_of(self.plan, mesh), mesh.shape, strict=True)
        return self.least <= ranks and prod(size for axis, size in axes if axis.weights in ("inner", "made")) <= HEADS


def names(ranks: int | None = None) -> list[str]:
    """Return the names of all strategies, or of those worth training on `ranks` ranks, in the table's order.

    >>> sorted(set(names()) - set(names(ranks=4)))
    ['tesseract']
    """
    return [strategy.name for strategy in STRATEGIES if ranks is None or strategy.suits(ranks)]


def find(name: str) -> DemoLayout:
    """Return the strategy called `name`, in which hyphens may stand for spaces."""
    for strategy in STRATEGIES:
        if strategy.name.replace(" ", "-") == name.replace(" ", "-"):
            return strategy
    raise UnknownStrategy(f"no strategy is called {name!r}; there are {', '.join(names())}")


SINGLE = DemoLayout("single")

STRATEGIES: tuple[DemoLayout, ...] = (
    SINGLE,
    DemoLayout("data", "data", {"dp": REST}),
    DemoLayout("megatron", "megatron", {"tp": REST}),
    DemoLayout("data x tensor", "data x megatron", {"dp": 2, "tp": REST}),
    DemoLayout("summa", "optimus", {"r": 2, "c": REST}),
    DemoLayout("atp", "atp", {"d1": REST, "d2": 2}),
    DemoLayout("tesseract", "tesseract", {"d": REST, "r": 2, "c": 2}, least=8),
)
