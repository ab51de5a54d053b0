"""Cut factors of rules in several: by the levels at which operands shard a contraction dim, or in blocks.

The order in which a sum runs is free, so operands that shard k over several mesh axes may be multiplied block by block
as they are stored: A with k over (c, d) and B with k over (r, d) agree on d, though neither holds a range of k there.
With k as k1 k2 k3, one for each level, the axes c and r shard k1 and d shards k2, in rule notation.

A factor that an operand shards in blocks is the blocks, and what is within them: `m k, k n -> m n` with n of the second
operand in blocks is `m k, k (n/ n) -> m (n/ n)`, in which n/ is not sharded. A local operator that does not depend on
its rank does the same to every index of a factor: to one index alone, as ranks may be as many as indices. So it may
have any indices of a factor, and blocks are right where ranges are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod

from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Placement, Shard
from dshard.rules.expand import Operand
from dshard.rules.rule import Dim, Rule, Term


@dataclass(frozen=True, slots=True)
class SplitContraction:
    """A matmul whose contraction dim, dim `dims[i]` of operand `i`, is cut into `sizes`."""

    rule: Rule
    dims: tuple[int, int]
    sizes: tuple[int, ...]
    operands: tuple[Operand, Operand]


def split_contraction(rule: Rule, operands: Sequence[Operand]) -> SplitContraction | None:
    """The matmul with its contraction dim cut, or None if that adds no candidate or sizes do not divide.

    It adds candidates if both operands shard the dim, at some level by different axes of one size.
    """
    (a, b), (out,) = rule.inputs[:2], rule.outputs
    shared = [dim for dim in a if dim and dim in b and dim not in out]
    if len(shared) != 1 or rule.blocks:
        return None
    dims = a.index(shared[0]), b.index(shared[0])
    layouts, mesh = [operand.layout for operand in operands[:2]], operands[0].layout.mesh
    levels = list(zip_longest(layouts[0].axes_of(dims[0]), layouts[1].axes_of(dims[1])))
    if len(levels) < 2 or all(first == second for first, second in levels):
        return None
    sizes = _sizes(levels, mesh)
    size = operands[0].shape[dims[0]]
    if sizes is None or size % prod(sizes) or size == 0:
        return None
    sizes = (*sizes, size // prod(sizes))
    names: tuple[Dim, ...] = tuple((f"{shared[0][0]}.{i}",) for i in range(len(sizes)))
    terms = [(*term[:dim], *names, *term[dim + 1 :]) for term, dim in zip((a, b), dims, strict=True)]
    cut_rule = Rule((terms[0], terms[1]), rule.outputs, passes=rule.passes, loops=True)
    pair = [_cut(operand, dim, sizes) for operand, dim in zip(operands, dims, strict=False)]
    return SplitContraction(cut_rule, dims, sizes, (pair[0], pair[1]))


def _sizes(levels: Sequence[tuple[int | None, int | None]], mesh: Mesh) -> tuple[int, ...] | None:
    sizes = []
    for level in levels:
        here = {mesh.shape[axis] for axis in level if axis is not None}
        if len(here) > 1:
            return None
        sizes.append(here.pop())
    return tuple(sizes)


def _cut(operand: Operand, dim: int, sizes: tuple[int, ...]) -> Operand:
    """The operand with dim `dim` unflattened: the axis of each level shards a dim of its own."""
    layout, extra = operand.layout, len(sizes) - 1
    level = {axis: i for i, axis in enumerate(layout.axes_of(dim))}
    placements: list[Placement] = []
    for axis, placement in enumerate(layout.placements):
        match placement:
            case Shard(d) if d == dim:
                placements.append(Shard(dim + level[axis]))
            case Shard(d) if d > dim:
                placements.append(Shard(d + extra))
            case other:
                placements.append(other)
    orders = tuple((d + extra * (d > dim), axes) for d, axes in layout.order if d != dim)
    shape: Shape = (*operand.shape[:dim], *sizes, *operand.shape[dim + 1 :])
    return Operand(Layout(layout.mesh, tuple(placements), orders), shape, operand.itemsize)


# -- factors that an operand shards in blocks


def with_blocks(rule: Rule, operands: Sequence[Operand]) -> Rule:
    """The rule with the factors that an operand shards in blocks each in two; the rule itself if there are none.

    Of operands with several numbers of blocks for a factor the first counts.

    >>> from dshard.layout import Layout
    >>> from dshard.mesh import Mesh
    >>> from dshard.placements import Shard
    >>> packed = Operand(Layout(Mesh((2,), ("tp",)), (Shard(0, blocks=2),)), (8, 6), 4)
    >>> print(with_blocks(Rule(((("n",), ("k",)),), ((("k",), ("n",)),)), [packed]))
    ([n/] n) k -> k ([n/] n)
    """
    inputs = zip(rule.inputs, operands, strict=True)
    return rule_in_blocks(rule, [(term, operand.shape, operand.layout.blocks) for term, operand in inputs])


def rule_in_blocks(rule: Rule, tensors: Sequence[tuple[Term, Shape, Mapping[int, int]]]) -> Rule:
    """The rule with the factors of tensors that are in blocks, so many of each dim, each in two.

    Each tensor is an operand or an output, by its term in the rule.
    """
    known, blocks, cut = dict(rule.sizes), set(rule.blocks), dict[str, int]()
    sizes = dict(known)
    for term, shape, of_dims in tensors:
        for dim, n in of_dims.items():
            names = term[dim]
            alone = shape[dim] if len(names) == 1 else 0
            of_names = {name: alone or known.get(name, 0) for name in names}
            leading, rest = _leading(names, n, of_names)
            if rest > 1:  # the blocks end within a factor
                name = names[len(leading)]
                if name in rule.unsharded or name in cut:
                    continue  # what is not sharded at all
                cut[name] = rest
                sizes |= {f"{name}/": rest, name: of_names[name] // rest}
            blocks |= {*leading}
    if not cut and blocks == rule.blocks:
        return rule
    blocks |= {f"{name}/" for name in cut}

    def halves(dim: Dim) -> Dim:
        return tuple([half for name in dim for half in ((f"{name}/", name) if name in cut else (name,))])

    inputs, outputs = (tuple([tuple(map(halves, term)) for term in terms]) for terms in (rule.inputs, rule.outputs))
    return replace(
        rule,
        inputs=inputs,
        outputs=outputs,
        unsharded=rule.unsharded | blocks,
        sizes=tuple(sizes.items()),
        blocks=frozenset(blocks),
    )


def _leading(names: Dim, n: int, sizes: Mapping[str, int]) -> tuple[Dim, int]:
    """The major factors of a dim that its `n` blocks consist of, and the number of those within the factor behind.

    >>> _leading(("a", "b"), 3, {"a": 3, "b": 4}), _leading(("a", "b"), 6, {"a": 3, "b": 4})
    ((('a',), 1), (('a',), 2))
    """
    for i, name in enumerate(names):
        size = sizes[name]
        if n == 1 or (n < size and size % n == 0) or len(names) == 1:
            return names[:i], n
        if not size or n % size:
            break
        n //= size
    return (), 1
