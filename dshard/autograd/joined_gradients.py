"""Reduce the gradients of leaves together: collectives of one kind along the same axes, needed about the same time.

The leaves of a mesh whose gradients need one kind of collective, a lane, are cut once into buckets: by their sizes and
the topology alone. In a backward pass a gradient waits in its bucket, which is one collective: it begins when its last
gradient arises, and ends at the first use of any. Buckets begin in one order on all ranks, that in which the leaves
were made, last first, however autograd ran its graph.

Not every pass has a gradient of every leaf. A pass waits for the gradients that the pass before it over the mesh had;
where two kinds of pass alternate, for those of the one before that. What is not awaited begins at the end of the pass,
and so do buckets that are not complete, or whose turn has not come. The ranks of a mesh run the same passes over it, so
all wait for the same.

Design: docs/design/0017-joined-collectives.md
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count, groupby
from math import sqrt
from operator import attrgetter
from typing import ClassVar, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from dshard import comm
from dshard.caches import Cache
from dshard.comm.streams import CURRENT
from dshard.core.context import planning_context
from dshard.core.moves import LocalRedistribution, begin_lane, count_write, run_alone
from dshard.core.observe import OBSERVERS, tell_observers
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper, is_leaf, wrap_in_flight
from dshard.cost import predicted_seconds
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.topology import Topology
from dshard.torch_private import autograd_engine, graph_task_id

_NUMBERS = count()
_MOST = 16384
"""With more ways to redistribute gradients on a mesh than this, those that a pass does not need are forgotten."""
_NUMBER, _OF, _MOVE, _KEY, _LOCAL, _OWN = map(attrgetter, ("leaf.number", "leaf.of", "move", "key", "local", "own"))
"""The attributes that are read of each gradient in each pass, without a call of Python."""


class GradientLeaf:
    """The state of a tensor whose gradients are redistributed to `layout` and may be reduced with others.

    A leaf of autograd `accumulates` them: nothing in the backward pass waits for one. `has_partial_sum` says that those
    of earlier passes were added without a reduction, `has_gradient` that the last pass over the leaf had one of it.
    They are reduced in `reduce_dtype`; None: in their own. `is_packed` says that the last one was reduced in a buffer
    with others, `joined` by which move, among which leaves; `planned` is how one of a spec is moved to a layout, in an
    era of the cache of moves.
    """

    __slots__ = (
        "accumulates",
        "has_gradient",
        "has_partial_sum",
        "is_packed",
        "joined",
        "layout",
        "number",
        "of",
        "planned",
        "reduce_dtype",
    )

    def __init__(self, x: Wrapper) -> None:
        self.layout, self.accumulates = x._spec.layout.cotangent(), is_leaf(x)
        # for observers: a weak reference would keep torch from swapping it for another
        self.of, self.number = (id(x), next(_NUMBERS)) if self.accumulates else (0, 0)
        self.has_partial_sum = self.is_packed = self.has_gradient = False
        self.reduce_dtype: torch.dtype | None = None
        self.joined: tuple[LocalRedistribution, MeshLeaves] | None = None
        self.planned: tuple[Spec, Layout, object, LocalRedistribution] | None = None

    def reduced(self, spec: Spec) -> Spec:
        """The spec of a gradient as it is reduced."""
        return spec if self.reduce_dtype is None else spec.with_dtype(self.reduce_dtype)


Key: TypeAlias = tuple[int, object]
"""The number of a leaf, and what stands for how its gradient is redistributed."""


class Arrived(NamedTuple):
    """Told to observers: the gradient of a leaf, by the id of the tensor, has arisen, and waits for its bucket."""

    leaf: int


class BucketBegins(NamedTuple):
    """Told to observers: a bucket of a mesh, with the gradients of these leaves, begins, until one is `BucketBegun`."""

    mesh: Mesh
    leaves: tuple[int, ...]


class BucketBegun(NamedTuple):
    """Told to observers: the bucket has begun, and its gradients are where they were packed."""


class GradientInFlight:
    """A gradient to be redistributed by `move`, of which this rank has `local`: the first use of its result waits.

    One whose bucket has not begun is then redistributed alone. `own` says that nobody else holds the local tensor, or,
    of a leaf that `is_packed`, not whether its memory has other tensors in it. The local tensor
    is dropped once its collective has begun. The result has the dtype of `local`, whatever that of the move. `stream`
    is the one on which the gradient arises: those of a bucket may come from several. `finish` waits for the end of a
    collective that has begun.
    """

    __slots__ = ("_value", "dtype", "finish", "key", "leaf", "local", "move", "own", "stream")

    def __init__(self, leaf: GradientLeaf, local: Tensor, move: LocalRedistribution, own: bool) -> None:
        self.leaf, self.move, self.own, self.dtype = leaf, move, own, local.dtype
        self.key: Key = leaf.number, move.same
        find = CURRENT.get(move.device_type)
        self.stream = None if find is None else find(move.spec.device)
        if self.dtype is not move.spec.dtype:
            local, self.own = local.to(move.spec.dtype), True
        self.local: Tensor | None = local
        self.finish: Callable[[], Tensor] | None = None
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._value is None:
            if self.finish is None:
                _begin([self])
            assert self.finish is not None
            value, self.finish = self.finish(), None
            self._value = value if value.dtype is self.dtype else value.to(self.dtype)
        assert self._value is not None
        return self._value


Buckets: TypeAlias = dict[Key, tuple[int, int]]
"""The number of the bucket of each gradient. Buckets begin in the order of their numbers."""


class MeshLeaves:
    """The leaves of a mesh, cut into buckets, and the gradients that the next pass over it waits for.

    `last` are the gradients of the last pass, `before` those of the one before; all in the order in which they begin.
    `sizes` has the number of awaited gradients of each bucket, in the order in which the buckets begin. `n_cuts` counts
    the buckets that were cut, on all meshes.
    """

    n_cuts: ClassVar[int] = 0
    __slots__ = ("awaited", "before", "buckets", "last", "sizes")

    def __init__(self) -> None:
        self.buckets: Buckets = {}
        self.awaited: Buckets = {}
        self.before = self.last = self.awaited
        self.sizes: Counter[tuple[int, int]] = Counter()

    def cut(self, gradients: Sequence[GradientInFlight]) -> None:
        """Cut the lanes of these gradients, in order, into buckets: those lanes in which one has no bucket yet."""
        lanes: defaultdict[object, list[GradientInFlight]] = defaultdict(list)
        for x in gradients:
            alone = x.move.lane is None  # a step of another kind, or several kinds
            lanes[x.leaf.number if alone else (x.move.lane, x.move.spec.dtype, x.move.spec.device)].append(x)
        for members in lanes.values():
            if not all(x.key in self.buckets for x in members):
                for bucket in _cut(members):
                    MeshLeaves.n_cuts += 1
                    self.buckets |= dict.fromkeys(map(_KEY, bucket), (-bucket[-1].leaf.number, next(_NUMBERS)))
        if len(self.buckets) > _MOST:
            self.buckets = {x.key: self.buckets[x.key] for x in gradients}

    def has_run(self, gradients: Buckets) -> None:
        """Record that a pass with these gradients has ended; if it equals the last but one, the last comes next."""
        alternates = gradients is self.before or gradients.keys() == self.before.keys()
        awaited = self.last if alternates else gradients
        self.before, self.last = self.last, gradients
        if awaited is not self.awaited:
            self.awaited, self.sizes = awaited, Counter(awaited.values())


_MESHES: Cache = Cache("gradient meshes", 256, record=True)
"""The leaves of each mesh, for each topology, device and type of local tensors."""


class PassOnMesh:
    """The gradients on one mesh in one backward pass: those that arrived by bucket, `rest` those that nobody awaited.

    `awaited` are those still to come, `missing` how many of each bucket, `turns` the buckets to begin, the next last.
    With `has_steps` a gradient takes several collectives. A pass that `creates_graph` awaits none.
    """

    __slots__ = ("arrived", "awaited", "creates_graph", "expected", "has_steps", "leaves", "missing", "rest", "turns")

    def __init__(self, leaves: MeshLeaves, creates_graph: bool) -> None:
        self.leaves, self.creates_graph = leaves, creates_graph
        self.expected: Buckets = {} if creates_graph else leaves.awaited
        self.awaited, self.missing = self.expected.copy(), {} if creates_graph else dict(leaves.sizes)
        self.turns = [*reversed(self.missing)]
        self.arrived: defaultdict[tuple[int, int], list[GradientInFlight]] = defaultdict(list)
        self.rest: list[GradientInFlight] = []
        self.has_steps = False

    def add(self, pending: GradientInFlight) -> None:
        """Add a gradient, and begin each bucket that is complete and next in order."""
        bucket, turns, missing = self.awaited.pop(pending.key, None), self.turns, self.missing
        self.has_steps |= pending.move.has_steps
        if bucket is None:
            self.rest.append(pending)
            return
        self.arrived[bucket].append(pending)
        missing[bucket] -= 1
        while turns and not missing[turns[-1]]:
            members = self.arrived[turns.pop()]
            members.sort(key=_NUMBER, reverse=True)
            _begin(members)

    def end(self) -> None:
        """Begin all that has not begun, and record the pass."""
        gradients = self.expected
        if self.rest or self.turns:
            every = self.every()
            self.leaves.cut(every)
            numbers = self.leaves.buckets
            every.sort(key=lambda x: numbers[x.key])
            for _, bucket in groupby(every, lambda x: numbers[x.key]):
                _begin([*bucket])
            gradients = {x.key: numbers[x.key] for x in every}
        is_new = gradients is not self.leaves.last or gradients is not self.leaves.before
        if is_new and not self.creates_graph:
            self.leaves.has_run(gradients)
        for x in self.every() if self.has_steps else ():
            if x.move.has_steps:  # so that later ones begin in one order, too
                x()

    def every(self) -> list[GradientInFlight]:
        """All gradients of the pass, in order: backward passes mostly reach last the leaves that were made first."""
        return sorted(chain(*self.arrived.values(), self.rest), key=_NUMBER, reverse=True)


class BackwardPass:
    """The gradients of one backward pass that are reduced together, from the first of them to the end of the pass."""

    __slots__ = ("__weakref__", "meshes", "sums")

    def __init__(self) -> None:
        self.meshes: dict[MeshLeaves, PassOnMesh] = {}
        self.sums: list[Wrapper] = []

    def add(self, pending: GradientInFlight) -> None:
        """Add a gradient to the pass over its mesh."""
        leaf, local, move = pending.leaf, pending.local, pending.move
        assert local is not None
        is_real = type(local) is Tensor and not comm.has_only_shape(local)  # what is only planned is not what runs
        if is_real and leaf.joined is not None and leaf.joined[0] is move:  # the hash of a mesh is slow
            leaves = leaf.joined[1]
        else:
            key = (move.plan.src.mesh, planning_context(), local.device, type(local))
            leaves = _MESHES.get(key) or _MESHES.add(key, MeshLeaves())
            if is_real:
                leaf.joined = move, leaves
        mesh = self.meshes.get(leaves)
        if mesh is None:
            mesh = self.meshes[leaves] = PassOnMesh(leaves, torch.is_grad_enabled())
        mesh.add(pending)

    def end(self) -> None:
        """Begin all remaining collectives at the end of the pass, and accumulate the gradients."""
        meshes = [*self.meshes.values()]
        for mesh in sorted(meshes, key=lambda mesh: -mesh.every()[0].leaf.number) if len(meshes) > 1 else meshes:
            mesh.end()
        for total in self.sums:
            total._local_tensor  # noqa: B018  # waits, and adds
        self.meshes, self.sums = {}, []


class _Passes(dict[int, Callable[[], BackwardPass | None]]):
    """References to the backward passes that run, by torch's number; torch holds each until its end."""

    def __missing__(self, number: int) -> Callable[[], BackwardPass | None]:
        begun = BackwardPass()
        self[number] = known = ref(begun, lambda _: self.pop(number, None))
        autograd_engine.queue_callback(begun.end)
        return known


