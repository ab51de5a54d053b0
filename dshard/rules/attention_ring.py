"""Ring attention: the panel of keys and values that each rank has in each step, and the messages between steps.

Every rank of the ring begins with its own panel, and sends its current panel to the next rank. Around several mesh axes
the innermost varies fastest: a panel goes around it, then one rank further on the next axis, and around again, so that
it crosses a slow axis least often. A panel that no later rank may see is not sent (Liu et al., Ring Attention, 2023).

In a balanced ring each rank first swaps the second half of its queries, keys and values with its mirror image in the
ring: then all ranks have equal work under a causal mask in every step (Brandon et al., Striped Attention, 2023; the
halves are those of zigzag forms, and the swap is the cheapest of these).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, TypeAlias

from dshard.caches import cached
from dshard.rules.attention_blocks import Block, Reach, Work, visible_blocks, work_of

Positions = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Ring:
    """The mesh axes around which keys and values are sent, outermost first, and whether halves are swapped."""

    axes: tuple[int, ...]
    balanced: bool = False


@dataclass(frozen=True, slots=True)
class RingMessages:
    """The sends and receives of one rank of a ring between steps: pairs of a peer's index and the panel's owner.

    `axis` is the position in the ring's axes of the only mesh axis along which all are sent; None for several.
    """

    axis: int | None
    sent: tuple[tuple[int, int], ...]
    received: tuple[tuple[int, int], ...]


MessageKind: TypeAlias = Literal["panels", "gradients"]


class Hop(NamedTuple):
    """The messages of all ranks of a ring beside one step: the most keys that a rank receives, and pairs of ranks.

    `axis` is that of `RingMessages`.
    """

    received: int
    axis: int | None
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class RingPlan:
    """The steps of a ring of this shape; ranks have indices in it.

    For each step `owners` has the owner of each rank's panel, `holders` the rank that has each owner's panel, `blocks`
    the visible blocks of each rank, and `pairs` their pairs of a query and a key. `last` is for each owner the last
    step in which a rank sees some of its panel; `lengths` are the keys in each panel, `rows` the queries of each rank.
    """

    shape: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[tuple[Block, ...], ...], ...]
    pairs: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks, and of steps, of the ring."""
        return len(self.lengths)

    def holder(self, owner: int, step: int) -> int:
        """The index of the rank that has the panel of `owner` in a step."""
        return self.holders[step][owner]

    def panels(self, index: int, step: int) -> RingMessages:
        """The panels that a rank sends and receives before `step`."""
        leaves, comes = self.owners[step - 1][index], self.owners[step][index]
        sent = ((self.holder(leaves, step), leaves),) if self.last[leaves] >= step else ()
        received = ((self.holder(comes, step - 1), comes),) if self.last[comes] >= step else ()
        return RingMessages(_moving_axis(self.shape, step), sent, received)

    def gradients(self, index: int, step: int) -> RingMessages:
        """The gradients that a rank sends and receives after `step`: they follow their panel, then go to its owner."""
        held = self.owners[step][index]
        sent: tuple[tuple[int, int], ...] = ()
        received: tuple[tuple[int, int], ...] = ()
        if self.last[held] >= step:
            sent = ((held if self.last[held] == step else self.holder(held, step + 1), held),)
        if step + 1 < self.ranks and self.last[comes := self.owners[step + 1][index]] > step:
            received = ((self.holder(comes, step), comes),)
        if self.last[index] == step:
            received = (*received, (self.holder(index, step), index))
        return RingMessages(self._axis_of_gradients(step), sent, received)

    @cached("rings", 256)
    def hops(self, kind: MessageKind) -> tuple[Hop, ...]:
        """The messages of panels, or of gradients, beside each step but the first."""
        messages = self.panels if kind == "panels" else self.gradients
        hops = list[Hop]()
        for step in range(1, self.ranks):
            of_ranks = [messages(i, step) for i in range(self.ranks)]
            received = max([sum([self.lengths[owner] for _, owner in each.received]) for each in of_ranks])
            pairs = tuple([(i, to) for i, each in enumerate(of_ranks) for to, _ in each.sent])
            hops.append(Hop(received, of_ranks[0].axis, pairs))
        return tuple(hops)

    def _axis_of_gradients(self, step: int) -> int | None:
        """The axis along which gradients are sent after `step`, by its position in the ring; None for several."""
        if len(self.shape) == 1:
            return 0
        if step + 1 == self.ranks or step in self.last:
            return None
        return _moving_axis(self.shape, step + 1)

    @cached("rings", 256)
    def works(self, backend: str, narrow: bool) -> list[tuple[Work, ...]]:
        """The work of each rank in each step, on devices with this backend; `narrow` in half precision."""
        of_ranks = zip(zip(*self.blocks, strict=True), self.rows, strict=True)
        return list(zip(*(work_of(steps, rows, backend, narrow) for steps, rows in of_ranks), strict=True))

    def seconds(self, work: Sequence[Sequence[float]], sends: Sequence[float], lost: Sequence[float]) -> float:
        """Seconds of the critical path, as a rank sends a panel on while it computes with it.

        `work` are the seconds of each step on each rank, `sends` those of the messages before each step but the first,
        and `lost` the seconds by which each of these slows the computation beside it.
        """
        starts = [0.0] * self.ranks
        for step, (send, longer) in enumerate(zip(sends, lost, strict=True), start=1):
            before, holders = starts, self.holders[step - 1]
            done = [start + seconds + longer for start, seconds in zip(before, work[step - 1], strict=True)]
            arrived = [before[holders[owner]] + send for owner in self.owners[step]]
            starts = list(map(max, done, arrived))
        return max(start + seconds for start, seconds in zip(starts, work[-1], strict=True))


