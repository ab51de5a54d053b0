"""Values that make up a topology: links, layers of the network, the device of a rank, and measured figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, TypeAlias, get_args

from dshard.errors import TopologyError
from dshard.mesh import Mesh
from dshard.validate import as_int, as_tuple, check_type

Collective: TypeAlias = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange", "broadcast", "permute"
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Hardware: TypeAlias = Literal["nvlink", "pcie", "network"]
Matrix: TypeAlias = tuple[tuple[float, ...], ...]
Points: TypeAlias = tuple[tuple[float, float], ...]
MAX_NUMBER = 1e30
"""The bound of all figures: larger than those of any machine, so that a larger one is a mistake."""


@dataclass(frozen=True, slots=True)
class Link:
    """The network as one rank sees it in one collective: seconds for each message, and bytes per second.

    A `measured` link comes from measurements, and includes all work of the ranks in this collective. Where the time per
    byte depends on the size, `points` are pairs of bytes and seconds, latency apart, between which seconds are
    interpolated; beyond the last point, `bandwidth` holds.

    Raises:
        TopologyError: a negative latency, no bandwidth, or points that do not rise.
    """

    latency: float
    bandwidth: float
    measured: bool = False
    points: Points = ()

    def __post_init__(self) -> None:
        check_number("latency", self.latency, zero=True)
        check_number("bandwidth", self.bandwidth, infinite=True)
        if self.points:
            object.__setattr__(self, "points", pairs_of(self.points))
            check_points(self.points)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for a rank to receive `nbytes`, without latency; they never fall as the bytes grow.

        >>> Link(0.0, 100.0, points=((10, 1.0), (20, 3.0))).seconds(15)
        2.0
        """
        if not self.points:
            return nbytes / self.bandwidth
        x0, y0 = 0.0, 0.0
        for x, y in self.points:
            if nbytes <= x:
                return y0 + (nbytes - x0) * (y - y0) / (x - x0)
            x0, y0 = x, y
        return y0 + (nbytes - x0) / self.bandwidth

    @property
    def best_bandwidth(self) -> float:
        """Return the link's highest bytes per second at any size, without latency."""
        return max(self.bandwidth, *(x / y if y else inf for x, y in self.points)) if self.points else self.bandwidth

    def no_faster_than(self, other: Link) -> Link:
        """Return a link as slow as the slower of both at every point of either, and nowhere faster than that."""
        bandwidth = min(self.bandwidth, other.bandwidth)
        sizes = sorted({x for x, _ in (*self.points, *other.points)})
        points = tuple((x, max(self.seconds(x), other.seconds(x))) for x in sizes)
        return replace(self, bandwidth=bandwidth, points=points)


