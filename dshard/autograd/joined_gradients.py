"""Reduce the gradients of leaves together: collectives of one kind along the same axes, needed about the same time.

A gradient that needs a collective waits for others of its lane: the same mesh, axes, reduction and dtype. Together they
are a bucket, one collective that begins in the backward pass when its last gradient arises, and ends at the first use
of any. Which gradients are expected is known from what followed the last pass over the mesh before. Buckets begin in
one order on all ranks, that in which the leaves were made, last first, however autograd ran its graph: those that are
not complete, or whose turn has not come, begin at the end of the pass. The ranks of a mesh run the same passes over it,
so all expect the same. A gradient that was the only one of the last two passes is redistributed at once, and nothing is
kept of the pass unless another arises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import sqrt
from operator import attrgetter
from typing import TypeAlias
from weakref import ref

import torch
from torch import Tensor

from dshard import comm
from dshard.caches import Cache
from dshard.core.context import planning_context
from dshard.core.joined_moves import begin_lane, run_alone
from dshard.core.moves import LocalRedistribution, count_write
from dshard.core.observe import OBSERVERS
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper, wrap_in_flight
from dshard.cost import predicted_seconds
from dshard.layout import interned
from dshard.topology import Topology
from dshard.torch_private import autograd_engine, graph_task_id

_NUMBERS = count()
_IN_ONE = frozenset({torch.float32, torch.float64})
"""The dtypes that every backend reduces in one collective."""
_NUMBER, _OF, _MOVE = attrgetter("leaf.number"), attrgetter("leaf.of"), attrgetter("move")
"""The attributes that are read of each gradient in each pass, without a call of Python."""


class Leaf:
    """The state of a tensor whose gradients are redistributed to `layout` and may be reduced with others.

    A leaf of autograd `accumulates` them: nothing in the backward pass waits for one. `has_partial_sum` says that those
    of earlier passes were added without a reduction. They are reduced in `reduce_dtype`; None: in their own. The
    gradient was the only one of a pass in the passes `alone` over its mesh. `is_packed` says that the last one was
    reduced in a buffer with others, `joined` by which move, in which passes.
    """

    __slots__ = (
        "accumulates",
        "alone",
        "has_partial_sum",
        "is_packed",
        "joined",
        "layout",
        "number",
        "of",
        "reduce_dtype",
    )

    def __init__(self, x: Wrapper) -> None:
        self.layout, self.accumulates = interned(x._spec.layout.cotangent()), x.is_leaf
        # for observers: a weak reference would keep torch from swapping it for another
        self.of, self.number = (id(x), next(_NUMBERS)) if self.accumulates else (0, 0)
        self.has_partial_sum = self.is_packed = False
        self.reduce_dtype: torch.dtype | None = None
        self.alone: MeshPasses | None = None
        self.joined: tuple[LocalRedistribution, MeshPasses] | None = None

    def reduced(self, spec: Spec) -> Spec:
        """The spec of a gradient as it is reduced."""
        return spec if self.reduce_dtype is None else spec.with_dtype(self.reduce_dtype)


class Pending:
    """A gradient to be redistributed by `move`, of which this rank has `local`: the first use of its result waits.

    One whose bucket has not begun is then redistributed alone; without `local` it has begun before. `own` says that
    nobody else holds the local tensor. That is dropped once its collective has begun. The result has the dtype of
    `local`, whatever that of the move. `stream` is the one on which the gradient arises: those of a bucket may come
    from several. `finish` waits for the end of a collective that has begun.
    """

    __slots__ = ("_value", "dtype", "finish", "leaf", "local", "move", "own", "stream")

    def __init__(self, leaf: Leaf, local: Tensor | None, move: LocalRedistribution, own: bool) -> None:
        self.leaf, self.move, self.own, self.dtype = leaf, move, own, move.spec.dtype
        self.stream = None
        if local is not None:
            self.stream = comm.current_stream(move.spec.device, move.device_type)
            if local.dtype is not self.dtype:
                self.dtype = local.dtype
                local, self.own = local.to(move.spec.dtype), True
        self.local = local
        self.finish: Callable[[], Tensor] | None = None
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._value is None:
            if self.finish is None:
                _begin([self])
            assert self.finish is not None
            self._value, self.finish = self.finish().to(self.dtype), None
        assert self._value is not None
        return self._value


Expected: TypeAlias = tuple[int, object]
"""The number of a leaf, and what stands for how its gradient is redistributed."""


class Buckets:
    """The buckets of all gradients on a mesh in one backward pass, in the order in which they begin."""

    __slots__ = ("all", "alone", "places", "sizes", "stepwise")

    def __init__(self, pendings: Iterable[Pending]) -> None:
        lanes: defaultdict[object, list[Pending]] = defaultdict(list)
        for pending in _in_order(pendings):
            move = pending.move
            alone = move.lane is None  # a step of another kind, or several kinds
            lanes[pending.leaf.number if alone else (move.lane, move.spec.dtype, move.spec.device)].append(pending)
        buckets = [bucket for members in lanes.values() for bucket in _cut(members)]
        buckets.sort(key=lambda members: -members[-1].leaf.number)
        self.all = [[*map(_expected, members)] for members in buckets]
        self.places = {member: (i, j) for i, bucket in enumerate(self.all) for j, member in enumerate(bucket)}
        self.sizes = [*map(len, self.all)]
        moves = [pending.move for bucket in buckets for pending in bucket]
        self.stepwise = any(map(has_steps, moves))
        one_step = len(moves) == 1 and len(moves[0].plan.steps) == 1 and not self.stepwise
        self.alone = self.all[0][0] if one_step else None


class MeshPasses:
    """The backward passes over a mesh: the buckets of each, which followed which, and the last.

    `began_alone` is the number of the last pass whose first gradient began alone.
    """

    __slots__ = ("began_alone", "following", "known", "last")

    def __init__(self) -> None:
        self.known = Cache("gradient buckets", 64, record=True)
        self.following = Cache("gradient passes", 64, record=True)
        self.last: Buckets | None = None
        self.began_alone = -1

    def repeat(self, leaf: Leaf, move: LocalRedistribution) -> bool:
        """Whether the next pass is expected to equal the last, which reduced this gradient alone."""
        last = self.last
        return last is not None and last.alone == (leaf.number, move.same) and self.following.get(last) is last

    def buckets_of(self, pendings: Iterable[Pending]) -> Buckets:
        """The buckets of these gradients."""
        key = (planning_context(), frozenset(map(_expected, pendings)))
        buckets: Buckets | None = self.known.get(key)
        if buckets is None:
            return self.known.add(key, Buckets(pendings))  # type: ignore[no-any-return]
        self.known.hits += 1
        return buckets

    def has_run(self, buckets: Buckets) -> None:
        """Record that a pass over these buckets has ended."""
        if self.following.get(self.last) is not buckets:
            self.following.pop(self.last, None)
            self.following.add(self.last, buckets)
        self.last = buckets


_MESHES: Cache = Cache("gradient meshes", 256, record=True)
"""The passes over each mesh, for each device and type of local tensors."""


class MeshPass:
    """The gradients on one mesh in one backward pass."""

    __slots__ = ("arrived", "expected", "missing", "passes", "turn", "unexpected")

    def __init__(self, passes: MeshPasses) -> None:
        self.passes = passes
        self.expected: Buckets | None = passes.following.get(passes.last) or passes.last
        self.missing = [*self.expected.sizes] if self.expected else []  # how many gradients of each bucket
        self.arrived: list[list[Pending | None]] = [[None] * n for n in self.missing]
        self.unexpected: list[Pending] = []
        self.turn = 0  # the bucket that is to begin next

    def add(self, pending: Pending) -> None:
        """Add a gradient, and begin each bucket that is complete and next in order."""
        expected, missing = self.expected, self.missing
        place = None if expected is None else expected.places.get((pending.leaf.number, pending.move.same))
        if place is None:
            self.unexpected.append(pending)
            return
        bucket, i = place
        self.arrived[bucket][i] = pending
        missing[bucket] -= 1
        while self.turn < len(missing) and not missing[self.turn]:
            _begin(self.arrived[self.turn])
            self.turn += 1

    def end(self) -> None:
        """Begin the remaining buckets, and record the pass."""
        known = self.expected
        if (
            known is not None
            and self.turn == len(self.missing)
            and not (self.unexpected or known.stepwise or known.alone)
        ):
            self.passes.has_run(known)  # as in most passes
            return
        every, expected = self._every(), self.expected
        complete = not self.unexpected and not any(self.missing)
        for arrived in self.arrived[self.turn :]:
            _begin(arrived)
        if self.unexpected:
            by_place = {_expected(pending): pending for pending in self.unexpected}
            for bucket in self.passes.buckets_of(self.unexpected).all:
                _begin([by_place[member] for member in bucket])
        if expected is not None and complete:
            self.passes.has_run(expected)
            if expected.alone is not None:
                every[0].leaf.alone = self.passes
        else:
            expected = self.passes.buckets_of(every)
            self.passes.has_run(expected)
        for pending in _in_order(every) if expected.stepwise else ():
            if has_steps(pending.move):
                pending()

    @property
    def order(self) -> int:
        """The number of the pass's last leaf, by which passes over several meshes end in one order on all ranks."""
        return max(pending.leaf.number for pending in self._every())

    def _every(self) -> list[Pending]:
        arrived = [pending for bucket in self.arrived for pending in bucket if pending is not None]
        return arrived + self.unexpected


