"""Meshes: named axes over ranks, as pure values that own no process and no process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

from dshard.errors import MeshError
from dshard.interned import Interned
from dshard.validate import as_int, as_tuple, shown, suggestion

MAX_RANKS = 1 << 22
"""The most ranks of a mesh, which holds them all; a larger one is a mistake."""

DEVICE_TYPES = {"cpu", "cuda", "hpu", "ipu", "maia", "meta", "mps", "mtia", "privateuseone", "xla", "xpu"}
"""torch's types of devices that compute; a custom backend's is added when a mesh over its processes is bound."""

Coordinate = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Mesh(Interned):
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
        _set(self, "shape", mesh_shape(self.shape))
        _set(self, "names", _axis_names(self.names, self.shape))
        _set(self, "ranks", _ranks(self.ranks) or tuple(range(prod(self.shape))))
        _check(self)

    @cached_property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def axis(self, name: str) -> int:
        """The index of the axis called `name`.

        Raises:
            MeshError: there is no such axis.
        """
        if name not in self.names:
            known = ", ".join(self.names)
            hint = suggestion(name, self.names)
            raise MeshError(f"the mesh ({self}) has no axis {name!r}; its axes are {known}{hint}")
        return self.names.index(name)

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of the global rank `rank`: one index for each axis.

        Raises:
            MeshError: the rank is not in the mesh.
        """
        if rank not in self:
            raise MeshError(f"rank {shown(rank)} is not in the mesh ({self}), whose ranks are {_some(self.ranks)}")
        return self._places[rank]

    def rank(self, coordinate: Sequence[int]) -> int:
        """The global rank at `coordinate`.

        Raises:
            MeshError: the mesh has no such coordinate.
        """
        at = coordinate
        if type(at) is not tuple:
            at = as_tuple(coordinate, "coordinate", f"give one index for each axis of ({self})", MeshError)
        if len(at) != self.ndim or not all(0 <= i < size for size, i in zip(self.shape, at, strict=False)):
            raise MeshError(f"the mesh ({self}) has no coordinate {at}: give an index of each axis, below its size")
        index = 0
        for size, i in zip(self.shape, at, strict=True):
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
        coordinates = []
        for values in product(*(range(self.shape[i]) for i in indices)):
            peer = list(coordinate)
            for i, value in zip(indices, values, strict=True):
                peer[i] = value
            coordinates.append(tuple(peer))
        return coordinates

    def __contains__(self, rank: object) -> bool:
        try:
            return rank in self._places
        except TypeError:  # what has no hash is no rank
            return False

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))

    @cached_property
    def _places(self) -> dict[int, Coordinate]:
        return dict(zip(self.ranks, self.coordinates(), strict=True))


def mesh_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a mesh's axes."""
    way_out = "give each axis at least one rank, as in Mesh((2, 4), ('dp', 'tp'))"
    sizes = as_tuple(shape, "the shape of a mesh", way_out, MeshError)
    try:
        shape = tuple(as_int(size, "size", MeshError, least=1) for size in sizes)
    except MeshError as error:
        raise type(error)(f"a mesh of shape {sizes}: {way_out}") from None
    if not shape:
        raise MeshError(f"a mesh of shape {sizes}: {way_out}")
    if prod(shape) > MAX_RANKS:
        raise MeshError(f"a mesh of shape {shape} has {prod(shape):,} ranks: one has at most {MAX_RANKS:,}")
    return shape


def _axis_names(names: Sequence[str], shape: tuple[int, ...]) -> tuple[str, ...]:
    if names is None:
        names = ()
    checked = as_tuple(names, "the names of mesh axes", "give a name for each axis, such as ('dp', 'tp')", MeshError)
    return checked or tuple(f"d{i}" for i in range(len(shape)))


def _ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    if ranks is None:
        ranks = ()
    checked = as_tuple(ranks, "the ranks of a mesh", "give the rank of each place, in row-major order", MeshError)
    if all(type(rank) is int and rank >= 0 for rank in checked):
        return checked
    return tuple(as_int(rank, "a rank of a mesh", MeshError, least=0) for rank in checked)


def _check(mesh: Mesh) -> None:
    if any(not isinstance(name, str) or not name or set(name) & set(" :;,()\n\t") for name in mesh.names):
        raise MeshError(f"mesh axis names {mesh.names}: a name is one word without any of ' :;,()'")
    if len(mesh.names) != len(mesh.shape) or len(set(mesh.names)) != len(mesh.names):
        raise MeshError(f"{len(mesh.shape)} mesh axes cannot be called {mesh.names}: give each axis its own name")
    if len(mesh.ranks) != prod(mesh.shape) or len(set(mesh.ranks)) != len(mesh.ranks):
        raise MeshError(
            f"a mesh of shape {mesh.shape} needs {prod(mesh.shape)} different ranks, got {_some(mesh.ranks)}"
        )
    if not isinstance(mesh.device_type, str) or mesh.device_type not in DEVICE_TYPES:
        known = sorted(DEVICE_TYPES)
        raise MeshError(
            f"{mesh.device_type!r} is no type of device: use one of torch's, without an index, "
            f"{', '.join(known)}{suggestion(mesh.device_type, known)}"
        )


def _some(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
