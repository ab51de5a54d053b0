"""Timelines of a pipeline step, simulated or measured: when each stage computed and each value was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dshard.chrome import Bar, to_chrome
from dshard.errors import ScheduleError
from dshard.notebook import Drawn
from dshard.pipeline.actions import Backward, BackwardInput, BackwardWeight, Compute, Edge, Forward
from dshard.pipeline.costs import Costs
from dshard.validate import as_int


@dataclass(frozen=True, slots=True)
class Span:
    """One computation of a stage, from `begin` to `end` in seconds since the step began."""

    stage: int
    compute: Compute
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """One value sent between stages; the receiver gave memory for it at `posted`."""

    edge: Edge
    microbatch: int
    begin: float
    end: float
    posted: float


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Drawn):
    """A step of a pipeline, stage by stage: computations in order, values sent, and the costs behind them."""

    spans: tuple[tuple[Span, ...], ...]
    crossings: tuple[Crossing, ...]
    costs: Costs

    def __repr__(self) -> str:
        return f"Timeline({len(self.spans)} stages, {self.makespan:g} s)"

    @property
    def makespan(self) -> float:
        """Seconds from the beginning to the last end, of computing or crossing."""
        ends = [span.end for stage in self.spans for span in stage] + [crossing.end for crossing in self.crossings]
        return max(ends, default=0.0)

    def busy(self, stage: int) -> float:
        """Seconds that a stage computes."""
        if not 0 <= as_int(stage, "stage", ScheduleError) < len(self.spans):
            raise ScheduleError(f"there is no stage {stage}: they are 0 to {len(self.spans) - 1}")
        return sum(span.end - span.begin for span in self.spans[stage])

    def bubble(self, stage: int) -> float:
        """The part of the makespan in which a stage does not compute."""
        return 1 - self.busy(stage) / self.makespan if self.makespan else 0.0

    def in_flight(self, stage: int) -> int:
        """The most microbatches at once whose forward has begun and whose activations are still needed."""
        count = most = 0
        for span in self.spans[stage]:
            count += isinstance(span.compute, Forward)
            most = max(most, count)
            count -= isinstance(span.compute, Backward | BackwardInput)
        return most

    def peak_bytes(self, stage: int) -> int:
        """The most bytes at once on the busiest rank of a stage: fixed, activations, and what is received early."""
        cost = self.costs.stages[stage]
        changes = [change for span in self.spans[stage] for change in _changes(span, cost.activation, cost.kept)]
        begins = {(type(span.compute), span.compute.microbatch): span.begin for span in self.spans[stage]}
        for crossing in self.crossings:
            if crossing.edge.dst == stage:
                nbytes = self.costs.of(crossing.edge).nbytes
                changes += [(crossing.posted, nbytes), (_consumed(crossing, begins), -nbytes)]
        held = most = cost.fixed
        for _, change in sorted(changes):  # at one moment memory is first freed
            held += change
            most = max(most, held)
        return most

    def fits(self, budget: int) -> bool:
        """Whether no stage ever holds more than `budget` bytes on a rank."""
        return all(self.peak_bytes(stage) <= budget for stage in range(len(self.spans)))

    def data(self) -> dict[str, Any]:
        """Figures and spans as JSON values, in seconds and bytes."""
        stages = range(len(self.spans))
        return {
            "makespan": self.makespan,
            "stages": [
                {
                    "busy": self.busy(i),
                    "bubble": self.bubble(i),
                    "in_flight": self.in_flight(i),
                    "peak_bytes": self.peak_bytes(i),
                    "spans": [[str(span.compute), span.begin, span.end] for span in self.spans[i]],
                }
                for i in stages
            ],
            "crossings": [[str(c.edge), c.microbatch, c.begin, c.end] for c in self.crossings],
        }

    def to_chrome(self) -> str:
        """The timeline in the Chrome trace format: a thread for each stage, and one for each pair that sends."""
        pairs = sorted({(c.edge.src, c.edge.dst) for c in self.crossings})
        tracks = [(0, f"stage {stage}") for stage in range(len(self.spans))]
        tracks += [(1, f"{src} to {dst}") for src, dst in pairs]
        spans = [_span(span) for stage in self.spans for span in stage]
        return to_chrome([*spans, *map(_crossing, self.crossings)], tracks)


def _changes(span: Span, activation: int, kept: int) -> list[tuple[float, int]]:
    """Times within a span, and the change of the stage's activation bytes at each."""
    match span.compute:
        case Forward():
            return [(span.begin, activation)]
        case Backward():
            return [(span.end, -activation)]
        case BackwardInput():
            return [(span.end, kept - activation)]
        case BackwardWeight():
            return [(span.end, -kept)]


def _consumed(crossing: Crossing, begins: dict[tuple[type, int], float]) -> float:
    """Time at which the stage begins to compute with a received value: from then on it counts as an activation."""
    kinds = (Backward, BackwardInput) if crossing.edge.backward else (Forward,)
    return next(begins[kind, crossing.microbatch] for kind in kinds if (kind, crossing.microbatch) in begins)


def _span(span: Span) -> Bar:
    name, kind = str(span.compute), type(span.compute).__name__
    return Bar(name, kind, (0, f"stage {span.stage}"), span.begin, span.end - span.begin)


def _crossing(crossing: Crossing) -> Bar:
    edge, took = crossing.edge, crossing.end - crossing.begin
    return Bar(f"{edge} {crossing.microbatch}", "Crossing", (1, f"{edge.src} to {edge.dst}"), crossing.begin, took)
