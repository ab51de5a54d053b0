"""The values that `explain` returns: candidates, the chosen one and why, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dshard.cost import PlannedCollective
from dshard.errors import MixedError
from dshard.notebook import Tabled
from dshard.rules.panel_stream import PanelCost, Transport
from dshard.tables import human_bytes, short_line, text_table
from dshard.validate import as_int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run an operator, priced.

    `name` is the row of each mesh axis; `placements` are the layouts of operands and outputs, as text; `steps` are the
    collectives for the operands and to complete partial outputs. Bytes are those of the busiest rank: `bytes_moved` are
    received, `peak_bytes` held if nothing is freed before the end (stored operands, redistributed copies, outputs).
    `messages` are sequential. `bound_ratio` is `bytes_moved` over a lower bound for matmuls of these sizes that store
    each tensor once; None for another operator, or a bound of zero. `one_copy` says whether each element of operands
    and outputs is stored on one rank only. `backward_seconds` are the seconds of needed gradients; bytes and steps are
    of the forward pass.
    """

    name: str
    placements: str
    bytes_moved: int
    messages: int
    peak_bytes: int
    gather_seconds: float
    compute_seconds: float
    reduce_seconds: float
    backward_seconds: float
    bound_ratio: float | None
    one_copy: bool
    steps: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds in all: gather, compute, reduce and backward."""
        return self.gather_seconds + self.compute_seconds + self.reduce_seconds + self.backward_seconds

    def data(self) -> dict[str, Any]:
        """The fields, and the seconds in all."""
        return asdict(self) | {"seconds": self.seconds}


HEADINGS = (
    *("", "axes", "layouts", "received", "messages", "peak"),
    *("gather us", "compute us", "reduce us", "backward us", "x bound"),
)


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Tabled):
    """One operator: its operands, the candidates from cheapest to dearest, the chosen one, and why.

    `topology` is the name of the topology of the prices, `network` its layers, `topology_why` the reason for its use.
    `candidates` are shown, out of `considered` ones. `line` is the calling line of the program. `panels` are the costs
    of the chosen candidate in each number of panels, and by symmetric memory; `run_in` is the number that runs, by
    `transport`. `collectives` run with the
    operator, as `trace` records them, without those that complete a partial result.
    """

    op: str
    operands: tuple[str, ...]
    rule: str
    topology: str
    network: str
    topology_why: str
    candidates: tuple[Candidate, ...]
    considered: int
    chosen: Candidate
    why: str
    line: str = ""
    panels: tuple[PanelCost, ...] = ()
    run_in: int = 1
    transport: Transport = "collective"
    collectives: tuple[PlannedCollective, ...] = ()

    def top(self, n: int) -> Explanation:
        """The explanation with only the `n` cheapest candidates, and the chosen one."""
        n = as_int(n, "top", least=0)
        first = self.candidates[:n]
        return replace(self, candidates=first if self.chosen in first else (*first, self.chosen))

    def data(self) -> dict[str, Any]:
        """The explanation as JSON values."""
        candidates = [candidate.data() for candidate in self.candidates]
        return asdict(self) | {"candidates": candidates, "chosen": self.chosen.data()}

    def to_json(self) -> str:
        """The explanation as JSON."""
        return json.dumps(self.data())

    def head(self) -> list[str]:
        """The lines above the table: operator, rule, topology, operands."""
        rule = f"   {self.rule}" if self.rule else ""
        line = f"   at {short_line(self.line)}" if self.line else ""
        network = f"topology {self.network}; {self.topology_why}"
        return [f"{self.op}{rule}{line}", f"  {network}", *(f"  operand {operand}" for operand in self.operands)]

    def foot(self) -> list[str]:
        """The lines below the table: the chosen candidate, why, and its steps."""
        hidden = self.considered - len(self.candidates)
        more = [f"{hidden:,} dearer candidates are not shown"] if hidden else []
        steps = [f"  {i}. {step}" for i, step in enumerate(self.chosen.steps, 1)] or ["  nothing is sent"]
        priced = [*map(self._panels, self.panels)]
        if (self.run_in, self.transport) not in [(cost.panels, cost.transport) for cost in self.panels]:
            priced.append(f"{self.run_in} by {self.transport}, not priced (as it runs)")
        panels = [] if len(self.panels) < 2 else [f"in panels, forward: {', '.join(priced)}"]
        return [*more, f"chosen: {self.chosen.name}, {self.why}", *steps, *panels]

    def _panels(self, cost: PanelCost) -> str:
        runs = (cost.panels, cost.transport) == (self.run_in, self.transport)
        mark, how = " (as it runs)" if runs else "", cost.panels if cost.transport == "collective" else cost.transport
        return f"{how}: {cost.seconds * 1e6:.1f} us, {human_bytes(cost.buffer_bytes)} in buffers{mark}"

    def __str__(self) -> str:
        rows = [
            ["*" if candidate is self.chosen else "", candidate.name, candidate.placements, *figures(candidate)]
            for candidate in self.candidates
        ]
        return "\n".join([*self.head(), text_table(HEADINGS, rows), *self.foot()])


def figures(priced: Candidate) -> list[str]:
    """Bytes, messages, peak, four times in us, and the ratio to the bound, as cells of a table."""
    seconds = (priced.gather_seconds, priced.compute_seconds, priced.reduce_seconds, priced.backward_seconds)
    return [
        human_bytes(priced.bytes_moved),
        str(priced.messages),
        human_bytes(priced.peak_bytes),
        *(f"{s * 1e6:.1f}" for s in seconds),
        "" if priced.bound_ratio is None else f"{priced.bound_ratio:.2f}",
    ]


@dataclass(frozen=True, slots=True, repr=False)
class Report(Tabled):
    """The explanations of `explain`, one for each operator that was called, in order."""

    operators: tuple[Explanation, ...]

    @property
    def chosen(self) -> Candidate:
        """The chosen candidate of the first operator."""
        return self._first().chosen

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The candidates of the first operator, from cheapest to dearest."""
        return self._first().candidates

    def _first(self) -> Explanation:
        if not self.operators:
            raise MixedError(f"{NOTHING}: give explain a function of DTensors")
        return self.operators[0]

    def top(self, n: int) -> Report:
        """The report with only the `n` cheapest candidates of each operator."""
        return Report(tuple(operator.top(n) for operator in self.operators))

    def to_json(self) -> str:
        """The report as JSON: a list, one object for each operator."""
        return json.dumps([operator.data() for operator in self.operators])

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.operators)) or NOTHING


