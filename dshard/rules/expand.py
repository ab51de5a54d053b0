"""Expand rules to layouts: one row for each mesh axis gives the layouts of all operands and outputs.

On one mesh axis an operator either shards one factor, passes partial operands through, or is replicated. Only rows that
some operand's placement suggests are tried, so operators do not invent shardings that nobody declared; an axis
on which all operands are replicated stays so. Only matmuls, whose rules have `loops`, try every factor on every axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from math import prod
from typing import TypeAlias

from dshard.caches import cached
from dshard.errors import LayoutError
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, ReduceOp, Replicate, Shard, nested_chunk
from dshard.rules.rule import Dim, PassThrough, Rule, Term, factor_sizes

Row: TypeAlias = str | PassThrough | None
"""The use of one mesh axis: it shards a factor, passes partial operands through, or does nothing (None)."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as far as the choice of a strategy depends on it: layout, global shape and itemsize."""

    layout: Layout
    shape: Shape
    itemsize: int


Allowed: TypeAlias = tuple[frozenset[Row] | None, ...]
"""For each mesh axis the rows that are allowed, or None for any."""


def expansions(
    rule: Rule,
    operands: Sequence[Operand],
    outputs: Sequence[tuple[Shape, int]],
    among: Sequence[Allowed] | None = None,
    result: Layout | None = None,
) -> Iterator[Expansion]:
    """Yield the candidate expansions of `rule`; with `among` only those that one of its alternatives allows.

    `result` is the requested layout of the first output, whose order of mesh axes then counts like an operand's.
    """
    sizes = sizes_of(rule, operands, outputs)
    rows = [rows_of_axis(rule, operands, axis) for axis in range(operands[0].layout.mesh.ndim)]
    assignments = product(*rows) if among is None else _allowed(rows, among)
    layouts = [(term, operand.layout) for term, operand in zip(rule.inputs, operands, strict=True)]
    if result is not None:
        layouts.append((rule.outputs[0], result))
    for assignment in assignments:
        for order in _orders(layouts, assignment):
            expansion = expand(rule, operands, assignment, order, sizes)
            if expansion is not None:
                yield expansion


def _allowed(rows: Sequence[Sequence[Row]], among: Sequence[Allowed]) -> list[tuple[Row, ...]]:
    assignments: dict[tuple[Row, ...], None] = {}
    for allowed in among:
        kept = ([row for row in rows[axis] if a is None or row in a] for axis, a in enumerate(allowed))
        assignments |= dict.fromkeys(product(*kept))
    return list(assignments)


def sizes_of(rule: Rule, operands: Sequence[Operand], outputs: Sequence[tuple[Shape, int]]) -> dict[str, int]:
    """The size of each factor of `rule`."""
    shapes = [operand.shape for operand in operands] + [shape for shape, _ in outputs]
    return dict(rule.sizes) | factor_sizes((*rule.inputs, *rule.outputs), shapes, rule)


def rows_of_axis(rule: Rule, operands: Sequence[Operand], axis: int) -> list[Row]:
    """The rows to try on one mesh axis: None, and those that an operand's placement there suggests."""
    rows: dict[Row, None] = {None: None}
    for i, operand in enumerate(operands):
        match operand.layout.placements[axis]:
            case Shard(dim):
                term = rule.inputs[i]
                dims = (dim, *reversed(range(dim)), *range(dim + 1, len(term))) if rule.reshards else (dim,)
                rows |= dict.fromkeys(factor for d in dims for factor in term[d] if factor not in rule.unsharded)
            case Partial(op):
                rows |= dict.fromkeys(
                    PassThrough(p.operands, (op,)) for p in rule.passes if i in p.operands and op in p.ops
                )
            case Replicate():
                pass
    if rule.loops:
        terms = (*rule.inputs, *rule.outputs)
        rows |= dict.fromkeys([name for term in terms for dim in term for name in dim if name not in rule.unsharded])
    return list(rows)


Order: TypeAlias = dict[str, tuple[int, ...]]


