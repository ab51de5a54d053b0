"""Rules of matmuls over their loops; a strategy gives every mesh axis a loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dshard.core.call import Call, LocalOp, Operator, RankCall
from dshard.errors import DtypeError
from dshard.layout import Shape
from dshard.rules.rule import Rule, linear, together
from dshard.rules.rule_notation import parse_rule


def notation(text: str) -> Operator:
    """A matmul by its rule, linear in its first two operands."""

    def rule(call: Call) -> Rule:
        """Any dim may be sharded; a sharded contraction leaves a partial sum."""
        same_dtype(str(call.func), [spec.dtype for spec in call.specs])
        return parse_rule(text, call.shapes, passes=linear(0, 1), loops=True)

    return Operator(rule, values=False)


def same_dtype(name: str, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse operands of a matmul that differ in dtype, which torch does not check on meta tensors."""
    if len(set(dtypes)) > 1:
        listed = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DtypeError(f"{name}: operands of dtype {listed}; a matmul takes one dtype, so convert with .to(dtype)")


def matmul_rule(a: Shape, b: Shape) -> Rule:
    """`torch.matmul` of operands of any number of dims: leading dims are broadcast.

    >>> print(matmul_rule((8, 2, 3), (3, 4)))
    _0 m k, k n -> _0 m n
    """
    left = "k" if len(a) == 1 else "... m k"
    right = "k" if len(b) == 1 else "k n" if len(b) == 2 else "... k n"
    out = " ".join(
        [*(["..."] if max(len(a), len(b)) > 2 else []), *(["m"] if len(a) > 1 else []), *(["n"] if len(b) > 1 else [])]
    )
    if len(a) == 2:
        left = "m k"
    return parse_rule(f"{left}, {right} -> {out}", [a, b], passes=linear(0, 1), loops=True)


def linear_rule(x: Shape, weight: Shape) -> Rule:
    """`torch.nn.functional.linear` without bias: the weight is stored [out, in].

    >>> print(linear_rule((8, 2, 3), (4, 3)))
    _0 _1 k, n k -> _0 _1 n
    """
    text = "... k, n k -> ... n" if len(weight) == 2 else "... k, k -> ..."
    return parse_rule(text, [x, weight], passes=linear(0, 1), loops=True)


def einsum_rule(equation: str, a: Shape, b: Shape) -> Rule | None:
    """`torch.einsum` of two operands; None if it is more than a matmul.

    That is with a diagonal, a sum over one operand's dim, or a summed dim of size one broadcast to the other operand's.

    >>> print(einsum_rule("bij,bjk->bik", (2, 3, 4), (2, 4, 5)))
    b i j, b j k -> b i k
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    sides = left.split(",")
    if len(sides) != 2 or "." in equation or any(len(set(side)) < len(side) for side in sides):
        return None
    once = sorted(letter for letter in set(left) - {","} if left.count(letter) == 1)
    out = right if arrow else "".join(once)
    if not set(once) <= set(out) or len(set(out)) < len(out) or not set(out) <= set(left):
        return None
    if len(sides[0]) != len(a) or len(sides[1]) != len(b):
        return None
    sizes = dict(zip(sides[0], a, strict=True))
    if any(letter not in out and sizes[letter] != n for letter, n in zip(sides[1], b, strict=True)):
        return None
    text = f"{' '.join(sides[0])}, {' '.join(sides[1])} -> {' '.join(out)}"
    return parse_rule(text, [a, b], passes=linear(0, 1), loops=True)


def bmm_rule(a: Shape, b: Shape) -> Rule:
    """`torch.bmm`, a batch of matmuls."""
    return parse_rule("b m k, b k n -> b m n", [a, b], passes=linear(0, 1), loops=True)


# -- with a bias


def plus(a: str, b: str, out: str) -> Operator:
    """An operator bias, a, b -> out, the bias broadcast; the factors k and s are contracted."""

    def rule(call: Call) -> Rule:
        """Any dim may be sharded; a sharded contraction leaves a partial sum, to which one rank adds the bias."""
        dims = out.split()
        bias = " ".join(dims[len(dims) - len(call.shapes[0]) :])
        return call.rule(f"{bias}, {a}, {b} -> {out}", passes=(*together(0, 1), *together(0, 2)))

    return Operator(rule, once, blocks=True)


def once(call: RankCall) -> LocalOp:
    """The kernel whose bias only the first rank along each axis that shards the contraction adds."""
    shape = call.out_local_shape()
    if 0 in shape:  # of nothing, torch does not broadcast the bias
        return lambda bias, *_, **__: bias.new_empty(shape)
    if call.is_first("k", "s"):
        return call.func
    return lambda *args, **kwargs: call.func(*args, **{**kwargs, "beta": 0})


RULES: dict[str, Operator] = {
    "aten::mm": notation("m k, k n -> m n"),
    "aten::bmm": notation("b m k, b k n -> b m n"),
    "aten::mv": notation("m k, k -> m"),
    "aten::dot": notation("k, k ->"),
    "aten::vdot": notation("k, k ->"),
    "aten::outer": notation("m, n -> m n"),
    "aten::ger": notation("m, n -> m n"),
    "aten::addmm": plus("m k", "k n", "m n"),
    "aten::addmv": plus("m k", "k", "m"),
    "aten::addr": plus("m", "n", "m n"),
    "aten::baddbmm": plus("b m k", "b k n", "b m n"),
    "aten::addbmm": plus("s m k", "s k n", "m n"),
}
