"""Operators along a sharded dim by small reductions instead of a gather: softmax, norms, distances.

Most are torch's own decompositions, whose reductions leave small partial results, completed at once. An operator whose
output follows from one reduced statistic for each of its elements uses `reduced_statistic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from dshard.autograd.crossing import redistribute
from dshard.caches import cached
from dshard.comm import HALF, sum_dtype
from dshard.core.call import Alternative, AlternativePlan, Call, LocalOp
from dshard.core.context import planning_context
from dshard.core.moves import local_redistribution, run_on_ranks
from dshard.core.signature import Function
from dshard.core.spec import Spec, spec_of
from dshard.core.trees import replace_leaves
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import Layout, Shape, placed
from dshard.ops.custom import wrapped
from dshard.placements import Partial, ReduceOp, Replicate
from dshard.redistribute import plan
from dshard.rules.expand import Order, order_of, sharded_anyway
from dshard.rules.rule import Rule
from dshard.rules.strategy import completed_layout
from dshard.topology import Topology
from dshard.torch_private import OpOverload, decomposition_table, no_torch_function

SMALL_REDUCTIONS = "small reductions"
"""The name of the alternative."""


def split_axes(layout: Layout, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The mesh axes of more than one rank that shard these dims."""
    return tuple(axis for dim in dims for axis in layout.axes_of(dim) if layout.mesh.shape[axis] > 1)


def along_dims(
    layout: Layout, shape: Shape, dims: tuple[int, ...], reductions: Sequence[ReduceOp]
) -> list[tuple[Layout, Layout, Shape]]:
    """The reductions of a tensor over `dims`, completed on all ranks: the layouts before and after, and the shape."""
    axes = tuple(axis for dim in dims for axis in layout.axes_of(dim))  # a dim of size 1 has no blocks
    small = tuple(1 if dim in dims else n for dim, n in enumerate(shape))
    return [(placed(layout, axes, Partial(op)), placed(layout, axes, Replicate()), small) for op in reductions]


def small_reductions(*reductions: ReduceOp, operand: int = 0) -> Alternative:
    """The alternative by torch's decomposition, with these reductions over the dims that the rule does not shard.

    All operands take the layout of operand number `operand`, as far as they share its dims.
    """
    return Alternative(SMALL_REDUCTIONS, partial(_plan, reductions, operand), all_sharded)


def all_sharded(rule: Rule) -> Rule:
    """The rule by which the alternative runs a call with this rule: any dim may be sharded.

    What `rule` does not shard is reduced within the call: outputs without it are replicated there, not partial.
    """
    return replace(rule, unsharded=frozenset())


def _plan(reductions: tuple[ReduceOp, ...], operand: int, call: Call, rule: Rule) -> AlternativePlan | None:
    spec, term = call.specs[operand], rule.inputs[operand]
    dims = tuple(dim for dim, factors in enumerate(term) if not rule.unsharded.isdisjoint(factors))
    layout = completed_layout(spec.layout)
    if not split_axes(layout, dims) or 0 in spec.shape:
        return None
    inputs, outputs = sharded_anyway(rule, order_of([term], [layout]), layout.mesh)
    sums = along_dims(layout, spec.shape, dims, reductions)
    if spec.dtype in HALF:  # computed in single precision: what is partial is completed before it is rounded
        ends = tuple(map(completed_layout, outputs))
        sums += zip(outputs, ends, call.out_shapes, strict=True)
        outputs = ends
    itemsize = sum_dtype(spec.dtype).itemsize
    topology = planning_context().topology_of(layout.mesh)
    plans = tuple((plan(src, dst, shape, itemsize, topology), itemsize) for src, dst, shape in sums)
    return AlternativePlan(inputs, outputs, _decomposition(call.func), plans)


def _decomposition(func: OpOverload) -> Function:
    """torch's decomposition of `func`, run on distributed tensors."""
    function = decomposition_table[func]

    def run(*args: object, **kwargs: object) -> Any:
        with no_torch_function():
            return wrapped(function(*args, **kwargs), (args, kwargs))

    return run


