"""Autograd functions between distributed and local tensors, and between layouts.

Design: docs/design/0011-where-autograd-records.md
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dshard import comm
from dshard.core.context import planning_context
from dshard.core.moves import LocalRedistribution, counting_as, local_redistribution
from dshard.core.observe import ASKED, OBSERVERS, Decision, finish_observed, observed
from dshard.core.signature import Context, Function
from dshard.core.spec import Spec, spec_of
from dshard.core.torch_tensors import from_torch, is_torchs
from dshard.core.transforms import is_differentiating_forward, refuse_batched, refuse_constants, with_tangent
from dshard.core.wrapper import Wrapper, wrap, wrap_in_flight
from dshard.errors import LayoutError, MeshError
from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.placements import Partial, Replicate
from dshard.reshard import plan_reshard
from dshard.rules.expand import Operand
from dshard.torch_private import (
    is_functorch_wrapped,
    is_legacy_batched,
    is_transforming,
    no_torch_function,
    outside_transforms,
    tensor_references,
)


class ToLocal(torch.autograd.Function):
    """Distributed -> local; backward: local gradient, of the layout in `grad_spec` -> distributed gradient."""

    @staticmethod
    def forward(ctx: Context, x: Wrapper, grad_spec: Spec) -> Tensor:
        local: Tensor = x._local_tensor
        ctx.spec, ctx.layout = grad_spec, x._spec.layout
        ctx.stride = local.stride() if not grad_spec.has_partial and x.is_leaf else None
        return local.detach()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        if is_functorch_wrapped(grad) or is_legacy_batched(grad):
            refuse_batched(grad, "the backward pass")
        if grad._is_zerotensor():
            grad = _with_memory(grad)
        if torch.is_grad_enabled():
            return _from_local(grad, ctx.spec, ctx.layout), None
        stride = ctx.stride
        if stride is not None and type(grad) is Tensor and (tensor_references(grad) > 1 or grad.stride() != stride):
            grad = grad.clone(memory_format=torch.contiguous_format)  # the leaf keeps it, and writes to it
        elif stride is None and type(grad) is Tensor and 0 in grad.stride():
            grad = grad.contiguous()  # a leaf may keep it through views, and write to it
        return wrap(grad, ctx.spec), None


class FromLocal(torch.autograd.Function):
    """Local -> distributed; backward: distributed gradient -> local gradient, of the layout `grad_layout`."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, spec: Spec, grad_layout: Layout) -> Wrapper:
        ctx.spec, ctx.grad_layout = spec, grad_layout
        return wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        redistributed = redistribute(as_distributed(grad, ctx.grad_layout), ctx.grad_layout)
        if not torch.is_grad_enabled():
            return redistributed._local_tensor, None, None
        return _to_local(redistributed, ctx.spec), None, None


def _to_local(x: Tensor, spec: Spec) -> Tensor:
    """`ToLocal` of a gradient, and of its tangent."""
    dual: Tensor | None = with_tangent(x, lambda y: _to_local(y, spec))
    return ToLocal.apply(x, spec) if dual is None else dual  # type: ignore[no-untyped-call]


def _from_local(x: Tensor, spec: Spec, grad_layout: Layout) -> Wrapper:
    """`FromLocal` of a gradient, and of its tangent."""
    dual: Wrapper | None = with_tangent(x, lambda y: _from_local(y, spec, grad_layout))
    return FromLocal.apply(x, spec, grad_layout) if dual is None else dual  # type: ignore[no-untyped-call]