class BackwardPass:
    """The gradients of one backward pass that are reduced together, from the first of them to the end of the pass."""

    __slots__ = ("__weakref__", "meshes", "sums")

    def __init__(self) -> None:
        self.meshes: dict[MeshPasses, MeshPass] = {}
        self.sums: list[Wrapper] = []

    def add(self, pending: Pending) -> None:
        """Add a gradient to the pass over its mesh."""
        leaf, local = pending.leaf, pending.local
        assert local is not None
        is_real = type(local) is Tensor and not local.is_meta  # what is only planned is not what runs
        if is_real and leaf.joined is not None and leaf.joined[0] is pending.move:  # the hash of a mesh is slow
            passes = leaf.joined[1]
        else:
            key = (pending.move.plan.src.mesh, local.device, type(local))
            passes = _MESHES.get(key) or _MESHES.add(key, MeshPasses())
            if is_real:
                leaf.joined = pending.move, passes
        (self.meshes.get(passes) or self.over(passes)).add(pending)

    def over(self, passes: MeshPasses) -> MeshPass:
        """The pass over a mesh, among the passes over it."""
        if passes not in self.meshes:
            self.meshes[passes] = MeshPass(passes)
        return self.meshes[passes]

    def end(self) -> None:
        """Begin all remaining collectives at the end of the pass, and accumulate the gradients."""
        meshes = [*self.meshes.values()]
        for mesh in sorted(meshes, key=lambda mesh: -mesh.order) if len(meshes) > 1 else meshes:
            mesh.end()
        for total in self.sums:
            total._local_tensor  # noqa: B018  # waits, and adds
        self.meshes, self.sums = {}, []


