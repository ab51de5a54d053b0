"""Fit measured times with a straight line where it is accurate, else with points to interpolate between.

A collective that takes `messages` latencies and passes its bytes `passes` times takes

    messages * latency + passes * seconds(bytes)

seconds, as `dshard.cost` has it. Seconds of bytes are bytes / bandwidth where that fits; where it does not (caches,
buffers, algorithms that change with the size) they are interpolated between the sizes measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from statistics import mean, median

from dshard.topology.links import Points

LINE_TYPICALLY, LINE_ALWAYS = 0.05, 0.15
"""A line describes times from which it differs by no more: in the median, and at any size."""

LEAST_SHARE = 0.1
"""Where times do not grow with the bytes, these still count for this part of what they take at the best rate."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The latency, bandwidth and points of one collective, as the fields of `dshard.topology.Measured` define them."""

    latency: float
    bandwidth: float
    points: Points = ()


def typical(times: Sequence[float]) -> float:
    """Return the mean of the faster half of `times`, as other load on the machine only ever adds time.

    >>> typical([1.0, 3.0, 2.0, 1000.0, 2000.0])
    2.0
    """
    return mean(sorted(times)[: (len(times) + 1) // 2])


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range of `times`, divided by their typical value.

    >>> spread([1.0, 2.0, 3.0, 4.0, 1000.0])
    1.0
    """
    ordered = sorted(times)
    last = len(ordered) - 1
    return (ordered[round(0.75 * last)] - ordered[round(0.25 * last)]) / typical(times)


def fit(times: Sequence[tuple[int, float]], messages: float, passes: float, cap: float = inf) -> Fit:
    """Fit pairs of bytes and seconds, whose bytes rise.

    The line is the one of least absolute relative deviation among those with a latency of at least zero and a positive
    bandwidth, so that sizes count alike and single wrong times do not move it. Points never fall as the bytes grow.
    No price falls below the bytes over `cap`, the bandwidth that no algorithm can exceed.
    """
    latency, slope = best_line(times)
    errors = [abs(latency + slope * nbytes - seconds) / seconds for nbytes, seconds in times]
    if median(errors) <= LINE_TYPICALLY and max(errors) <= LINE_ALWAYS:
        return Fit(latency / messages, min(passes / slope, cap))
    return _table(times, messages, passes, cap)


def best_line(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the intercept and slope of the line with the least relative error, through two points or the origin."""
    lines = [(0.0, seconds / nbytes) for nbytes, seconds in times]
    for (x0, y0), (x1, y1) in combinations(times, 2):
        slope = (y1 - y0) / (x1 - x0)
        if slope > 0 and y0 - slope * x0 >= 0:
            lines.append((y0 - slope * x0, slope))
    return min(lines, key=lambda line: sum(abs(line[0] + line[1] * x - y) / y for x, y in times))


def _table(times: Sequence[tuple[int, float]], messages: float, passes: float, cap: float) -> Fit:
    sizes = [nbytes for nbytes, _ in times]
    seconds = rising([seconds for _, seconds in times])
    free = LEAST_SHARE * min(y / x for x, y in zip(sizes, seconds, strict=True))
    start = max(0.0, seconds[0] - free * sizes[0])
    points: list[tuple[float, float]] = []
    x0, y0 = 0.0, 0.0
    for x, y in zip(sizes, seconds, strict=True):
        least = max(y0 + free * (x - x0) / passes, x / cap)
        points.append((x, max((y - start) / passes, least)))
        x0, y0 = points[-1]
    return Fit(start / messages, x0 / y0, tuple(points))


def rising(values: Sequence[float]) -> list[float]:
    """Return the nondecreasing values nearest to `values` in squared distance (isotonic regression).

    >>> rising([1.0, 4.0, 2.0, 5.0])
    [1.0, 3.0, 3.0, 5.0]
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
            before, n = blocks.pop()
            total, count = total + before, count + n
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]
