"""What ranks compute and receive if a token's row goes once to each rank, or host, that needs it: expected numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dshard import Routing
from dshard.placements.chunk import chunk
from dshard.routing import Held


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Expected rows of one pass of a layer of experts, by rank.

    `pairs` are computed by a rank; `tokens` are rows that it receives because it has experts, `results` rows that it
    receives back for its own tokens, one from each rank that had them.
    """

    pairs: tuple[float, ...]
    tokens: tuple[float, ...]
    results: tuple[float, ...]

    @property
    def received(self) -> tuple[float, ...]:
        """The rows that each rank receives, of tokens and of results."""
        return tuple([there + back for there, back in zip(self.tokens, self.results, strict=True)])

    @property
    def skew(self) -> float:
        """The pairs of the busiest rank over the mean."""
        return max(self.pairs) * len(self.pairs) / (sum(self.pairs) or 1.0)


def expert_ranges(experts: int, ranks: int) -> Held:
    """The experts of each rank where `Shard(0)` on one mesh axis divides them; a rank may have none."""
    return tuple([chunk(experts, ranks, rank) for rank in range(ranks)])


def routed_rows(routing: Routing, held: Held, choices: int, tokens: Sequence[float]) -> RoutedRows:
    """A token's row goes once to each other rank that needs it. `tokens` are those of each rank."""
    hits, total = routing.hits(held, choices), sum(tokens)
    distinct = sum(hits)
    return RoutedRows(
        _pairs(routing, held, choices, total),
        tuple([hit * (total - own) for hit, own in zip(hits, tokens, strict=True)]),
        tuple([own * (distinct - hit) for hit, own in zip(hits, tokens, strict=True)]),
    )


def rows_by_host(
    routing: Routing, held: Held, choices: int, tokens: Sequence[float], hosts: int
) -> tuple[RoutedRows, RoutedRows]:
    """What each rank computes and receives over two levels: between hosts, and within them.

    `held` and `tokens` are by rank, host by host. A token goes once to each other host that needs it, to the rank
    with its own rank's number there, and from there once to each other rank of the host that needs it. Results are
    summed by host on the same way back.
    """
    hits, within = routing.hits(held, choices), len(held) // hosts
    of_hosts = routing.hits(
        tuple([range(held[i].start, held[i + within - 1].stop) for i in range(0, len(held), within)]), choices
    )
    pairs = _pairs(routing, held, choices, sum(tokens))
    lanes = [sum(tokens[lane::within]) for lane in range(within)]  # the ranks of one number on all hosts
    total, distinct = sum(tokens), sum(of_hosts)
    across, inside = list[tuple[float, float]](), list[tuple[float, float]]()
    for rank, (hit, own) in enumerate(zip(hits, tokens, strict=True)):
        host, lane = divmod(rank, within)
        of_host = sum(hits[host * within : (host + 1) * within])
        across.append((of_hosts[host] * (lanes[lane] - own), own * (distinct - of_hosts[host])))
        inside.append((hit * (total - lanes[lane]), lanes[lane] * (of_host - hit)))
    outer, inner = (
        RoutedRows(pairs, tuple([there for there, _ in each]), tuple([back for _, back in each]))
        for each in (across, inside)
    )
    return outer, inner


def _pairs(routing: Routing, held: Held, choices: int, tokens: float) -> tuple[float, ...]:
    shares = routing.shares(held[-1].stop, choices)
    return tuple([tokens * choices * sum([shares[expert] for expert in each]) for each in held])
