"""Price attention around a ring, and to windows of the keys: seconds of the critical path, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf, prod

from dshard.comm import sum_dtype
from dshard.core.spec import Spec
from dshard.cost import (
    PlannedCollective,
    collective_seconds,
    copy_seconds,
    hidden_seconds_lost,
    message_terms,
    planned_collective,
    together_seconds,
    work_seconds,
)
from dshard.layout import Layout
from dshard.mesh import Coordinate
from dshard.ops.attention.key_windows import KeyWindows
from dshard.ops.attention.local_attention import Options
from dshard.ops.attention.ring_attention import RingAttention
from dshard.placements import Shard
from dshard.rules.attention_blocks import (
    ADDED,
    COPIED,
    COPYING,
    HELD,
    HELD_OPERATORS,
    HELD_PASSES,
    MERGING,
    PREPARING,
    STANDING_IN,
    Reach,
    Work,
)
from dshard.rules.attention_ring import MessageKind, Ring, halved
from dshard.rules.expand import Allowed, Expansion, expansions
from dshard.rules.strategy import Question, Strategy
from dshard.rules.strategy_price import Price
from dshard.topology import Topology

STEP = 8
"""The host's time for a step, in that of a distributed operator, as measured on short sequences: it begins an exchange,
waits for the other ranks in one, and merges."""
BEGINNING = 1 / 2
"""The part of a step's host time that passes before its exchange is under way."""


@dataclass(frozen=True, slots=True, eq=False)
class RingCall:
    """A call of attention as far as the price of a ring depends on it."""

    question: Question
    specs: Sequence[Spec]
    options: Options
    reach: Reach | None


def ring_strategy(call: RingCall, rows: Allowed, ring: Ring, most: float = inf) -> Strategy | None:
    """The cheapest strategy in which keys and values go round these mesh axes; None where there is none.

    None also where it takes more than `most` seconds for certain: to price a ring of n ranks takes n x n blocks.
    """
    question, times = call.question, 1 + sum(call.question.constraints.gradients)
    price = Price(question._replace(rule=replace(question.rule, triangle=None)))  # a mask is priced step by step
    ways, bases = [*_with_keys_split(call, rows, ring.axes)], dict[int, Strategy]()
    # without the local work, which is less where halves are swapped, and without the ring, a price is a bound
    bounds = list(map(price.bound, ways))

    def at_least(i: int) -> float:
        return bounds[i].seconds(price) - price.local_work(ways[i])[0] * times

    queue = [(at_least(i), i) for i in range(len(ways))]
    heapify(queue)
    best: Strategy | None = None
    while queue:
        least, i = heappop(queue)
        if best is not None and least >= best.seconds:
            break
        with_ring = least + _least(call, ways[i].inputs, ring) * (1 - 1e-12)
        if with_ring > most:
            continue
        if i not in bases:
            if bounds[i].refine(price, most * (1 + 1e-8) - with_ring):
                heappush(queue, (at_least(i), i))
                continue
            base = bases[i] = price.of(ways[i])
            heappush(queue, (base.seconds - base.compute * times, i))
            continue
        strategy = _Price(call, bases[i], ring).strategy()
        if best is None or strategy.seconds < best.seconds:
            best = strategy
    return best


