"""Tests of every strategy of a rule on local tensors, including rows that are never the cheapest, and their layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from random import Random
from typing import Literal, TypeAlias

from torch import Tensor

from dshard.core.call import Call, Operator
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec
from dshard.core.trees import tensors_in, with_tensors
from dshard.dispatch.operator import call_of
from dshard.dispatch.registry import known
from dshard.errors import RuleError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.ops.random import is_random
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.rules.expand import Operand, expansions
from dshard.rules.rule import Rule
from dshard.rules.strategy import Strategy
from dshard.testing.simulated_ranks import Parts, join_local_tensors, local_tensor_of
from dshard.torch_private import OpOverload

Choice: TypeAlias = tuple[Layout, ...]


def layouts_of(x: Tensor, mesh: Mesh, placements: Literal["all"] | Sequence[Placement] = "all") -> list[Layout]:
    """All layouts of `x` with these placements; if two axes shard one dim, in both orders."""
    if placements == "all":
        placements = [Replicate(), *map(Shard, range(x.dim())), *([Partial()] if has_gradient(x) else [])]
    legal = [p for p in placements if not isinstance(p, Shard) or p.dim < x.dim()]
    legal = [p for p in legal if not isinstance(p, Partial) or has_gradient(x)]
    layouts: list[Layout] = []
    for combination in product(legal, repeat=mesh.ndim):
        layout = Layout(mesh, combination)
        layouts += dict.fromkeys((layout, in_other_order(layout)))
    return layouts


def in_other_order(layout: Layout) -> Layout:
    """The layout with the axes that shard one dim in reverse order."""
    orders = tuple((dim, tuple(reversed(layout.axes_of(dim)))) for dim in layout.sharded_dims())
    return Layout(layout.mesh, layout.placements, orders)


def sample_combinations(choices: Sequence[Sequence[Layout]], limit: int) -> Iterator[Choice]:
    """All combinations of one layout for each operand, or a fixed sample of `limit` of them."""
    total = prod(map(len, choices))
    numbers: Sequence[int] = range(total) if total <= limit else sorted(Random(0).sample(range(total), limit))
    for number in numbers:
        picked = []
        for options in choices:
            number, i = divmod(number, len(options))
            picked.append(options[i])
        yield tuple(picked)


def has_gradient(x: Tensor) -> bool:
    """Whether tensors of the dtype of `x` can have gradients, and be sums of terms."""
    return x.is_floating_point() or x.is_complex()


Same: TypeAlias = Callable[[Tensor, Tensor], None]
"""Raises an AssertionError if a value differs from the expected one."""


def check_rows(func: OpOverload, args: Args, kwargs: Kwargs, mesh: Mesh, same: Same) -> None:
    """Run `func` in the layouts of every strategy of its rule, rank by rank, and compare with one device.

    Nothing is checked for an operator without a rule of its own.
    """
    facts = known(func)
    op, tensors = facts.op, tensors_in((args, kwargs))
    if op is None or facts.is_composed(args) or is_random(func) or not tensors:
        return
    arguments = (args, kwargs)
    expected = run_on(func, arguments, [x.clone() for x in tensors])
    call, _ = call_of(func, mesh, args, kwargs)
    rule = op.rule(call)
    for strategy in every_strategy(rule, call, mesh):
        with blaming(f"the rule '{rule}' of {func}", mesh, strategy):
            for value, expected_value in zip(run_strategy(op, call, strategy, arguments), expected, strict=True):
                same(value, expected_value)


@contextmanager
def blaming(what: str, mesh: Mesh, strategy: Strategy) -> Iterator[None]:
    """Raise errors within the block as a RuleError that names the call, the mesh and the strategy."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
        raise RuleError(f"{what} is wrong on the mesh ({mesh}), in the layouts\n  {strategy}\n{reason}") from error


def run_strategy(op: Operator, call: Call, strategy: Strategy, arguments: tuple[object, object]) -> list[Tensor]:
    """Run a call under one strategy, and join the local outputs of all ranks into global ones."""
    pairs = zip(tensors_in(arguments), strategy.inputs, strict=True)
    operands = [local_tensor_of(x, layout, seed) for seed, (x, layout) in enumerate(pairs)]
    outputs: list[Parts] = [{} for _ in call.outs]
    for at in strategy.inputs[0].mesh.coordinates():
        local_op = call.func if op.kernel is None else op.kernel(call.at(strategy, at))
        local_outputs = run_on(local_op, arguments, [part(at) for part in operands])
        for output, local in zip(outputs, local_outputs, strict=True):
            output[at] = local
    return [
        join_local_tensors(output, layout, tuple(out.shape), out.dtype)
        for output, layout, out in zip(outputs, strategy.outputs, call.outs, strict=True)
    ]


def every_strategy(rule: Rule, call: Call, mesh: Mesh) -> list[Strategy]:
    """List all strategies of the rule for any layouts of the operands, each once, without prices."""
    outputs = [(tuple(out.shape), out.itemsize) for out in call.outs]
    strategies: dict[tuple[object, ...], Strategy] = {}
    for operands in suggestive(rule, call.specs, mesh):
        for some in expansions(rule, operands, outputs):
            key = (some.inputs, some.outputs)
            if key not in strategies:
                strategies[key] = Strategy(*key, some.rows, some.gradients, some.outputs, some.order)
    return list(strategies.values())


def suggestive(rule: Rule, specs: Sequence[Spec], mesh: Mesh) -> Iterator[list[Operand]]:
    """Yield operands in layouts that together reach every row of the rule, in both axis orders."""
    options = [
        (i, placement) for i, spec in enumerate(specs) for placement in _suggestive_placements(rule, i, len(spec.shape))
    ]
    for picked in product([(0, Replicate()), *options], repeat=mesh.ndim):
        placements: list[list[Placement]] = [[Replicate()] * mesh.ndim for _ in specs]
        for axis, (i, placement) in enumerate(picked):
            placements[i][axis] = placement
        if any(len({p for p in row if isinstance(p, Partial)}) > 1 for row in placements):
            continue
        layouts = tuple(Layout(mesh, tuple(row)) for row in placements)
        for turned in dict.fromkeys((layouts, tuple(in_other_order(layout) for layout in layouts))):
            yield [Operand(layout, spec.shape, spec.itemsize) for layout, spec in zip(turned, specs, strict=True)]


def _suggestive_placements(rule: Rule, operand: int, ndim: int) -> list[Placement]:
    ops = {op for passed in rule.passes if operand in passed.operands for op in passed.ops}
    return [*map(Shard, range(ndim)), *map(Partial, sorted(ops))]


def run_on(func: Function, arguments: tuple[object, object], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call `func` with `tensors` in place of the tensors among its arguments, and return the tensors it returns."""
    args, kwargs = with_tensors(arguments, tensors)
    return tensors_in(func(*args, **kwargs))
