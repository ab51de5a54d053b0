"""Where autograd crosses between distributed and local tensors, and between layouts.

An operator that needs no communication is recorded on the local tensors, by torch alone. Its result is distributed
again for whoever wants that, and remembers the local tensor that was recorded: the next such operator takes it up from
there, and going back torch passes the gradient on without a crossing. `Live` is that memory.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from dshard import comm
from dshard.core.context import planning_context
from dshard.core.moves import LocalRedistribution, local_redistribution
from dshard.core.observe import OBSERVERS, Decision, observed
from dshard.core.spec import Spec, spec_of
from dshard.core.transforms import is_batched, refuse_batched, with_tangent
from dshard.core.wrapper import Wrapper, wrap, wrap_later
from dshard.errors import LayoutError, MeshError
from dshard.layout import Layout, interned, replicated
from dshard.mesh import Mesh
from dshard.placements import Partial, Replicate
from dshard.reshard import plan_reshard
from dshard.rules.expand import Operand


class ToLocal(torch.autograd.Function):
    """Distributed -> local; backward: the local gradient, laid out as said, -> distributed."""

    @staticmethod
    def forward(ctx: Any, x: Any, grad_spec: Spec) -> Tensor:
        local: Tensor = x._local
        ctx.spec, ctx.layout = grad_spec, x._spec.layout
        ctx.stride = local.stride() if not grad_spec.pending and x.is_leaf else None
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        if is_batched(grad):
            refuse_batched(grad, "the backward pass")
        if grad._is_zerotensor():  # torch's zeros without memory, which nobody can send
            grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
        if torch.is_grad_enabled():
            return FromLocal.apply(grad, ctx.spec, ctx.layout), None  # type: ignore[no-untyped-call]
        stride = ctx.stride
        if stride is not None and type(grad) is Tensor and (_tensor_references(grad) > 1 or grad.stride() != stride):
            grad = grad.clone(memory_format=torch.contiguous_format)  # it will be the leaf's own, to be written
        elif stride is None and type(grad) is Tensor and 0 in grad.stride():
            grad = grad.contiguous()  # a leaf may take it for its own through views, and write to it
        return wrap(grad, ctx.spec), None


class FromLocal(torch.autograd.Function):
    """Local -> distributed; backward: the distributed gradient -> local, laid out as said."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: Spec, grad_layout: Layout) -> Any:
        ctx.spec, ctx.grad_layout = spec, grad_layout
        return wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None]:
        laid = redistribute(as_distributed(grad, ctx.grad_layout), ctx.grad_layout)
        if not torch.is_grad_enabled():
            return laid._local, None, None
        return ToLocal.apply(laid, ctx.spec), None, None  # type: ignore[no-untyped-call]


class LocalGraph:
    """The local part of a recorded tensor as autograd knows it, for as long as nobody writes to the tensor.

    `home` is the recorded local tensor whose gradient lies as that of the distributed one does, made by `make` when it
    is first asked for; `others` are such with gradients laid out otherwise. Where it is not `made` by operators on
    local tensors, they all come from the distributed tensor itself. `used` says whether something was recorded on it.
    """

    __slots__ = ("home", "made", "make", "others", "used", "version")

    def __init__(self, version: int, home: Tensor | None = None, make: Callable[[], Tensor] | None = None) -> None:
        self.version, self.home, self.make = version, home, make
        self.made = home is not None or make is not None
        self.used = False
        self.others: dict[Spec, Tensor] = {}

    def at_home(self) -> Tensor:
        """The recorded local tensor, of one that is `made`."""
        self.used = True
        if self.home is None:
            assert self.make is not None
            self.home, self.make = self.make(), None
        return self.home


def tracked_local(x: Any, grad: Spec, is_home: bool) -> Tensor:
    """The recorded local part of `x`, whose gradient will be `grad`; `is_home` where that lies as `x` wants it.

    That of a leaf is not remembered: its gradient is to be accumulated as soon as it is known.
    """
    found: LocalGraph | None = x._local_graph
    if found is None or found.version != x._version:
        if x.is_leaf:
            return to_local(x, grad)  # type: ignore[no-any-return]
        found = x._local_graph = LocalGraph(x._version)
    if is_home:
        if found.made:
            return found.at_home()
        if found.home is None:
            found.home = to_local(x, grad)
        return found.home
    if grad not in found.others:
        found.others[grad] = _with_gradient_layout(x, grad) if found.made else to_local(x, grad)
    return found.others[grad]


def _with_gradient_layout(x: Any, grad: Spec) -> Tensor:
    """The same, beside one whose gradient lies otherwise, which the sum of what comes back here is brought to."""
    back = local_redistribution(grad, x._spec.layout.cotangent())
    return _redistribute_local(x._local_graph.at_home(), None, back, None)  # type: ignore[no-any-return]


