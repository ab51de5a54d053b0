"""`from_local`: make a distributed tensor of the local tensors of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard import comm
from dshard.autograd.crossing import FromLocalOfTerms, OperandFromLocal
from dshard.caches import cached
from dshard.comm import DeviceMesh, traced
from dshard.core.local_checks import check_strided, checked, gathered_shape, gradient_layout
from dshard.core.moves import replica_broadcasts, sending, wrap_counting
from dshard.core.observe import OBSERVERS, observed
from dshard.core.signature import Context
from dshard.core.spec import Spec, contiguous_stride, dense_stride, spec_of
from dshard.core.subclasses import as_plain
from dshard.core.transforms import refuse_wrapped, with_tangent
from dshard.core.wrapper import DISTRIBUTED, Wrapper
from dshard.errors import MixedError, ShapeError
from dshard.layout import Layout, Shape, layout_of, replicated
from dshard.mesh import Mesh
from dshard.placements import Placement
from dshard.torch_dtensor import TorchPlacement
from dshard.validate import as_shape

# -- ranks outside a mesh run the same program: tensors on it have no data there, as on a mesh without processes, so
# that operators, backward passes and random draws are planned as on the ranks of the mesh, and send nothing


class Emptied(torch.autograd.Function):
    """A local tensor without data -> an empty one on `device`, or zero without dims; backward: no data."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, device: torch.device) -> Tensor:
        ctx.shape, ctx.dtype = tuple(local.shape), local.dtype
        return torch.zeros((0,) if local.ndim else (), dtype=local.dtype, device=device)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty(ctx.shape, dtype=ctx.dtype, device="meta"), None


class ToNoData(torch.autograd.Function):
    """A user's local tensor -> one of `shape` without data; backward: zeros."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, shape: Shape) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = tuple(local.shape), local.dtype, local.device
        return torch.empty(shape, dtype=local.dtype, device="meta")

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device), None


AnyPlacement: TypeAlias = Placement | TorchPlacement
"""A placement of dshard's classes or of torch's."""


def from_local(
    local: Tensor,
    device_mesh: DeviceMesh | Mesh | None,
    placements: Sequence[AnyPlacement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[AnyPlacement] | None,
) -> Any:
    """The distributed tensor made of each rank's local tensor; the arguments are those of `DTensor.from_local`."""
    mesh = comm.as_mesh(device_mesh)
    if isinstance(local, DISTRIBUTED):
        raise MixedError(
            "from_local takes this rank's plain local tensor, not a DTensor: use redistribute to change placements"
        )
    check_strided(local, "from_local", "this rank's local tensor")
    local = as_plain(local)
    refuse_wrapped(local, "from_local")
    local = comm.on_device_of(mesh, local)
    dual: Wrapper | None = with_tangent(
        local, lambda x: from_local(x, mesh, placements, run_check, shape, stride, grad_placements)
    )
    if dual is not None:
        return dual
    shape = None if shape is None else as_shape(shape, "from_local: shape", ShapeError)
    ndim = local.ndim if shape is None else len(shape)
    layout = replicated(mesh) if placements is None else layout_of(mesh, placements, ndim)
    grad_layout, compared = checked(layout, local.dtype)
    if grad_placements is not None:
        layout_of(mesh, grad_placements, ndim)  # before anything is sent
    stride = None if stride is None else _strides(stride, ndim)
    if compared and not traced(local):
        call = f"from_local of {local.ndim} dims, {local.dtype}, [{layout}], {shape=}"
        call += f", {run_check=}, {grad_placements=}" + ", requires_grad" * local.requires_grad
        comm.compare_calls(call, mesh)
    spec = _global_spec(local, layout, shape, stride, run_check, compared)
    if grad_placements is not None:
        grad_layout = gradient_layout(layout, spec.shape, grad_placements, "from_local")
    if run_check:
        local = _of_first_ranks(local, spec)
    if comm.is_outside(mesh):
        local = ToNoData.apply(local, layout.largest_shape(spec.shape))  # type: ignore[no-untyped-call]
    own, axes = wrap_counting(local, local.detach(), spec), grad_layout.partial_axes()
    if not (torch.is_grad_enabled() and local.requires_grad):
        return own
    if axes:
        Wrapper.keeps_terms = True
    node = FromLocalOfTerms if axes else OperandFromLocal
    out = node.apply(local, spec, grad_layout, [own])  # type: ignore[no-untyped-call]
    out._leaf = axes or None
    return out