_PASSES: dict[int, ref[BackwardPass]] = {}
"""The backward passes that run, by torch's number; torch holds each until its end."""

_ALONE: dict[int, tuple[Leaf, LocalRedistribution, MeshPasses]] = {}
"""The gradient that began alone, by the number of its backward pass: that of the last such pass over each mesh."""


def join(leaf: Leaf, grad: Wrapper, move: LocalRedistribution, own: bool) -> Wrapper | None:
    """Redistribute the gradient of a leaf by `move` together with others; None if it is to be redistributed alone."""
    number = graph_task_id()
    local = grad._local_tensor
    if number < 0 or not move.plan.steps or (type(local) is not Tensor and comm.traced(local)):
        return None
    if leaf.alone is not None and _is_alone(leaf, leaf.alone, move, number):
        return None
    pending = Pending(leaf, local, move, own)
    running = number in _PASSES and _PASSES[number]()
    (running or _running(number)).add(pending)
    dtype = grad._spec.dtype
    return wrap_in_flight(pending, move.spec if move.spec.dtype is dtype else move.spec.with_dtype(dtype))


def _is_alone(leaf: Leaf, passes: MeshPasses, move: LocalRedistribution, number: int) -> bool:
    """Whether a gradient is redistributed alone, as the only one expected in its backward pass; if so, record it."""
    if OBSERVERS:  # which are given the parameters of a collective
        return False
    if not passes.repeat(leaf, move) or number in _ALONE or number in _PASSES:
        return False
    _ALONE.pop(passes.began_alone, None)
    passes.began_alone = number
    _ALONE[number] = leaf, move, passes
    return True