def local_graph_of(x: Any) -> LocalGraph | None:
    """What is remembered of `x` as the result of operators on local tensors, or None."""
    found: LocalGraph | None = x._local_graph
    return found if found is not None and found.made and found.version == x._version else None


def wrap_tracked(local: Tensor, spec: Spec, cotangent: Layout) -> Any:
    """The distributed tensor of spec `spec` whose local part was recorded, or was not."""
    if not local.requires_grad:
        return wrap(local, spec)
    out = from_local(local, spec, cotangent)
    out._local_graph = LocalGraph(0, local)
    return out


class RedistributeLocal(torch.autograd.Function):
    """A recorded local tensor brought to another layout by `move`; backward: its gradient by the move `back`.

    None is no move. The gradient is itself recorded with the moves exchanged: what is a tensor's layout is that of the
    gradient of its gradient, and the other way round.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, move: LocalRedistribution | None, back: LocalRedistribution | None, op: str | None
    ) -> Tensor:
        ctx.move, ctx.back = move, back
        moved = local if move is None else _moved_local(local, move, op)
        return moved.detach() if moved is local else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back: LocalRedistribution | None = ctx.back
        if torch.is_grad_enabled():
            return _redistribute_local(grad, back, ctx.move, None), None, None, None
        return grad if back is None else _moved_local(grad, back, None), None, None, None


def _moved_local(local: Tensor, move: LocalRedistribution, op: str | None) -> Tensor:
    return observed(_decision(move, op), move, (local,)) if OBSERVERS else move(local)


def _unchecked_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the questions that it asks of its arguments: there is no functorch on this way."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


class Redistribute(torch.autograd.Function):
    """One layout -> another; backward: the gradient goes back, still pending where the operand is whole."""

    @staticmethod
    def forward(ctx: Any, x: Any, layout: Layout, op: str | None, later: bool) -> Any:
        ctx.move, ctx.later = local_redistribution(x._spec, layout), later
        return _redistributed(x, ctx.move, op, later)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None, None]:
        move: LocalRedistribution = ctx.move
        grad = as_distributed(grad, move.back)
        target = move.targets.get(grad._spec)
        if target is None:
            target = move.targets[grad._spec] = interned(keep_partial_sums(grad._spec.layout, move.back))
        return redistribute(grad, target, later=ctx.later), None, None, None


class Reshard(torch.autograd.Function):
    """A layout on one mesh -> a layout on another; backward: the gradient goes back the other way.

    A rank outside a mesh has an empty local tensor there. What it gives as its part of a gradient is not looked at, and
    it gets none.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, layout: Layout) -> Any:
        ctx.back, ctx.there = x._spec.layout.cotangent(), layout.cotangent()
        return wrap(_reshard_local(x._local, x._spec, layout), x._spec.with_layout(layout))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        if torch.is_grad_enabled():
            _refuse_second_order(ctx.back, ctx.there)
        grad = as_distributed(grad, ctx.there)
        if _is_outside(ctx.there.mesh):
            grad = wrap(grad._local.new_empty(0), grad._spec.with_layout(ctx.there))
        back = redistribute(redistribute(grad, ctx.there), ctx.back)
        return None if _is_outside(ctx.back.mesh) else back, None


def _refuse_second_order(layout: Layout, other: Layout) -> None:
    """Refuse to record a gradient that some ranks do not get: differentiated, it would let the others wait for them.

    Raises:
        MeshError: the meshes are not of the same ranks.
    """
    if set(layout.mesh.ranks) != set(other.mesh.ranks):
        raise MeshError(
            f"a backward pass with create_graph=True through a redistribution from ({layout.mesh}) to ({other.mesh}): "
            "second derivatives need both meshes to be of the same ranks; take the second derivative on one mesh, or "
            "leave out create_graph"
        )


def _is_outside(mesh: Mesh) -> bool:
    """Whether this process is a rank outside the mesh."""
    runtime = comm.runtime_of(mesh)
    return runtime is not None and runtime.coordinate is None and comm.simulated_ranks() is None


def _reshard_local(local: Tensor, spec: Spec, layout: Layout) -> Tensor:
    """The local tensor under a layout on another mesh; empty where this rank is not in that."""
    topology = planning_context().topology_of(spec.layout.mesh)
    crossing = plan_reshard(spec.layout, layout, spec.shape, spec.itemsize, topology)
    typed = local if local.dtype == spec.dtype else local.new_empty(0, dtype=spec.dtype)  # empty, of a rank outside
    if OBSERVERS:
        operand = Operand(spec.layout, spec.shape, spec.itemsize)
        decision = Decision("redistribute", (operand,), (), None, None, (), topology, explicit=True, crossing=crossing)
        out = observed(decision, comm.reshard, (crossing, typed))
    else:
        out = comm.reshard(crossing, typed)
    return local.new_empty(0, dtype=spec.dtype) if out is None else out


