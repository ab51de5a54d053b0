"""Matmuls to which a bias is added: where the contraction is sharded, one rank adds it."""

from __future__ import annotations

from dshard.core.call import Call, LocalOp, Operator, aligned, out_local_shape
from dshard.mesh import Coordinate
from dshard.rules.rule import LINEAR, PassThrough, Rule
from dshard.rules.strategy import Strategy

CONTRACTED = frozenset({"k", "s"})


def plus(a: str, b: str, out: str) -> Operator:
    """An operator bias, a, b -> out, the bias broadcast; each letter is a factor, k and s are contracted."""
    left, right, result = (tuple((name,) for name in term) for term in (a, b, out))

    def rule(call: Call) -> Rule:
        """A product to which something is added, once."""
        bias = tuple(result[int(dim[0])] if dim else () for dim in aligned(call.shapes[0], call.out_shapes[0]))
        pending = tuple(PassThrough(frozenset({0, factor}), LINEAR) for factor in (1, 2))
        return Rule((bias, left, right), (result,), passes=pending)

    return Operator(rule, once)


def once(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """The kernel whose bias only the first rank along each axis that shards the contraction adds."""
    shape = out_local_shape(call, strategy, coordinate)
    if 0 in shape:  # of nothing, torch does not broadcast the bias
        return lambda bias, *_, **__: bias.new_empty(shape)
    if all(row not in CONTRACTED or coordinate[axis] == 0 for axis, row in enumerate(strategy.rows)):
        return call.func
    return lambda *args, **kwargs: call.func(*args, **{**kwargs, "beta": 0})


RULES: dict[str, Operator] = {
    "aten::addmm": plus("mk", "kn", "mn"),
    "aten::addmv": plus("mk", "k", "m"),
    "aten::addr": plus("m", "n", "mn"),
    "aten::baddbmm": plus("bmk", "bkn", "bmn"),
    "aten::addbmm": plus("smk", "skn", "mn"),
}
