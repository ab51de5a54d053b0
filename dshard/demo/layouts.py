"""Strategies that lay out the model, as data: a new strategy is a new row of the table below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import gcd, prod

from dshard.errors import DShardError
from dshard.mesh import Mesh
from dshard.placements import Placement, Replicate, Shard

Placements = tuple[Placement, ...]
REST = 0  # as the size of a mesh axis: all ranks that the other axes leave over


class UnknownStrategy(DShardError, ValueError):
    """Raised for a name that is in no row of the table of strategies."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy: a mesh, and the placements of the batch and of each parameter on it.

    `mesh` gives the size of each named axis; `parameters` the placements by a pattern of the parameter's name. The
    first pattern that matches counts; a parameter that matches none is replicated. No mesh: one device, plain tensors.
    `matmul` is the strategy of all products, by its name; without one each product takes its cheapest. On fewer ranks
    than `least` the mesh is that of another row, so this one is left out unless it is asked for.
    """

    name: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    inputs: Placements = ()
    parameters: Mapping[str, Placements] = field(default_factory=dict)
    matmul: str | None = None
    least: int = 1

    def on(self, ranks: int) -> Mesh | None:
        """The mesh over `ranks` ranks; an axis shrinks to a size that divides them. None for one device.

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

    def placements(self, parameter: str) -> Placements:
        """The placements of the parameter of this name.

        >>> find("megatron").placements("blocks.0.up.weight")
        (Shard(dim=0),)
        """
        for pattern, placements in self.parameters.items():
            if fnmatchcase(parameter, pattern):
                return placements
        return (Replicate(),) * len(self.mesh)


def names(ranks: int | None = None) -> list[str]:
    """The names of all strategies, or of those worth training on so many ranks, in the order of the table.

    >>> sorted(set(names()) - set(names(ranks=4)))
    ['tesseract']
    """
    return [strategy.name for strategy in STRATEGIES if ranks is None or strategy.least <= ranks]


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

# Optimus: activations in blocks, the batch over the rows and the hidden dim over the columns; weights in blocks, too.
SUMMA: dict[str, Placements] = {
    "*norm*": (Replicate(), Shard(0)),
    "*position": (Replicate(), Shard(1)),
    "*.weight": (Shard(1), Shard(0)),
    "*.bias": (Replicate(), Shard(0)),
}

# ATP: activations whole on d1, their hidden dim over d2. `qkv` and `up` are column-first, `out` and `down` row-first:
# what the first of a pair leaves is what the second takes, so nothing is moved between them.
ATP: dict[str, Placements] = {
    "*norm*": (Replicate(), Shard(0)),
    "*position": (Replicate(), Shard(1)),
    "embed.*": (Replicate(), Shard(0)),
    "*.qkv.weight": (Shard(0), Shard(1)),
    "*.qkv.bias": (Shard(0), Replicate()),
    "*.out.weight": (Shard(1), Shard(0)),
    "*.out.bias": (Replicate(), Shard(0)),
    "*.up.weight": (Shard(0), Shard(1)),
    "*.up.bias": (Shard(0), Replicate()),
    "*.down.weight": (Shard(1), Shard(0)),
    "*.down.bias": (Replicate(), Shard(0)),
    "head.weight": (Replicate(), Shard(1)),
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
    Strategy(
        "summa",
        mesh={"r": 2, "c": REST},
        inputs=(Shard(0), Replicate()),
        parameters=SUMMA,
        matmul="summa",
    ),
    Strategy(
        "atp",
        mesh={"d1": REST, "d2": 2},
        inputs=(Replicate(), Replicate()),
        parameters=ATP,
    ),
    Strategy(
        "tesseract",
        mesh={"d": REST, "r": 2, "c": 2},
        inputs=(Shard(0), Shard(0), Replicate()),
        parameters={pattern: (Replicate(), *placements) for pattern, placements in SUMMA.items()},
        matmul="tesseract",
        least=8,
    ),
)
