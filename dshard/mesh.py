"""Named axes over ranks, as a pure value: it owns no process and no process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

from dshard.errors import MeshError

Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """Ranks arranged along named axes, the last axis varying fastest.

    A plan can be made for any mesh, such as 4,096 ranks on a laptop. `ranks` are the global ranks in row-major order;
    by default 0, 1, 2, ... `device_type` says what the ranks compute on.

    >>> mesh = Mesh((2, 4), ("dp", "tp"))
    >>> mesh.size, mesh.axis("tp"), mesh.coordinate(6)
    (8, 1, (1, 2))
    >>> str(mesh)
    'dp=2 tp=4'

    Raises:
        MeshError: sizes, names and ranks that do not fit together.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = field(default=(), repr=False)
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        _set = object.__setattr__
        _set(self, "shape", tuple(self.shape))
        _check_shape(self.shape)
        _set(self, "names", tuple(self.names) or tuple(f"d{i}" for i in range(len(self.shape))))
        _set(self, "ranks", tuple(self.ranks) or tuple(range(prod(self.shape))))
        _check(self)
        _set(self, "_hash", hash((self.shape, self.names, self.ranks, self.device_type)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]  # set once, above: meshes are keys of warm caches

    def __reduce__(self) -> tuple[type[Mesh], tuple[object, ...]]:
        return Mesh, (self.shape, self.names, self.ranks, self.device_type)  # hashes differ between processes

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def axis(self, name: str) -> int:
        """The index of the axis called `name`.

        Raises:
            MeshError: there is no such axis.
        """
        if name not in self.names:
            raise MeshError(f"the mesh ({self}) has no axis {name!r}; its axes are {', '.join(self.names)}")
        return self.names.index(name)

    def coordinate(self, rank: int) -> Coordinate:
        """Where the global rank `rank` sits, one index for each axis.

        Raises:
            MeshError: the rank is not in the mesh.
        """
        if rank not in self._places:
            raise MeshError(f"rank {rank} is not in the mesh ({self}), whose ranks are {_some(self.ranks)}")
        return self._places[rank]

    def rank(self, coordinate: Sequence[int]) -> int:
        """The global rank at `coordinate`."""
        index = 0
        for size, i in zip(self.shape, coordinate, strict=True):
            index = index * size + i
        return self.ranks[index]

    def coordinates(self) -> Iterator[Coordinate]:
        """All coordinates, in the order of `ranks`."""
        return product(*map(range, self.shape))

    def group(self, axes: Sequence[str], coordinate: Coordinate) -> tuple[int, ...]:
        """The global ranks that differ from `coordinate` along `axes` alone, the first of `axes` varying slowest.

        >>> Mesh((2, 4), ("dp", "tp")).group(["dp"], (1, 2))
        (2, 6)
        """
        return tuple(self.rank(peer) for peer in self.peers(axes, coordinate))

    def peers(self, axes: Sequence[str], coordinate: Coordinate) -> list[Coordinate]:
        """The coordinates that differ from `coordinate` along `axes` alone, the first of `axes` varying slowest."""
        indices = [self.axis(name) for name in axes]
        found = []
        for values in product(*(range(self.shape[i]) for i in indices)):
            peer = list(coordinate)
            for i, value in zip(indices, values, strict=True):
                peer[i] = value
            found.append(tuple(peer))
        return found

    def __contains__(self, rank: object) -> bool:
        return rank in self._places

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))

    @cached_property
    def _places(self) -> dict[int, Coordinate]:
        return dict(zip(self.ranks, self.coordinates(), strict=True))


def _check_shape(shape: tuple[int, ...]) -> None:
    if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
        raise MeshError(f"a mesh of shape {shape}: give each axis at least one rank, as in Mesh((2, 4), ('dp', 'tp'))")


def _check(mesh: Mesh) -> None:
    if len(mesh.names) != len(mesh.shape) or len(set(mesh.names)) != len(mesh.names):
        raise MeshError(f"{len(mesh.shape)} mesh axes cannot be called {mesh.names}: give each axis its own name")
    if any(not name or set(name) & set(" :;,()") for name in mesh.names):
        raise MeshError(f"mesh axis names {mesh.names}: a name is one word without any of ' :;,()'")
    if len(mesh.ranks) != prod(mesh.shape) or len(set(mesh.ranks)) != len(mesh.ranks):
        raise MeshError(
            f"a mesh of shape {mesh.shape} needs {prod(mesh.shape)} different ranks, got {_some(mesh.ranks)}"
        )


def _some(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
