"""The mesh and the specs of a call's operands."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dshard.core.context import planning_context
from dshard.core.spec import Spec, contiguous_stride, spec_of
from dshard.core.wrapper import Wrapper
from dshard.errors import MeshError
from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.redistribute import Plan, plan
from dshard.rules.expand import Operand


def common_mesh(func: object, tensors: list[Tensor]) -> Mesh:
    """The mesh of all distributed tensors among `tensors`.

    Raises:
        MeshError: the tensors are on different meshes.
    """
    meshes = {t._spec.layout.mesh for t in tensors if isinstance(t, Wrapper)}
    if len(meshes) > 1:
        listed = " and ".join(f"({mesh}) of ranks {mesh.ranks}" for mesh in meshes)
        raise MeshError(
            f"{func}: operands on the meshes {listed}; redistribute them to one mesh first, as in "
            "x.redistribute(y.device_mesh, placements)"
        )
    mesh: Mesh = meshes.pop()
    return mesh


def spec_like(t: Any, mesh: Mesh) -> Spec:
    """The spec of an operand; a plain tensor, which a composite operator made on all ranks, counts as replicated."""
    if isinstance(t, Wrapper):
        return t._spec
    return spec_of(replicated(mesh), tuple(t.shape), contiguous_stride(tuple(t.shape)), t.dtype, t.device)


def plan_to(spec: Spec, layout: Layout) -> Plan:
    """The cheapest redistribution of a tensor of `spec` to `layout`, on the topology in use."""
    return plan(spec.layout, layout, spec.shape, spec.itemsize, planning_context().topology_of(layout.mesh))


def operand_of(spec: Spec) -> Operand:
    """Layout, shape and item size of a tensor of `spec`, which is all that rules see of it."""
    return Operand(spec.layout, spec.shape, spec.itemsize)
