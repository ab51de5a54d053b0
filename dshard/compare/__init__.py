"""`compare` runs a model alone and laid out, and names the first module that differs by more than rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

from dshard.comm import DeviceMesh, as_mesh, is_outside, runtime_of
from dshard.compare.comparison import Comparison, Deviation, ModuleComparison
from dshard.compare.copies import Passes
from dshard.compare.observed_pass import OF_INPUT
from dshard.errors import MeshError
from dshard.parallel.model_plan import PlanArgument
from dshard.validate import check_type

__all__ = ["Comparison", "Deviation", "ModuleComparison", "compare"]

LayOut: TypeAlias = Callable[[nn.Module, Any], nn.Module]
FEW, MANY = 3, 8
"""Passes rounded at random: before anything is found to differ, and then."""


def compare(
    model: nn.Module | Callable[[], nn.Module],
    mesh: DeviceMesh,
    plan: PlanArgument | LayOut = "auto",
    /,
    *args: object,
    loss: Callable[[Any], Tensor] | None = None,
    inputs: str = "global",
    precision: object = None,
    group: object = None,
    **kwargs: object,
) -> Comparison:
    """Run copies of `model` alone and laid out, forward and backward, and name the first module that differs.

    Call it on all ranks, with the whole batch in `args` and `kwargs`; each rank gets the same result. `model` is
    unchanged; where it cannot be copied, give a function that makes it. `plan` is that of `parallelize`, as `inputs`,
    `precision` and `group` are, or a function of a copy and the mesh that returns the copy laid out.

    `loss` is a function of the model's output; by default its numbers are added, or if there are none its elements,
    with random weights. Random operators draw alike, so dropout may be on. Values may differ as much as roundings of
    their dtypes explain, whose effect is measured: some passes alone are rounded at random after each module. So it
    takes a few times the time and memory of a step on one device, on every rank: use a small batch and few layers.

        print(dshard.compare(model, mesh, "data x megatron", ids, loss=lambda out: F.cross_entropy(out, targets)))

    Raises:
        ArgumentError: no model, one that cannot be copied or has no data, whose output has no floating-point tensor, or
            whose passes alone differ from each other: its values are not determined.
        MeshError: a mesh without processes, or without this rank.
        StrategyError: as of `parallelize`, as is LayoutError.
    """
    pure = as_mesh(mesh)
    if runtime_of(pure) is None or is_outside(pure):
        raise MeshError(f"compare on the mesh ({pure}), without a process here: call it on the ranks of a device mesh")
    check_type(inputs, str, "inputs", "give 'global' or 'per-data-rank'")
    options = {"inputs": inputs, "outputs": "distributed", "precision": precision, "group": group}
    passes = Passes(model, mesh, plan, (args, kwargs), loss, options)
    found = passes.compared(FEW)
    passes.check_determined()
    if found.deviation is None:
        return found
    if found.deviation.what == OF_INPUT:  # whose gradient several modules may have a share in
        isolated = passes.compared(MANY, isolated=True)
        if isolated.deviation is not None:
            return isolated
    return passes.compared(MANY)
