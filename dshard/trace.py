"""`trace` records each collective with its operator, bytes, seconds and line; `strict` forbids implicit ones."""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import Module, register_module_forward_hook, register_module_forward_pre_hook

from dshard.chrome import Bar, to_chrome
from dshard.comm import CommEvent, collectives_of, listen, runtime_of, user_line
from dshard.core.observe import Decision, observing
from dshard.core.plain_tensors import refusing_plain
from dshard.errors import LayoutError
from dshard.notebook import Tabled
from dshard.ops.experts.experts_call import RoutedTokens
from dshard.step_timeline import event_seconds
from dshard.tables import human_bytes, short_line, text_table
from dshard.torch_private import current_autograd_node, sequence_number
from dshard.validate import check_one_of

__all__ = ["Modules", "user_line"]


class Modules:
    """The module that runs, in the forward pass or in its part of the backward pass.

    Autograd numbers its nodes as the forward pass makes them, so the number of the node that runs backward tells the
    module that made it, if its forward pass was followed. A parameter's gradient belongs to the module that has it.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._owners: dict[int, str] = {}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._running: list[str] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow all modules that run within the block."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def current(self) -> str:
        """The path of the innermost module, from the class of the outermost: "Net.layers.0.fc"; "" outside all."""
        if self._stack:
            return self._stack[-1]
        node = current_autograd_node()
        if node is None:
            return ""
        if hasattr(node, "variable"):  # it accumulates the gradient of a leaf
            return self._owners.get(id(node.variable), "")
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._running[index] if index >= 0 else ""

    def shares(self, members: Sequence[tuple[int, int]], nbytes: int) -> tuple[tuple[str, int], ...]:
        """The paths of the modules that have parameters, each with its share of `nbytes`.

        `members` are the ids of the parameters, and the bytes by which they share.
        """
        weights: dict[str, int] = {}
        for parameter, weight in members:
            path = self._owners.get(parameter)
            if path is not None:
                weights[path] = weights.get(path, 0) + weight
        total, done, cumulative, out = sum(weights.values()), 0, 0, []
        for path, weight in weights.items():
            done += weight
            share = nbytes * done // total - cumulative if total else 0
            cumulative += share
            out.append((path, share))
        return tuple(out)

    def _enter(self, module: Module, args: object) -> None:
        if is_dynamo_compiling():  # which traces hooks, too; a graph has no modules
            return
        if module not in self._names:
            name = ".".join([*self._stack[-1:], type(module).__name__])
            for path, child in module.named_modules(prefix=name):
                self._names[child] = path
                self._owners |= {id(parameter): path for parameter in child.parameters(recurse=False)}
        self._move([*self._stack, self._names[module]])

    def _leave(self, module: Module, args: object, output: object) -> None:
        if is_dynamo_compiling():
            return
        self._move(self._stack[:-1])

    def _move(self, stack: list[str]) -> None:
        self._stack = stack
        self._starts.append(sequence_number())
        self._running.append(stack[-1] if stack else "")


@dataclass(frozen=True, slots=True)
class Traced:
    """One collective: the operator that needed it, its mesh axes, bytes received by this rank, and its line.

    `seconds` are predicted by the topology, `measured` by a measuring trace; `at` is the start, in seconds since the
    trace began. `module` is the path of the module that ran, forward or backward: "Net.fc.1". `asked` says whether the
    user requested the collective; if False, `strict` would have refused the operator. `members` are the modules whose
    parameters, or their gradients, one collective moves, each with its bytes; `module` is then the common part of
    their paths.
    """

    op: str
    collective: str
    axis: str
    nbytes: int
    seconds: float
    line: str
    at: float
    module: str = ""
    measured: float | None = None
    asked: bool = False
    members: tuple[tuple[str, int], ...] = ()


HEADINGS = ("operator", "collective", "axis", "count", "received", "predicted ms", "measured ms", "module", "line")


@dataclass(slots=True, repr=False)
class Trace(Tabled):
    """The collectives that ran within a `trace()` block, in order, and the operators that were called.

    `rank` is the one that recorded it; 0 where all ranks are simulated. `experts` are the calls of layers of experts.
    """

    events: list[Traced] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    rank: int = 0
    experts: list[TracedExperts] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank received in all."""
        return sum(event.nbytes for event in self.events)

    def by(self, field_name: str) -> dict[str, tuple[int, int]]:
        """Collectives and bytes for each value of a field of the events: "axis", "op", "module", "line", ..."""
        check_one_of(field_name, [known.name for known in fields(Traced)], "a field of the events")
        totals: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for event in self.events:
            count, nbytes = totals[getattr(event, field_name)]
            totals[getattr(event, field_name)] = count + 1, nbytes + event.nbytes
        return dict(totals)

    def rows(self) -> list[list[str]]:
        """The events grouped by operator, collective, axis, module and line, with totals: cells under `HEADINGS`."""
        groups: defaultdict[tuple[str, ...], list[Traced]] = defaultdict(list)
        for event in self.events:
            groups[event.op, event.collective, event.axis, event.module, event.line].append(event)
        total = ("total", "", "", "", "")
        return [_row(key, events) for key, events in groups.items()] + [_row(total, self.events)]

    def summary(self) -> str:
        """The rows as a table without columns that are empty throughout, and a second one of layers of experts."""
        collectives = _table(HEADINGS, self.rows(), OPTIONAL)
        if not self.experts:
            return collectives
        return f"{collectives}\n\n{_table(EXPERT_HEADINGS, expert_rows(self.experts), EXPERT_HEADINGS)}"

    def to_json(self) -> str:
        """The events, and the calls of layers of experts, as JSON."""
        events = [asdict(event) for event in self.events]
        experts = [call.data() for call in self.experts]
        return json.dumps({"rank": self.rank, "events": events, "nbytes": self.nbytes, "experts": experts})

    def to_chrome(self) -> str:
        """The events in the Chrome trace format, to be opened in Perfetto or a browser's about:tracing.

        A process for this rank, a thread for each mesh axis. Each event lasts as long as was measured, or else as the
        topology predicts.
        """
        axes = dict.fromkeys(event.axis for event in self.events)
        tracks = [(self.rank, f"axis {axis}") for axis in axes]
        return to_chrome(map(self._slice, self.events), tracks, {self.rank: f"rank {self.rank}"})

    def _slice(self, event: Traced) -> Bar:
        measured = {} if event.measured is None else {"measured us": event.measured * 1e6}
        shown = {"bytes": event.nbytes, "predicted us": event.seconds * 1e6, **measured}
        return Bar(
            f"{event.collective} ({event.op})",
            event.collective,
            (self.rank, f"axis {event.axis}"),
            event.at,
            event.seconds if event.measured is None else event.measured,
            {**shown, "module": event.module, "line": event.line},
        )

    def __str__(self) -> str:
        return self.summary()


