"""Redistribute local tensors, and run a local operator on this rank or on all simulated ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard import comm
from dshard.caches import Cache
from dshard.comm import (
    RECORDERS,
    Moving,
    are_simulated,
    mapped,
    of_rank,
    on_each,
    own_coordinate,
    plain,
    recorder,
    runner,
    stack,
)
from dshard.core.call import LocalOp
from dshard.core.context import planning_context
from dshard.core.observe import ASKED, NEEDED, OBSERVERS, Decision, Members, finish_observed, observed
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import Spec
from dshard.core.transforms import is_below_autograd, is_wrapped
from dshard.core.trees import leaves, replace_leaves, replace_tensors, tensors_in
from dshard.core.wrapper import Wrapper, wrap
from dshard.cost import planned_collective
from dshard.layout import Layout
from dshard.mesh import Coordinate, Mesh
from dshard.placements import Replicate, Shard
from dshard.redistribute import plan
from dshard.redistribute.plan import Search
from dshard.rules.expand import Operand
from dshard.rules.strategy import completed_layout
from dshard.torch_private import (
    DispatchKey,
    exclude_key,
    increment_version,
    is_key_excluded,
    make_subclass,
    no_torch_function,
)

_SAME = Cache("redistributions", record=True)
_IN_ONE = frozenset({torch.float32, torch.float64})
"""The dtypes that every backend reduces in one collective."""


class LocalRedistribution:
    """The redistribution of local tensors of one spec to another layout, planned once for each topology.

    `spec` is the spec of the result, `grad` the layout of its gradient, `source_grad` that of the source's gradient.
    `gathers` says whether a sharded dim becomes replicated: then one collective reduces a partial gradient. `same` is
    one object for all with equal plans between equal specs: what a rank has planned anew is what it was to others.
    `keeps_data` says that the layouts differ on axes of one rank alone, so that the local tensor is the same,
    `has_steps` that it may take several collectives, of which later ones begin when the result is used.
    `device_type` is the type of the spec's device, which torch makes anew each time.
    """

    __slots__ = (
        "device_type",
        "gathers",
        "grad",
        "has_steps",
        "keeps_data",
        "lane",
        "plan",
        "runner",
        "same",
        "source",
        "source_grad",
        "spec",
        "targets",
    )

    def __init__(self, source: Spec, layout: Layout, search: Search = "lean") -> None:
        if source.has_partial or layout.partial_axes():
            comm.check_reduced(source.dtype, f"redistributing [{source.layout}] -> [{layout}]")
        topology = planning_context().topology_of(layout.mesh)
        self.plan = plan(source.layout, layout, source.shape, source.itemsize, topology, search=search)
        self.source, self.spec = source, source.with_layout(layout)
        self.lane, self.device_type = comm.lane_of(self.plan), self.spec.device.type
        self.grad, self.source_grad = layout.cotangent(), source.layout.cotangent()
        self.gathers = any(
            isinstance(target, Replicate) and isinstance(placement, Shard)
            for placement, target in zip(source.layout.placements, layout.placements, strict=True)
        )
        self.keeps_data = source.layout.differs_on_one_rank(layout)
        several = self.lane is None or len(self.lane.collectives) > 1
        self.has_steps = several or self.spec.dtype not in _IN_ONE
        self.runner: Moving | None = None
        self.targets: dict[Spec, Layout] = {}
        key = (self.plan, source.dtype, source.device)  # strides are those of the graph by which it was made
        self.same: object = _SAME.get(key) or _SAME.add(key, object())

    def gains_joined(self) -> bool:
        """Whether the redistribution takes no longer as part of one of several tensors than alone."""
        topology = planning_context().topology_of(self.source.layout.mesh)
        return self.lane is not None and self.plan.joined_seconds(self.spec.itemsize, topology) <= self.plan.seconds

    def __call__(self, local: Tensor) -> Tensor:
        """The local tensor under the target layout; not recorded by autograd."""
        return (self.runner or self._ready())(local) if self.plan.steps else local

    def begin(self, local: Tensor, own: bool = False) -> Callable[[], Tensor] | None:
        """Begin the redistribution; the first use of its result waits. None if nothing can be in flight.

        With `own` the caller owns the local tensor, which may be overwritten.
        """
        return (self.runner or self._ready()).begin(local, own) if self.plan.steps else None

    def begin_or_run(self, local: Tensor, own: bool = False) -> Callable[[], Tensor]:
        """Begin the redistribution, or run it if it cannot be asynchronous; return a function that gives its result."""
        return (self.runner or self._ready()).begin_or_run(local, own) if self.plan.steps else lambda: local

    def _ready(self) -> Moving:
        self.runner = runner(self.plan)
        return self.runner

    def decision(self, op: str, explicit: bool = False) -> Decision:
        """The decision to redistribute, because the operator named `op` needs it, or at the user's request."""
        operand = Operand(self.source.layout, self.source.shape, self.source.itemsize)
        topology = planning_context().topology_of(self.source.layout.mesh)
        return Decision(op, (operand,), topology, plans=(self.plan,), why=ASKED if explicit else NEEDED)


