"""Rules for operands that are sharded in blocks: a factor that one shards so is the blocks, and what is within them.

`m k, k n -> m n` with n of the second operand in blocks is `m k, k (n/ n) -> m (n/ n)`, in which n/ is not sharded. A
local operator that does not depend on its rank does the same to every index of a factor: to one index alone, as ranks
may be as many as indices. So it may have any indices of a factor, and blocks are right where ranges are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from dshard.layout import Shape
from dshard.rules.expand import Operand
from dshard.rules.rule import Dim, Rule, Term


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
    sizes, blocks, cut = dict(rule.sizes), set(rule.blocks), dict[str, int]()
    for term, shape, of_dims in tensors:
        for dim, n in of_dims.items():
            match term[dim]:
                case (name,) if name not in rule.unsharded and name not in cut:
                    cut[name] = n
                    sizes |= {f"{name}/": n, name: shape[dim] // n}
                case (_, _, *_) as names:
                    blocks |= {*_leading(names, n, sizes)}
                case _:
                    pass  # what is not sharded at all
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


def _leading(names: Dim, n: int, sizes: dict[str, int]) -> Dim:
    """The major factors of a dim that are its `n` blocks; none if no factors are."""
    for count in range(1, len(names)):
        if prod([sizes.get(name, 0) for name in names[:count]]) == n:
            return names[:count]
    return ()