_PASSES = _Passes()


def join(leaf: GradientLeaf, local: Tensor, move: LocalRedistribution, own: bool) -> Wrapper | None:
    """Redistribute the gradient of a leaf by `move` together with others; None if it is to be redistributed alone.

    `local` is its local tensor.
    """
    number = graph_task_id()
    if number < 0 or not move.plan.steps or (type(local) is not Tensor and comm.traced(local)):
        return None
    pending = GradientInFlight(leaf, local, move, own)
    if OBSERVERS:
        tell_observers(partial(Arrived, leaf.of))
    running = _PASSES[number]()
    assert running is not None
    running.add(pending)
    spec = move.spec
    return wrap_in_flight(pending, spec if spec.dtype is local.dtype else spec.with_dtype(local.dtype))


def bucket_of(leaf: GradientLeaf) -> object:
    """The bucket in which the leaf's gradient is reduced with others; None: it is not known yet."""
    if leaf.joined is None:
        return None
    move, leaves = leaf.joined
    return leaves.buckets.get((leaf.number, move.same))


def all_reduced_together(leaves: Mapping[int, GradientLeaf]) -> tuple[tuple[int, ...], ...]:
    """The numbers of these leaves whose gradients are all-reduced in one buffer, in its order, if it has no others."""
    buffers, sizes = defaultdict[object, list[int]](list), Counter[object]()
    for known in {id(leaf.joined[1]): leaf.joined[1] for leaf in leaves.values() if leaf.joined is not None}.values():
        sizes.update(known.buckets.values())
    for n, leaf in leaves.items():
        bucket, lane = bucket_of(leaf), None if leaf.joined is None else leaf.joined[0].lane
        kinds = [] if lane is None else [kind for kind, _, _ in lane.collectives]
        if bucket is not None and kinds == ["all_reduce"] and leaf.reduce_dtype is None:
            buffers[bucket].append(n)
    orders = (sorted(numbers, key=lambda n: leaves[n].number, reverse=True) for numbers in buffers.values())
    return tuple(tuple(each) for each in orders if 1 < len(each) == sizes[bucket_of(leaves[each[0]])])


