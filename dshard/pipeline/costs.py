"""Costs of a pipeline step: seconds and bytes of its stages and edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from dshard.errors import ScheduleError
from dshard.pipeline.program import Backward, BackwardInput, BackwardWeight, Compute, Edge, Forward
from dshard.validate import as_int, as_number, as_tuple, check_type


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one stage and one microbatch: seconds to compute, and bytes on its busiest rank.

    `activation` bytes are held from the forward until the gradients of the inputs; `kept` of them until the gradients
    of the weights. `fixed` bytes are held throughout: parameters, gradients, optimizer.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    activation: int = 0
    kept: int = 0
    fixed: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self)

    def seconds(self, compute: Compute) -> float:
        """Seconds that the stage computes for `compute`."""
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
    """The cost of one value sent for one microbatch: `latency` seconds, and the seconds of its `nbytes` bytes.

    Its gradient costs as much.
    """

    edge: Edge
    seconds: float = 0.0
    nbytes: int = 0
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_type(self.edge, Edge, "edge", "give an Edge(value, src, dst)", ScheduleError)
        _check_numbers(self)


def _check_numbers(cost: StageCost | EdgeCost) -> None:
    for field in fields(cost):
        if field.name != "edge":
            what = f"of the costs of a pipeline none is negative; {type(cost).__name__}.{field.name}"
            as_number(getattr(cost, field.name), what, ScheduleError, zero=True)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of all stages, in order, and of the edges; an edge without an entry costs nothing."""

    stages: tuple[StageCost, ...]
    edges: tuple[EdgeCost, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in ("stages", StageCost), ("edges", EdgeCost):
            way_out = f"give a {kind.__name__} for each, as a tuple"
            costs = as_tuple(getattr(self, name), name, way_out, ScheduleError)
            for cost in costs:
                check_type(cost, kind, f"one of the {name}", way_out, ScheduleError)
            object.__setattr__(self, name, costs)
        if not self.stages:
            raise ScheduleError("the costs of a pipeline are those of at least one stage, and none is negative")
        if len({cost.edge.forth() for cost in self.edges}) < len(self.edges):
            raise ScheduleError("an edge has two costs: give one for each, its gradient costs as much")

    def of(self, edge: Edge) -> EdgeCost:
        """The cost of a value sent along an edge, in either direction."""
        edge = edge.forth()
        return next((cost for cost in self.edges if cost.edge == edge), EdgeCost(edge))

    def signals(self) -> Costs:
        """These costs if every message had one byte: a lower bound on communication (arXiv 2211.05322, 4)."""
        return replace(self, edges=tuple(replace(cost, seconds=0.0) for cost in self.edges))


def uniform(
    n_stages: int, edges: Sequence[Edge], stage: StageCost, seconds: float = 0.0, nbytes: int = 0, latency: float = 0.0
) -> Costs:
    """Costs of equal stages and equal edges.

    >>> uniform(2, [Edge("x", 0, 1)], StageCost(), seconds=0.5).of(Edge("x", 1, 0)).seconds
    0.5
    """
    n_stages = as_int(n_stages, "n_stages", ScheduleError, least=1)
    return Costs((stage,) * n_stages, tuple(EdgeCost(edge, seconds, nbytes, latency) for edge in edges))
