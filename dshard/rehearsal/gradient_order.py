"""The order in which a run of a rehearsed module gives gradients to autograd, and the gradients of a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from dshard.rehearsal.contents import Contents


class GradientOrder:
    """The operands that get a gradient, in segments, each of which has a node of autograd.

    They come in the order in which an eager backward pass gives their gradients, which is known of a program. A leaf's
    gradient that is `alone`, not reduced with others, is reduced when it arises: all ranks have to keep the order.
    """

    def __init__(self, contents: Contents) -> None:
        first = {n: i for i, call in reversed([*enumerate(contents.calls)]) for n in call.refs}
        likely = sorted(contents.trained, key=lambda n: (-first.get(n, 0), n))  # those used first come last
        self._segments = [[n] for n in likely] or [[]]
        self._n_known = -1
        self.alone = False

    def learn(self, parts: Sequence[Sequence[int]]) -> None:
        """Take over the order of a program, and its parts, if it gives more than those before."""
        known = {n for part in parts for n in part}
        if len(known) > self._n_known:
            rest = [n for segment in self._segments for n in segment if n not in known]
            self._n_known, self._segments = len(known), [*map(list, parts[:-1]), [*parts[-1], *rest]]

    def segments(self, alone: bool) -> list[list[int]]:
        """The segments, of one operand each if gradients are `alone`."""
        return [[n] for each in self._segments for n in each] if alone or self.alone else self._segments


Parts: TypeAlias = tuple[Iterable[int], Iterator[dict[int, Any]]]
"""The operands that get gradients, and these by number, in parts, which may be computed when they are asked for."""


class GivenGradients:
    """The gradients that the nodes of a run give, each those of one of its `segments`."""

    def __init__(self, segments: list[list[int]]) -> None:
        self.segments = segments
        self._coming, self._found = set[int](), dict[int, Any]()  # of the backward pass that runs
        self._parts: Iterator[dict[int, Any]] = iter(())

    def begin(self, parts: Parts) -> None:
        """Begin a backward pass."""
        self._coming, self._parts, self._found = {*parts[0]}, parts[1], {}

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
