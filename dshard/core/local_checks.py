"""Checks of the tensors that become distributed, and the exchange between ranks that makes local tensors of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from dshard import comm
from dshard.caches import cached
from dshard.core.moves import sending
from dshard.core.observe import OBSERVERS, observed
from dshard.core.spec import contiguous_spec
from dshard.core.subclasses import refuse_own_rules
from dshard.core.wrapper import Wrapper
from dshard.errors import ArgumentError, LayoutError
from dshard.layout import Layout, Shape, layout_of
from dshard.placements import Partial
from dshard.validate import article, shown


def check_strided(x: object, what: str, kind: str) -> None:
    """Refuse values that are no torch tensors, and tensors whose `torch.layout` is not strided."""
    if not isinstance(x, Tensor):
        raise ArgumentError(
            f"{what} takes {kind}, a torch.Tensor, not {shown(x)}, {article(x)}: make one, as by torch.as_tensor"
        )
    if type(x) not in (Tensor, Parameter) and not isinstance(x, Wrapper):  # which most are
        refuse_own_rules(what, [type(x)], LayoutError)
    refuse_other_forms(x, f"{what} of a tensor that")


def refuse_other_forms(x: Tensor, what: str) -> None:
    """Refuse a tensor that is sparse, nested or quantized; `what` is the subject of the sentence that says so."""
    if not isinstance(x, Wrapper) and (x.layout is not torch.strided or x.is_quantized or x.is_nested):
        actual = "nested" if x.is_nested else "quantized" if x.is_quantized else f"of layout {x.layout}"
        by = "to_padded_tensor(0.0)" if x.is_nested else "dequantize()" if x.is_quantized else "to_dense()"
        raise LayoutError(f"{what} is {actual}: a DTensor is strided; make it dense first, by {by}")


@cached("local specs", 4096)
def checked(layout: Layout, dtype: torch.dtype) -> tuple[Layout, bool]:
    """The layout of the gradient of a local tensor, and whether the ranks compare what they give, as in debug mode."""
    if layout.partial_axes():
        comm.check_reduced(dtype, f"a tensor laid out [{layout}]")
    for placement in layout.placements:
        if isinstance(placement, Partial) and (
            (placement.reduce_op == "avg" and not (dtype.is_floating_point or dtype.is_complex))
            or (placement.reduce_op in ("max", "min") and dtype.is_complex)
        ):
            why = "a mean of whole numbers is none" if placement.reduce_op == "avg" else "complex numbers have no order"
            raise LayoutError(f"{placement} of {dtype}: {why}; convert with .to(dtype), or use another reduction")
    return layout.cotangent(), comm.comparing()


def gradient_layout(own: Layout, shape: Shape, grad_placements: Sequence[object], what: str) -> Layout:
    """The layout that `grad_placements` give the gradient of a local tensor of layout `own`, whose shape it has."""
    layout = layout_of(own.mesh, grad_placements, len(shape))
    if layout.placements == own.placements or not (layout.sharded_dims() or own.sharded_dims()):
        return layout
    last = tuple(n - 1 for n in own.mesh.shape)  # its shard is the smallest, so that all ranks find the same
    gradient_shape, local_shape = layout.local_shape(shape, last), own.local_shape(shape, last)
    if gradient_shape != local_shape:
        raise LayoutError(
            f"{what}(grad_placements=...) of a tensor of shape {tuple(shape)} laid out [{own}], its gradient laid out "
            f"[{layout}]: a gradient has the shape of the local tensor, on the last rank {local_shape}, and would have "
            f"{gradient_shape}; shard the dims that the local tensor is a shard of, and give Replicate or Partial "
            "elsewhere"
        )
    return layout


def gathered_shape(local: Tensor, layout: Layout) -> Shape:
    """The global shape of the ranks' local tensors, which may be uneven: they exchange their shapes."""
    exchange = comm.shape_exchange(local, layout) if OBSERVERS else []
    if not exchange:
        return comm.global_shape(local, layout)
    shape = tuple(local.shape)
    spec = contiguous_spec(layout, shape, local.dtype, local.device)
    return observed(sending("from_local", [spec], exchange, explicit=True), comm.global_shape, (local, layout))  # type: ignore[no-any-return]


def scattered(tensor: Tensor, layout: Layout, source: int | None) -> Tensor:
    """The local tensor of this rank: sent by rank `source`, or with None cut out of this rank's own copy."""
    if not (OBSERVERS and comm.scatters(tensor, layout, source)):
        return comm.scatter_shards(tensor, layout, source)
    shape = tuple(tensor.shape)
    spec = contiguous_spec(layout, shape, tensor.dtype, tensor.device)
    nbytes = layout.local_numel(shape) * tensor.itemsize
    kind = "scatter" if layout.sharded_dims() else "broadcast"
    decision = sending("distribute_tensor", [spec], [(kind, layout.mesh.names, nbytes)], explicit=True)
    return observed(decision, comm.scatter_shards, (tensor, layout, source))  # type: ignore[no-any-return]
