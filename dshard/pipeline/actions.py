"""Actions of a stage, as values: schedules yield them, the simulator prices them, ranks run them.

Edges between stages are a dataflow by names: a stage gets a value from the last earlier stage that gives it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from dshard.errors import ScheduleError
from dshard.validate import as_int, as_tuple, check_type


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A value that crosses between stages: an activation to a later stage, or its gradient back to an earlier one.

    >>> Edge("x", 0, 1).back(), Edge("x", 1, 0).backward
    (Edge(value='x', src=1, dst=0), True)
    """

    value: str
    src: int
    dst: int

    def __post_init__(self) -> None:
        for name in ("src", "dst"):
            object.__setattr__(self, name, as_int(getattr(self, name), f"{name} of an edge", ScheduleError, least=0))
        if self.src == self.dst:
            raise ScheduleError(f"the edge {self} goes from a stage to itself: what a stage computes it has")

    @property
    def backward(self) -> bool:
        """Whether this edge sends the gradient of the value."""
        return self.src > self.dst

    def back(self) -> Edge:
        """The edge in the other direction: from an activation's edge, its gradient's."""
        return Edge(self.value, self.dst, self.src)

    def forth(self) -> Edge:
        """The edge of the activation, for an activation or its gradient."""
        return self.back() if self.backward else self

    def __str__(self) -> str:
        return f"{'gradient of ' if self.backward else ''}{self.value} {self.src}->{self.dst}"


@dataclass(frozen=True, slots=True)
class _Compute:
    """The work of a stage on one microbatch; as text a letter and the microbatch."""

    letter: ClassVar[str]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.letter}{self.microbatch}"


class Forward(_Compute):
    """The stage's module on one microbatch."""

    letter = "F"


class Backward(_Compute):
    """The backward pass of the stage on one microbatch: gradients of inputs and weights."""

    letter = "B"


class BackwardInput(_Compute):
    """The first half of a split backward pass: the gradients of the inputs, for which earlier stages wait."""

    letter = "I"


class BackwardWeight(_Compute):
    """The second half of a split backward pass: the gradients of the weights, after `BackwardInput`."""

    letter = "W"


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of one microbatch along an edge."""

    verb: ClassVar[str]
    edge: Edge
    microbatch: int

    def __str__(self) -> str:
        return f"{self.verb} {self.edge} of microbatch {self.microbatch}"


class Send(_Message):
    """Begin to send a value that was computed."""

    verb = "send"


class Receive(_Message):
    """Begin to receive a value into memory; the action that computes with it waits for it."""

    verb = "receive"


Compute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
Action: TypeAlias = Compute | Send | Receive


Ports = tuple[Sequence[str], Sequence[str]]
"""The names of a stage's inputs, and of its outputs."""


def edges_of(stages: Sequence[Ports], batch: Collection[str]) -> tuple[Edge, ...]:
    """The edges of activations: a stage gets each input from the last earlier stage with an output of that name.

    Other inputs are values of the `batch`, which every rank has: nothing is sent for them.

    >>> edges_of([(["x"], ["x", "skip"]), (["x"], ["x"]), (["x", "skip"], ["x"])], batch=["x"])
    (Edge(value='x', src=0, dst=1), Edge(value='skip', src=0, dst=2), Edge(value='x', src=1, dst=2))
    """
    batch = names_of(batch, "batch")
    givers: dict[str, int] = {}
    edges: list[Edge] = []
    for stage, ports in enumerate(as_tuple(stages, "stages", "give the names of each", ScheduleError)):
        if len(ports) != 2 or isinstance(ports, str):
            raise ScheduleError(f"stage {stage}: {ports!r} is no pair: give the names it takes, and those it gives")
        takes, gives = (
            names_of(names, f"what stage {stage} {verb}") for names, verb in zip(ports, _VERBS, strict=True)
        )
        for names, verb in (takes, "takes"), (gives, "gives"):
            if len(set(names)) < len(names):
                raise ScheduleError(f"stage {stage} {verb} {', '.join(names)}: name each value once")
        for name in takes:
            if name in givers:
                edges.append(Edge(name, givers[name], stage))
            elif name not in batch:
                raise ScheduleError(
                    f"stage {stage} takes {name!r}, which neither an earlier stage gives ({_listed(givers)}) "
                    f"nor the batch has ({_listed(batch)}): name it in `gives` of an earlier stage, or in the batch"
                )
        givers.update(dict.fromkeys(gives, stage))
    return tuple(sorted(edges, key=lambda edge: (edge.src, edge.dst, edge.value)))


_VERBS = ("takes", "gives")


def names_of(names: Collection[str], what: str) -> tuple[str, ...]:
    """Check names of values and return them as a tuple; a single string is refused."""
    checked = as_tuple(names, what, "give names in a tuple, such as ('x',)", ScheduleError)
    for name in checked:
        check_type(name, str, what, "give names as text, such as ('x',)", ScheduleError)
    return checked


def chain(n_stages: int) -> tuple[Edge, ...]:
    """The edges of one value that each stage sends to the next.

    >>> chain(3)
    (Edge(value='x', src=0, dst=1), Edge(value='x', src=1, dst=2))
    """
    n_stages = as_int(n_stages, "n_stages", ScheduleError, least=1)
    return tuple(Edge("x", stage, stage + 1) for stage in range(n_stages - 1))


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "nothing"
