"""Writer of timelines in the Chrome trace format, for Perfetto or a browser's about:tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Track: TypeAlias = tuple[int, str]
"""A line of the picture: the number of a process, and the name of a thread in it."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of time on a track: `begin` and `seconds` in seconds, and further values to show."""

    name: str
    category: str
    track: Track
    begin: float
    seconds: float
    shown: Mapping[str, Any] = field(default_factory=dict)


def to_chrome(slices: Iterable[Bar], tracks: Sequence[Track], processes: Mapping[int, str] | None = None) -> str:
    """A trace with tracks in this order; processes may have names.

    >>> text = to_chrome([Bar("gemm", "forward", (0, "compute"), 1.0, 0.5)], [(0, "compute")])
    >>> [event["ph"] for event in json.loads(text)["traceEvents"]]
    ['M', 'X']
    """
    threads: dict[Track, int] = {}
    for track in tracks:
        threads[track] = sum(process == track[0] for process, _ in threads)
    names = [_named("process_name", process, 0, name) for process, name in (processes or {}).items()]
    names += [_named("thread_name", track[0], thread, track[1]) for track, thread in threads.items()]
    return json.dumps({"traceEvents": [*names, *(_event(each, threads[each.track]) for each in slices)]})


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": {"name": name}}


def _event(span: Bar, thread: int) -> dict[str, Any]:
    """A complete event; the format counts in microseconds."""
    return {
        "name": span.name,
        "cat": span.category,
        "ph": "X",
        "ts": span.begin * 1e6,
        "dur": span.seconds * 1e6,
        "pid": span.track[0],
        "tid": thread,
        "args": dict(span.shown),
    }
