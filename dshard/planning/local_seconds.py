"""Seconds of the local work of a call of a step, forward and backward: its own kernels, run without data.

So a plan is priced by what the executor will record: all operators that torch runs for a call on local tensors of a
strategy's shapes, priced each as `StepTimeline` prices them. Where an operator has other arguments on each rank, as the
groups of a norm have, the executor runs it, as it may do other work backward than autograd would of these; but a view
does none, whatever its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dshard.caches import Cache
from dshard.comm import plain, planning
from dshard.core.call import Call, Kernel, LocalOp, views_first
from dshard.core.context import use_topology
from dshard.core.local_work import host_seconds
from dshard.core.observe import OperatorMode, observing
from dshard.core.spec import contiguous_spec
from dshard.core.trees import tensors_in
from dshard.core.wrapper import wrap
from dshard.dispatch.registry import find
from dshard.layout import Layout, Shape, replicated
from dshard.mesh import Mesh
from dshard.ops.matmul.options import use_strategy
from dshard.planning.step_graph import GraphCall, Value
from dshard.redistribute.axis_roles import roles
from dshard.rules.attention_loops import AttentionLoops
from dshard.rules.expand import Expansion, Row
from dshard.rules.strategy import Strategy
from dshard.step_timeline import StepTimeline
from dshard.topology import Topology
from dshard.torch_private import OpOverload, disable_modes

_SECONDS = Cache("local work", 65536)
ONE = replicated(Mesh((1,), ("one",)))


class LocalSeconds(NamedTuple):
    """Seconds of a call's local work, and of the host's for its distributed operators, in each pass.

    `saved` are the bytes that the forward pass leaves to the backward pass, beside operands and results.
    """

    forward: float
    backward: float
    saved: int = 0

    @property
    def both(self) -> float:
        """The seconds of both passes."""
        return self.forward + self.backward


def local_seconds(call: GraphCall, expansion: Expansion, topology: Topology, alternative: str = "") -> LocalSeconds:
    """The seconds of a call's local work on the first rank, by an expansion of its rule, or by an `alternative`.

    By the rule the kernels run on tensors without data of the local shapes; by an alternative, of which only the
    layouts of the operands count, or with arguments of its own on each rank the executor itself does. Cached by the
    call's signature and the local shapes.
    """
    shapes, results = _local_shapes(expansion.inputs, call.operands), _local_shapes(expansion.outputs, call.results)
    key = call.signature, alternative, shapes, results, topology
    seconds: LocalSeconds | None = _SECONDS.get(key)
    if seconds is None:
        if alternative or _has_local_arguments(call):
            seconds = executed(call, expansion.inputs, topology, expansion.rows).local
        else:
            seconds = _by_kernels(call, kernel_of(call, expansion), shapes, topology)
            if topology.dispatch:
                host = _host_seconds(call, expansion, topology)
                seconds = LocalSeconds(seconds.forward + host.forward, seconds.backward + host.backward, seconds.saved)
        _SECONDS.add(key, seconds)
    return seconds


def _local_shapes(layouts: Sequence[Layout], values: Sequence[Value]) -> tuple[Shape, ...]:
    """The shapes of the first rank's local tensors."""
    return tuple([layout.largest_shape(x.shape) for layout, x in zip(layouts, values, strict=True)])


def _has_local_arguments(call: GraphCall) -> bool:
    """Whether the call is of an operator that has other arguments on each rank, and is no view."""
    function = call.function
    return isinstance(function, OpOverload) and not views_first(function) and _own_kernel(call) is not None


def _own_kernel(call: GraphCall) -> Kernel | None:
    """The source of an operator's arguments that differ between ranks, if it has any."""
    op = find(call.function) if call.kernel is None and isinstance(call.function, OpOverload) else None
    return None if op is None else op.kernel


def kernel_of(call: GraphCall, expansion: Expansion) -> LocalOp | None:
    """The function that the first rank runs on its local operands in place of another, or of a view, if it does."""
    strategy, first = cast(Strategy, expansion), (0,) * expansion.inputs[0].mesh.ndim
    if call.kernel is not None:
        return call.kernel(strategy, first)
    own, function = _own_kernel(call), call.function
    if own is None or not isinstance(function, OpOverload):
        return None
    ends = zip(expansion.inputs, call.operands, strict=True)
    specs = tuple([contiguous_spec(layout, x.shape, x.dtype, torch.device("meta")) for layout, x in ends])
    outs = tuple([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in call.results])
    args, kwargs = call.arguments_of(specs)
    local = own(Call(function, args, kwargs, specs, outs).at(strategy, first))

    def run(*operands: object) -> Any:
        args, kwargs = call.arguments_of(operands)
        return local(*args, **kwargs)

    return run