def local_redistribution(spec: Spec, layout: Layout) -> LocalRedistribution:
    """The redistribution of tensors of `spec` to `layout`, from the cache of the topology in use."""
    moves = planning_context().moves
    redistribution: LocalRedistribution | None = moves.get((spec, layout))
    if redistribution is None:
        redistribution = moves.add((spec, layout), LocalRedistribution(spec, layout))
    else:
        moves.hits += 1
    return redistribution


def joined_redistribution(spec: Spec, layout: Layout) -> LocalRedistribution:
    """The redistribution of a weight or gradient of `spec` to `layout`, joined with others, from the same cache."""
    key = (joined_redistribution, spec, layout)
    return planning_context().moves.of(key, partial(LocalRedistribution, spec, layout, "joined"))  # type: ignore[no-any-return]


def redistribute_local(local: Tensor, spec: Spec, layout: Layout, op: object, explicit: bool = False) -> Tensor:
    """The local tensor under `layout`, for operator `op` or at the user's request; not recorded by autograd."""
    redistribution = local_redistribution(spec, layout)
    if OBSERVERS and redistribution.plan.steps:
        moved: Tensor = observed(redistribution.decision(str(op), explicit), redistribution, (local,))
        return moved
    return redistribution(local)


def sending(
    op: str, specs: Sequence[Spec], collectives: Sequence[tuple[str, tuple[str, ...], int]], explicit: bool = False
) -> Decision:
    """The decision of an operator that runs `collectives` itself: each a kind, mesh axes, the busiest rank's bytes."""
    mesh = specs[0].layout.mesh
    topology = planning_context().topology_of(mesh)
    sent = tuple(planned_collective(kind, mesh, axes, nbytes, topology) for kind, axes, nbytes in collectives)
    operands = tuple(Operand(spec.layout, spec.shape, spec.itemsize) for spec in specs)
    return Decision(op, operands, topology, exchanges=sent, why=ASKED if explicit else NEEDED)


def replica_broadcasts(spec: Spec) -> list[tuple[str, tuple[str, ...], int]]:
    """The broadcasts of the first rank's local tensor, one along each mesh axis that holds replicas."""
    mesh, nbytes = spec.layout.mesh, spec.layout.local_numel(spec.shape) * spec.itemsize
    axes = zip(mesh.names, spec.layout.placements, mesh.shape, strict=True)
    return [("broadcast", (name,), nbytes) for name, placement, n in axes if placement == Replicate() and n > 1]


def redistributed(x: Wrapper, layout: Layout, op: str) -> Wrapper:
    """The distributed tensor `x` in `layout`, which the operator named `op` needs; not recorded by autograd."""
    spec: Spec = x._spec
    if spec.layout == layout:
        return x
    return wrap(redistribute_local(x._local_tensor, spec, layout, op), spec.with_layout(layout))


def with_partials_reduced(x: object, op: str) -> Any:
    """`x` with its partial reductions completed, cached for all uses; a plain tensor unchanged."""
    return redistributed(x, completed_layout(x._spec.layout), op) if isinstance(x, Wrapper) else x


def write_local(target: Tensor, value: Tensor) -> None:
    """Write the elements of the local tensor `value` into `target`, in order.

    Of an expanded dim it writes the first entry, as all share its memory.
    """
    on_each(_write, target, value)


def _write(target: Tensor, value: Tensor) -> None:
    entry = target
    if value.shape != target.shape:
        value = value.reshape(target.shape)
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:  # torch does not copy into memory that several entries share
            entry, value = entry.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    entry.copy_(value)
    count_write(target)  # below autograd a view has a version counter of its own


def expanded_as(spec: Spec, copy: Tensor) -> Tensor:
    """`copy`, a copy of a local tensor of `spec`, whose expanded dims again have one memory for all entries.

    A write to one entry is then a write to all. `copy` itself if no dim is expanded.
    """
    return mapped(partial(_expanded, spec.expanded_dims), copy) if spec.expanded_dims else copy


def _expanded(dims: Sequence[int], copy: Tensor) -> Tensor:
    first = copy
    for dim in dims:
        first = first.narrow(dim, 0, min(1, copy.shape[dim]))
    return first.expand(copy.shape)