def add_later(total: Tensor, grad: Wrapper) -> bool:
    """Add a gradient that is reduced with others to `total` once it is there; False if it is to be added now.

    torch accumulates a gradient in place as soon as it arises, which would wait for its collective.
    """
    pending, number = grad.__dict__.get("_lazy_local"), graph_task_id()
    if not isinstance(pending, GradientInFlight) or number < 0 or not isinstance(total, Wrapper):
        return False
    if total._spec.layout is not grad._spec.layout:
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
    running = _PASSES[number]()
    assert running is not None
    running.sums.append(total)
    return True


def _cut(pendings: list[GradientInFlight]) -> Iterable[list[GradientInFlight]]:
    """Cut the gradients of a lane, in order, into buckets of the size that takes the least time."""
    lane = pendings[0].move.lane
    if lane is None:
        return [pendings]
    sizes = [pending.move.plan.busiest() * pending.move.spec.itemsize for pending in pendings]
    limit = bucket_bytes(sum(sizes), lane, planning_context().topology_of(lane.mesh))
    buckets, nbytes = [list[GradientInFlight]()], 0
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


def _begin(members: Sequence[GradientInFlight]) -> None:
    """Begin the collective of one lane's gradients, except those that have begun or were used before."""
    waiting = [pending for pending in members if pending.local is not None]
    for pending in waiting:
        if pending.stream is not None:
            comm.follow(pending.stream, (_LOCAL(pending),))
    if not waiting:
        return
    if OBSERVERS:
        tell_observers(partial(BucketBegins, waiting[0].move.plan.src.mesh, tuple(map(_OF, waiting))))
    first = waiting[0]
    if len(waiting) == 1 and len(first.move.plan.steps) > 1:
        # begun, its first collective would hold it and a buffer until the end of the pass
        reduced = run_alone(first.move, _LOCAL(first), "redistribute", (first.leaf.of,))
        first.local, first.finish = None, lambda: reduced
    elif len(waiting) == 1 and not OBSERVERS:
        first.finish = first.move.begin_or_run(_LOCAL(first), first.own and not first.leaf.is_packed)
        first.local, first.leaf.is_packed = None, False
    else:
        name, leaves = "redistribute", ()
        if OBSERVERS:
            name = f"gradients of {len(waiting)} leaves" if len(waiting) > 1 else name
            leaves = tuple(map(_OF, waiting))
        own = all(map(_OWN, waiting))
        ends = begin_lane([*map(_MOVE, waiting)], [*map(_LOCAL, waiting)], name, leaves, own)
        for pending, end in zip(waiting, ends, strict=True):
            pending.local, pending.finish, pending.leaf.is_packed = None, end, True
    if OBSERVERS:
        tell_observers(BucketBegun)