@plain()
@disable_modes()
def _by_kernels(call: GraphCall, kernel: LocalOp | None, shapes: Sequence[Shape], topology: Topology) -> LocalSeconds:
    """The seconds of a call and its backward pass on local tensors without data; a kernel may run in its place."""
    timeline = StepTimeline(topology, for_shapes=True)
    operands = [
        torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.needs_grad)
        for shape, x in zip(shapes, call.operands, strict=True)
    ]
    with torch.enable_grad():
        operands = [x.clone() for x in operands]  # no leaves, to which a call may not write
    with torch.enable_grad(), OperatorMode(timeline.run):
        out = (kernel or call.run)(*operands)
        forward, saved = timeline.seconds("compute"), _saved(timeline, tensors_in(out))
        _backward(call, out, operands)
    return LocalSeconds(forward, timeline.seconds("compute") - forward, saved)


def _saved(timeline: StepTimeline, results: Sequence[Tensor]) -> int:
    """The bytes alive of what a call has made, beside its results."""
    storages = {x.untyped_storage()._cdata for x in results}
    return timeline.memory.alive() - sum([timeline.memory.sizes.get(each, 0) for each in storages])


def _backward(call: GraphCall, out: object, operands: Sequence[Tensor]) -> None:
    """Run the backward pass from the results that are read, or the first, to the operands that need a gradient."""
    results = [x for x in zip(tensors_in(out), call.results, strict=True) if x[0].requires_grad]
    outs = [x for x, value in results if value.uses] or [x for x, _ in results[:1]]
    if outs:
        gradients = list(map(torch.empty_like, outs))
        torch.autograd.grad(outs, [x for x in operands if x.requires_grad], gradients, allow_unused=True)


class ExecutedCall(NamedTuple):
    """A call as the executor runs it: seconds of local work, of them the host's, and of what it sends in both passes.

    `outputs` are the layouts of its results, and `received` the bytes that it receives in each pass.
    """

    local: LocalSeconds
    host: LocalSeconds
    sent: float
    outputs: tuple[Layout, ...]
    received: tuple[int, int]


def executed(call: GraphCall, layouts: Sequence[Layout], topology: Topology, rows: Sequence[Row] = ()) -> ExecutedCall:
    """A call and its backward pass with operands in these layouts, on tensors without data, cached.

    Attention has the loops that are these `rows`, as it has where a plan is followed. Gradients of the operands are
    those that the call gives, and are not redistributed. Layouts that differ only by a permutation of interchangeable
    mesh axes are run once.
    """
    axes = _canonical_axes(layouts, topology)
    renamed = [_with_axes(layout, axes) for layout in layouts]
    loops = call.attention_loops([rows[axes.index(axis)] for axis in range(len(rows))]) if rows else None
    key = call.signature, tuple(renamed), loops, topology
    known: ExecutedCall | None = _SECONDS.get(key)
    if known is None:
        known = _SECONDS.add(key, run_by_executor(call, renamed, topology, loops))
    back = [axes.index(axis) for axis in range(len(axes))]
    return known._replace(outputs=tuple([_with_axes(layout, back) for layout in known.outputs]))


def _canonical_axes(layouts: Sequence[Layout], topology: Topology) -> list[int]:
    """For each mesh axis the one that takes its place where interchangeable ones are sorted by their placements."""
    axes = list(range(layouts[0].mesh.ndim)) if layouts else []
    if any(layout.blocks for layout in layouts):
        return axes
    places = [{axis: i for dim in x.sharded_dims() for i, axis in enumerate(x.axes_of(dim))} for x in layouts]
    for role in roles(layouts[0].mesh, topology) if len(axes) > 1 else ():
        keys = {
            axis: [(str(x.placements[axis]), at.get(axis, 0)) for x, at in zip(layouts, places, strict=True)]
            for axis in role
        }
        for axis, own in zip(role, sorted(role, key=keys.__getitem__), strict=True):
            axes[own] = axis
    return axes