class OperandFromLocal(FromLocal):
    """Local -> distributed, with the version counter of the tensor in the list `operand`, whose copy it is."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Context, local: Tensor, spec: Spec, grad_layout: Layout, operand: list[Wrapper]
    ) -> object:
        return _with_versions_of(operand[0], FromLocal.forward(ctx, local, spec, grad_layout))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return (*FromLocal.backward(ctx, grad), None)


class FromLocalOfTerms(OperandFromLocal):
    """`OperandFromLocal` whose ranks get terms of the gradient: their own of a partial one, equal shares of others."""

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        layout, spec = ctx.grad_layout, ctx.spec
        grad, n = as_distributed(grad, layout), 1
        for axis, (wanted, placement) in enumerate(zip(layout.placements, grad._spec.layout.placements, strict=True)):
            if wanted == Partial() and not isinstance(placement, Partial):
                layout, n = layout.replace(axis, Replicate()), n * layout.mesh.shape[axis]
                spec = spec.with_layout(spec.layout.replace(axis, Partial()))
        moved = redistribute(grad, layout)
        local = _to_local(moved, spec) if torch.is_grad_enabled() else moved._local_tensor
        return local if n == 1 else local / n, None, None, None


def unchecked_apply(function: type[torch.autograd.Function]) -> Function:
    """`function.apply` without torch's checks for functorch tensors, which these calls never have."""
    apply: Function = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def apply_to(x: Wrapper, function: type[torch.autograd.Function], unchecked: Function) -> Function:
    """The `apply` that records `function` of `x`: the unchecked one, but while torch traces."""
    return function.apply if comm.traced(x._local_tensor) else unchecked


class Redistribute(torch.autograd.Function):
    """One layout -> another; backward: the gradient in the operand's layout, or partial where that is replicated."""

    @staticmethod
    def forward(
        ctx: Context, x: Wrapper, layout: Layout, op: str | None, asynchronous: bool, as_operand: bool
    ) -> object:
        ctx.move, ctx.asynchronous = local_redistribution(x._spec, layout), asynchronous
        out = redistribute_unrecorded(x, ctx.move, op, asynchronous)
        return _with_versions_of(x, out) if as_operand else out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        move: LocalRedistribution = ctx.move
        grad = as_distributed(grad, move.source_grad)
        target = move.targets.get(grad._spec)
        if target is None:
            target = move.targets[grad._spec] = keep_partial_sums(grad._spec.layout, move.source_grad)
        return redistribute(grad, target, asynchronous=ctx.asynchronous), None, None, None, None


class RedistributeWith(Redistribute):
    """One layout -> another; backward: the gradient in the layout `wanted`."""

    @staticmethod
    def forward(ctx: Context, x: Wrapper, layout: Layout, wanted: Layout) -> Wrapper:  # type: ignore[override]
        ctx.wanted = wanted
        return redistribute_unrecorded(x, local_redistribution(x._spec, layout), None, False)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return redistribute(as_distributed(grad, ctx.wanted), ctx.wanted), None, None


def _with_versions_of(x: Wrapper, moved: Wrapper) -> Wrapper:
    """`moved`, a copy of `x` in another layout, with the version counters of `x`."""
    if comm.traced(moved._local_tensor) or x._view_sync is not None:  # an alias of a view would be written to with it
        return moved
    out = x.detach()
    out._local_tensor = (
        counting_as(x._local_tensor, moved._local_tensor)
        if type(moved._local_tensor) is Tensor
        else moved._local_tensor
    )
    out._spec = moved._spec
    return out


class RedistributeInDtypes(torch.autograd.Function):
    """One layout and dtype -> others; backward: the gradient is sent in a third dtype, and cast to the operand's."""

    @staticmethod
    def forward(
        ctx: Context, x: Wrapper, layout: Layout, asynchronous: bool, dtype: torch.dtype, grad_dtype: torch.dtype
    ) -> object:
        ctx.layout, ctx.asynchronous = x._spec.layout.cotangent(), asynchronous
        ctx.dtype, ctx.grad_dtype = x._spec.dtype, grad_dtype
        out = redistribute(x.detach().to(dtype), layout, asynchronous=asynchronous)
        return out.detach() if out._local_tensor is x._local_tensor else out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad = as_distributed(grad, ctx.layout).to(ctx.grad_dtype)
        return redistribute(grad, ctx.layout, asynchronous=ctx.asynchronous).to(ctx.dtype), None, None, None, None


class Reshard(torch.autograd.Function):
    """A layout on one mesh -> a layout on another; backward: the gradient from the second to the first.

    A rank outside a mesh has no data there, and its gradient is ignored.
    """

    @staticmethod
    def forward(ctx: Context, x: Wrapper, layout: Layout) -> object:
        ctx.source, ctx.target = x._spec.layout.cotangent(), layout.cotangent()
        return wrap(reshard_local(x._local_tensor, x._spec, layout), x._spec.with_layout(layout))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            _refuse_second_order(ctx.source, ctx.target)
        grad = as_distributed(grad, ctx.target)
        if comm.is_outside(ctx.target.mesh):
            grad = absent_tensor(grad._spec.with_layout(ctx.target))
        return redistribute(redistribute(grad, ctx.target), ctx.source), None


