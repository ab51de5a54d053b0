"""The rule of attention: batch, heads and queries may be sharded; keys, values and features may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dshard.layout import Shape
from dshard.rules.rule import Rule
from dshard.rules.rule_notation import parse_rule


def attention_rule(shapes: Sequence[Shape], gqa: bool) -> Rule:
    """`scaled_dot_product_attention` of query, key, value and perhaps a mask that is broadcast to the scores.

    A causal mask is about absolute positions: where queries are sharded, each rank's kernel knows where its own begin.
    With grouped queries, the heads of the query are those of the key times the group that shares one, and sharded with
    those.

    >>> print(attention_rule([(2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)], False))
    _0 _1 s [d], _0 _1 [t] [d], _0 _1 [t] [e] -> _0 _1 s [e]
    """
    query, key, value, out = "... s [d]", "... [t] [d]", "... [t] [e]", "... s [e]"
    mask = [f"{'...' if len(shape) > 2 else ''} s [t]" for shape in shapes[3:]]
    if not gqa or shapes[0][-3] == shapes[1][-3]:
        return parse_rule(f"{', '.join([query, key, value, *mask])} -> {out}", shapes)
    query, out = (f"... (h [g]) {term[4:]}" for term in (query, out))
    key, value = (f"... h {term[4:]}" for term in (key, value))
    mask = [
        f"... {'(h [g])' if shape[-3] != 1 else '1'} s [t]" if len(shape) > 2 else m
        for m, shape in zip(mask, shapes[3:], strict=True)
    ]
    rule = parse_rule(f"{', '.join([query, key, value, *mask])} -> {out}", shapes)
    return replace(rule, sizes=(("g", shapes[0][-3] // shapes[1][-3]),))
