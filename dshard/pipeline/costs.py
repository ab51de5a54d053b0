"""What a step of a pipeline costs: seconds and bytes of its stages and edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dshard.errors import ScheduleError
from dshard.pipeline.actions import Backward, BackwardInput, BackwardWeight, Compute, Edge, Forward


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage and one microbatch: seconds to compute, and bytes on its busiest rank.

    `activation` bytes are held from the forward until the gradients of the inputs; of these `kept` are needed until
    those of the weights. `fixed` bytes are there throughout: parameters, gradients, optimiser.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    activation: int = 0
    kept: int = 0
    fixed: int = 0

    def seconds(self, compute: Compute) -> float:
        """How long it computes."""
        match compute:
            case Forward():
                return self.forward
            case Backward():
                return self.backward_input + self.backward_weight
            case BackwardInput():
                return self.backward_input
            case BackwardWeight():
                return self.backward_weight


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """One value that crosses, for one microbatch: `latency` seconds and those of its bytes, `nbytes` in its buffer.

    Its gradient costs as much.
    """

    edge: Edge
    seconds: float = 0.0
    nbytes: int = 0
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Those of all stages, in order, and of the edges; an edge that is not there costs nothing.

    Raises:
        ScheduleError: a negative time or number of bytes, no stage, or an edge given twice.
    """

    stages: tuple[StageCost, ...]
    edges: tuple[EdgeCost, ...] = ()

    def __post_init__(self) -> None:
        numbers = [n for s in self.stages for n in (s.forward, s.backward_input, s.backward_weight, s.activation)]
        numbers += [n for s in self.stages for n in (s.kept, s.fixed)]
        numbers += [n for e in self.edges for n in (e.seconds, e.nbytes, e.latency)]
        if not self.stages or not all(0 <= number < float("inf") for number in numbers):
            raise ScheduleError("the costs of a pipeline are those of at least one stage, and none is negative")
        if len({cost.edge.forth() for cost in self.edges}) < len(self.edges):
            raise ScheduleError("an edge has two costs: give one for each, its gradient costs as much")

    def of(self, edge: Edge) -> EdgeCost:
        """What crosses along an edge, either way."""
        edge = edge.forth()
        return next((cost for cost in self.edges if cost.edge == edge), EdgeCost(edge))

    def signals(self) -> Costs:
        """The same if every message had one byte: the least that any communication can take (arXiv 2211.05322, 4)."""
        return replace(self, edges=tuple(replace(cost, seconds=0.0) for cost in self.edges))


def uniform(
    n_stages: int, edges: Sequence[Edge], stage: StageCost, seconds: float = 0.0, nbytes: int = 0, latency: float = 0.0
) -> Costs:
    """Equal stages and equal edges.

    >>> uniform(2, [Edge("x", 0, 1)], StageCost(), seconds=0.5).of(Edge("x", 1, 0)).seconds
    0.5
    """
    return Costs((stage,) * n_stages, tuple(EdgeCost(edge, seconds, nbytes, latency) for edge in edges))