def _refuse_second_order(layout: Layout, other: Layout) -> None:
    """Refuse to record a gradient between meshes of different ranks: its own backward pass would wait for ever."""
    if set(layout.mesh.ranks) != set(other.mesh.ranks):
        raise MeshError(
            f"a backward pass with create_graph=True through a redistribution from ({layout.mesh}) to ({other.mesh}): "
            "second derivatives need both meshes to be of the same ranks; take the second derivative on one mesh, or "
            "leave out create_graph"
        )


def as_distributed(grad: Tensor, layout: Layout) -> Wrapper:
    """A gradient as a distributed tensor: a plain one, such as zeros that autograd makes, counts as replicated."""
    if isinstance(grad, Wrapper):
        return grad
    if is_torchs(grad):
        return from_torch(grad)  # type: ignore[no-any-return]
    grad, alike = _with_memory(grad), replicated(layout.mesh)
    spec = spec_of(alike, tuple(grad.shape), grad.stride(), grad.dtype, grad.device)
    if grad.requires_grad and torch.is_grad_enabled():  # given to a pass that is recorded, and differentiated by
        return _from_local(grad, spec, alike)
    return wrap(grad, spec)


def redistribute_unrecorded(
    x: Wrapper, move: LocalRedistribution, op: str | None, asynchronous: bool, own: bool = False
) -> Wrapper:
    """`x` redistributed by `move`, not recorded by autograd; in flight where it is `asynchronous` and can be.

    The memory of a tensor that the caller owns, `own`, may be overwritten.
    """
    if asynchronous:
        start, args = move.begin, (x._local_tensor, own)
        decision = _decision(move, op) if OBSERVERS else None
        in_flight = start(*args) if decision is None else observed(decision, start, args)
        if in_flight is not None:
            end = in_flight if decision is None else partial(finish_observed, decision, in_flight)
            return wrap_in_flight(end, move.spec)
    local = observed(_decision(move, op), move, (x._local_tensor,)) if OBSERVERS else move(x._local_tensor)
    return wrap(local, move.spec)


NUMBER = "number"
"""The name, in reports, of the reduction of a number when it is made, which the user asked for."""


def _decision(move: LocalRedistribution, op: str | None) -> Decision:
    return move.decision(op or "redistribute", explicit=op is None or op == NUMBER)


def _with_memory(grad: Tensor) -> Tensor:
    """The gradient itself, or zeros with memory in place of torch's zeros without."""
    return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device) if grad._is_zerotensor() else grad


def redistribute(
    x: Wrapper, layout: Layout, op: str | None = None, *, asynchronous: bool = False, as_operand: bool = False
) -> Wrapper:
    """`x` in `layout`, on its mesh or another; `x` itself if it has that layout. Differentiable.

    `op` names the operator that needs it, None for a request of the user. If `asynchronous`, the result and its
    gradient may be in flight on return. If `as_operand`, autograd saves the result in place of `x`, on the same mesh: a
    backward pass then notices a write to `x`.
    """
    current = x._spec.layout
    if current is layout:
        return x
    refuse_constants(x, "redistribute", is_operator=False)
    if is_transforming():  # torch.func follows what it wraps, not this tensor
        with outside_transforms():
            return redistribute(x, layout, op, asynchronous=asynchronous, as_operand=as_operand)
    if current.mesh is not layout.mesh:
        _refuse_slices(current.mesh, layout.mesh)
        crossed: Wrapper = Reshard.apply(x, layout)  # type: ignore[no-untyped-call]
        return crossed
    if is_differentiating_forward():
        dual: Wrapper | None = with_tangent(x, lambda y: in_layout(y, layout, op, asynchronous=asynchronous))
        if dual is not None:
            return dual
    with no_torch_function():
        if torch.is_grad_enabled() and x.requires_grad:
            out: Wrapper = apply_to(x, Redistribute, _redistribute)(x, layout, op, asynchronous, as_operand)
            return out
        return redistribute_unrecorded(x, local_redistribution(x._spec, layout), op, asynchronous)