def _least(call: RingCall, inputs: Sequence[Layout], ring: Ring) -> float:
    """At most the seconds of a ring and of the work beside it; 0 where that is not known.

    A step sends a message, and where something is seen it takes a kernel, and operators that join its result. Where
    ranks have equally many rows each sees something in every step if halves are swapped, or nothing is hidden; else the
    last one does, which sees all keys but some of its own. Of others the average rank is taken.
    """
    (query, key, value), device = call.specs[:3], call.question.topology
    if call.reach is not None or query.shape[-2] != key.shape[-2]:
        return 0.0
    mesh, placements, length = inputs[0].mesh, inputs[0].placements, query.shape[-2]
    ranks, times = prod([mesh.shape[axis] for axis in ring.axes]), call.question.constraints.gradients
    parts = prod([n for n, placement in zip(mesh.shape, placements, strict=True) if isinstance(placement, Shard)])
    steps = seen = (ranks + 1) // 2  # in some rank, and by some of its rows
    pairs = length * (length + 1) // 2
    if length % prod([mesh.shape[axis] for axis in inputs[0].axes_of(len(query.shape) - 2)]) == 0:
        steps = ranks
        if not (call.options.causal and ring.balanced):
            seen, pairs = ranks, length * (length - call.options.causal * (length // ranks))
    flops = 2.0 * prod(query.shape[:-2]) * (query.shape[-1] + value.shape[-1]) * pairs / parts
    nbytes = prod(inputs[1].largest_shape(key.shape)[:-1]) * key.shape[-1] * key.itemsize
    hop = min([layer.latency for layer in device.layers])
    hop = 0.0 if device.measured else hop + nbytes / max([layer.group_bandwidth for layer in device.layers])
    if ring.balanced and len(ring.axes) == 1:  # no message is spared
        hop = planned_collective("permute", mesh, (mesh.names[ring.axes[0]],), nbytes, device).seconds
    sent, wide = (ranks - 1) * hop * (3 if any(times) else 1), sum_dtype(call.specs[0].dtype).itemsize
    elements = prod(query.shape[:-1]) // parts * (COPIED * value.shape[-1] + ADDED * query.shape[-1] * any(times))
    joined = (steps - 1) * min(COPYING, MERGING) * device.launch
    joined += (seen - 1) * elements * wide / device.memory_bandwidth
    kernels = (1 + sum(times)) * (flops / device.flops("") + steps * device.launch)
    return max(sent, (kernels + joined) * device.device.alone)  # of ranks that wait others have the cores


def window_strategy(call: RingCall, rows: Allowed, axes: tuple[int, ...]) -> tuple[Strategy, KeyWindows] | None:
    """The cheapest strategy in which ranks receive their windows of the keys along these mesh axes, if there is one."""
    assert call.reach is not None
    topology, gradients = call.question.topology, call.question.constraints.gradients
    by_windows: list[tuple[Strategy, KeyWindows]] = []
    for base in map(Price(call.question).of, _with_keys_split(call, rows, axes)):
        queries, keys, values = base.inputs[:3]
        if keys != values or {axis for axis, row in enumerate(base.rows) if row == "q"} != set(axes):
            continue
        mesh = keys.mesh
        names, lengths = tuple(mesh.names[axis] for axis in axes), tuple(spec.shape[2] for spec in call.specs[:2])
        windows = KeyWindows(queries, keys, names, (lengths[0], lengths[1]), call.reach)
        shapes = [keys.largest_shape(spec.shape) for spec in call.specs[1:3]]
        key = sum(prod(shape[:2]) * shape[3] for shape in shapes) * call.specs[1].itemsize
        sent, returned = (
            planned_collective("permute", mesh, names, windows.received(back) * key, topology) for back in (False, True)
        )
        copied = copy_seconds(2 * windows.longest * key, topology)
        compute = base.compute * windows.longest / max(1, lengths[1])
        backward = base.backward - (base.compute - compute) * sum(gradients)
        if any(gradients[1:3]):
            backward += returned.seconds + copied
        strategy = replace(
            base,
            name=_name(base, axes, "window"),
            exchanges=(sent,),
            gather=base.gather + sent.seconds + copied,
            compute=compute,
            backward=backward,
            held=base.held * windows.longest // max(1, lengths[1]),
        )
        by_windows.append((strategy, windows))
    return min(by_windows, key=lambda pair: pair[0].seconds, default=None)


def _name(strategy: Strategy, axes: Sequence[int], word: str) -> str:
    """The name of a strategy by its rows, with a word in place of those of some mesh axes."""
    pairs = enumerate(zip(strategy.inputs[0].mesh.names, strategy.rows, strict=True))
    words = [(name, word if axis in axes else row) for axis, (name, row) in pairs]
    return " ".join(f"{name}:{row}" for name, row in words if row is not None)


def _with_keys_split(call: RingCall, rows: Allowed, axes: Sequence[int]) -> Iterator[Expansion]:
    """Yield the expansions by these rows, with keys and values, and their gradients, sharded over mesh axes."""
    question = call.question

    def split(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        out = list(layouts)
        for i, axis in product((1, 2), axes):
            out[i] = out[i].replace(axis, Shard(len(call.specs[i].shape) - 2))
        return tuple(out)

    for expansion in expansions(question.rule, question.operands, question.outputs, (rows,)):
        yield replace(expansion, inputs=split(expansion.inputs), gradients=split(expansion.gradients))


class _Price:
    """The price of one strategy in which keys and values go round."""

    def __init__(self, call: RingCall, strategy: Strategy, ring: Ring) -> None:
        self.call, self.base, self.ring, self.topology = call, strategy, ring, call.question.topology
        shapes = tuple(spec.shape for spec in call.specs)
        self.attention = RingAttention(strategy.inputs, shapes, call.options, ring, call.reach)
        self.mesh = strategy.inputs[0].mesh
        self.dtype = call.specs[0].dtype
        along = {axis for i in range(3) for axis in strategy.inputs[i].axes_of(len(shapes[i]) - 2)} - {*ring.axes}
        others = [range(n) if axis in along else range(1) for axis, n in enumerate(self.mesh.shape)]
        self.rings: list[Coordinate] = list(product(*others))
        """A rank of each ring, of rings with the same rows one."""
        self.plans = list(
            {id(plan): plan for plan in map(self.attention.plan, self.rings)}.values()
        )  # plans are cached
        locals_ = [layout.largest_shape(spec.shape) for layout, spec in self._operands()]
        self.heads = prod(locals_[0][:-2])
        key_heads = prod(locals_[1][:-2])
        d, e = locals_[1][-1], locals_[2][-1]
        self.flops, self.width = 2.0 * self.heads * (d + e), key_heads * (d + e)
        self.row, self.result = self.heads * d, self.heads * e

    def _operands(self) -> Iterator[tuple[Layout, Spec]]:
        return zip(self.base.inputs, self.call.specs, strict=True)

    def strategy(self) -> Strategy:
        """The strategy with the seconds of the ring, and what it sends in its forward pass."""
        base, itemsize, sums = self.base, self.dtype.itemsize, sum_dtype(self.dtype).itemsize
        steps = range(1, self.plans[0].ranks)
        panels = [self._hop("panels", step, itemsize) for step in steps]
        swaps = self._swaps([(0, self.row, itemsize), (1, self.width, itemsize)])
        results = [*self._swaps([(0, self.result, itemsize)]), *self._swaps([(0, self.heads, sums)])]
        exchanges = (*swaps, *panels, *results)
        compute, forward = self._seconds([(each,) for each in panels], 0)
        panel = self.plans[0].lengths[0] * self.width * itemsize
        forward += self._swapping([*swaps, *results]) + copy_seconds(panel, self.topology)  # packed, to be sent
        forward += self._laying_out()
        base = replace(
            base,
            name=_name(base, self.ring.axes, "balanced ring" if self.ring.balanced else "ring"),
            exchanges=exchanges,
            gather=base.gather + forward - compute,
            compute=compute,
            held=self._held(),
        )
        gradients = sum(self.call.question.constraints.gradients)
        if not gradients:
            return base
        returns = [self._hop("gradients", step, sums) for step in steps]
        _, backward = self._seconds(list(zip(panels, returns, strict=True)), gradients)
        there = self._swaps([(0, self.row + self.result, itemsize), (1, self.width, itemsize)])
        statistics = self._swaps([(0, 2 * self.heads, sums)])
        moved = self.base.backward - self.base.compute * gradients
        backward += (STANDING_IN + PREPARING + gradients) * self.topology.launch
        return replace(base, backward=moved + backward + self._swapping([*there, *statistics, *swaps]))

    def _seconds(self, steps: Sequence[tuple[PlannedCollective, ...]], times: int) -> tuple[float, float]:
        """Seconds of the work of the busiest rank, and of the critical path.

        Those of the backward pass, which adds so many gradients; of the forward pass if none. `steps` are the
        exchanges beside each step but the last.
        """
        device = self.topology
        rows = sum(self.base.inputs[0].largest_shape(self.call.specs[0].shape)[-2:-1])
        nbytes = (rows * (self.row + self.result) + self.plans[0].lengths[0] * self.width) * self.dtype.itemsize

        wide, held = sum_dtype(self.dtype).itemsize, self.call.question.rule.held
        narrow, backend = wide > self.dtype.itemsize, HELD if held else device.backend

        host = STEP * device.dispatch * (2 if times else 1)  # in the backward pass sums are sent, too

        def seconds(work: Work) -> float:
            if not work.pairs:
                return host
            scores = HELD_PASSES * held * self.heads * work.pairs
            kernels = work_seconds(self.flops * work.pairs, nbytes + scores, device)
            kernels += (HELD_OPERATORS - 1) * device.launch * work.blocks if held else 0.0
            operators, elements = work.operators - 1, work.rows * self.result
            if times:
                operators = work.blocks * (1 + times) - times
                elements = ADDED * (work.queries * self.row + work.keys * self.width)
            beside = operators * device.launch + elements * wide / device.memory_bandwidth
            return host + kernels * max(1, times) + beside

        of_plans = [plan.works(backend, narrow) for plan in self.plans]
        known = {work: seconds(work) for work in {work for steps in of_plans for step in steps for work in step}}
        works = [[_together([known[work] for work in step], device) for step in steps] for steps in of_plans]
        busiest = max(sum(of_rank) for steps_of in works for of_rank in zip(*steps_of, strict=True))
        sends = [BEGINNING * host + sum(each.seconds for each in sent) for sent in steps]
        lost = [sum(hidden_seconds_lost(each.nbytes, each.seconds, device) for each in sent) for sent in steps]
        return busiest, max(plan.seconds(each, sends, lost) for plan, each in zip(self.plans, works, strict=True))

    def _held(self) -> int:
        """Bytes of the scores that a rank holds at once: those of its largest block, where they are held."""
        blocks = (block for plan in self.plans for step in plan.blocks for of_rank in step for block in of_rank)
        most = max((len(block.queries) * len(block.keys) for block in blocks), default=0)
        return self.call.question.rule.held * self.heads * most

    def _hop(self, kind: MessageKind, step: int, itemsize: int) -> PlannedCollective:
        """The exchange of a step, with elements of a size: the busiest rank receives the most keys."""
        hops = [plan.hops(kind)[step - 1] for plan in self.plans]
        keys, axis, pairs = max([hop.received for hop in hops]), hops[0].axis, hops[0].pairs
        axes = self.attention.axes if axis is None else self.attention.axes[axis : axis + 1]
        sent = self._sent(axes, keys * self.width * itemsize)
        if not sent.nbytes or len(pairs) == self.plans[0].ranks or len(hops) > 1:
            return sent
        # where a mask spares messages, those of a step may all stay within hosts
        within = message_terms(self.mesh, self.attention.axes, pairs, self.topology).message_seconds(sent.nbytes, 1)
        return replace(sent, seconds=min(sent.seconds, within))

    def _swaps(self, tensors: Sequence[tuple[int, int, int]]) -> list[PlannedCollective]:
        """The swap of second halves of tensors: each has the rows of an operand, of so many elements of a size."""
        if not self.ring.balanced:
            return []
        received = [0]
        for at in self.rings:
            halves = [[len(halved(each)[1]) for each in self.attention.positions(i, at)] for i, _, _ in tensors]
            sizes = [
                sum(half[i] * n * itemsize for half, (_, n, itemsize) in zip(halves, tensors, strict=True))
                for i in range(len(halves[0]))
            ]
            received += [size for i, size in enumerate(sizes) if 2 * i + 1 != len(sizes)]
        sent, axes = self._sent(self.attention.axes, max(received)), self.attention.axes
        # opposite ranks exchange: the slowest links carry every message at once, of a shift to the next rank one
        seconds = collective_seconds("exchange", sent.nbytes, self.mesh, axes, self.topology, peers=1)
        return [replace(sent, seconds=max(sent.seconds, seconds))]

    def _swapping(self, swaps: Sequence[PlannedCollective]) -> float:
        """Seconds of swaps: for the host a step each; of a tensor a half is packed, and all of it put together."""
        topology = self.topology
        return sum(each.seconds + copy_seconds(3 * each.nbytes, topology) + STEP * topology.dispatch for each in swaps)

    def _laying_out(self) -> float:
        """Seconds that lay out a result that began as that of a kernel, whose heads stand within its rows."""
        (q, spec), *_ = self._operands()
        *_, heads, rows, _ = (1, *q.largest_shape(spec.shape))
        if heads == 1 or self.ring.balanced:
            return 0.0
        nbytes = rows * self.result * sum_dtype(self.dtype).itemsize
        return copy_seconds(nbytes, self.topology) + self.topology.launch  # and of the log-sum-exps

    def _sent(self, axes: tuple[str, ...], nbytes: int) -> PlannedCollective:
        return planned_collective("permute", self.mesh, axes, nbytes, self.topology)


def _together(seconds: Sequence[float], topology: Topology) -> list[float]:
    """Seconds of a step on each rank: those while all compute, shorter where ranks that share cores have less to do."""
    busiest, together = max(seconds), together_seconds(seconds, topology)
    return [each * together / busiest for each in seconds] if busiest else [*seconds]