NOTHING = "no operator on distributed tensors was called"


def why_chosen(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """Why `chosen` was chosen of all candidates, and the seconds or bytes of the next best ones."""
    if len(candidates) == 1:
        return "the only candidate"
    second = next(c for c in candidates if c is not chosen)
    times = _times(second.seconds, chosen.seconds)
    text = f"the cheapest of {len(candidates):,}; {second.name} would take {times}"
    if second.seconds < chosen.seconds and 2 * chosen.bytes_moved <= second.bytes_moved:
        text = f"about as fast as the fastest of {len(candidates):,}, {second.name}, which would take {times} and move "
        text += f"{human_bytes(second.bytes_moved)}, not {human_bytes(chosen.bytes_moved)}"
    least = min(candidates, key=lambda c: c.bytes_moved)
    if least.bytes_moved < chosen.bytes_moved:
        text += f"; {least.name} would move fewer bytes, {human_bytes(least.bytes_moved)}, but take longer"
    stored_once = [c for c in candidates if c.one_copy]
    if stored_once and not chosen.one_copy:
        best = min(stored_once, key=lambda c: c.seconds)
        text += f"; of those that store each tensor once {best.name} is the cheapest, and would take "
        text += f"{_times(best.seconds, chosen.seconds)}, with a peak of {human_bytes(best.peak_bytes)}"
    return text


def _times(dearer: float, cheaper: float) -> str:
    if dearer == cheaper:
        return "just as long"
    return f"{dearer / cheaper:.2f}x as long" if cheaper else "longer"