def _orders(layouts: Sequence[tuple[Term, Layout]], assignment: tuple[Row, ...]) -> list[Order]:
    """The orders of the mesh axes that shard one factor: left to right, and any order of an operand."""
    split: Order = {}
    for axis, row in enumerate(assignment):
        if isinstance(row, str):
            split[row] = (*split.get(row, ()), axis)
    choices: list[list[tuple[int, ...]]] = []
    for factor, axes in split.items():
        orders = {axes: None}
        if len(axes) > 1:
            for term, layout in layouts:
                for dim, factors in enumerate(term):
                    if factor in factors:
                        axes_of_dim = tuple([axis for axis in layout.axes_of(dim) if axis in axes])
                        orders |= {
                            order: None
                            for order in permutations(axes)
                            if axes_of_dim and order[: len(axes_of_dim)] == axes_of_dim
                        }
        choices.append(list(orders))
    return [dict(zip(split, chosen_orders, strict=True)) for chosen_orders in product(*choices)]


@dataclass(frozen=True, slots=True)
class Expansion:
    """The layouts of all operands, outputs and gradients that one row for each mesh axis gives."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    rows: tuple[Row, ...]
    order: Order


def expand(
    rule: Rule, operands: Sequence[Operand], assignment: tuple[Row, ...], order: Order, sizes: dict[str, int]
) -> Expansion | None:
    """The expansion of these rows, or None if they exclude each other."""
    mesh, terms, n = operands[0].layout.mesh, (*rule.inputs, *rule.outputs), len(rule.inputs)
    for term in terms:
        for dim in term:
            if len(dim) > 1 and not merges(_without_blocks(dim, rule) if rule.blocks else dim, order, sizes, mesh):
                return None
    try:
        layouts = [
            operands[i].layout
            if i in rule.unread
            else _layout(mesh, term, order, rest, blocks_of(rule, term, sizes) if rule.blocks else None)
            for i, (term, rest) in enumerate(zip((*terms, *rule.inputs), _rests(rule, assignment), strict=True))
        ]
    except LayoutError:  # one tensor would be partial by two reductions
        return None
    inputs, outputs, gradients = layouts[:n], layouts[n : len(terms)], layouts[len(terms) :]
    return Expansion(tuple(inputs), tuple(outputs), tuple(gradients), assignment, order)


def order_of(terms: Sequence[Term], layouts: Sequence[Layout]) -> Order:
    """For each factor the mesh axes that shard it, if tensors of these terms have these layouts."""
    order: Order = {}
    for term, layout in zip(terms, layouts, strict=True):
        for dim, factors in enumerate(term):
            if len(factors) == 1 and layout.axes_of(dim):
                order.setdefault(factors[0], layout.axes_of(dim))
    return order


def term_layout(mesh: Mesh, term: Term, order: Order) -> Layout:
    """The layout of a tensor of this term, replicated on the axes that shard none of its factors."""
    return _layout(mesh, term, order, (None,) * mesh.ndim)


def sharded_anyway(rule: Rule, order: Order, mesh: Mesh) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The layouts of operands and outputs of an alternative that shards even factors that `rule` does not.

    A sharded factor that an output lacks leaves it partial, or, if the rule does not shard it, replicated.
    """
    factors: list[Row] = [next((f for f, axes in order.items() if axis in axes), None) for axis in range(mesh.ndim)]
    rows = tuple([None if factor in rule.unsharded else factor for factor in factors])
    inputs = tuple([term_layout(mesh, term, order) for term in rule.inputs])
    rests = _rests(rule, rows)[len(inputs) :]
    return inputs, tuple([_layout(mesh, term, order, rest) for term, rest in zip(rule.outputs, rests, strict=False)])


Rest: TypeAlias = tuple[ReduceOp | None, ...]
"""For each mesh axis that shards no factor of a tensor, the reduction by which the tensor is partial there, if any."""


_SUM: tuple[ReduceOp] = ("sum",)


def _rests(rule: Rule, assignment: tuple[Row, ...]) -> list[Rest]:
    """The rests of the operands, then of the outputs, then of the operands' gradients.

    If the work is sharded but an operand is replicated, its gradient is partial. So it is if another operand is
    partial: the gradient is summed or averaged like that operand.
    """
    n, reductions = len(rule.inputs), rule.reductions()
    outs = len(reductions)
    columns: list[list[ReduceOp | None]] = []
    for row in assignment:
        if row is None:
            columns.append([None] * (2 * n + outs))
        elif isinstance(row, PassThrough):
            op: ReduceOp = row.ops[0]
            passed = [op if i in row.operands else None for i in range(n)]
            gradient: ReduceOp = "avg" if op == "avg" else "sum"
            columns.append([*passed, *[op] * outs, *[None if each else gradient for each in passed]])
        else:
            columns.append([*[None] * n, *reductions, *_SUM * n])
    return list(zip(*columns, strict=True))


