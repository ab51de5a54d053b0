"""The order in which a run of a rehearsed module gives gradients to autograd, and the gradients of a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

from dshard.autograd.joined_gradients import MeshLeaves, all_reduced_together, bucket_of
from dshard.rehearsal.contents import Contents


class GradientOrder:
    """The operands that get a gradient, in segments, each of which has a node of autograd.

    They come in the order in which an eager backward pass has their gradients whole. Segments end where a bucket of
    gradients does; in `packs` are those that one buffer reduces, in its order. A leaf's gradient that is `alone`, not
    reduced with others, is reduced when it arises, and has its own segment: all ranks have to keep the order.
    """

    def __init__(self, contents: Contents) -> None:
        self._leaves, self._order = contents.leaves, contents.trained
        self._segments, self._n_cuts = list[list[int]](), -1
        self.packs: tuple[tuple[int, ...], ...] = ()

    def _cut(self) -> None:
        """Cut the order by the buckets that there are."""
        self._n_cuts = MeshLeaves.n_cuts
        last: dict[object, int] = {}
        found = {n: getattr(self._leaves.get(n), "_gradient_leaf", None) for n in self._order}
        leaves = {n: leaf for n, leaf in found.items() if leaf is not None}
        for i, n in enumerate(self._order):
            bucket = bucket_of(leaves[n]) if n in leaves else None
            if bucket is not None:
                last[bucket] = i + 1
        self.packs = all_reduced_together(leaves)
        ends = {*last.values(), len(self._order)}
        self._segments = [self._order[start:end] for start, end in pairwise([0, *sorted(ends)])]

    def segments(self, alone: bool) -> list[list[int]]:
        """The segments, of one operand each if gradients are `alone`."""
        if self._n_cuts != MeshLeaves.n_cuts:
            self._cut()
        return [[n] for n in self._order] or [[]] if alone else self._segments


Parts: TypeAlias = tuple[Iterable[int], Iterator[dict[int, Any]]]
"""The operands that get gradients, and these by number, in parts, which may be computed when they are asked for."""


class GivenGradients:
    """The gradients that the nodes of a run give, each those of one of its `segments`; `packs` lie in one buffer."""

    def __init__(self, segments: list[list[int]], packs: tuple[tuple[int, ...], ...]) -> None:
        self.segments, self.packs = segments, packs
        self._coming, self._found = set[int](), dict[int, Any]()  # of the backward pass that runs
        self._parts: Iterator[dict[int, Any]] = iter(())

    def begin(self, parts: Parts) -> None:
        """Begin a backward pass."""
        self._coming, self._parts, self._found = {*parts[0]}, parts[1], {}
        if not self._coming:
            for _ in self._parts:  # hooks within may wait for gradients
                pass

    def of(self, segment: int) -> list[Any]:
        """The gradients of a segment; None: there is none."""
        numbers = self.segments[segment]
        while not self._coming.isdisjoint(numbers):
            part = next(self._parts)
            self._coming -= part.keys()
            self._found |= part
        if not self._coming:
            self._parts = iter(())  # the others hold values
        return [self._found.pop(n, None) for n in numbers]