def _with_axes(layout: Layout, axes: Sequence[int]) -> Layout:
    """The layout with other axes in place of its mesh axes."""
    if list(axes) == sorted(axes):
        return layout
    placements = [layout.placements[axes.index(axis)] for axis in range(len(axes))]
    order = tuple([(dim, tuple([axes[axis] for axis in layout.axes_of(dim)])) for dim in layout.sharded_dims()])
    return Layout(layout.mesh, tuple(placements), order)


@plain()
@planning()
@disable_modes()
def run_by_executor(
    call: GraphCall, layouts: Sequence[Layout], topology: Topology, loops: AttentionLoops | None = None
) -> ExecutedCall:
    """A call and its backward pass with operands in these layouts, as `executed` gives it, run anew."""
    operands = []
    with torch.enable_grad():
        for layout, shape, x in zip(layouts, _local_shapes(layouts, call.operands), call.operands, strict=True):
            local = torch.empty(shape, dtype=x.dtype, device="meta")
            wrapped = wrap(local, contiguous_spec(layout, x.shape, x.dtype, local.device)).requires_grad_(x.needs_grad)
            operands.append(wrapped.clone())  # no leaf, whose gradient would be reduced, and to which no call may write
    timeline, host = StepTimeline(topology, for_shapes=True), list[float]()
    observed = observing(lambda decision: host.append(host_seconds(decision.op, topology)))
    with use_topology(topology), planning(topology.backend), torch.enable_grad(), timeline.recorded(), observed:
        with use_strategy(attention=loops):
            out = call.run(*operands)
        outs: list[Any] = tensors_in(out)
        forward, begun, received = timeline.seconds("compute"), len(host), _received(timeline)
        saved = _saved(timeline, [x._local_tensor for x in outs])
        _backward(call, out, operands)
    seconds = LocalSeconds(forward, timeline.seconds("compute") - forward, saved)
    layouts = [x._spec.layout for x in outs]
    own = LocalSeconds(sum(host[:begun]), sum(host[begun:]))
    of_passes = received, _received(timeline) - received
    return ExecutedCall(seconds, own, timeline.seconds("network"), tuple(layouts), of_passes)


def _received(timeline: StepTimeline) -> int:
    return sum([event.nbytes for event in timeline.events if event.queue == "network"])


def _host_seconds(call: GraphCall, expansion: Expansion, topology: Topology) -> LocalSeconds:
    """The host's seconds for the distributed operators of a call; their number depends on layouts where a kernel does.

    That is so for functions, which run as one operator or as torch's own.
    """
    if call.kernel is not None:
        return executed(call, expansion.inputs, topology, expansion.rows).host
    key = call.signature, topology
    seconds: LocalSeconds | None = _SECONDS.get(key)
    if seconds is None:
        seconds = _SECONDS.add(key, executed(call, [ONE] * len(call.operands), topology).host)
    return seconds


def gradient_sum_seconds(value: Value, layout: Layout, topology: Topology) -> float:
    """The seconds in which the gradients from all uses of a value, in this layout, are added on the first rank."""
    times = len(value.uses) - 1
    if times < 1 or not value.needs_grad:
        return 0.0
    return times * _elementwise("add", value, layout, value.dtype, value.dtype, topology)


def cast_seconds(value: Value, layout: Layout, src: torch.dtype, dst: torch.dtype, topology: Topology) -> float:
    """The seconds in which a tensor of a value's shape, in this layout, is cast on the first rank."""
    return 0.0 if src == dst else _elementwise("_to_copy", value, layout, src, dst, topology)


def _elementwise(
    name: str, value: Value, layout: Layout, src: torch.dtype, dst: torch.dtype, topology: Topology
) -> float:
    """The seconds of an addition or a cast of tensors of a value's shape, in this layout, on the first rank."""
    (shape,) = _local_shapes([layout], [value])
    key = name, shape, src, dst, topology
    seconds: float | None = _SECONDS.get(key)
    if seconds is None:
        timeline = StepTimeline(topology, for_shapes=True)
        x = torch.empty(shape, dtype=src, device="meta")
        with plain(), disable_modes(), OperatorMode(timeline.run):
            torch.add(x, x) if name == "add" else x.to(dst)
        host = host_seconds("aten.add.Tensor", topology) if name == "add" else 0.0
        seconds = _SECONDS.add(key, timeline.seconds("compute") + host)
    return seconds