def blocks_of(rule: Rule, term: Term, sizes: dict[str, int]) -> tuple[int, ...]:
    """The number of blocks in which each dim of a term is sharded, if it is."""
    return tuple([prod([sizes[name] for name in dim[: len(dim) - len(_without_blocks(dim, rule))]]) for dim in term])


def _without_blocks(dim: Dim, rule: Rule) -> Dim:
    """The factors of a dim behind those that are blocks of them."""
    while len(dim) > 1 and dim[0] in rule.blocks:
        dim = dim[1:]
    return dim


def _layout(mesh: Mesh, term: Term, order: Order, rest: Rest, blocks: tuple[int, ...] | None = None) -> Layout:
    """The layout of a tensor of this term, whose sharded dims are in so many blocks."""
    split, partial = [], list(rest)
    for dim in term:
        axes = order.get(dim[0], ()) if len(dim) == 1 else _axes_of(dim, order)
        split.append(axes)
        for axis in axes:
            partial[axis] = None
    return _expanded_layout(mesh, tuple(split), tuple(partial), blocks)


def _axes_of(factors: Dim, order: Order) -> tuple[int, ...]:
    return tuple([axis for factor in factors for axis in order.get(factor, ())])


@cached("layouts", 16384)
def _expanded_layout(
    mesh: Mesh,
    split: tuple[tuple[int, ...], ...],
    rest: tuple[ReduceOp | None, ...],
    blocks: tuple[int, ...] | None,
) -> Layout:
    """The cached layout, one object for all expansions that have it; `split` are the mesh axes that shard each dim."""
    placements: list[Placement] = [Replicate() if op is None else Partial(op) for op in rest]
    orders = []
    for dim, axes in enumerate(split):
        if len(axes) > 1:
            orders.append((dim, axes))
        for axis in axes:
            placements[axis] = Shard(dim) if blocks is None else Shard(dim, blocks=blocks[dim])
    return Layout(mesh, tuple(placements), tuple(orders))


def merges(dim: Dim, order: Order, sizes: dict[str, int], mesh: Mesh) -> bool:
    """Whether factors sharded in this order merge, on every rank, into exactly its chunk of the merged dim."""
    counts = tuple([tuple([mesh.shape[axis] for axis in order.get(factor, ())]) for factor in dim])
    return not any(counts) or _merge(tuple([sizes[factor] for factor in dim]), counts)


@cached("layouts", 16384)
def _merge(sizes: tuple[int, ...], counts: tuple[tuple[int, ...], ...]) -> bool:
    """Whether factors of these sizes, each sharded over mesh axes of so many ranks, merge into the merged dim's chunks.

    Even chunks do on all ranks or on none: their numbers are digits of that of the merged one.
    """
    split = [n for own in counts for n in own]
    rest = iter(range(len(split)))
    axes = [tuple(islice(rest, len(own))) for own in counts]
    is_even = not any(size % prod(own) for size, own in zip(sizes, counts, strict=True))
    for at in islice(product(*map(range, split)), 1 if is_even else None):
        merged = nested_chunk(prod(sizes), range(len(split)), split, at)
        parts = [nested_chunk(size, own, split, at) for size, own in zip(sizes, axes, strict=True)]
        if _flatten(parts, sizes) != (merged or range(0)):
            return False
    return True


def _flatten(parts: Sequence[range], sizes: Sequence[int]) -> range | None:
    """The product of ranges of consecutive factors as one range of the merged dim, or None if it has gaps."""
    if not all(parts):
        return range(0)
    start, length, gap = 0, 1, False
    for part, size in zip(parts, sizes, strict=True):
        start = start * size + part.start
        if length > 1 and len(part) < size:
            gap = True
        length *= len(part)
    return None if gap else range(start, start + length)