# -- functions made of operators, whose reductions cost less than a gather


def reduce_statistics(x: Any, op: str | None) -> Any:
    """`x` with its partial sums reduced, for operator `op` or at the user's request; recorded by autograd."""
    return redistribute(x, completed_layout(x._spec.layout), op) if x._spec.has_partial else x


def stays_sharded(spec: Spec, dims: tuple[int, ...], reductions: tuple[ReduceOp, ...], always: bool = False) -> bool:
    """Whether one of these dims is sharded, and reductions over them cost less than gathering it, or run `always`."""
    if 0 in spec.shape or not split_axes(spec.layout, dims):
        return False
    return always or _reductions_are_cheaper(spec, dims, reductions, planning_context().topology_of(spec.layout.mesh))


@cached("reductions or gathers", 16384)
def _reductions_are_cheaper(
    spec: Spec, dims: tuple[int, ...], reductions: tuple[ReduceOp, ...], topology: Topology
) -> bool:
    """Whether `reductions` over `dims`, completed on all ranks, cost less than gathering these dims."""
    whole = placed(spec.layout, split_axes(spec.layout, dims), Replicate())
    gathering = plan(spec.layout, whole, spec.shape, spec.itemsize, topology)
    sums = along_dims(completed_layout(spec.layout), spec.shape, dims, reductions)
    return sum(plan(*each, spec.itemsize, topology).seconds for each in sums) < gathering.seconds


# -- a statistic of each rank's part


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic of local tensors, in the output's shape, its reduction, and the output computed from it.

    `part` takes the arguments of the call with local tensors, also on a rank without elements of the sharded dim.
    """

    part: LocalOp
    reduce: ReduceOp
    finish: Callable[[Tensor], Tensor]


def reduced_statistic(of: Callable[[Call], Statistic | None]) -> Alternative:
    """The alternative of an operator of one output by one reduced statistic over the dims that the rule does not shard.

    It does not apply if `of` returns None, nor in half precision, in which each rank's statistic would be rounded.
    """
    return Alternative(SMALL_REDUCTIONS, partial(_plan_statistic, of), all_sharded)


def _plan_statistic(of: Callable[[Call], Statistic | None], call: Call, rule: Rule) -> AlternativePlan | None:
    layouts = [completed_layout(spec.layout) for spec in call.specs]
    mesh, (out,) = layouts[0].mesh, call.outs
    order: Order = {}
    for factor, axes in order_of(rule.inputs, layouts).items():
        if not any(axis in used for used in order.values() for axis in axes):
            order[factor] = axes
    unsharded = [factor for factor in order if factor in rule.unsharded]
    axes = tuple(axis for factor in unsharded for axis in order[factor] if mesh.shape[axis] > 1)
    statistic = of(call)
    if statistic is None or not axes or any(0 in shape for shape in call.shapes) or out.dtype in HALF:
        return None
    inputs, (result,) = sharded_anyway(rule, order, mesh)
    spec = spec_of(result, tuple(out.shape), out.stride(), out.dtype, call.specs[0].device)
    parts = spec.with_layout(placed(result, axes, Partial(statistic.reduce)))

    def run(*args: object, **kwargs: object) -> Any:
        local_arguments = replace_leaves(
            (args, kwargs), lambda leaf: leaf._local_tensor if isinstance(leaf, Wrapper) else leaf
        )
        local = run_on_ranks(mesh, lambda at: statistic.part, *local_arguments)
        reduced = local_redistribution(parts, result)(local)
        return wrap(run_on_ranks(mesh, lambda at: statistic.finish, (reduced,), {}), spec)

    topology = planning_context().topology_of(mesh)
    moved = plan(parts.layout, result, spec.shape, spec.itemsize, topology)
    return AlternativePlan(inputs, (result,), run, ((moved, spec.itemsize),))
