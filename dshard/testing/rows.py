"""Every strategy of a rule, run on local tensors: a wrong row that is never the cheapest is found, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from dshard.errors import RuleError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.ops.call import Call, Op
from dshard.ops.moving import leaves, replace_leaves, run_on_ranks
from dshard.ops.random import is_random
from dshard.ops.registry import known
from dshard.ops.rule import Rule
from dshard.ops.spec import Spec, contiguous_stride, spec_of
from dshard.ops.strategy import Operand, Strategy, strategies
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.tensor import DTensor
from dshard.testing.simulate import distribute, whole
from dshard.topology import default_topology


def check_rows(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, tolerance: dict[str, float | None]
) -> None:
    """Run `func` in the layouts of every strategy of its rule, on simulated ranks, and compare with one device.

    Nothing is checked for an operator without a rule of its own.

    Raises:
        RuleError: a strategy gives something else.
    """
    facts = known(func)
    op, replaced = facts.op, facts.instead is not None and facts.instead(args) is not None
    tensors = _tensors((args, kwargs))
    if op is None or replaced or is_random(func) or not tensors:
        return
    copies = iter([x.clone() for x in tensors])
    expected = _tensors(func(*(pair := _filled((args, kwargs), copies))[0], **pair[1]))
    call = call_of(func, args, kwargs, mesh)
    rule = op.rule(call)
    for strategy in every_strategy(rule, call, mesh):
        _check(op, rule, call, strategy, (args, kwargs), tensors, expected, tolerance)


def call_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> Call:
    """The call as its rule sees it, all operands replicated."""
    whole_layout = Layout(mesh, (Replicate(),) * mesh.ndim)
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    specs = tuple(_spec(x, whole_layout) for x in tensors)
    spec_args, spec_kwargs = _filled((args, kwargs), iter(specs))
    meta_args, meta_kwargs = _filled((args, kwargs), (spec.meta() for spec in specs))
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    return Call(func, spec_args, spec_kwargs, specs, tuple(_tensors(func(*meta_args, **meta_kwargs))))


def every_strategy(rule: Rule, call: Call, mesh: Mesh) -> list[Strategy]:
    """All strategies that the rule has for any layouts of the operands, each once."""
    outputs = [(tuple(out.shape), out.itemsize) for out in call.outs]
    topology = default_topology(mesh.device_type)
    found: dict[tuple[Any, ...], Strategy] = {}
    for operands in suggestive(rule, call.specs, mesh):
        for strategy in strategies(rule, operands, outputs, topology):
            found.setdefault((strategy.inputs, strategy.outputs), strategy)
    return list(found.values())


def suggestive(rule: Rule, specs: Sequence[Spec], mesh: Mesh) -> Iterator[list[Operand]]:
    """Operands whose layouts suggest every row: on each axis one of them is split or pending, in either order."""
    options = [(i, placement) for i, spec in enumerate(specs) for placement in _suggesting(rule, i, len(spec.shape))]
    for picked in product([(0, Replicate()), *options], repeat=mesh.ndim):
        placements: list[list[Placement]] = [[Replicate()] * mesh.ndim for _ in specs]
        for axis, (i, placement) in enumerate(picked):
            placements[i][axis] = placement
        if any(len({p for p in row if isinstance(p, Partial)}) > 1 for row in placements):
            continue
        layouts = [Layout(mesh, tuple(row)) for row in placements]
        for turned in (layouts, [_reversed(layout) for layout in layouts]):
            yield [
                Operand(layout, spec.shape, spec.itemsize) for layout, spec in zip(turned, specs, strict=True)
            ]


def _suggesting(rule: Rule, operand: int, ndim: int) -> list[Placement]:
    ops = {op for pending in rule.pending if operand in pending.operands for op in pending.ops}
    return [*map(Shard, range(ndim)), *map(Partial, sorted(ops))]


def _reversed(layout: Layout) -> Layout:
    """The same with the axes that shard one dim in the other order."""
    orders = tuple((dim, tuple(reversed(layout.axes_of(dim)))) for dim in layout.sharded_dims())
    return Layout(layout.mesh, layout.placements, orders)


def _check(
    op: Op,
    rule: Rule,
    call: Call,
    strategy: Strategy,
    given: tuple[Any, Any],
    tensors: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: dict[str, float | None],
) -> None:
    mesh = strategy.inputs[0].mesh
    operands = [distribute(x, layout, seed=i) for i, (x, layout) in enumerate(zip(tensors, strategy.inputs, strict=True))]
    try:
        args, kwargs = _filled(given, (x._local for x in operands))
        kernel = op.kernel
        out = run_on_ranks(
            mesh, lambda at: call.func if kernel is None else kernel(call, strategy, at), args, kwargs
        )
        for local, value, layout in zip(_tensors(out), expected, strategy.outputs, strict=True):
            torch.testing.assert_close(
                whole(DTensor._wrap(local, _spec(value, layout))), value, equal_nan=True, **tolerance
            )
    except Exception as error:
        what = str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
        raise RuleError(
            f"the rule '{rule}' of {call.func} is wrong on the mesh ({mesh}), in the layouts\n  {strategy}\n{what}"
        ) from error


def _filled(tree: tuple[Any, Any], tensors: Iterator[Any]) -> tuple[Any, Any]:
    """The same arguments with other tensors."""
    filled: tuple[Any, Any] = replace_leaves(tree, lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf)
    return filled


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def _spec(x: Tensor, layout: Layout) -> Spec:
    shape = tuple(x.shape)
    return spec_of(layout, shape, contiguous_stride(shape), x.dtype, x.device)
