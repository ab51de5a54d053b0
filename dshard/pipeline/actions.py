"""Actions of a stage, as values: schedules yield them, the simulator prices them, ranks run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from dshard.errors import ScheduleError
from dshard.validate import as_int


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
