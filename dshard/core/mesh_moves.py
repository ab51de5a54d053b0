"""Move local tensors from one mesh to another: a rank outside a mesh has no data there."""

from __future__ import annotations

import torch
from torch import Tensor

from dshard import comm
from dshard.core.context import planning_context
from dshard.core.observe import ASKED, OBSERVERS, Decision, observed
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import Layout
from dshard.reshard import plan_reshard
from dshard.rules.expand import Operand


def reshard_local(local: Tensor, spec: Spec, layout: Layout) -> Tensor:
    """The local tensor under a layout on another mesh; without data on ranks outside that mesh."""
    outside = comm.is_outside(spec.layout.mesh)
    if outside and comm.is_outside(layout.mesh):
        return without_data(spec.with_layout(layout))._local_tensor
    topology = planning_context().topology_of(spec.layout.mesh)
    crossing = plan_reshard(spec.layout, layout, spec.shape, spec.itemsize, topology)
    typed = torch.empty(0, dtype=spec.dtype, device=comm.device_of(layout.mesh)) if outside else local
    if OBSERVERS:
        operand = Operand(spec.layout, spec.shape, spec.itemsize)
        decision = Decision("redistribute", (operand,), (), None, None, (), topology, why=ASKED, crossing=crossing)
        out: Tensor | None = observed(decision, comm.reshard, (crossing, typed))
    else:
        out = comm.reshard(crossing, typed)
    return without_data(spec.with_layout(layout))._local_tensor if out is None else out


def without_data(spec: Spec) -> Wrapper:
    """The distributed tensor of this spec on a rank outside its mesh."""
    mesh = spec.layout.mesh
    shape = spec.layout.local_shape(spec.shape, (0,) * mesh.ndim)
    return wrap(torch.empty(shape, dtype=spec.dtype, device="meta"), spec)
