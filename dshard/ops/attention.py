"""Attention as a rule: batch and heads split freely, queries too; keys, values and features stay whole."""

from __future__ import annotations

from collections.abc import Sequence

from dshard.layout import Shape
from dshard.ops.rule import Rule, parse_rule


def attention_rule(shapes: Sequence[Shape], causal: bool, gqa: bool) -> Rule:
    """`scaled_dot_product_attention` of query, key, value and perhaps a mask that is broadcast to the scores.

    A causal mask is about absolute positions, so queries then stay whole, too; with grouped queries the heads do, for
    query and key have different numbers of them.

    >>> print(attention_rule([(2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)], False, False))
    _0 _1 s [d], _0 _1 [t] [d], _0 _1 [t] [e] -> _0 _1 s [e]
    """
    s = "[s]" if causal else "s"
    query, key, value, out = f"... {s} [d]", "... [t] [d]", "... [t] [e]", f"... {s} [e]"
    if gqa and shapes[0][-3] != shapes[1][-3]:
        query, key, value, out = (
            f"... [{head}] {rest[4:]}" for head, rest in zip("gkkg", (query, key, value, out), strict=True)
        )
    mask = [f"{'...' if len(shape) > 2 else ''} {s} [t]" for shape in shapes[3:]]
    return parse_rule(f"{', '.join([query, key, value, *mask])} -> {out}", shapes)