def count_write(local: Tensor) -> None:
    """Increment the version of a local tensor that was written below autograd, where torch does not."""
    if type(local) is Tensor:  # so that a backward pass refuses a tensor that was saved before the write
        increment_version([local])


def counting_as(source: Tensor, copy: Tensor) -> Tensor:
    """`copy` with the version counter of `source`, so that a backward pass which saved it notices a write to `source`.

    On one device there is no copy, and torch saves the operand itself. In graphs, and of simulated ranks, versions are
    not compared.
    """
    if type(copy) is not Tensor:
        return copy
    out = source.detach()
    out.data = copy
    if RECORDERS and (told := recorder()) is not None:
        told.add_alias(out, copy)
    return out


def wrap_counting(x: Tensor, local: Tensor, spec: Spec) -> Wrapper:
    """The distributed tensor of spec `spec` whose local tensor `local` has the memory of the user's plain tensor `x`.

    It has the version counter of `x`, too: a backward pass that saved it notices a write to `x`, as on one device.
    """
    out = wrap(local, spec)
    if type(x) not in _PLAIN or is_below_autograd() or is_wrapped(x) or x.device.type != out.device.type:
        return out
    with no_torch_function():
        counting: Wrapper = make_subclass(Wrapper.public, x, False)
        counting.data = out
    counting._local_tensor, counting._spec = local, spec
    return counting


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def sharing_version(operator: LocalOp) -> LocalOp:
    """`operator`, whose output views share the version counter of its operand also below autograd.

    Views are of the device of what they view, also on ranks outside the mesh: `keeps_device`.
    """
    run = _with_key(DispatchKey.ADInplaceOrView, operator, in_inference=False)
    run.keeps_device = True  # type: ignore[attr-defined]
    return run


def resolving_conjugates(operator: LocalOp) -> LocalOp:
    """`operator`, within which torch's kernels conjugate what they do lazily: below autograd they would leave it.

    So would collectives, which read memory as it is: results are resolved.
    """

    def run(*args: object, **kwargs: object) -> Any:
        return replace_tensors(operator(*args, **kwargs), Tensor.resolve_conj)

    return _with_key(DispatchKey.Conjugate, run, in_inference=True)


def _with_key(key: DispatchKey, operator: LocalOp, *, in_inference: bool) -> LocalOp:
    """`operator`, run with a dispatch key that torch excludes where it calls `__torch_dispatch__`."""

    def run(*args: object, **kwargs: object) -> Any:
        if not is_key_excluded(key) or (not in_inference and torch.is_inference_mode_enabled()):
            return operator(*args, **kwargs)
        exclude_key(key, False)
        try:
            return operator(*args, **kwargs)
        finally:
            exclude_key(key, True)

    return run


def run_on_ranks(mesh: Mesh, local_op: Callable[[Coordinate], LocalOp], args: Args, kwargs: Kwargs) -> Any:
    """Run the local operator on this rank, or on all ranks if they are simulated in one process."""
    return operator_on(mesh, local_op, leaves((args, kwargs)))(*args, **kwargs)


def operator_on(mesh: Mesh, local_op: Callable[[Coordinate], LocalOp], local: Iterable[object]) -> LocalOp:
    """The local operator of this rank, or one that runs those of all ranks if the tensors among `local` are theirs."""
    return partial(_simulate, mesh, local_op) if are_simulated(local) else local_op(own_coordinate(mesh))


def _simulate(mesh: Mesh, local_op: Callable[[Coordinate], LocalOp], /, *args: Any, **kwargs: Any) -> Any:
    """Run the local operator on each simulated rank's tensors, and stack the results."""
    with plain():
        results = {}
        for rank in mesh.ranks:
            rank_args, rank_kwargs = replace_leaves((args, kwargs), partial(of_rank, rank))
            results[rank] = local_op(mesh.coordinate(rank))(*rank_args, **rank_kwargs)
        tensors = {rank: iter(tensors_in(result)) for rank, result in results.items()}

        def join(leaf: object) -> object:
            return stack({rank: next(rest) for rank, rest in tensors.items()}) if isinstance(leaf, Tensor) else leaf

        return replace_leaves(results[mesh.ranks[0]], join)


# -- several together: plans of one lane run as one collective

Ends: TypeAlias = list[Callable[[], Tensor]]
"""Functions, each of which waits for one result and returns it."""


def reduced_together(xs: Sequence[Wrapper], op: str) -> list[Tensor]:
    """The distributed tensors with their partial sums reduced: by one collective if all need the same."""
    moves = [local_redistribution(x._spec, completed_layout(x._spec.layout)) for x in xs]
    if any(comm.traced(x._local_tensor) for x in xs):
        return [with_partials_reduced(x, op) for x in xs]
    ends = begin_together(moves, [x._local_tensor for x in xs], op)
    return [wrap(end(), move.spec) for end, move in zip(ends, moves, strict=True)]