@dataclass(frozen=True, slots=True)
class Layer:
    """One level of the network, connecting the units of this level within one unit of the level above.

    Units are nodes in a cluster, sockets in a node, devices in a socket: each level has names of its own. All
    bandwidths are bytes per second in one direction, all links full duplex.

    Attributes:
        name: What one unit is called.
        ranks: Units within each unit of the level above; None, for the outermost level alone, is any number.
        group_bandwidth: From one unit to all others, together.
        latency: Seconds for one message between units.
        pair_bandwidth: Between two units: the same for all pairs, or a symmetric matrix, zero for pairs that no link
            joins; traffic between those passes through others. None: only the group bandwidth counts.
        rank_bandwidth: What one rank alone can send out of its unit, such as through a NIC of its own; None is all.
        hardware: What joins the units, by which NCCL prices its steps: "nvlink", "pcie" or "network"; None is unknown.

    Raises:
        TopologyError: a value that no network has, with the field's name.
    """

    name: str
    ranks: int | None
    group_bandwidth: float
    latency: float = 0.0
    pair_bandwidth: float | Matrix | None = None
    rank_bandwidth: float | None = None
    hardware: Hardware | None = None

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.hardware not in (None, *get_args(Hardware)):
            raise TopologyError(f"hardware: {self.hardware!r} is none; use {', '.join(get_args(Hardware))}, or None")
        if self.ranks is not None:
            object.__setattr__(self, "ranks", as_int(self.ranks, "ranks", TopologyError, least=1))
        check_number("group_bandwidth", self.group_bandwidth)
        check_number("latency", self.latency, zero=True)
        if self.rank_bandwidth is not None:
            check_number("rank_bandwidth", self.rank_bandwidth)
        if isinstance(self.pair_bandwidth, tuple | list):
            way_out = "give one number for all pairs, or a row of them for each unit"
            rows = (as_tuple(row, "pair_bandwidth", way_out, TopologyError) for row in self.pair_bandwidth)
            object.__setattr__(self, "pair_bandwidth", tuple(rows))
            _check_matrix(self.pair_bandwidth, self.ranks)
        elif self.pair_bandwidth is not None:
            check_number("pair_bandwidth", self.pair_bandwidth)


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one rank: its rates, memory bandwidth and overheads.

    Attributes:
        name: For people.
        flops: Pairs of a dtype's name and floating-point operations per second; the first is the default.
        memory_bandwidth: Bytes per second to the rank's memory, reads and writes together.
        launch: Seconds to start one local operation.
        dispatch: Seconds that one operator of a distributed program takes beyond its bytes and operations, launches
            included; 0 where that is not known, or the host runs ahead of the device.
        in_place: Seconds, as `dispatch`, of an operator that writes to its operand, as those of an optimiser.
        memory: Bytes of the rank's memory; None where they are not known.
        alone: Seconds of a rank's work while all others wait, over those while all compute, as the rates are: below 1
            where ranks share cores.
        overlap: The part of a collective's seconds in which work beside it goes on as without it, along axes for which
            that was not measured: 1 where the network sends by itself, 0 where all of it takes the time of cores that
            compute.

    Raises:
        TopologyError: a value that no device has, with the field's name.
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    launch: float
    dispatch: float = 0.0
    in_place: float = 0.0
    memory: float | None = None
    alone: float = 1.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        check_name("name", self.name)
        object.__setattr__(self, "flops", _rates(self.flops))
        if not self.flops or len(dict(self.flops)) != len(self.flops):
            raise TopologyError(f"flops: give the rate of at least one dtype, each once, got {self.flops}")
        for dtype, rate in self.flops:
            check_name("flops", dtype)
            check_number(f"flops.{dtype}", rate)
        check_number("memory_bandwidth", self.memory_bandwidth, infinite=True)
        check_number("launch", self.launch, zero=True)
        check_number("dispatch", self.dispatch, zero=True)
        check_number("in_place", self.in_place, zero=True)
        if self.memory is not None:
            check_number("memory", self.memory)
        check_number("alone", self.alone)
        if self.alone > 1:
            raise TopologyError(f"alone: {self.alone!r}: work takes no longer while others wait: give at most 1")
        _check_overlap(self.overlap)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured figures that replace the computed ones for the same groups of ranks, whatever the axes are named.

    They were taken with all groups of the axes active. Seconds are those of `dshard.cost`: messages one after the
    other, times `latency`, plus the bytes that the busiest rank receives, over `bandwidth` or, where a straight line
    does not describe what was measured, between `points`.

    Attributes:
        mesh: The mesh whose groups were measured.
        axes: The axes along which the groups lie.
        latency: Seconds for each message.
        bandwidth: Bytes per second of one rank.
        collective: The collective that was measured; None is any without figures of its own.
        points: Bytes and their seconds, latency apart, both rising; beyond the last, `bandwidth` holds.
        overlap: As `Device.overlap`, of collectives of these groups; None if it was not measured.
        date, device, sizes, spread: When, on what, with how many bytes, and by how much repetitions differed (their
            interquartile range over the typical time, at the size in the middle).
    """

    mesh: Mesh
    axes: tuple[str, ...]
    latency: float
    bandwidth: float
    collective: Collective | None = None
    date: str = ""
    device: str = ""
    sizes: tuple[int, ...] = ()
    spread: float = 0.0
    points: Points = ()
    overlap: float | None = None

    def __post_init__(self) -> None:
        way_out = "give the names of mesh axes, such as ('tp',)"
        object.__setattr__(self, "axes", as_tuple(self.axes, "axes", way_out, TopologyError))
        check_type(self.mesh, Mesh, "mesh", "give the dshard.Mesh whose groups were measured", TopologyError)
        object.__setattr__(self, "points", pairs_of(self.points))
        sizes = as_tuple(self.sizes, "sizes", "give them as a tuple", TopologyError)
        object.__setattr__(self, "sizes", tuple([as_int(size, "sizes", TopologyError, least=1) for size in sizes]))
        if self.collective is not None and self.collective not in COLLECTIVES:
            raise TopologyError(f"collective: {self.collective!r} is none; use {', '.join(COLLECTIVES)} or None")
        unknown = [axis for axis in self.axes if axis not in self.mesh.names]
        if unknown or not self.axes or len(set(self.axes)) != len(self.axes):
            raise TopologyError(f"axes: {self.axes} of the mesh ({self.mesh}): name some of its axes, each once")
        check_number("latency", self.latency, zero=True)
        check_number("bandwidth", self.bandwidth)
        check_number("spread", self.spread, zero=True)
        check_points(self.points)
        if self.overlap is not None:
            _check_overlap(self.overlap)

    @property
    def link(self) -> Link:
        """Return the measured figures as the link of one rank of these groups."""
        return Link(self.latency, self.bandwidth, measured=True, points=self.points)


def check_number(field: str, value: object, *, zero: bool = False, infinite: bool = False) -> None:
    """Refuse a value that is no number above 0; `zero` and `infinite` allow these too."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        low = value >= 0 if zero else value > 0
        if low and (value < MAX_NUMBER or (infinite and value == inf)):
            return
    least = "a number of at least 0" if zero else "a number above 0"
    raise TopologyError(f"{field}: {value!r} is not {least}")


