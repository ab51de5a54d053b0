"""Matmuls to which a bias is added: where the contraction is sharded, one rank adds it."""

from __future__ import annotations

from dshard.core.call import Call, LocalOp, Operator, out_local_shape
from dshard.mesh import Coordinate
from dshard.rules.rule import Rule, together
from dshard.rules.strategy import Strategy

CONTRACTED = frozenset({"k", "s"})


def plus(a: str, b: str, out: str) -> Operator:
    """An operator bias, a, b -> out, the bias broadcast; the factors k and s are contracted."""

    def rule(call: Call) -> Rule:
        """Any dim may be sharded; a sharded contraction leaves a partial sum, to which one rank adds the bias."""
        dims = out.split()
        bias = " ".join(dims[len(dims) - len(call.shapes[0]) :])
        return call.rule(f"{bias}, {a}, {b} -> {out}", passes=(*together(0, 1), *together(0, 2)))

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
    "aten::addmm": plus("m k", "k n", "m n"),
    "aten::addmv": plus("m k", "k", "m"),
    "aten::addr": plus("m", "n", "m n"),
    "aten::baddbmm": plus("b m k", "b k n", "b m n"),
    "aten::addbmm": plus("s m k", "s k n", "m n"),
}