def begin_together(
    moves: Sequence[LocalRedistribution], local: list[Tensor], op: str, members: tuple[int, ...] = ()
) -> Ends:
    """Begin redistributions of several local tensors, one lane as one collective; the first use of a result waits.

    Local tensors of another dtype than the redistribution's are cast. `members` are the ids of the parameters whose
    values or gradients they are. The list `local` is emptied, so that tensors without other owners are freed once
    packed.
    """
    lanes = _lanes(moves)
    ends: dict[int, Callable[[], Tensor]] = {}
    parts = [[local[i] for i in together] for together in lanes]
    local.clear()
    for together, tensors in zip(lanes, parts, strict=True):
        some = [moves[i] for i in together]
        leaves_of = tuple(map(members.__getitem__, together)) if members else ()
        ends |= zip(together, begin_lane(some, tensors, op, leaves_of), strict=True)
    return [ends[i] for i in range(len(moves))]


def _lanes(moves: Sequence[LocalRedistribution]) -> list[list[int]]:
    """The positions of redistributions that begin as one, from the cache of the topology in use.

    Of a large tensor the copies into one buffer, or out of it, may take longer than a collective of its own to begin.
    """

    def make() -> list[list[int]]:
        lanes: defaultdict[object, list[int]] = defaultdict(list)
        for i, move in enumerate(moves):
            lanes[(move.lane, move.spec.dtype, move.spec.device) if move.gains_joined() else i].append(i)
        return [*lanes.values()]

    return planning_context().moves.of((_lanes, *moves), make)  # type: ignore[no-any-return]


def begin_lane(
    moves: Sequence[LocalRedistribution], local: list[Tensor], op: str, members: tuple[int, ...], own: bool = False
) -> Ends:
    """`begin_together` for redistributions of one lane; with `own` nobody else holds the local tensors."""
    if len(moves) == 1:
        move, tensor = moves[0], local.pop()
        if tensor.dtype is not move.spec.dtype:
            tensor = tensor.to(move.spec.dtype)
        if OBSERVERS and move.plan.steps:
            decision = replace(move.decision(op), why=_why(moves, members))
            return [partial(finish_observed, decision, observed(decision, move.begin_or_run, (tensor,)))]
        return [move.begin_or_run(tensor)]
    joined = _joined(moves)
    if not OBSERVERS:
        results = joined.begin_or_run(local, own)
    else:
        decision = decision_together(moves, op, members)
        begun = observed(decision, joined.begin_or_run, (local, own))
        results = comm.Once(partial(finish_observed, decision, begun))
    return [*map(partial, repeat(results), range(len(moves)))]


def run_alone(move: LocalRedistribution, local: Tensor, op: str, members: tuple[int, ...]) -> Tensor:
    """Run one redistribution to its end; `members` is the id of the parameter whose value or gradient it is."""
    if not OBSERVERS:
        return move(local)
    moved: Tensor = observed(replace(move.decision(op), why=_why([move], members)), move, (local,))
    return moved


def _joined(moves: Sequence[LocalRedistribution]) -> comm.Moving:
    """The redistributions as one, from the cache of the topology in use."""
    return planning_context().moves.of(  # type: ignore[no-any-return]
        tuple(moves), lambda: comm.joined(tuple([move.plan for move in moves]), moves[0].spec.dtype)
    )


def decision_together(moves: Sequence[LocalRedistribution], op: str, members: tuple[int, ...] = ()) -> Decision:
    """The decision to redistribute several tensors by one collective.

    `members` are the ids of parameters whose values or gradients they are: the user asked for their layouts.
    """
    sources = [move.source for move in moves]
    operands = tuple(Operand(source.layout, source.shape, source.itemsize) for source in sources)
    plans = tuple(move.plan for move in moves)
    mesh = plans[0].src.mesh
    topology = planning_context().topology_of(mesh)
    sent = tuple(
        planned_collective(kind, mesh, axes, elements * sources[0].itemsize, topology)
        for kind, axes, elements in comm.joined_received(plans)
    )
    return Decision(op, operands, topology, exchanges=sent, why=_why(moves, members))


def _why(moves: Sequence[LocalRedistribution], members: tuple[int, ...]) -> str | Members:
    pairs = zip(members, moves, strict=False)
    return Members(tuple((id_, move.plan.busiest() * move.spec.itemsize) for id_, move in pairs)) if members else NEEDED
