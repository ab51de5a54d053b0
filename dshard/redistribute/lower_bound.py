"""A lower bound on the seconds of any plan between two layouts: launches, messages, and missing bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Literal, NamedTuple

from dshard.caches import cached
from dshard.cost import Terms, copy_seconds
from dshard.layout import Shape
from dshard.mesh import Mesh
from dshard.redistribute.axis_roles import step_terms
from dshard.redistribute.layout_state import COUNTED, Partials, State, nested_and_apart_in
from dshard.topology import Collective, Topology

REDUCTIONS: tuple[Collective, ...] = ("reduce_scatter", "all_reduce")
MOVES: tuple[Collective, ...] = ("all_gather", "all_to_all", "exchange")


class CrossingBound(NamedTuple):
    """The least seconds beyond those along any axis for elements that must be sent along one axis.

    For each byte, and to begin: `begin[i]` where the number of ranks whose elements a rank has received doubles `i`
    times.
    """

    byte: float
    begin: tuple[float, ...]


class LeastTerms(NamedTuple):
    """Bounds for plans in which tensors are partial on given axes.

    The most bytes per second of any collective; the least seconds to begin moves of elements, and reductions, by
    doublings; those of reductions whose sums several ranks need, by an all_reduce, or a move more; and for moves and
    reductions what takes longer along each axis on which one does.
    """

    rate: float
    moves: tuple[float, ...]
    reductions: tuple[float, ...]
    all_reductions: tuple[float, ...]
    slow: tuple[tuple[int, CrossingBound, CrossingBound], ...]


class _Way(NamedTuple):
    """A collective along some axes: its ranks, the least seconds to begin by doublings, the most bytes per second.

    An exchange is `counted` where what crosses an axis takes as long as along that axis alone.
    """

    kind: Literal["gather", "all_reduce", "all_to_all", "exchange", "counted"]
    axes: frozenset[int]
    ranks: int
    begins: tuple[tuple[int, float], ...]
    rate: float

    def received(self, n: int) -> float:
        """The bytes that a rank receives, at least, for each that must come along an axis of `n` ranks.

        A rank of `ranks` gathers or reduces a part of each other. Those from elsewhere on the axis come to all ranks of
        the group with one index there, `ranks` / `n` of them, and only one of these need receive them. In an all_to_all
        each rank receives parts of its own.
        """
        if self.kind in ("exchange", "counted"):
            return 1.0
        elsewhere = self.ranks - self.ranks // n
        return (self.ranks - 1) / (elsewhere if self.kind == "all_to_all" else n - 1)


class _Ways(NamedTuple):
    """Ways, and the least seconds to begin them by doublings: of any, and beyond those if one is along each axis."""

    ways: tuple[_Way, ...]
    begin: tuple[float, ...]
    along: tuple[tuple[float, ...], ...]


@cached("plan spaces", 1024)
def least_terms(mesh: Mesh, topology: Topology, partial: frozenset[int]) -> LeastTerms:
    """The bounds of plans on a mesh and topology whose reductions run along axes among `partial`."""
    moves, reducing = _moves_and_reductions(mesh, topology)
    reductions = _ways([way for way in reducing if way.axes <= partial], mesh) if partial else _ways([], mesh)
    rate = max([way.rate for way in moves.ways + reductions.ways], default=inf)
    slow = []
    for axis, n in enumerate(mesh.shape):
        there = _crossing(moves, axis, n, rate), _crossing(reductions, axis, n, rate)
        moved, summed = there
        if moved.byte or summed.byte or any(moved.begin) or any(summed.begin):
            slow.append((axis, *there))
    move, sums = topology.launch + moves.begin[1], _begins([way for way in reductions.ways if way.kind == "all_reduce"])
    whole = _least(sums, reductions.begin)
    complete = tuple([min(each, some + move) for each, some in zip(whole, reductions.begin, strict=True)])
    return LeastTerms(rate, moves.begin, reductions.begin, complete, tuple(slow))


@cached("plan spaces", 256)
def _moves_and_reductions(mesh: Mesh, topology: Topology) -> tuple[_Ways, tuple[_Way, ...]]:
    # gloo reduces by an all_to_all, see `dshard.cost`
    kinds = (*REDUCTIONS, "all_to_all") if topology.backend == "gloo" else REDUCTIONS
    along = step_terms(mesh, topology)
    moves = [_way(axes, terms, each) for axes, terms in along.items() for each in MOVES]
    sums = [_way(axes, terms, each) for axes, terms in along.items() for each in kinds]
    return _ways(moves, mesh), tuple([way._replace(kind="gather") if way.kind == "all_to_all" else way for way in sums])


def _way(axes: frozenset[int], terms: dict[Collective, Terms], collective: Collective) -> _Way:
    ranks, link, algorithms, latency, messages = terms[collective]
    kind: Literal["gather", "all_reduce", "all_to_all", "exchange", "counted"] = "gather"
    if collective == "exchange":
        kind = "counted" if len(axes) > 1 and ranks <= COUNTED else "exchange"
    elif collective == "all_reduce" or collective == "all_to_all":
        kind = collective
    doublings = (ranks - 1).bit_length()
    if algorithms:
        begin, rate = min([price.begin for price in algorithms]), max([price.rate for price in algorithms])
        return _Way(kind, axes, ranks, ((doublings, begin),), rate)
    begin, one, most, slowed = map(min, zip(*messages or [(0.0, link.latency, latency, 1.0)], strict=True))
    if begin == 0.0:  # at least a message for each doubling, of one collective or of several
        return _Way(kind, axes, ranks, ((1, min(one, most)),), link.best_bandwidth / slowed)
    begins = tuple([(many, begin + min(many * one, most)) for many in range(1, doublings + 1)])
    return _Way(kind, axes, ranks, begins, link.best_bandwidth / slowed)


def _ways(ways: list[_Way], mesh: Mesh) -> _Ways:
    if not ways:
        none = (0.0,) * (mesh.size.bit_length() + 1)
        return _Ways((), none, (none,) * mesh.ndim)
    seconds, anywhere, along = [0.0], _begins(ways), list[tuple[float, ...]]()
    for i in range(1, mesh.size.bit_length() + 1):
        seconds.append(inf)
        for many, begin in anywhere:
            seconds[i] = min(seconds[i], begin + seconds[max(0, i - many)])
    for axis in range(mesh.ndim):
        there = _begins([way for way in ways if axis in way.axes])
        least = _least(there, seconds) if there and there != anywhere else seconds
        along.append(tuple([some - any_way for some, any_way in zip(least, seconds, strict=True)]))
    return _Ways(tuple(ways), tuple(seconds), tuple(along))


def _begins(ways: list[_Way]) -> set[tuple[int, float]]:
    return {each for way in ways for each in way.begins}


def _least(begins: set[tuple[int, float]], seconds: Sequence[float]) -> list[float]:
    """By doublings, the least seconds to begin one of these, and others, which take `seconds` by their doublings."""
    least = [inf if begins else 0.0] * len(seconds)
    least[0] = 0.0
    for i in range(1, len(seconds)):
        for many, begin in begins:
            least[i] = min(least[i], begin + seconds[max(0, i - many)])
    return least


def _crossing(ways: _Ways, axis: int, n: int, rate: float) -> CrossingBound:
    """The least that collectives along `axis`, of `n` ranks, take beyond the fastest, for a byte that crosses it."""
    there = [way for way in ways.ways if axis in way.axes and way.kind != "counted"]
    byte = min([(1 / way.rate - 1 / rate) * way.received(n) for way in there], default=0.0)
    return CrossingBound(byte, ways.along[axis])


class _Reductions(NamedTuple):
    """What the reductions before and after say of a plan: its bounds, and which reductions it ends and begins.

    The mesh axes of more than one rank on which it ends one, its terms, the doublings by which they meet at a rank;
    the seconds of a copy between layouts of other dims, and of one that leaves a reduction partial anew.
    """

    least: LeastTerms
    ends: bool
    begins: bool
    ended: tuple[int, ...]
    terms: int
    meetings: int
    copied: float
    begun: float


class _DimChange(NamedTuple):
    """What the mesh axes that shard a dim before and after say of a plan.

    The most of its size that a rank can keep; the fewest chunks that make up the largest after; whether chunks nest,
    and whether some rank holds none that it needs, see `nested_and_apart`; whether steps copy; whether it changes.
    """

    kept: int
    sources: int
    nested: bool
    apart: bool
    copies: bool
    changes: bool


class LowerBound:
    """Lower bounds for tensors of one shape on one mesh and topology."""

    def __init__(self, mesh: Mesh, topology: Topology, shape: Shape, itemsize: int) -> None:
        self.sizes, self.ranks = mesh.shape, mesh.size
        self.launch, self.itemsize, self.numel = topology.launch, itemsize, prod(shape)
        self.mesh, self.topology = mesh, topology
        self.copy = copy_seconds(self.numel / self.ranks * itemsize, topology) - topology.launch
        """Seconds of the copy of a rank's part of the elements; no rank holds less than that of the busiest."""
        self.reductions: dict[tuple[Partials, Partials], _Reductions] = {}
        self.changes: list[dict[tuple[tuple[int, ...], tuple[int, ...]], _DimChange]] = [{} for _ in shape]

    def _reductions(self, src: Partials, dst: Partials) -> _Reductions:
        """The terms of plans between tensors with these reductions, which run along axes that are partial in either."""
        ended, left, reduced = list[int](), list[int](), False
        ends = begins = False
        for axis, (op, target) in enumerate(zip(src, dst, strict=True)):
            ends, begins = ends or (op != target and op is not None), begins or (op != target and target is not None)
            if self.sizes[axis] > 1:
                if op is not None and op != target:
                    ended.append(axis)
                if target is not None:
                    left.append(axis)
                    reduced = reduced or op != target
        terms, unsplit = prod(map(self.sizes.__getitem__, ended)), self.copy * prod(map(self.sizes.__getitem__, left))
        begun = unsplit if reduced else 0.0  # at the latest where the last one begins
        sums = src.count(None) < len(src)
        least = least_terms(self.mesh, self.topology, frozenset((*ended, *left) if sums else ()))
        meetings = (terms - 1).bit_length()
        found = _Reductions(least, ends, begins, tuple(ended), terms, meetings, self.copy if begun else unsplit, begun)
        self.reductions[src, dst] = found
        return found

    def _change(self, src: State, dst: State, dim: int) -> _DimChange:
        have, want = src.local[dim], dst.local[dim]
        sources = -(-want // have) if want > have > 0 else 1
        # all steps but those of chunks of the first dim copy what they leave, or what they begin with
        copies = dim > 0 and src.wide[dim] != dst.wide[dim]
        changes = src.axes[dim] != dst.axes[dim]
        change = _DimChange(min(have, want), sources, *nested_and_apart_in(src, dst, dim), copies, changes)
        self.changes[dim][src.axes[dim], dst.axes[dim]] = change
        return change

    def seconds(self, src: State, dst: State) -> float:
        """The least seconds of any plan from `src` to `dst`.

        Each message at most doubles the number of ranks whose chunks, or terms, a rank holds; chunks and terms come
        in steps of their own, unless the chunks are nested. As in any plan, `t` terms take `t` - 1 receives to
        meet at one rank that needs the sum, and one more for each other rank that needs it. Where dims but the first
        are sharded otherwise some step copies, and one that leaves a reduction partial copies, too.
        """
        held, sources, nested, separate, copies, changes = 1, 1, True, False, False, False
        for dim, pair in enumerate(zip(src.axes, dst.axes, strict=True)):
            if pair[0] == pair[1]:
                held *= src.local[dim]
                continue
            kept, some, within, apart, copying, _ = self.changes[dim].get(pair) or self._change(src, dst, dim)
            held, sources, changes = held * kept, sources * some, True
            nested, separate, copies = nested and within, separate or apart, copies or copying
        reductions = self.reductions.get((src.partial, dst.partial)) or self._reductions(src.partial, dst.partial)
        least, ends, begins, ended, terms, meetings, copied, begun = reductions
        doublings = 0 if nested or not self.numel else max(1, (sources - 1 + separate).bit_length())
        latency, lacking, more = least.moves[doublings], float(dst.numel - (0 if separate else held)), 0.0
        if terms > 1:
            if not doublings and self.numel and not dst.split.keys() >= set(ended):
                more = least.all_reductions[meetings] - least.reductions[meetings]
            latency += least.reductions[meetings] + more
            alone = 0.0 if nested else self._alone(src, dst)
            lacking = max(lacking, dst.numel, self.numel * (dst.share + (terms - 2 + alone) / self.ranks))
        steps = max(1, begins + ((1 if nested else 2) if ends else changes))
        seconds = steps * self.launch + latency + lacking * self.itemsize / least.rate + begun + copied * copies
        return seconds + self._crossing(src, dst, least, (doublings, meetings), more) if least.slow else seconds

    def _alone(self, src: State, dst: State) -> float:
        """The part of the elements, at least, that no rank that needs it holds a term of.

        Where an axis shards another dim, evenly, a rank's index on it is that of what it needs, and of what it holds,
        for one part in `n` of them.
        """
        moved = [axis for axis, dim in src.split.items() if dst.split.get(axis, dim) != dim and _even(src, dst, axis)]
        return 1 - 1 / max([self.sizes[axis] for axis in moved], default=1)

    def _crossing(self, src: State, dst: State, least: LeastTerms, doublings: tuple[int, int], more: float) -> float:
        """The least seconds, beyond those along any axis, for elements that must be sent along a slow axis.

        Equally many enter each slice of the mesh along the axis. A slice that has, or reduces, one part in `n` of the
        elements that it needs lacks the other parts; if the axis shards another dim afterwards, evenly, the slice needs
        one part in `n`, and has one in `n` of that. The sums of a reduction may come by a move. `more` are seconds that
        reductions are known to take to begin beyond the least.
        """
        most, each = 0.0, self.numel / self.ranks * self.itemsize
        for axis, moves, reductions in least.slow:
            n = self.sizes[axis]
            if src.partial[axis] != dst.partial[axis] and src.partial[axis] is not None:
                byte = reductions.byte + (0.0 if axis in dst.split else min(moves.byte, reductions.byte))
                seconds = (n - 1) * each * byte + max(0.0, reductions.begin[doublings[1]] - more)
            elif axis in src.split and axis not in dst.split:
                seconds = (n - 1) * each * moves.byte + moves.begin[doublings[0]]
            elif axis in src.split and src.split[axis] != dst.split[axis] and _even(src, dst, axis):
                seconds = (n - 1) / n * each * moves.byte + moves.begin[doublings[0]]
            else:
                continue
            most = max(most, seconds)
        return most


def _even(src: State, dst: State, axis: int) -> bool:
    """Whether the dims that this axis shards, before and after, are sharded evenly."""
    return src.exact[src.split[axis]] and dst.exact[dst.split[axis]]