@cached("rings", 4096)
def ring_plan(
    shape: tuple[int, ...],
    queries: tuple[Positions, ...],
    keys: tuple[Positions, ...],
    causal: bool,
    reach: Reach | None = None,
) -> RingPlan:
    """The plan of a ring for the initial positions of each rank's queries and keys.

    Without a causal mask `reach` may say which keys queries see.

    >>> plan = ring_plan((2, 2), ((range(1),),) * 4, ((range(1),),) * 4, False)
    >>> plan.owners
    ((0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0), (2, 3, 0, 1))
    """
    n = prod(shape)
    owners = tuple(tuple(_owner(shape, index, step) for index in range(n)) for step in range(n))
    holders = tuple(tuple(sorted(range(n), key=step.__getitem__)) for step in owners)
    blocks = tuple(
        tuple(visible_blocks(queries[index], keys[owner], causal, reach) for index, owner in enumerate(step))
        for step in owners
    )
    pairs = tuple(tuple(sum([block.pairs for block in each]) for each in step) for step in blocks)
    last = tuple(max((step for step in range(n) if pairs[step][holders[step][owner]]), default=0) for owner in range(n))
    lengths, rows = (tuple(sum(map(len, each)) for each in positions) for positions in (keys, queries))
    return RingPlan(shape, owners, holders, blocks, pairs, last, lengths, rows)


def swapped(positions: Sequence[range]) -> tuple[Positions, ...]:
    """The positions of each rank after it has swapped second halves with its mirror image in the ring.

    >>> swapped([range(0, 4), range(4, 8), range(8, 10)])
    ((range(0, 2), range(9, 10)), (range(4, 6), range(6, 8)), (range(8, 9), range(2, 4)))
    """
    halves = [halved(each) for each in positions]
    return tuple((first, halves[-1 - i][1]) for i, (first, _) in enumerate(halves))


def halved(positions: range) -> tuple[range, range]:
    """The two halves of a range; the first is the longer one."""
    middle = positions.start + -(-len(positions) // 2)
    return range(positions.start, middle), range(middle, positions.stop)


def _moving_axis(shape: tuple[int, ...], step: int) -> int:
    """The axis of the ring along which panels are sent before a step: the outermost whose inner axes are back at 0."""
    return next(axis for axis in range(len(shape)) if step % prod(shape[axis + 1 :]) == 0)


def _owner(shape: tuple[int, ...], index: int, step: int) -> int:
    """The owner of the panel that a rank has in a step."""
    owner = 0
    for axis, n in enumerate(shape):
        inner = prod(shape[axis + 1 :])
        sent = step // inner - step // (inner * n)  # those times that `inner` divides and no outer axis moved
        if axis == 0:
            sent = step // inner
        owner += (index // inner - sent) % n * inner
    return owner
