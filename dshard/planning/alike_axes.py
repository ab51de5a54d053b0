"""Mesh axes that a plan uses alike. The choices of a call are powers of the number of axes, so there are far fewer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias, TypeVar

T = TypeVar("T")
AxisGroups: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of mesh axes that are used alike; axes in none of them are used each by itself."""


def on_axes(each: Sequence[T], ndim: int, alike: AxisGroups = ()) -> Iterator[tuple[T, ...]]:
    """One of these for each mesh axis, for all axes of a group the same.

    >>> ["".join(way) for way in on_axes("ab", 3, ((0, 2),))]
    ['aaa', 'aba', 'bab', 'bbb']
    """
    leader = [next((group[0] for group in alike if axis in group), axis) for axis in range(ndim)]
    leaders = sorted({*leader})
    for way in product(each, repeat=len(leaders)):
        own = dict(zip(leaders, way, strict=True))
        yield tuple([own[axis] for axis in leader])


def are_alike(of_axes: Mapping[int, object], alike: AxisGroups) -> bool:
    """Whether all axes of each group have the same, or none has anything."""
    return all(len({of_axes.get(axis) for axis in group}) == 1 for group in alike)
