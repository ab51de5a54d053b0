"""Meshes: named axes over ranks, as pure values that own no process and no process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

from dshard.caches import cached
from dshard.errors import MeshError
from dshard.interned import Interned
from dshard.validate import as_int, as_tuple, of_wrong_type, shown, suggestion

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
        return _group(self, tuple(axes), tuple(coordinate))

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

    def folded(self, axes: Sequence[str], name: str) -> Mesh:
        """The mesh of the same ranks in which `axes` are one axis called `name`, the first of them varying slowest.

        It stands where the first of `axes` does. Chunks of a dim that is sharded over `axes` are those of one sharded
        over `name` if it divides evenly.

        >>> mesh = Mesh((2, 2, 4), ("pp", "dp", "tp")).folded(("dp", "tp"), "ep")
        >>> str(mesh), mesh.unfolded("ep", {"dp": 2, "tp": 4}) == Mesh((2, 2, 4), ("pp", "dp", "tp"))
        ('pp=2 ep=8', True)

        Raises:
            MeshError: no axes, one that the mesh has not or that is given twice, or the name of another axis.
        """
        folding = as_tuple(axes, "the axes to fold", "give names, as in mesh.folded(('dp', 'tp'), 'ep')", MeshError)
        moved = [self.axis(axis) for axis in folding]
        if not moved or len(set(moved)) < len(moved):
            raise MeshError(f"cannot fold {folding} of the mesh ({self}): give one or more of its axes, each once")
        kept = [axis for axis in range(self.ndim) if axis not in moved]
        before = [axis for axis in kept if axis < moved[0]]
        after = kept[len(before) :]
        if name in [self.names[axis] for axis in kept]:
            raise MeshError(
                f"cannot fold {folding} of the mesh ({self}) into {name!r}, which is another axis: give another name"
            )
        shape = (*map(self.shape.__getitem__, before), prod(map(self.shape.__getitem__, moved)))
        return Mesh(
            (*shape, *map(self.shape.__getitem__, after)),
            (*map(self.names.__getitem__, before), name, *map(self.names.__getitem__, after)),
            self._ranks_by([*before, *moved, *after]),
            self.device_type,
        )

    def unfolded(self, axis: str, sizes: Mapping[str, int]) -> Mesh:
        """The mesh of the same ranks in which one axis becomes several, named and sized by `sizes`, the first slowest.

        >>> str(Mesh((2, 8), ("pp", "dp")).unfolded("dp", {"host": 2, "local": 4}))
        'pp=2 host=2 local=4'

        Raises:
            MeshError: no such axis, sizes whose product is not its size, or the name of another axis.
        """
        i = self.axis(axis)
        way_out = f"give sizes whose product is {self.shape[i]}, such as {{'a': {self.shape[i]}, 'b': 1}}"
        if not isinstance(sizes, Mapping):
            raise of_wrong_type(MeshError)(f"cannot unfold {axis} into {shown(sizes)}: {way_out}")
        into = [as_int(size, f"the size of {name!r}", MeshError, least=1) for name, size in sizes.items()]
        if not into or prod(into) != self.shape[i]:
            text = " ".join(f"{name}={size}" for name, size in sizes.items())
            raise MeshError(
                f"cannot unfold {axis} of the mesh ({self}), which has {self.shape[i]} ranks, into ({text}): {way_out}"
            )
        names = (*self.names[:i], *self.names[i + 1 :])
        taken = [name for name in sizes if name in names]
        if taken:
            raise MeshError(
                f"cannot unfold {axis} of the mesh ({self}) into {taken[0]!r}, which is another axis: give another name"
            )
        return Mesh(
            (*self.shape[:i], *into, *self.shape[i + 1 :]),
            (*self.names[:i], *sizes, *self.names[i + 1 :]),
            self.ranks,
            self.device_type,
        )

    def _ranks_by(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks in the order in which the first of `axes`, all of the mesh, varies slowest."""
        if list(axes) == sorted(axes):
            return self.ranks
        strides = [prod(self.shape[axis + 1 :]) for axis in axes]
        offsets = [range(0, self.shape[axis] * stride, stride) for axis, stride in zip(axes, strides, strict=True)]
        return tuple([self.ranks[sum(place)] for place in product(*offsets)])

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


@cached("layouts", 4096)
def _group(mesh: Mesh, axes: tuple[str, ...], coordinate: Coordinate) -> tuple[int, ...]:
    return tuple(map(mesh.rank, mesh.peers(axes, coordinate)))


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