def _global_spec(
    local: Tensor,
    layout: Layout,
    shape: Shape | None,
    stride: tuple[int, ...] | None,
    run_check: bool,
    compared: bool,
) -> Spec:
    """The spec of the global tensor, of the given `shape` or the shape that the local tensors make up.

    If `compared`, as in debug mode, the ranks compare replicated local tensors, unless `run_check` makes them equal.
    """
    if shape is not None:
        global_shape = comm.checked_shape(local, layout, shape)
    else:
        global_shape = gathered_shape(local, layout) if run_check else comm.even_shape(local, layout, compared)
        stride = _global_stride(local, layout, global_shape) if stride is None else stride
    if compared and not run_check:
        way_out = (
            "give the same on all, Partial() where each rank has a term, or run_check=True to take the first rank's"
        )
        comm.compare_replicas(local, layout, "the local tensor given to from_local", way_out)
    return _spec_of_local(layout, global_shape, stride, local.dtype, local.device)


def _of_first_ranks(local: Tensor, spec: Spec) -> Tensor:
    """The local tensor, on mesh axes with replicas replaced by the first rank's, which is broadcast."""
    if not OBSERVERS:
        return comm.same_replicas(local, spec.layout)
    decision = sending("from_local", [spec], replica_broadcasts(spec), explicit=True)
    return observed(decision, comm.same_replicas, (local, spec.layout))  # type: ignore[no-any-return]


def compare_gradients(layout: Layout, grad: Tensor) -> None:
    """The hook of a local tensor that compares its gradient between the ranks, in debug mode."""
    way_out = "each rank has a term of it, so give to_local(grad_placements=...) with Partial() there"
    comm.compare_replicas(grad, layout, "the gradient of what to_local returned", way_out)


@cached("local specs", 4096)
def _spec_of_local(
    layout: Layout, shape: Shape, stride: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> Spec:
    """The spec of local tensors, cached: a program that makes many alike tensors holds none of their specs for long."""
    return spec_of(layout, shape, contiguous_stride(shape) if stride is None else stride, dtype, device)


def _strides(stride: Sequence[int], ndim: int) -> tuple[int, ...]:
    strides = as_shape(stride, "from_local: stride", ShapeError)
    if len(strides) != ndim:
        raise ShapeError(
            f"from_local: {len(strides)} strides {strides} for a tensor of {ndim} dims: give one for each dim"
        )
    return strides


def _global_stride(local: Tensor, layout: Layout, shape: Shape) -> tuple[int, ...] | None:
    """The strides of the global tensor of `shape` that local tensors like `local` make up; None if contiguous.

    A dim's stride counts the shards of each dim within it, as in torch, so a slice leaves its gaps. Where the shards
    are uneven or expanded no such strides exist: the tensor counts as dense, in the same order of dims.
    """
    if local.is_contiguous():
        return None
    sizes, stride = layout.mesh.shape, local.stride()
    shards = {dim: prod(sizes[axis] for axis in layout.axes_of(dim)) for dim in layout.sharded_dims()}
    if any(shape[dim] % n or not stride[dim] for dim, n in shards.items()):
        return dense_stride(shape, stride)
    return tuple(
        step * prod(n for other, n in shards.items() if other != dim and stride[other] <= step)
        for dim, step in enumerate(stride)
    )
