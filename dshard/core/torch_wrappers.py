"""Refuse torch's wrappers for data parallelism that would take a parameter's local tensor for the global one.

torch has no hook for them. Before they send anything, each reads an attribute of the parameters, by which it is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

from dshard.callers import callers
from dshard.comm import ranks_in
from dshard.errors import MeshError
from dshard.layout import Layout
from dshard.mesh import Mesh

_WAY_OUT = (
    'lay the model out on other axes than those, as with parallelize(model, mesh["tp"], ...), and wrap it with '
    'fully_shard(model, mesh=mesh["dp"]) or DistributedDataParallel(model, process_group=mesh["dp"].get_group()); or '
    'let parallelize do it all, with "data" or "fsdp"'
)


UNNAMED = SimpleNamespace(mesh_dim_names=None)
"""The mesh of layers that compute with full weights, as peft recognizes them."""


def refuse_shared_ranks(what: str, ranks: Iterable[int], mesh: Mesh) -> None:
    """Refuse the wrapper `what` over `ranks`, if some of these hold shards of one tensor on `mesh`."""
    shared = [rank for rank in ranks if rank in mesh.ranks]
    if len(shared) > 1:
        raise MeshError(
            f"{what} between ranks {', '.join(map(str, shared))}, of tensors on the mesh ({mesh}) of the same ranks: "
            f"it would take each rank's part for the whole; {_WAY_OUT}"
        )


def refuse_collective(name: str, ranks: Iterable[int], layout: Layout) -> None:
    """Refuse a collective, called `name`, of a distributed tensor, unless it goes to no other rank of its mesh."""
    shared = {*(ranks or layout.mesh.ranks)} & {*layout.mesh.ranks}
    if len(shared) > 1 or name.removeprefix("i") in ("send", "recv", "gather", "scatter"):
        raise MeshError(
            f"{name} of a distributed tensor, laid out [{layout}]: its value is that of all ranks already; leave the "
            "collective out, or take x.full_tensor(), that value as a plain tensor, or x.to_local(), this rank's part"
        )


def refuse_fully_shard(asker: FrameType, mesh: Mesh) -> None:
    """Refuse `fully_shard` over ranks of the mesh of a parameter; `asker` is the code that reads the mesh."""
    if asker.f_code.co_name != "_init_sharding_spec_tp":
        return
    over = asker.f_locals["self"].mesh_info.mesh
    refuse_shared_ranks("fully_shard", ranks_in(over), mesh)


class FlattenedByFSDP:
    """`_fsdp_flattened` of a parameter, which `FullyShardedDataParallel` reads before it flattens the parameter.

    No parameter has it: optimisers of others take one that has it, whatever its value, for what only its rank knows.
    """

    def __get__(self, parameter: Any, owner: type) -> NoReturn:
        for asker in islice(callers(), 3) if parameter is not None else ():
            if asker.f_code.co_name == "_init_param_handle_from_module":
                refuse_fully_sharded(asker.f_locals["state"], parameter._spec.layout.mesh)
        raise AttributeError("_fsdp_flattened")


def refuse_fully_sharded(wrapper: Any, mesh: Mesh) -> None:
    """Refuse a `FullyShardedDataParallel` without a mesh of data axes beside the axes of a parameter.

    With such a mesh it shards the local tensors, by torch's own extension for tensor parallelism.
    """
    refuse_shared_ranks("FullyShardedDataParallel", ranks_in(wrapper.process_group), mesh)
    if wrapper._fsdp_extension is None:
        raise MeshError(
            f"FullyShardedDataParallel of parameters on the mesh ({mesh}) flattens them as if they were plain tensors; "
            'use fully_shard(model, mesh=mesh["dp"]), or give it device_mesh=mesh["dp"], of the mesh that has the '
            'model\'s mesh["tp"], too'
        )
