"""What ran: each collective with its operator, bytes, predicted seconds and the user's line; and a way to forbid it."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

from dshard.comm import Event, listen
from dshard.cost import collective_seconds
from dshard.errors import LayoutError
from dshard.ops.observe import Decision, observing
from dshard.ops.settings import current
from dshard.tables import human_bytes, text_table
from dshard.topology import COLLECTIVES

_OWN = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Traced:
    """One collective: the operator that needed it, its mesh axes, bytes received by this rank, and where it was asked.

    `seconds` are what the topology predicts, `at` the seconds since the trace began.
    """

    op: str
    collective: str
    axis: str
    nbytes: int
    seconds: float
    line: str
    at: float


@dataclass(slots=True)
class Trace:
    """The collectives that ran within a `trace()` block, in order, and the operators that were called."""

    events: list[Traced] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank received in all."""
        return sum(event.nbytes for event in self.events)

    def by(self, field_name: str) -> dict[str, tuple[int, int]]:
        """Collectives and bytes for each value of a field of the events: "axis", "op", "collective" or "line"."""
        totals: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for event in self.events:
            count, nbytes = totals[getattr(event, field_name)]
            totals[getattr(event, field_name)] = count + 1, nbytes + event.nbytes
        return dict(totals)

    def summary(self) -> str:
        """A table of what ran, by operator, collective and axis, with totals."""
        rows: dict[tuple[str, str, str, str], list[float]] = {}
        for event in self.events:
            row = rows.setdefault((event.op, event.collective, event.axis, event.line), [0, 0, 0.0])
            row[0], row[1], row[2] = row[0] + 1, row[1] + event.nbytes, row[2] + event.seconds
        cells = [
            [op, collective, axis, str(int(count)), human_bytes(nbytes), f"{seconds * 1e3:.3f}", line]
            for (op, collective, axis, line), (count, nbytes, seconds) in rows.items()
        ]
        seconds = sum(event.seconds for event in self.events)
        cells.append(["total", "", "", str(len(self.events)), human_bytes(self.nbytes), f"{seconds * 1e3:.3f}", ""])
        return text_table(["operator", "collective", "axis", "count", "received", "predicted ms", "line"], cells)

    def to_json(self) -> str:
        """The events as JSON."""
        return json.dumps({"events": [asdict(event) for event in self.events], "nbytes": self.nbytes})

    def to_chrome(self) -> str:
        """The events in the Chrome trace format: open it in a browser's about:tracing or in Perfetto.

        Each event begins when it ran and lasts as long as the topology predicts; one row for each mesh axis.
        """
        rows = [
            {
                "name": f"{event.collective} ({event.op})",
                "ph": "X",
                "ts": event.at * 1e6,
                "dur": event.seconds * 1e6,
                "pid": 0,
                "tid": event.axis,
                "args": {"bytes": event.nbytes, "line": event.line},
            }
            for event in self.events
        ]
        return json.dumps({"traceEvents": rows})

    def __str__(self) -> str:
        return self.summary()


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the operators and collectives that run within the block.

    >>> with trace() as t:
    ...     pass
    >>> t.events, t.nbytes
    ([], 0)
    """
    found, stack, begin = Trace(), ["?"], perf_counter()

    @contextmanager
    def on_operator(decision: Decision) -> Iterator[None]:
        outermost = len(stack) == 1
        if outermost:
            found.operators.append(decision.op)
        stack.append(decision.op if outermost else stack[-1])
        try:
            yield
        finally:
            stack.pop()

    def on_event(event: Event) -> None:
        seconds = _predicted(event)
        at = perf_counter() - begin
        found.events.append(Traced(stack[-1], event.collective, event.axis, event.nbytes, seconds, user_line(), at))

    with observing(on_operator), listen(on_event):
        yield found


def _predicted(event: Event) -> float:
    topology, axes = current().topology_of(event.mesh), tuple(event.axis.split(","))
    if event.collective in COLLECTIVES:
        return collective_seconds(event.collective, event.nbytes, event.mesh, axes, topology)
    link = topology.link(event.mesh, axes)
    return link.latency + event.nbytes / link.bandwidth


def user_line() -> str:
    """The innermost line of the running program that lies neither in dshard nor in torch: "file:number"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_OWN, "<")) or "/torch/" in name or "contextlib" in name):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"


@contextmanager
def strict() -> Iterator[None]:
    """Within the block an operator that would redistribute an operand by itself is an error, before anything is sent.

    What you ask for stays allowed: `redistribute`, `full_tensor`, and gradients that are brought into the layout of
    their parameters.

    Raises:
        LayoutError: an implicit redistribution; names the operator, the layouts and the line.
    """

    @contextmanager
    def refuse(decision: Decision) -> Iterator[None]:
        if not decision.explicit:
            _check(decision)
        yield

    with observing(refuse):
        yield


def _check(decision: Decision) -> None:
    moved = [plan for plan in decision.plans if plan.steps]
    if moved:
        changes = "; ".join(f"[{plan.src}] -> [{plan.dst}]" for plan in moved)
        raise LayoutError(
            f"{decision.op} at {user_line()} would redistribute {changes}, which strict() forbids: "
            "redistribute the operands yourself, or lay them out alike"
        )