def _running(number: int) -> BackwardPass:
    """Return the backward pass of this number, including the gradient that began alone in it."""
    known = _PASSES.get(number)
    running = None if known is None else known()
    if running is None:
        running = BackwardPass()
        _PASSES[number] = ref(running, lambda _: _PASSES.pop(number, None))
        autograd_engine.queue_callback(running.end)
        if number in _ALONE:
            leaf, move, passes = _ALONE.pop(number)
            running.over(passes).add(Pending(leaf, None, move, False))
    return running


def add_later(total: Wrapper, grad: Wrapper) -> bool:
    """Add a gradient that is reduced with others to `total` once it is there; False if it is to be added now.

    torch accumulates a gradient in place as soon as it arises, which would wait for its collective.
    """
    pending, number = grad.__dict__.get("_lazy_local"), graph_task_id()
    if not isinstance(pending, Pending) or number < 0 or total._spec.layout is not grad._spec.layout:
        return False
    if total._spec.dtype != grad._spec.dtype or total._view_sync is not None:
        return False
    local = total._local_tensor
    del total._local_tensor

    def add() -> Tensor:
        with torch.no_grad():
            local.add_(pending())
        count_write(local)
        return local

    total._lazy_local = add
    _running(number).sums.append(total)
    return True


def has_steps(move: LocalRedistribution) -> bool:
    """Whether `move` may take several collectives, of which later ones begin when the result is used."""
    return move.lane is None or len(move.lane.collectives) > 1 or move.spec.dtype not in _IN_ONE


def _expected(pending: Pending) -> Expected:
    return pending.leaf.number, pending.move.same


def _in_order(pendings: Iterable[Pending]) -> list[Pending]:
    """Order gradients as backward passes mostly reach their leaves: the last created comes first."""
    return sorted(pendings, key=_NUMBER, reverse=True)


def _cut(pendings: list[Pending]) -> Iterable[list[Pending]]:
    """Cut the gradients of a lane, in order, into buckets of the size that takes the least time."""
    lane = pendings[0].move.lane
    if lane is None:
        return [pendings]
    sizes = [pending.move.plan.busiest() * pending.move.spec.itemsize for pending in pendings]
    limit = bucket_bytes(sum(sizes), lane, planning_context().topology_of(lane.mesh))
    buckets, nbytes = [list[Pending]()], 0
    for pending, size in zip(pendings, sizes, strict=True):
        if nbytes and nbytes >= limit:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(pending)
        nbytes += size
    return buckets


def bucket_bytes(total: int, lane: comm.Lane, topology: Topology) -> float:
    """Return the received bytes per bucket that let a backward pass end first, of `total` bytes in a lane.

    Each of `n` buckets takes a latency; all but the last run beside the backward pass. The latencies and the last
    bucket take `n latency + transfer / n` seconds, least for `n = sqrt(transfer / latency)`.
    """
    latency, seconds = (
        sum(predicted_seconds(kind, nbytes, lane.mesh, axes, topology) for kind, axes, _ in lane.collectives)
        for nbytes in (0, total // len(lane.collectives))
    )
    transfer = seconds - latency
    return total / max(1, int(sqrt(transfer / latency))) if latency > 0 else 0.0


def _begin(members: Sequence[Pending | None]) -> None:
    """Begin the collective of one lane's gradients, except those that were used before."""
    waiting, local = list[Pending](), list[Tensor]()
    for pending in members:
        if pending is not None and pending.local is not None:
            waiting.append(pending)
            local.append(pending.local)
            if pending.stream is not None:
                comm.follow(pending.stream, (pending.local,))
    if not waiting:
        return
    if len(waiting) == 1 and len(waiting[0].move.plan.steps) > 1:
        (pending,) = waiting  # begun, its first collective would hold it and a buffer until the end of the pass
        reduced = run_alone(pending.move, local.pop(), "redistribute", (pending.leaf.of,))
        pending.local, pending.finish = None, lambda: reduced
        return
    if len(waiting) == 1 and not OBSERVERS:
        (pending,) = waiting
        pending.finish = pending.move.begin_or_run(local.pop(), pending.own)
        pending.local, pending.leaf.is_packed = None, False
        return
    name, leaves = "redistribute", ()
    if OBSERVERS:
        name = f"gradients of {len(waiting)} leaves" if len(waiting) > 1 else name
        leaves = tuple(map(_OF, waiting))
    ends = begin_lane([*map(_MOVE, waiting)], local, name, leaves)
    for pending, end in zip(waiting, ends, strict=True):
        pending.local, pending.finish, pending.leaf.is_packed = None, end, True
