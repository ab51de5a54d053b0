"""Gradients of leaves reduced together: collectives of one kind along the same axes, wanted at about the same time.

A gradient that needs one collective waits for others of its lane: the same mesh, axes, reduction and dtype. Together
they are a bucket, one collective that begins in the backward pass when its last gradient arises, and ends at the first
use of any. The last pass over the same leaves says which are expected. Buckets begin in one order on all ranks, that in
which the leaves were made, last first, however autograd ran its graph: those that are not complete, or whose turn has
not come, begin at the end of the pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from math import sqrt
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from dshard import comm
from dshard.core.context import planning_context
from dshard.core.moves import LocalRedistribution, count_write, decision_together
from dshard.core.observe import OBSERVERS, observed
from dshard.core.wrapper import Wrapper, wrap_in_flight
from dshard.cost import collective_seconds
from dshard.layout import interned
from dshard.topology import Topology
from dshard.torch_private import autograd_engine, graph_task_id

_NUMBERS = count()


class Leaf:
    """The gradients of `tensor` are redistributed to `layout`; `number` is its place among all such tensors.

    A leaf of autograd `accumulates` them: nothing in the backward pass waits for one. `schedule` is that of the last
    backward pass in which its gradient was reduced with others.
    """

    __slots__ = ("accumulates", "layout", "number", "schedule", "tensor")

    def __init__(self, x: Wrapper) -> None:
        self.layout, self.accumulates = interned(x._spec.layout.cotangent()), x.is_leaf
        self.tensor = ref(x)
        self.number = next(_NUMBERS)
        self.schedule: Schedule | None = None


class Pending:
    """A gradient to be redistributed by `move`, of which this rank has `local`: the first use of its result waits.

    One whose bucket has not begun is then redistributed alone. `own` says that nobody else holds the local tensor.
    """

    __slots__ = ("_finish", "_value", "leaf", "local", "move", "own", "owner")

    def __init__(self, leaf: Leaf, local: Tensor, move: LocalRedistribution, own: bool, owner: BackwardPass) -> None:
        self.leaf, self.move, self.own, self.owner = leaf, move, own, owner
        self.local: Tensor | None = local
        self._finish: Callable[[], Tensor] | None = None
        self._value: Tensor | None = None

    @property
    def has_begun(self) -> bool:
        """Whether its collective has begun."""
        return self.local is None

    def begun(self, finish: Callable[[], Tensor]) -> None:
        """Its collective has begun; `finish` waits for its end."""
        self.local, self._finish = None, finish

    def __call__(self) -> Tensor:
        if self._value is None:
            if self._finish is None:
                _begin([self])
            assert self._finish is not None
            self._value, self._finish = self._finish(), None
        assert self._value is not None
        return self._value


class Bucket:
    """Gradients that are expected in one backward pass, and reduced by one collective."""

    __slots__ = ("joined", "members")

    def __init__(self, members: Sequence[Pending]) -> None:
        self.members = [(pending.leaf, pending.move) for pending in members]
        self.joined: comm.Joined | None = None


class Schedule:
    """The buckets of a backward pass in the order in which they begin."""

    __slots__ = ("buckets", "places")

    def __init__(self, pendings: Iterable[Pending]) -> None:
        lanes: defaultdict[object, list[Pending]] = defaultdict(list)
        for pending in sorted(pendings, key=lambda pending: -pending.leaf.number):
            spec = pending.move.spec
            lanes[_lane(pending), spec.dtype, spec.device].append(pending)
        buckets = [bucket for members in lanes.values() for bucket in _cut(members)]
        buckets.sort(key=lambda members: -members[-1].leaf.number)
        self.buckets = [Bucket(members) for members in buckets]
        self.places = {leaf: (i, move) for i, bucket in enumerate(self.buckets) for leaf, move in bucket.members}


class BackwardPass:
    """The gradients of one backward pass that are reduced together, from the first of them to the end of the pass."""

    def __init__(self, schedule: Schedule | None) -> None:
        self.schedule = schedule
        self.arrived: list[list[Pending]] = [[] for _ in schedule.buckets] if schedule else []
        self.unexpected: list[Pending] = []
        self.sums: list[Wrapper] = []
        self.turn = 0  # the bucket that is to begin next

    def add(self, pending: Pending) -> None:
        """A gradient arose: begin each bucket that is complete and has its turn."""
        place = None if self.schedule is None else self.schedule.places.get(pending.leaf)
        if self.schedule is None or place is None or place[1] is not pending.move:
            self.unexpected.append(pending)
            return
        self.arrived[place[0]].append(pending)
        buckets = self.schedule.buckets
        while self.turn < len(buckets) and len(self.arrived[self.turn]) == len(buckets[self.turn].members):
            self._begin_next()

    def end(self) -> None:
        """At the end of the pass begin what has not begun, and make another schedule if something else was expected."""
        expected = self.schedule is not None and not self.unexpected
        while self.schedule is not None and self.turn < len(self.schedule.buckets):
            expected = expected and len(self.arrived[self.turn]) == len(self.schedule.buckets[self.turn].members)
            self._begin_next()
        if not expected:
            every = [pending for arrived in self.arrived for pending in arrived] + self.unexpected
            for bucket in _scheduled(self.unexpected).buckets:
                of_leaf = {pending.leaf: pending for pending in self.unexpected}
                _begin([of_leaf[leaf] for leaf, _ in bucket.members])
            _scheduled(every)
        for total in self.sums:
            total._local_tensor  # noqa: B018  # waits, and adds
        self.arrived, self.unexpected, self.sums = [], [], []

    def _begin_next(self) -> None:
        assert self.schedule is not None
        bucket, arrived = self.schedule.buckets[self.turn], self.arrived[self.turn]
        self.turn += 1
        complete = len(arrived) == len(bucket.members)
        _begin(sorted(arrived, key=lambda pending: -pending.leaf.number), bucket if complete else None)


_PASSES: WeakValueDictionary[int, BackwardPass] = WeakValueDictionary()
"""The backward passes that run, by torch's number; torch holds each until its end."""


