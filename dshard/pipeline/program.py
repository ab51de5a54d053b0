"""Programs: a schedule with its sends and receives, the actions of every stage in order, as one value.

A schedule is what one stage computes, in order: how many forwards it runs before its first backward, its lead. After
that backwards and forwards alternate, and the remaining backwards come last. With n stages and m microbatches stage i
leads by

- gpipe: m (Huang et al., arXiv 1811.06965): all forwards, then all backwards;
- 1f1b: n - i (PipeDream-flush, Narayanan et al., arXiv 2104.04473), the least without idling;
- eager-1f1b: 2(n - i) - 1 (Zhuang et al., arXiv 2211.05322, section 4), so that messages between two neighbours overlap
  with the computation of both.

The lead is also how many microbatches are in flight at most: forward begun, backward not done.

Actions are values: schedules yield them, the simulator prices them, ranks run them. Edges between stages are a dataflow
by names: a stage gets a value from the last earlier stage that gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, TypeAlias

from dshard.caches import cached
from dshard.errors import ScheduleError
from dshard.validate import as_int, as_tuple, check_type, suggestion


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


Lead: TypeAlias = Callable[[int, int, int], int]
"""Stage, number of stages, number of microbatches -> forwards before the first backward."""


def gpipe(stage: int, n_stages: int, n_microbatches: int) -> int:
    """The lead of GPipe.

    >>> [gpipe(i, 4, 16) for i in range(4)]
    [16, 16, 16, 16]
    """
    return n_microbatches


def one_f_one_b(stage: int, n_stages: int, n_microbatches: int) -> int:
    """The lead of 1F1B.

    >>> [one_f_one_b(i, 4, 16) for i in range(4)]
    [4, 3, 2, 1]
    """
    return min(n_microbatches, n_stages - stage)


def eager_one_f_one_b(stage: int, n_stages: int, n_microbatches: int) -> int:
    """The lead of eager-1F1B.

    >>> [eager_one_f_one_b(i, 4, 16) for i in range(4)]
    [7, 5, 3, 1]
    """
    return min(n_microbatches, 2 * (n_stages - stage) - 1)


SCHEDULES: MappingProxyType[str, Lead] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "eager-1f1b": eager_one_f_one_b}
)


def lead_of(schedule: str, stage: int, n_stages: int, n_microbatches: int) -> int:
    """The lead of a stage: the number of forwards before its first backward."""
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        known = f"use one of {', '.join(SCHEDULES)}{suggestion(schedule, SCHEDULES)}"
        raise ScheduleError(f"there is no schedule {schedule!r}: {known}")
    if not 0 <= stage < n_stages:
        raise ScheduleError(f"there is no stage {stage}: they are 0 to {n_stages - 1}")
    return SCHEDULES[schedule](stage, n_stages, n_microbatches)


def computes(lead: int, n_microbatches: int, delay: int | None = None) -> Iterator[Compute]:
    """The computes of a stage: `lead` forwards, one backward and one forward alternately, then the remaining backwards.

    With a `delay` each backward is split: the gradients of the inputs first, and those of the weights after the
    `delay` next ones (backward weight delaying, arXiv 2211.05322, section 4).

    >>> " ".join(map(str, computes(2, 4)))
    'F0 F1 B0 F2 B1 F3 B2 B3'
    >>> " ".join(map(str, computes(2, 4, delay=1)))
    'F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3'
    """
    least = {"n_microbatches": 1, "lead": 1, "delay": 0}
    for name, number in {"n_microbatches": n_microbatches, "lead": lead, "delay": delay}.items():
        if number is not None:
            as_int(number, name, ScheduleError, least=least[name])
    if lead > n_microbatches:
        raise ScheduleError(f"a lead of {lead} forwards is more than the {n_microbatches} microbatches")
    yield from map(Forward, range(lead))
    for microbatch in range(n_microbatches):
        yield from _backward(microbatch, delay)
        if microbatch + lead < n_microbatches:
            yield Forward(microbatch + lead)
    if delay is not None:
        yield from map(BackwardWeight, range(max(0, n_microbatches - delay), n_microbatches))


def _backward(microbatch: int, delay: int | None) -> Iterator[Compute]:
    if delay is None:
        yield Backward(microbatch)
        return
    yield BackwardInput(microbatch)
    if microbatch >= delay:
        yield BackwardWeight(microbatch - delay)


AHEAD = 2
"""The number of microbatches by which a stage posts receives early: how far a stage is ahead of the next under
eager-1F1B."""


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of `n_stages` stages for `n_microbatches` microbatches, sent along `edges`.

    `delay` splits each backward, see `computes`. With `overlap` a stage computes during its sends, else it waits until
    they have arrived. A stage posts receives at least `ahead` microbatches early, see `early`.

    >>> from dshard.pipeline.program import chain
    >>> print(Program("1f1b", 2, 2, chain(2), ahead=0))
    stage 0: F0, send x 0->1 of microbatch 0, F1, send x 0->1 of microbatch 1, receive gradient of x 1->0 of microbatch 0, B0, receive gradient of x 1->0 of microbatch 1, B1
    stage 1: receive x 0->1 of microbatch 0, F0, B0, send gradient of x 1->0 of microbatch 0, receive x 0->1 of microbatch 1, F1, B1, send gradient of x 1->0 of microbatch 1
    """  # noqa: E501

    schedule: str
    n_stages: int
    n_microbatches: int
    edges: tuple[Edge, ...]
    delay: int | None = None
    overlap: bool = True
    ahead: int = AHEAD

    def __post_init__(self) -> None:
        for name in ("n_stages", "n_microbatches", "delay", "ahead"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_int(getattr(self, name), name, ScheduleError))
        object.__setattr__(self, "edges", as_tuple(self.edges, "edges", "give Edges in a tuple", ScheduleError))
        for what, number in ("stages", self.n_stages), ("microbatches", self.n_microbatches):
            if number < 1:
                raise ScheduleError(f"a pipeline of {number} {what}: it needs at least one")
        lead_of(self.schedule, 0, self.n_stages, self.n_microbatches)
        if min(self.delay or 0, self.ahead) < 0:
            raise ScheduleError(f"delay {self.delay}, ahead {self.ahead}: neither can be negative")
        if len(set(self.edges)) < len(self.edges):
            raise ScheduleError("an edge is given twice: name each value that crosses between two stages once")
        for edge in self.edges:
            check_type(edge, Edge, "an edge", "give an Edge(value, src, dst)", ScheduleError)
            if not 0 <= edge.src < edge.dst < self.n_stages:
                way = f"{edge.value} {edge.src}->{edge.dst}"  # an edge back calls itself a gradient
                raise ScheduleError(f"the edge {way} must go from a stage to a later one of {self.n_stages}")

    def lead(self, stage: int) -> int:
        """The forwards that a stage runs before its first backward: its most microbatches in flight."""
        return lead_of(self.schedule, stage, self.n_stages, self.n_microbatches)

    def window(self, edge: Edge) -> int:
        """The most microbatches of `edge` in flight at once: the lead of the earlier of its stages."""
        return self.lead(min(edge.src, edge.dst))

    def early(self, edge: Edge) -> int:
        """The number of microbatches by which a stage posts the receive of a value along `edge` early.

        Without overlap as many as can be in flight: else a stage that waits until its message has arrived may wait for
        a receiver that posts the receive only after its own message has arrived.
        """
        return self.ahead if self.overlap else max(self.ahead, self.window(edge))

    def actions(self, stage: int) -> tuple[Action, ...]:
        """All actions of a stage, in order."""
        if not 0 <= as_int(stage, "stage", ScheduleError) < self.n_stages:
            raise ScheduleError(f"there is no stage {stage}: they are 0 to {self.n_stages - 1}")
        return _actions(self, stage)

    def takes(self, compute: Compute, stage: int) -> tuple[Edge, ...]:
        """The edges along which a stage receives before `compute`."""
        return tuple(edge for edge in self._edges_after(compute) if edge.dst == stage)

    def gives(self, compute: Compute, stage: int) -> tuple[Edge, ...]:
        """The edges along which a stage sends after `compute`."""
        return tuple(edge for edge in self._edges_after(compute) if edge.src == stage)

    def _edges_after(self, compute: Compute) -> tuple[Edge, ...]:
        """The edges of all stages along which values are sent after `compute`."""
        match compute:
            case Forward():
                return self.edges
            case Backward() | BackwardInput():
                return tuple(edge.back() for edge in self.edges)
            case BackwardWeight():
                return ()

    def __str__(self) -> str:
        return "\n".join(f"stage {i}: {', '.join(map(str, self.actions(i)))}" for i in range(self.n_stages))


@cached("pipeline actions", 1024)
def _actions(program: Program, stage: int) -> tuple[Action, ...]:
    return tuple(_generate(program, stage))


def _generate(program: Program, stage: int) -> Iterator[Action]:
    last = program.n_microbatches - 1
    order = tuple(computes(program.lead(stage), program.n_microbatches, program.delay))
    for microbatch in range(last + 1):
        for first in (Forward(microbatch), Backward(microbatch)):
            edges = program.takes(first, stage)
            yield from (Receive(edge, microbatch) for edge in edges if microbatch < program.early(edge))
    for compute in order:
        microbatch = compute.microbatch
        for edge in program.takes(compute, stage):
            if microbatch + program.early(edge) <= last:
                yield Receive(edge, microbatch + program.early(edge))
        yield compute
        yield from (Send(edge, microbatch) for edge in program.gives(compute, stage))
