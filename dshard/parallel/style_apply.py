"""Styles applied to the modules that a plan names."""

from __future__ import annotations

import warnings
from fnmatch import fnmatch

from torch import nn

from dshard.comm import current_mesh
from dshard.errors import ArgumentError, LayoutError, MeshError
from dshard.parallel.style import AnyMesh, ParallelStyle, one_axis
from dshard.validate import as_int, check_type


def parallelize_module(
    module: nn.Module,
    device_mesh: AnyMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Lay out a module in place on a mesh of one axis, and return it; as torch's `parallelize_module`.

    The plan is a style for the module itself, or a style for each name of submodules: names may have wildcards in each
    of their parts ("layers.*.wq"); "" is the module itself. A name that no submodule has is a warning. Without a mesh
    that of the `with mesh:` block around the call is used. All ranks get shards of the parameters of the mesh's rank
    number `src_data_rank`; with None each rank cuts its shards out of its own, and nothing is sent.

    Raises:
        ArgumentError: a plan that is neither a style nor a dict of them.
        LayoutError: a mesh of several axes, or something in the dict that is no style.
        MeshError: no mesh, or no processes.
    """
    check_type(module, nn.Module, "parallelize_module", "give an nn.Module")
    mesh = current_mesh() if device_mesh is None else device_mesh
    size = one_axis(mesh).size
    if src_data_rank is not None and as_int(src_data_rank, "src_data_rank", MeshError, least=0) >= size:
        raise MeshError(f"src_data_rank {src_data_rank}: the mesh has ranks number 0 to {size - 1}")
    if parallelize_plan is None:
        warnings.warn("No parallelize_plan is provided: parallelize_module leaves the module as it is", stacklevel=2)
        return module
    plan = {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    _check(plan)
    for name, style in plan.items():
        submodules = _matching(module, name.split(".") if name else [])
        if not submodules:
            warnings.warn(
                f"parallelize_module: {name!r} names no submodule of {type(module).__name__} and does nothing",
                stacklevel=2,
            )
        style.src_data_rank = src_data_rank
        for submodule in submodules:
            style._apply(submodule, mesh)
    return module


def _check(plan: object) -> None:
    if not isinstance(plan, dict):
        raise ArgumentError(
            f"parallelize_plan is {type(plan).__name__}: give a ParallelStyle, or a dict of them by module name"
        )
    for name, style in plan.items():
        check_type(name, str, "parallelize_plan", "give names of submodules, such as 'layers.*.wq'", LayoutError)
        if not isinstance(style, ParallelStyle):
            raise LayoutError(
                f"parallelize_plan[{name!r}] is {style!r}: give a ParallelStyle, such as ColwiseParallel()"
            )


def _matching(module: nn.Module, parts: list[str]) -> list[nn.Module]:
    """The submodules whose path matches the patterns `parts`, name by name."""
    if not parts:
        return [module]
    first, *rest = parts
    children = [child for name, child in module.named_children() if fnmatch(name, first)]
    return [match for child in children for match in _matching(child, rest)]
