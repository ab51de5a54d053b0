"""Ways to lay out the model, as data: a strategy is placements, and a new strategy is a new row of the table below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import gcd, prod

from dshard.errors import DShardError
from dshard.mesh import Mesh
from dshard.placements import Placement, Replicate, Shard

Placements = tuple[Placement, ...]
REST = 0  # as the size of a mesh axis: all ranks that the axes before it left over


class UnknownStrategy(DShardError, ValueError):
    """A name that is in no row of the table."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A mesh, where the batch lives on it, and where each parameter does.

    `mesh` gives the size of each named axis; `parameters` the placements by a pattern of the parameter's name. The
    first pattern that matches counts; a parameter that matches none is replicated. No mesh: one device, plain tensors.
    """

    name: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    inputs: Placements = ()
    parameters: Mapping[str, Placements] = field(default_factory=dict)

    def on(self, ranks: int) -> Mesh | None:
        """The mesh over `ranks` ranks; an axis shrinks to a size that divides them. None for one device.

        >>> str(find("data x tensor").on(8)), str(find("data x tensor").on(3))
        ('dp=2 tp=4', 'dp=1 tp=3')
        """
        if not self.mesh:
            return None
        sizes: list[int] = []
        for size in self.mesh.values():
            left = ranks // prod(sizes)
            sizes.append(left if size == REST else gcd(size, left))
        return Mesh(tuple(sizes), tuple(self.mesh))

    def placements(self, parameter: str) -> Placements:
        """Where the parameter of this name lives.

        >>> find("megatron").placements("blocks.0.up.weight")
        (Shard(dim=0),)
        """
        for pattern, placements in self.parameters.items():
            if fnmatchcase(parameter, pattern):
                return placements
        return (Replicate(),) * len(self.mesh)


def names() -> list[str]:
    """The names of all strategies, in the order of the table."""
    return [strategy.name for strategy in STRATEGIES]


def find(name: str) -> Strategy:
    """The strategy of this name; hyphens stand for spaces, which shells dislike.

    Raises:
        UnknownStrategy: there is none.
    """
    for strategy in STRATEGIES:
        if strategy.name.replace(" ", "-") == name.replace(" ", "-"):
            return strategy
    raise UnknownStrategy(f"no strategy is called {name!r}; there are {', '.join(names())}")


# A linear stores its weight as [out, in]: Shard(0) splits what it computes, Shard(1) what it sums over.
# `qkv` and `up` are split by columns, `out` and `down` by rows, so that each pair needs one reduction.
MEGATRON: dict[str, Placement] = {
    "*.qkv.*": Shard(0),
    "*.out.weight": Shard(1),
    "*.up.*": Shard(0),
    "*.down.weight": Shard(1),
}

SINGLE = Strategy("single")

STRATEGIES: tuple[Strategy, ...] = (
    SINGLE,
    Strategy(
        "data",
        mesh={"dp": REST},
        inputs=(Shard(0),),
    ),
    Strategy(
        "megatron",
        mesh={"tp": REST},
        inputs=(Replicate(),),
        parameters={pattern: (placement,) for pattern, placement in MEGATRON.items()},
    ),
    Strategy(
        "data x tensor",
        mesh={"dp": 2, "tp": REST},
        inputs=(Shard(0), Replicate()),
        parameters={pattern: (Replicate(), placement) for pattern, placement in MEGATRON.items()},
    ),
)
