"""Where autograd crosses between distributed and local tensors, and between layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dshard import comm
from dshard.layout import Layout, interned, replicated
from dshard.mesh import Mesh
from dshard.ops.expand import Operand
from dshard.ops.moving import Move, move_of
from dshard.ops.observe import OBSERVERS, Decision, observed
from dshard.ops.settings import current
from dshard.ops.spec import Spec, spec_of
from dshard.placements import Partial, Replicate
from dshard.reshard import plan_reshard


class ToLocal(torch.autograd.Function):
    """Distributed -> local; backward: the local gradient, laid out as said, -> distributed."""

    @staticmethod
    def forward(ctx: Any, x: Any, grad_layout: Layout) -> Tensor:
        ctx.cls, ctx.spec = type(x), x._spec.with_layout(grad_layout)
        local: Tensor = x._local
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        return FromLocal.apply(grad, ctx.cls, ctx.spec, ctx.spec.layout.cotangent()), None  # type: ignore[no-untyped-call]


class FromLocal(torch.autograd.Function):
    """Local -> distributed; backward: the distributed gradient -> local, laid out as said."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, cls: Any, spec: Spec, grad_layout: Layout) -> Any:
        ctx.cls, ctx.grad_layout = cls, grad_layout
        return cls._wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None, None]:
        laid = redistribute(distributed(ctx.cls, grad, ctx.grad_layout), ctx.grad_layout)
        return ToLocal.apply(laid, ctx.grad_layout.cotangent()), None, None, None  # type: ignore[no-untyped-call]


class Redistribute(torch.autograd.Function):
    """One layout -> another; backward: the gradient goes back, still pending where the operand is whole."""

    @staticmethod
    def forward(ctx: Any, x: Any, layout: Layout, op: str | None, later: bool) -> Any:
        ctx.cls, ctx.move, ctx.later = type(x), move_of(x._spec, layout), later
        return _moved(x, ctx.move, op, later)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None, None]:
        move: Move = ctx.move
        grad = distributed(ctx.cls, grad, move.back)
        target = move.targets.get(grad._spec)
        if target is None:
            target = move.targets[grad._spec] = interned(left_pending(grad._spec.layout, move.back))
        return redistribute(grad, target, later=ctx.later), None, None, None


class Reshard(torch.autograd.Function):
    """A layout on one mesh -> a layout on another; backward: the gradient goes back the other way.

    A rank outside a mesh has an empty local tensor there. What it gives as its part of a gradient is not looked at, and
    it gets none.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, layout: Layout) -> Any:
        ctx.cls, ctx.back, ctx.there = type(x), x._spec.layout.cotangent(), layout.cotangent()
        return type(x)._wrap(_cross(x._local, x._spec, layout), x._spec.with_layout(layout))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        grad = distributed(ctx.cls, grad, ctx.there)
        if _outside(ctx.there.mesh):
            grad = ctx.cls._wrap(grad._local.new_empty(0), grad._spec.with_layout(ctx.there))
        back = redistribute(redistribute(grad, ctx.there), ctx.back)
        return None if _outside(ctx.back.mesh) else back, None


def _outside(mesh: Mesh) -> bool:
    """Whether this process is a rank outside the mesh."""
    runtime = comm.runtime_of(mesh)
    return runtime is not None and runtime.coordinate is None and comm.simulated_ranks() is None


def _cross(local: Tensor, spec: Spec, layout: Layout) -> Tensor:
    """The local tensor under a layout on another mesh; empty where this rank is not in that."""
    topology = current().topology_of(spec.layout.mesh)
    crossing = plan_reshard(spec.layout, layout, spec.shape, spec.itemsize, topology)
    typed = local if local.dtype == spec.dtype else local.new_empty(0, dtype=spec.dtype)  # empty, of a rank outside
    if OBSERVERS:
        operand = Operand(spec.layout, spec.shape, spec.itemsize)
        decision = Decision("redistribute", (operand,), (), None, None, (), topology, explicit=True, crossing=crossing)
        out = observed(decision, comm.reshard, (crossing, typed))
    else:
        out = comm.reshard(crossing, typed)
    return local.new_empty(0, dtype=spec.dtype) if out is None else out


def distributed(cls: Any, grad: Any, layout: Layout) -> Any:
    """A gradient; where autograd made it plain, of zeros, the whole one on every rank."""
    if isinstance(grad, cls):
        return grad
    whole = replicated(layout.mesh)
    return cls._wrap(grad, spec_of(whole, tuple(grad.shape), grad.stride(), grad.dtype, grad.device))


def _moved(x: Any, move: Move, op: str | None, later: bool) -> Any:
    if later:
        start = move.later
        coming = observed(_decision(x._spec, move, op), start, (x._local,)) if OBSERVERS else start(x._local)
        if coming is not None:
            return type(x)._wrap_later(coming, move.spec)
    local = observed(_decision(x._spec, move, op), move, (x._local,)) if OBSERVERS else move(x._local)
    return type(x)._wrap(local, move.spec)


def _decision(spec: Spec, move: Move, op: str | None) -> Decision:
    topology = current().topology_of(spec.layout.mesh)
    operand = Operand(spec.layout, spec.shape, spec.itemsize)
    outputs = ((spec.shape, spec.itemsize),)
    return Decision(op or "redistribute", (operand,), outputs, None, None, (move.plan,), topology, explicit=op is None)


def redistribute(x: Any, layout: Layout, op: str | None = None, *, later: bool = False) -> Any:
    """`x` in another layout, on its mesh or another; `x` itself where it lies so already. Differentiable.

    `op` names the operator that needs it so, where the user did not ask for it. With `later` it may still be on its way
    on return, and so may the gradient.
    """
    held = x._spec.layout
    if held is layout or held == layout:
        return x
    if held.mesh is not layout.mesh and held.mesh != layout.mesh:
        return Reshard.apply(x, layout)  # type: ignore[no-untyped-call]
    with torch._C.DisableTorchFunctionSubclass():
        if torch.is_grad_enabled() and x.requires_grad:
            return Redistribute.apply(x, layout, op, later)  # type: ignore[no-untyped-call]
        return _moved(x, move_of(x._spec, layout), op, later)


def left_pending(layout: Layout, target: Layout) -> Layout:
    """`target`, but pending wherever `layout` has a pending sum and `target` is whole: later uses may add up first."""
    placements = tuple(
        mine if isinstance(mine, Partial) and mine.reduce_op in ("sum", "avg") and theirs == Replicate() else theirs
        for mine, theirs in zip(layout.placements, target.placements, strict=True)
    )
    return Layout(target.mesh, placements, target.order)
