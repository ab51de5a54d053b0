"""Between the operators and the ranks: move a local tensor to another layout, run a local operator on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from dshard.comm import LocalTensor, plain, run, runtime_of, stack, unstack
from dshard.errors import MeshError
from dshard.layout import Layout
from dshard.mesh import Coordinate, Mesh
from dshard.ops.call import LocalOp
from dshard.ops.settings import current
from dshard.ops.spec import Spec
from dshard.redistribute import plan


def move(local: Tensor, spec: Spec, layout: Layout) -> Tensor:
    """The local tensor under another layout; not recorded by autograd."""
    return run(plan(spec.layout, layout, spec.shape, spec.itemsize, current().topology_of(layout.mesh)), local)


def write_local(target: Tensor, value: Tensor) -> None:
    """Write the local tensor `value` into `target`."""
    if type(target) is LocalTensor:
        with plain():
            for rank, t in unstack(value).items():
                unstack(target)[rank].copy_(t)
    else:
        target.copy_(value)


def coordinate_of(mesh: Mesh) -> Coordinate:
    """Where this process sits on the mesh; without processes, the first place.

    Raises:
        MeshError: this rank is not in the mesh.
    """
    runtime = runtime_of(mesh)
    if runtime is None:
        return (0,) * mesh.ndim
    if runtime.coordinate is None:
        raise MeshError(f"this rank, {runtime.rank}, is not in the mesh ({mesh}): run operators only on its ranks")
    return runtime.coordinate


def run_on_ranks(mesh: Mesh, local_op: Callable[[Coordinate], LocalOp], args: Any, kwargs: Any) -> Any:
    """The local operator on this rank, or on all ranks where they are simulated in one process."""
    if any(type(leaf) is LocalTensor for leaf in leaves((args, kwargs))):
        return simulate(mesh, local_op, args, kwargs)
    return local_op(coordinate_of(mesh))(*args, **kwargs)


def simulate(mesh: Mesh, local_op: Callable[[Coordinate], LocalOp], args: Any, kwargs: Any) -> Any:
    """The local operator on each rank's tensors, the results stacked again."""
    with plain():
        results = {}
        for rank in mesh.ranks:
            rank_args, rank_kwargs = replace_leaves((args, kwargs), partial(_of_rank, rank))
            results[rank] = local_op(mesh.coordinate(rank))(*rank_args, **rank_kwargs)
        tensors = {rank: iter([t for t in leaves(result) if isinstance(t, Tensor)]) for rank, result in results.items()}

        def join(leaf: Any) -> Any:
            return stack({rank: next(rest) for rank, rest in tensors.items()}) if isinstance(leaf, Tensor) else leaf

        return replace_leaves(results[mesh.ranks[0]], join)


def _of_rank(rank: int, leaf: Any) -> Any:
    return unstack(leaf)[rank] if type(leaf) is LocalTensor else leaf


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in leaves(item)]
    return [tree]


def replace_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with each leaf changed, in order."""
    if isinstance(tree, list):
        return [replace_leaves(item, change) for item in tree]
    if isinstance(tree, tuple):
        return tuple(replace_leaves(item, change) for item in tree)
    if isinstance(tree, dict):
        return {name: replace_leaves(item, change) for name, item in tree.items()}
    return change(tree)
