"""The mesh and the specs of a call's operands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from dshard.comm import of_first_rank, ranks_of_root
from dshard.core.moves import redistribute_local
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.subclasses import refuse_own_rules
from dshard.core.trees import replace_leaves, tensors_in
from dshard.core.wrapper import Wrapper, is_recorded, wrap
from dshard.errors import MeshError
from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.redistribute import Plan, plan
from dshard.rules.expand import Operand
from dshard.topology import Topology


def common_mesh(func: object, tensors: list[Tensor]) -> Mesh:
    """The mesh of all distributed tensors among `tensors`."""
    meshes = {t._spec.layout.mesh for t in tensors if isinstance(t, Wrapper)}
    if len(meshes) > 1:
        raise _several_meshes(func, meshes)
    mesh: Mesh = meshes.pop()
    return mesh


def _several_meshes(func: object, meshes: Iterable[Mesh]) -> MeshError:
    listed = " and ".join(f"({mesh}) of ranks {mesh.ranks}" for mesh in meshes)
    return MeshError(
        f"{func}: operands on the meshes {listed}; redistribute them to one mesh first, as in "
        "x.redistribute(y.device_mesh, placements)"
    )


def are_on_several_meshes(tensors: list[Tensor]) -> bool:
    """Whether some of the distributed tensors among `tensors` are on another mesh than others."""
    return len({t._spec.layout.mesh for t in tensors if isinstance(t, Wrapper)}) > 1


def on_one_mesh(func: object, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with numbers, tensors without dims, on the mesh of the other operands; nothing is sent.

    So norms of gradients on several meshes add up to one norm. If all are numbers, the mesh is that of the first.
    """
    tensors: list[Tensor] = [t for t in tensors_in((args, kwargs)) if isinstance(t, Wrapper)]
    recorded = is_recorded(tensors)
    mesh = common_mesh(func, tensors if recorded else [t for t in tensors if t.dim()] or tensors[:1])

    def moved(leaf: object) -> object:
        if not isinstance(leaf, Wrapper) or leaf._spec.layout.mesh == mesh:
            return leaf
        return wrap(number_on(func, leaf, mesh), leaf._spec.with_layout(replicated(mesh)))

    moved_arguments: tuple[Args, Kwargs] = replace_leaves((args, kwargs), moved)
    return moved_arguments


def number_on(func: object, x: Wrapper, mesh: Mesh) -> Tensor:
    """The global value of `x`, a number, as a tensor on `mesh`, whose ranks all have it on their own meshes."""
    own = x._spec.layout.mesh
    if own != mesh and ranks_of_root(own) != ranks_of_root(mesh):
        raise _several_meshes(func, [own, mesh])
    return redistribute_local(x._local_tensor, x._spec, replicated(own), func)


def plain_value(func: object, x: Wrapper) -> Tensor:
    """The global value of `x` as a plain tensor, equal on all ranks of its mesh."""
    return of_first_rank(number_on(func, x, x._spec.layout.mesh))


def spec_like(t: Tensor, mesh: Mesh) -> Spec:
    """The spec of an operand; plain tensors, which composite operators make on all ranks, count as replicated."""
    if isinstance(t, Wrapper):
        return t._spec
    refuse_own_rules("an operator", [type(t)])
    shape = tuple(map(int, t.shape))  # of sizes that a traced graph leaves open those that they have now
    return contiguous_spec(replicated(mesh), shape, t.dtype, t.device)


def plan_to(spec: Spec, layout: Layout, topology: Topology) -> Plan:
    """The cheapest redistribution of a tensor of `spec` to `layout`."""
    return plan(spec.layout, layout, spec.shape, spec.itemsize, topology)


def plans_to(specs: Sequence[Spec], layouts: Sequence[Layout], topology: Topology) -> tuple[Plan, ...]:
    """The cheapest redistribution of a tensor of each spec to its layout."""
    return tuple([plan_to(spec, layout, topology) for spec, layout in zip(specs, layouts, strict=True)])


def operand_of(spec: Spec) -> Operand:
    """The layout, shape and item size of a tensor of `spec`, as rules see it."""
    return Operand(spec.layout, spec.shape, spec.itemsize)
