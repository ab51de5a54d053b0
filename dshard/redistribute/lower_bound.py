"""A lower bound on the seconds of any plan between two layouts: launches, messages, and missing bytes."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, prod
from typing import NamedTuple, TypeAlias

from dshard.caches import cached
from dshard.cost import Terms
from dshard.layout import Shape
from dshard.mesh import Mesh
from dshard.redistribute.axis_roles import step_terms
from dshard.redistribute.layout_state import State, nested_and_apart
from dshard.topology import Collective, Topology

MOVES: tuple[Collective, ...] = ("all_gather", "all_to_all", "exchange")
REDUCTIONS: tuple[Collective, ...] = ("reduce_scatter", "all_reduce")


class Least(NamedTuple):
    """Bounds for some collectives: the most bytes per second, and the least seconds beside the bytes.

    In `seconds[i]` the number of ranks whose elements a rank has received can double `i` times.
    """

    rate: float
    seconds: tuple[float, ...]


class LeastTerms(NamedTuple):
    """Bounds for exchanges of elements and for reductions; and for both along each axis on which they take longer."""

    moves: Least
    reductions: Least
    slow: tuple[tuple[int, Least, Least], ...]


@cached("least terms", 256)
def least_terms(mesh: Mesh, topology: Topology) -> LeastTerms:
    """The bounds of collectives on a mesh and topology."""
    # gloo reduces by an all_to_all, see `dshard.cost`
    reductions = (*REDUCTIONS, "all_to_all") if topology.backend == "gloo" else REDUCTIONS
    along = step_terms(mesh, topology)
    moves, reduces = (
        {axes: _each_least([terms[each] for each in kind]) for axes, terms in along.items()}
        for kind in (MOVES, reductions)
    )
    anywhere = _least(moves, along, mesh), _least(reduces, along, mesh)
    slow = []
    for axis, n in enumerate(mesh.shape):
        if n > 1:
            sets = [axes for axes in along if axis in axes]
            there = _least(moves, sets, mesh), _least(reduces, sets, mesh)
            if there != anywhere:
                slow.append((axis, *there))
    return LeastTerms(*anywhere, tuple(slow))


EachLeast: TypeAlias = tuple[float, set[tuple[int, float]]]
"""The most bytes per second of collectives along some axes; of each its doublings, and its seconds to begin."""


def _each_least(among: Iterable[Terms]) -> EachLeast:
    rates, begins = list[float](), set[tuple[int, float]]()
    for ranks, link, algorithms in among:
        if algorithms:
            rates.append(max([price.rate for price in algorithms]))
            begins.add(((ranks - 1).bit_length(), min([price.begin for price in algorithms])))
        else:  # at least a message for each doubling
            rates.append(link.best_bandwidth)
            begins.add((1, link.latency))
    return max(rates), begins


def _least(leasts: dict[frozenset[int], EachLeast], first: Iterable[frozenset[int]], mesh: Mesh) -> Least:
    """The bounds of a sequence of collectives: one along one of the sets of axes `first`, the others along any."""
    begins = {begin for axes in first for begin in leasts[axes][1]}
    others = {begin for _, each in leasts.values() for begin in each}
    seconds, least = [0.0], [0.0]
    for i in range(1, mesh.size.bit_length() + 1):
        seconds.append(min([took + seconds[max(0, i - doublings)] for doublings, took in others], default=0.0))
        least.append(min([took + seconds[max(0, i - doublings)] for doublings, took in begins], default=0.0))
    return Least(max([leasts[axes][0] for axes in first], default=inf), tuple(least))


class LowerBound:
    """Lower bounds for tensors of one shape on one mesh and topology."""

    def __init__(self, mesh: Mesh, topology: Topology, shape: Shape, itemsize: int) -> None:
        self.sizes, self.ranks = mesh.shape, mesh.size
        self.launch, self.itemsize, self.numel = topology.launch, itemsize, prod(shape)
        self.moves, self.reductions, self.slow = least_terms(mesh, topology)

    def seconds(self, src: State, dst: State) -> float:
        """The least seconds of any plan from `src` to `dst`.

        Each message at most doubles the number of ranks whose chunks, or terms, a rank holds; chunks and terms come
        in steps of their own, unless the chunks are nested. As in `received_bound`, `t` terms take `t` - 1 receives to
        meet at one rank that needs the sum, and one more for each other rank that needs it.
        """
        terms, begins, ends = 1, 0, False
        if src.partial != dst.partial:
            for op, target, n in zip(src.partial, dst.partial, self.sizes, strict=True):
                if op != target:
                    begins += target is not None
                    if op is not None:
                        ends, terms = True, terms * n
        nested, separate = nested_and_apart(src, dst)
        held, sources = 1, 1
        for have, want in zip(src.local, dst.local, strict=True):
            if want > have:
                held *= have
                sources *= -(-want // have) if have else 1
            else:
                held *= want
        doublings = 0 if nested or not self.numel else max(1, (sources - 1 + separate).bit_length())
        latency, meetings = self.moves.seconds[doublings], (terms - 1).bit_length() if terms > 1 else 0
        lacking = float(dst.numel - (0 if separate else held))
        if terms > 1:
            latency += self.reductions.seconds[meetings]
            lacking = max(lacking, dst.numel, self.numel * (dst.share + (terms - 2) / self.ranks))
        steps = max(1, ends + begins + (ends and not nested))
        rate = max(self.moves.rate, self.reductions.rate) if any(src.partial) else self.moves.rate
        seconds = steps * self.launch + latency + lacking * self.itemsize / rate
        return seconds + self._crossing(src, dst, rate, (doublings, meetings)) if self.slow else seconds

    def _crossing(self, src: State, dst: State, rate: float, doublings: tuple[int, int]) -> float:
        """The least seconds, beyond those at `rate`, for elements that must be sent along a slow axis.

        Equally many enter each slice of the mesh along the axis. A slice that has, or reduces, one part in `n` of the
        elements that it needs lacks the other parts; if the axis shards another dim afterwards, evenly, the slice needs
        one part in `n`, and has one in `n` of that.
        """
        most = 0.0
        for axis, moves, reductions in self.slow:
            n, there, anywhere, times = self.sizes[axis], moves, self.moves, doublings[0]
            if src.partial[axis] != dst.partial[axis] and src.partial[axis] is not None:
                numel = 1.0 * self.numel * (n - 1) * (1 if axis in dst.split else 2)
                there, anywhere, times = reductions, self.reductions, doublings[1]
            elif axis in src.split and axis not in dst.split:
                numel = self.numel * (n - 1)
            elif axis in src.split and src.split[axis] != dst.split[axis] and _even(src, dst, axis):
                numel = self.numel * (n - 1) / n
            else:
                continue
            byte, begin = 1 / there.rate - 1 / rate, there.seconds[times] - anywhere.seconds[times]
            most = max(most, numel / self.ranks * self.itemsize * byte + begin)
        return most


def _even(src: State, dst: State, axis: int) -> bool:
    """Whether the dims that this axis shards, before and after, are sharded evenly."""
    return src.exact[src.split[axis]] and dst.exact[dst.split[axis]]