OPTIONAL = ("measured ms", "module")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str]) -> str:
    """The rows as a table, without the optional columns that are empty throughout."""
    kept = [i for i, heading in enumerate(headings) if heading not in optional or any(row[i] for row in rows)]
    return text_table([headings[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _row(key: tuple[str, ...], events: list[Traced]) -> list[str]:
    op, collective, axis, module, line = key
    nbytes = human_bytes(sum(event.nbytes for event in events))
    measured = [event.measured for event in events if event.measured is not None]
    seconds = (f"{sum(event.seconds for event in events) * 1e3:.3f}", f"{sum(measured) * 1e3:.3f}" if measured else "")
    return [op, collective, axis, str(len(events)), nbytes, *seconds, module, short_line(line)]


@contextmanager
def trace(*, measure: bool = False) -> Iterator[Trace]:
    """Record the operators and collectives that run within the block.

    With `measure` each collective is timed: its ranks wait for each other, then for its end, on the device too. That
    perturbs the program: communication no longer overlaps with computation, and steps take longer. All ranks must
    measure or none. Simulated ranks are not measured.

    >>> with trace() as t:
    ...     pass
    >>> t.events, t.nbytes
    ([], 0)
    """
    recorded, modules, begin = Trace(), Modules(), perf_counter()
    of_experts: list[int] = []  # how many events there were when each layer of experts began

    def on_operator(decision: Decision) -> None:
        if len(running) == 1:
            recorded.operators.append(decision.op)
        if decision.op == "experts":
            of_experts.append(len(recorded.events))

    def on_found(found: object) -> None:
        if isinstance(found, RoutedTokens):
            nbytes = sum(event.nbytes for event in recorded.events[of_experts.pop() :])
            recorded.experts.append(TracedExperts.of(found, modules.current(), user_line(), nbytes))

    def on_event(event: CommEvent) -> None:
        at = perf_counter() - begin - (event.measured or 0.0)
        runtime = runtime_of(event.mesh)
        members = modules.shares(running[-1].members, event.nbytes) if running else ()
        recorded.rank = 0 if runtime is None else runtime.rank
        recorded.events.append(
            Traced(
                running[0].op if running else "?",
                event.collective,
                event.axis,
                event.nbytes,
                event_seconds(event),
                user_line(),
                at,
                common_module([path for path, _ in members]) if members else modules.current(),
                event.measured,
                bool(running) and running[0].explicit,
                members,
            )
        )

    observed = observing(on_operator, found=on_found)
    with observed as running, listen(on_event, measure=measure), modules.followed():
        yield recorded


def common_module(paths: Sequence[str]) -> str:
    """The path of the innermost module within which all of these are.

    >>> common_module(["Net.blocks.0.q", "Net.blocks.0.norm"])
    'Net.blocks.0'
    """
    together = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, together))


@contextmanager
def strict() -> Iterator[None]:
    """Within the block an operator that communicates implicitly is an error, before it sends anything.

    Explicit communication stays allowed: `redistribute`, `full_tensor`, `distribute_tensor` and `from_local`; numbers
    of global tensors, such as `item()` and norms without dims; gradients that are redistributed to the layout of their
    parameters.

    Raises:
        LayoutError: an implicit collective; names the operator, the layouts and the line.
    """

    def refuse(decision: Decision) -> None:
        if not running[0].explicit:
            _refuse_collectives(running[0].op, decision)

    with observing(refuse) as running, refusing_plain():
        yield


def _refuse_collectives(op: str, decision: Decision) -> None:
    """Refuse a decision that communicates; `op` is the operator called by the user, whose run made the decision."""
    if not decision.collectives():
        return
    moved = [f"[{plan.src}] -> [{plan.dst}]" for plan, itemsize in decision.moves() if collectives_of(plan, itemsize)]
    sent = [f"{sent.collective} over {sent.axis}" for sent in decision.exchanges]
    would = " and ".join(
        f"{verb} {'; '.join(what)}" for verb, what in (("redistribute", moved), ("send", sent)) if what
    )
    raise LayoutError(
        f"{op} at {user_line()} would {would}, which strict() forbids: "
        "redistribute the operands yourself, or lay them out alike"
    )


# -- layers of experts: what came to this rank, and how tokens were spread over experts and ranks

EXPERT_HEADINGS = (
    *("experts of", "loops", "calls", "tokens", "rows", "bytes a token"),
    *("tokens an expert", "most", "busiest rank / mean", "counted", "line"),
)
NUMBERS = EXPERT_HEADINGS[2:9]


@dataclass(frozen=True, slots=True)
class TracedExperts:
    """One call of a layer of experts, forward: its module and line, the choice of loops, and its tokens.

    `tokens` are those that this rank has, `rows` those that came to it from other ranks in the ragged form (None in
    others), `nbytes` what it received; where ranks are simulated, of the busiest. `counts` [experts], on the device,
    are tokens by expert: those of this rank, or of `all_ranks`, where these are simulated, have the same tokens, or
    measure. `held` are the experts of each rank, or group of ranks that have the same ones.

    `Routing.of(experts.by_expert())` is how the call spread its tokens.
    """

    module: str
    line: str
    loops: str
    tokens: int
    rows: int | None
    nbytes: int
    counts: Tensor
    all_ranks: bool
    held: tuple[range, ...]

    @classmethod
    def of(cls, routed: RoutedTokens, module: str, line: str, nbytes: int) -> TracedExperts:
        """The record of a call that told how it spread tokens, and received so many bytes."""
        counted = routed.counts, routed.all_ranks, routed.held
        return cls(module, line, routed.loops, routed.tokens, routed.rows, nbytes, *counted)

    def by_expert(self) -> list[int]:
        """The tokens of each expert; the host waits for the device."""
        return self.counts.tolist()

    def data(self) -> dict[str, Any]:
        """The record as plain values."""
        names = ("module", "line", "loops", "tokens", "rows", "nbytes", "all_ranks")
        held = [[each.start, each.stop] for each in self.held]
        return {**{name: getattr(self, name) for name in names}, "tokens_by_expert": self.by_expert(), "held": held}


def expert_rows(calls: Sequence[TracedExperts]) -> list[list[str]]:
    """The calls grouped by module, loops and line: cells under `EXPERT_HEADINGS`."""
    groups: defaultdict[tuple[object, ...], list[TracedExperts]] = defaultdict(list)
    for call in calls:
        groups[call.module, call.loops, call.line, call.held, call.all_ranks].append(call)
    return [_calls_row(group) for group in groups.values()]


def _calls_row(calls: Sequence[TracedExperts]) -> list[str]:
    first, tokens = calls[0], sum(call.tokens for call in calls)
    counts: list[int] = sum(call.counts for call in calls).tolist()  # type: ignore[union-attr]
    rows = [call.rows for call in calls if call.rows is not None]
    numbers = [
        str(len(calls)),
        str(tokens),
        str(sum(rows)) if rows else "",
        human_bytes(sum(call.nbytes for call in calls) / tokens) if tokens else "",
        f"{sum(counts) / len(counts):.4g}" if counts else "",
        str(max(counts, default=0)),
        _busiest(counts, first.held),
    ]
    counted = "all tokens" if first.all_ranks else "this rank's tokens"
    return [first.module, first.loops, *numbers, counted, short_line(first.line)]


def _busiest(counts: Sequence[int], held: Sequence[range]) -> str:
    """The tokens of the busiest rank's experts over those of a rank in the mean; "" where all have all experts.

    >>> _busiest([3, 1, 0, 0], [range(2), range(2, 4)])
    '2.00'
    """
    of_ranks = [sum(counts[each.start : each.stop]) for each in held]
    total = sum(of_ranks)
    return f"{max(of_ranks) * len(of_ranks) / total:.2f}" if total and len(held) > 1 else ""