def as_distributed(grad: Any, layout: Layout) -> Any:
    """A gradient; where autograd made it plain, of zeros, the whole one on every rank."""
    if isinstance(grad, Wrapper):
        return grad
    whole = replicated(layout.mesh)
    return wrap(grad, spec_of(whole, tuple(grad.shape), grad.stride(), grad.dtype, grad.device))


def _is_sole_owner(grad: Tensor) -> bool:
    """Whether a gradient is in no other hands, nor its memory but of what it is a view of, which is in none either."""
    return _tensor_references(grad) == 1 and _reference_counts(grad) in _SOLE_OWNER_COUNTS


def _reference_counts(x: Tensor) -> tuple[int, int, int]:
    """How many hold the memory of a tensor; and what it is a view of, in C++ and in Python."""
    base, memory = x._base, _storage_references(x.untyped_storage()._cdata)
    return (memory, 0, 0) if base is None else (memory, _tensor_references(base), getrefcount(base))


def _redistributed(x: Any, move: LocalRedistribution, op: str | None, later: bool, own: bool = False) -> Any:
    if later:
        start, given = move.later, (x._local, own)
        coming = observed(_decision(move, op), start, given) if OBSERVERS else start(*given)
        if coming is not None:
            return wrap_later(coming, move.spec)
    local = observed(_decision(move, op), move, (x._local,)) if OBSERVERS else move(x._local)
    return wrap(local, move.spec)


def _decision(move: LocalRedistribution, op: str | None) -> Decision:
    return move.decision(op or "redistribute", explicit=op is None)


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
    dual = with_tangent(x, lambda y: in_layout(y, layout, op, later=later))
    if dual is not None:
        return dual
    with torch._C.DisableTorchFunctionSubclass():
        if torch.is_grad_enabled() and x.requires_grad:
            if not later and local_graph_of(x) is not None:
                move = local_redistribution(x._spec, layout)
                if not move.gathers:
                    local = _redistribute_local(x._local_graph.at_home(), move, move.of_gradient(), op)
                    return wrap_tracked(local, move.spec, move.grad)
            return Redistribute.apply(x, layout, op, later)  # type: ignore[no-untyped-call]
        return _redistributed(x, local_redistribution(x._spec, layout), op, later)


def in_layout(x: Any, layout: Layout, op: str | None = None, *, later: bool = False) -> Any:
    """A tensor or a tangent in another layout; `distributed` where torch made it plain.

    Raises:
        LayoutError: a partial maximum, minimum or product, which is not linear.
    """
    x = as_distributed(x, layout)
    for placement in (*x._spec.layout.placements, *layout.placements):
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise LayoutError(
                f"a tangent of a pending {placement.reduce_op}, [{x._spec.layout}] -> [{layout}]: only sums are "
                "linear; redistribute to a Shard or Replicate before the tangent is made"
            )
    return redistribute(x, layout, op, later=later)


def gradient_in_layout(grad: Any, layout: Layout) -> Any:
    """A gradient of a leaf, in its layout. One collective that this takes runs beside the rest of the backward pass.

    Of several the first would hold its buffers until the end.
    """
    grad = as_distributed(grad, layout)
    spec: Spec = grad._spec
    if spec.layout is layout:
        return grad
    move = local_redistribution(spec, layout)
    later = len(move.plan.steps) == 1
    if torch.is_grad_enabled():
        return redistribute(grad, layout, later=later)
    return _redistributed(grad, move, None, later, own=later and _is_sole_owner(grad._local))


def keep_partial_sums(layout: Layout, target: Layout) -> Layout:
    """`target`, but pending wherever `layout` has a pending sum and `target` is whole: later uses may add up first."""
    placements = tuple(
        mine if isinstance(mine, Partial) and mine.reduce_op in ("sum", "avg") and theirs == Replicate() else theirs
        for mine, theirs in zip(layout.placements, target.placements, strict=True)
    )
    return Layout(target.mesh, placements, target.order)


to_local, from_local = _unchecked_apply(ToLocal), _unchecked_apply(FromLocal)
_redistribute_local = _unchecked_apply(RedistributeLocal)
_tensor_references: Callable[[Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]
_storage_references: Callable[[int], int] = torch._C._storage_Use_Count
_SOLE_OWNER_COUNTS = [
    _reference_counts(torch.empty(2, device="cpu")),
    _reference_counts(torch.empty(2, device="cpu").view(2, 1)),
]
"""How many that are of a tensor that nobody else has, and of a view."""
