"""Actions of a stage, as values: schedules yield them, the simulator prices them, ranks run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from dshard.errors import ScheduleError
from dshard.validate import as_int


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A value that crosses between stages: an activation to a later stage, or its gradient back to an earlier one.

    >>> Edge("x", 0, 1).back(), Edge("x", 1, 0).backward
    (Edge(value='x', src=1, dst=0), True)

    Raises:
        ScheduleError: what are no two stages.
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
class Forward:
    """The stage's module on one microbatch."""

    microbatch: int

    def __str__(self) -> str:
        return f"F{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass of the stage on one microbatch: gradients of inputs and weights."""

    microbatch: int

    def __str__(self) -> str:
        return f"B{self.microbatch}"


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """The first half of a split backward pass: the gradients of the inputs, for which earlier stages wait."""

    microbatch: int

    def __str__(self) -> str:
        return f"I{self.microbatch}"


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The second half of a split backward pass: the gradients of the weights, after `BackwardInput`."""

    microbatch: int

    def __str__(self) -> str:
        return f"W{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send a value that was computed."""

    edge: Edge
    microbatch: int

    def __str__(self) -> str:
        return f"send {self.edge} of microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Begin to receive a value into memory; the action that computes with it waits for it."""

    edge: Edge
    microbatch: int

    def __str__(self) -> str:
        return f"receive {self.edge} of microbatch {self.microbatch}"


Compute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
Action: TypeAlias = Compute | Send | Receive