def _refuse_slices(source: Mesh, target: Mesh) -> None:
    """Refuse a mesh and a slice of it, or two: each rank has a slice of its own, and would plan another reshard."""
    first, second = {*source.ranks}, {*target.ranks}
    of_slice, to_slice = first != comm.ranks_of_root(source), second != comm.ranks_of_root(target)
    if first != second and ((of_slice and (to_slice or first < second)) or (to_slice and second < first)):
        raise MeshError(
            f"from ({source}) to ({target}), of which one is a slice of a mesh: each rank has another slice, but all "
            "ranks of both meshes call one redistribution; redistribute on the whole mesh, with Replicate() along the "
            "axes that the slice lacks, and take DTensor.from_local(x.to_local(), slice, placements, shape=x.shape)"
        )


def redistribute_with(x: Wrapper, layout: Layout, wanted: Layout) -> Wrapper:
    """`x` in `layout` on its mesh; its gradient is brought to the layout `wanted` before it is added to others."""
    if x._spec.layout is layout or is_differentiating_forward() or not (torch.is_grad_enabled() and x.requires_grad):
        return redistribute(x, layout)
    with no_torch_function():
        return RedistributeWith.apply(x, layout, wanted)  # type: ignore[no-any-return, no-untyped-call]


def redistributed_operand(x: Wrapper, layout: Layout) -> Wrapper:
    """`x` in `layout`, saved by autograd in place of `x`, whether `x` is recorded or another operand alone."""
    moved = redistribute(x, layout, as_operand=True)
    if moved is x or moved.requires_grad or not torch.is_grad_enabled():
        return moved
    return _with_versions_of(x, moved)


def in_layout(x: Tensor, layout: Layout, op: str | None = None, *, asynchronous: bool = False) -> Wrapper:
    """A tensor or a tangent in `layout`; a plain one, which torch made, is distributed first."""
    x = as_distributed(x, layout)
    for placement in (*x._spec.layout.placements, *layout.placements):
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise LayoutError(
                f"a tangent of a partial {placement.reduce_op}, [{x._spec.layout}] -> [{layout}]: only sums are "
                "linear; redistribute to a Shard or Replicate before the tangent is made"
            )
    return redistribute(x, layout, op, asynchronous=asynchronous)


def keep_partial_sums(layout: Layout, target: Layout) -> Layout:
    """`target` with a partial sum on each mesh axis where `layout` is a partial sum and `target` replicated."""
    placements = tuple(  # gradients may be added first, and reduced once
        placement
        if isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg") and target_placement == Replicate()
        else target_placement
        for placement, target_placement in zip(layout.placements, target.placements, strict=True)
    )
    return Layout(target.mesh, placements, target.order)


to_local, from_local, _redistribute = map(unchecked_apply, (ToLocal, FromLocal, Redistribute))
redistribute_in_dtypes = unchecked_apply(RedistributeInDtypes)


def reshard_local(local: Tensor, spec: Spec, layout: Layout) -> Tensor:
    """The local tensor under a layout on another mesh; without data on ranks outside that mesh."""
    outside = comm.is_absent(local, spec.layout.mesh)
    if outside and comm.is_outside(layout.mesh):
        return absent_tensor(spec.with_layout(layout))._local_tensor
    topology = planning_context().topology_of(spec.layout.mesh)
    crossing = plan_reshard(spec.layout, layout, spec.shape, spec.itemsize, topology)
    typed = torch.empty(0, dtype=spec.dtype, device=comm.device_of(layout.mesh)) if outside else local
    if OBSERVERS:
        operand = Operand(spec.layout, spec.shape, spec.itemsize)
        decision = Decision("redistribute", (operand,), topology, crossing=crossing, why=ASKED)
        out: Tensor | None = observed(decision, comm.reshard, (crossing, typed))
    else:
        out = comm.reshard(crossing, typed)
    return absent_tensor(spec.with_layout(layout))._local_tensor if out is None else out


def absent_tensor(spec: Spec) -> Wrapper:
    """The distributed tensor of this spec on a rank outside its mesh."""
    return wrap(torch.empty(spec.layout.largest_shape(spec.shape), dtype=spec.dtype, device="meta"), spec)
