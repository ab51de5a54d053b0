"""Layers of experts in a trace: what came to this rank, and how tokens were spread over experts and ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dshard.ops.experts.experts_call import RoutedTokens
from dshard.tables import human_bytes, short_line

HEADINGS = (
    *("experts of", "loops", "calls", "tokens", "rows", "bytes a token"),
    *("tokens an expert", "most", "busiest rank / mean", "counted", "line"),
)
NUMBERS = HEADINGS[2:9]


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
    """The calls grouped by module, loops and line: cells under `HEADINGS`."""
    groups: defaultdict[tuple[object, ...], list[TracedExperts]] = defaultdict(list)
    for call in calls:
        groups[call.module, call.loops, call.line, call.held, call.all_ranks].append(call)
    return [_row(group) for group in groups.values()]


def _row(calls: Sequence[TracedExperts]) -> list[str]:
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