def pairs_of(points: object) -> Points:
    """Convert points to tuples, without checking lengths and numbers (`check_points` does)."""
    way_out = "give pairs of bytes and seconds"
    return tuple(
        as_tuple(point, "points", way_out, TopologyError)  # check_points refuses other lengths
        for point in as_tuple(points, "points", way_out, TopologyError)
    )


def _rates(flops: object) -> tuple[tuple[str, float], ...]:
    """Convert a mapping or pairs to pairs of a dtype's name and a rate."""
    way_out = "give pairs of a dtype's name and a rate, such as (('float32', 1e13),)"
    rates = []
    for pair in flops.items() if isinstance(flops, Mapping) else as_tuple(flops, "flops", way_out, TopologyError):
        if isinstance(pair, str) or len(as_tuple(pair, "flops", way_out, TopologyError)) != 2:
            raise TopologyError(f"flops: {pair!r} is no pair: {way_out}")
        rates.append((pair[0], pair[1]))
    return tuple(rates)


def _check_overlap(overlap: float) -> None:
    check_number("overlap", overlap, zero=True)
    if overlap > 1:
        raise TopologyError(f"overlap: {overlap!r}: all of a collective at most is beside work: give at most 1")


def check_points(points: object) -> None:
    """Refuse points that are no pairs, or whose bytes do not rise, or whose seconds fall."""
    assert isinstance(points, tuple)
    before: tuple[float, float] = (0.0, 0.0)
    for i, point in enumerate(points):
        if len(point) != 2:
            raise TopologyError(f"points[{i}]: {point!r} is no pair of bytes and seconds")
        check_number(f"points[{i}]", point[0])
        check_number(f"points[{i}]", point[1], zero=True)
        if point[0] <= before[0] or point[1] < before[1]:
            raise TopologyError(
                f"points[{i}]: {point!r} comes after {before!r}: more bytes, in no less time, must follow"
            )
        before = point


def check_name(field: str, value: object) -> None:
    """Refuse a value that is not a string, or is empty."""
    if not isinstance(value, str) or not value:
        raise TopologyError(f"{field}: {value!r} is not a name")


def _check_matrix(matrix: object, ranks: int | None) -> None:
    assert isinstance(matrix, tuple)
    if ranks is None or len(matrix) != ranks or any(len(row) != ranks for row in matrix):
        shape = f"{len(matrix)} rows of {sorted({len(row) for row in matrix})}"
        raise TopologyError(f"pair_bandwidth: {shape} for {ranks} ranks: give one row and column for each")
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            check_number(f"pair_bandwidth[{i}][{j}]", value, zero=True)
            if value != matrix[j][i] or (i == j and value != 0):
                raise TopologyError(
                    f"pair_bandwidth[{i}][{j}]: {value!r}: the matrix must be symmetric, with zeros on its diagonal"
                )
    reached = reached_from(0, [[j for j, bandwidth in enumerate(row) if bandwidth > 0] for row in matrix])
    if len(reached) < ranks:
        lost = min(set(range(ranks)) - reached)
        raise TopologyError(f"pair_bandwidth: no link leads from unit 0 to unit {lost}: join all units")


def reached_from(first: int, neighbours: Mapping[int, Sequence[int]] | Sequence[Sequence[int]]) -> set[int]:
    """Return the units connected to `first` by links, directly or through others."""
    reached, queue = {first}, [first]
    for unit in queue:  # which grows
        new = [other for other in neighbours[unit] if other not in reached]
        reached.update(new)
        queue += new
    return reached