def join(leaf: Leaf, grad: Wrapper, move: LocalRedistribution, own: bool) -> Any:
    """The gradient of a leaf redistributed by `move` together with others; None where it is redistributed alone."""
    number = graph_task_id()
    local = grad._local_tensor
    if number < 0 or comm.traced(local) or comm.lane_of(move.plan) is None:
        return None
    running = _PASSES.get(number)
    if running is None:
        running = _PASSES[number] = BackwardPass(leaf.schedule)
        autograd_engine.queue_callback(running.end)
    pending = Pending(leaf, local, move, own, running)
    running.add(pending)
    return wrap_in_flight(pending, move.spec)


def add_later(total: Wrapper, grad: Wrapper) -> bool:
    """Add a gradient that is reduced with others to `total` once it is there; False if it is to be added now.

    torch accumulates a gradient in place as soon as it arises, which would wait for its collective.
    """
    pending = grad.__dict__.get("_lazy_local")
    if not isinstance(pending, Pending) or total._spec.layout is not grad._spec.layout:
        return False
    if total._spec.dtype != grad._spec.dtype or "_local_tensor" not in total.__dict__ or total._view_sync is not None:
        return False
    local = total.__dict__.pop("_local_tensor")

    def add() -> Tensor:
        with torch.no_grad():
            local.add_(pending())
        count_write(local)
        return local  # type: ignore[no-any-return]

    total._lazy_local = add
    pending.owner.sums.append(total)
    return True


def _scheduled(pendings: list[Pending]) -> Schedule:
    """A schedule of these gradients, which their leaves keep."""
    schedule = Schedule(pendings)
    for pending in pendings:
        pending.leaf.schedule = schedule
    return schedule


def _lane(pending: Pending) -> comm.Lane:
    lane = comm.lane_of(pending.move.plan)
    assert lane is not None, "others are redistributed alone"
    return lane


def _cut(members: list[Pending]) -> Iterable[list[Pending]]:
    """The members of one lane, in order, in buckets of the size that takes the least time."""
    plan = members[0].move.plan
    topology = planning_context().topology_of(plan.src.mesh)
    sizes = [pending.move.plan.busiest() * pending.move.spec.itemsize for pending in members]
    limit = bucket_bytes(sum(sizes), _lane(members[0]), topology)
    bucket, held = list[Pending](), 0
    for pending, size in zip(members, sizes, strict=True):
        bucket.append(pending)
        held += size
        if held >= limit:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def bucket_bytes(total: int, lane: comm.Lane, topology: Topology) -> float:
    """The bytes received in a bucket, of `total` in its lane, that let a backward pass end first.

    Each of `n` buckets takes a latency; all but the last run beside the backward pass. The latencies and the last
    bucket take `n latency + transfer / n` seconds, least for `n = sqrt(transfer / latency)`.
    """
    latency = collective_seconds(lane.kind, 0, lane.mesh, lane.axes, topology)
    transfer = collective_seconds(lane.kind, total, lane.mesh, lane.axes, topology) - latency
    return total / max(1, int(sqrt(transfer / latency))) if latency > 0 else 0.0


def _begin(members: Sequence[Pending], bucket: Bucket | None = None) -> None:
    """Begin the collective of gradients of one lane; `bucket` is theirs, where they are all of it."""
    waiting = [pending for pending in members if not pending.has_begun]
    if len(waiting) < len(members):  # others were used before
        members, bucket = waiting, None
    if len(members) < 2:
        for pending in members:
            _begin_alone(pending)
        return
    plans = [pending.move.plan for pending in members]
    local = [pending.local for pending in members if pending.local is not None]
    joined = None if bucket is None else bucket.joined
    if bucket is not None and joined is None and type(local[0]) is Tensor and not local[0].is_meta:
        joined = bucket.joined = comm.joined_of(plans, local[0].dtype)
    finish: Callable[[], Sequence[Tensor]]
    if OBSERVERS:
        name, leaves = f"gradients of {len(members)} leaves", tuple(id(pending.leaf.tensor()) for pending in members)
        decision = decision_together([pending.move for pending in members], name, leaves)
        finish = observed(decision, comm.begin_joined, (plans, local, joined))
    else:
        finish = comm.begin_joined(plans, local, joined)
    results = _Once(finish)
    for i, pending in enumerate(members):
        pending.begun(partial(results, i))


class _Once:
    """The results of a collective, for which the first use waits."""

    __slots__ = ("_finish", "_results")

    def __init__(self, finish: Callable[[], Sequence[Tensor]]) -> None:
        self._finish: Callable[[], Sequence[Tensor]] | None = finish
        self._results: Sequence[Tensor] = ()

    def __call__(self, i: int) -> Tensor:
        if self._finish is not None:
            self._results, self._finish = self._finish(), None
        return self._results[i]


def _begin_alone(pending: Pending) -> None:
    move, local = pending.move, pending.local
    assert local is not None
    if OBSERVERS:
        in_flight = observed(move.decision("redistribute", explicit=True), move.begin_or_run, (local, pending.own))
    else:
        in_flight = move.begin_or_run(local, pending.own)
    pending.begun(in_flight)
