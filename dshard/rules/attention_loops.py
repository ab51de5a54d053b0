"""Attention as nested loops: O[b, h, q] = softmax(Q[b, h, q] K[b, h, k]^T) V[b, h, k]; each mesh axis shards one loop.

Loops b and h communicate nothing if the operands are stored by batch or heads; if they are sharded over the sequence,
an all_to_all moves them to loop h and the result back. Loop q moves K and V. Loop k moves O: each rank has a partial
result, and these are merged by the log-sum-exp of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Literal, TypeAlias

from dshard.errors import StrategyError
from dshard.layout import Layout, Shape
from dshard.placements import Replicate, Shard
from dshard.rules.expand import Allowed, Row
from dshard.rules.named_loops import LoopTable, NamedLoops
from dshard.rules.rule import Rule
from dshard.rules.rule_notation import parse_rule

AttentionLoop: TypeAlias = Literal["b", "h", "q", "k", "ring", "balanced ring"]
LOOPS: tuple[AttentionLoop, ...] = ("b", "h", "q", "k")
RINGS: tuple[AttentionLoop, ...] = ("ring", "balanced ring")
"""Forms of loop q whose keys and values are not gathered, but sent around a ring."""
AttentionLoops: TypeAlias = tuple[AttentionLoop | None, ...]
"""A loop for each mesh axis, None for any."""
RequestedLoops: TypeAlias = str | AttentionLoops | None
"""A name of the table below, loops, or None for the cheapest of all."""
Keys: TypeAlias = Literal["whole", "split", "every head"]
"""The keys that a rank has: all keys of its heads, a range of them, or all keys of every head."""


ATTENTIONS: LoopTable[AttentionLoop] = LoopTable(
    "attention",
    (*LOOPS, *RINGS),
    "('b', 'h')",
    {
        "batch": NamedLoops("x", ("b",), "data parallel"),
        "heads": NamedLoops("x", ("h",), "Megatron; stored by heads"),
        "ulysses": NamedLoops("x", ("h",), "DeepSpeed-Ulysses; stored split over the sequence"),
        "context": NamedLoops("x", ("q",), "context parallel: K and V gathered"),
        "ring": NamedLoops("x", ("ring",), "Ring Attention: K and V in panels, from rank to rank"),
        "balanced ring": NamedLoops("x", ("balanced ring",), "zigzag, Striped Attention: halves are swapped first"),
        "split-keys": NamedLoops("x", ("k",), "flash-decoding, Helix: partial results merged by their log-sum-exp"),
        "ulysses x context": NamedLoops("u c", ("h", "q"), "USP, with K and V gathered"),
        "ulysses x ring": NamedLoops("u r", ("h", "ring"), "USP: heads inside, a ring on the slow axis"),
        "ring x ring": NamedLoops("s f", ("ring", "ring"), "a ring around two axes, the slow one outside"),
        "heads x split-keys": NamedLoops("h k", ("h", "k"), "a cache split by heads and by sequence"),
    },
)


def attention_rule(
    shapes: Sequence[Shape], gqa: bool, keys: Keys = "whole", causal: bool = False, held: int = 0
) -> Rule:
    """`scaled_dot_product_attention` of query, key, value and perhaps a mask that is broadcast to the scores.

    A causal mask has absolute positions: each rank's kernel knows where its queries begin. With grouped queries, the
    heads of the query are the key heads times the group that shares one, and sharded with the key heads; if every rank
    has "every head" of the keys, the heads of the query are sharded alone. If keys are "split", loop k is one of the
    loops, and leaves a partial sum. `held` are the bytes of each score, if scores are held in memory.

    >>> print(attention_rule([(2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)], False))
    b h q [d], b h [k] [d], b h [k] [e] -> b h q [e]
    """
    grouped, k = is_grouped(shapes, gqa), "k" if keys == "split" else "[k]"
    heads, key_heads = "h", "h"
    if grouped:
        heads, key_heads = ("h", "[]") if keys == "every head" else ("(h [g])", "h")
    terms = [
        _term(shapes[0], heads, "q [d]"),
        _term(shapes[1], key_heads, f"{k} [d]"),
        _term(shapes[2], key_heads, f"{k} [e]"),
        *(
            _term(shape, "1" if grouped and len(shape) > 2 and shape[-3] == 1 else heads, f"q {k}")
            for shape in shapes[3:]
        ),
    ]
    rule = parse_rule(f"{', '.join(terms)} -> {_term(shapes[0], heads, 'q [e]')}", shapes, loops=True)
    sizes = (("g", shapes[0][-3] // shapes[1][-3]),) if grouped and keys != "every head" else ()
    return replace(rule, sizes=sizes, apart=("d", "e"), triangle=("q", "k") if causal else None, held=held)


def is_grouped(shapes: Sequence[Shape], gqa: bool) -> bool:
    """Whether several heads of the query share one key head."""
    return gqa and shapes[0][-3] != shapes[1][-3]


def _term(shape: Shape, heads: str, rest: str) -> str:
    """The term of a tensor of this shape: batch dims, heads, and the last two dims as in `rest`."""
    return f"{leading_dims(len(shape), heads)} {rest}".lstrip()


def leading_dims(ndim: int, heads: str = "h") -> str:
    """The factors of the batch dims and the heads of a tensor with `ndim` dims in attention.

    >>> [leading_dims(ndim) for ndim in (2, 3, 4, 5)]
    ['', 'h', 'b h', '... b h']
    """
    return " ".join(["...", "b", heads] if ndim > 4 else ["b", heads][4 - ndim :])


Way: TypeAlias = tuple[Allowed, tuple[int, ...]]
"""The rows that each mesh axis may have, and the axes around which keys and values are sent."""


def ways_of(requested: RequestedLoops, rule: Rule, layouts: Sequence[Layout]) -> tuple[tuple[Way, ...], bool | None]:
    """The assignments of loops to mesh axes, and whether rings are balanced: None for either.

    Axes without a role may have any loop. Without a requested loop an axis on which all operands are replicated stays
    so, and a ring goes around axes that shard the sequence of keys, the first of them outermost.
    """
    mesh, assignments = layouts[0].mesh, ATTENTIONS.assignments(requested, layouts[0].mesh)
    ways = [way for loops in assignments if (way := _way(loops, rule, layouts)) is not None]
    if not ways:
        raise StrategyError(
            f"attention={requested!r} on the mesh ({mesh}): a ring goes round an axis of at least two ranks; use "
            "'context', or a mesh with a larger axis"
        )
    asked = assignments[0].values()
    if any(loop in RINGS for loop in asked):
        return tuple(ways), "balanced ring" in asked
    stored = Shard(len(rule.inputs[1]) - 2)
    free = [axis for axis, loop in assignments[0].items() if loop is None and mesh.shape[axis] > 1]
    split = [axis for axis in free if layouts[1].placements[axis] == stored]
    rings = (ring for n in range(1, len(split) + 1) for ring in combinations(split, n))
    return (*ways, *((with_queries(ways[0][0], ring), ring) for ring in rings)), None


def _way(loops: Mapping[int, AttentionLoop | None], rule: Rule, layouts: Sequence[Layout]) -> Way | None:
    """The assignment of loops to mesh axes as rows; None if a ring has one rank."""
    mesh, rows = layouts[0].mesh, {loop: frozenset[Row]({loop}) for loop in LOOPS}
    rows["b"] |= {name for dim in rule.outputs[0][:-3] for name in dim}
    allowed: dict[int, frozenset[Row] | None] = {}
    for axis, loop in loops.items():
        if loop is None:
            idle = all(layout.placements[axis] == Replicate() for layout in layouts)
            allowed[axis] = frozenset[Row]({None}) if idle else None
        else:
            allowed[axis] = rows["q" if loop in RINGS else loop]
    rings = tuple(axis for axis, loop in loops.items() if loop in RINGS)
    if any(mesh.shape[axis] == 1 for axis in rings):
        return None
    return tuple(allowed.get(axis) for axis in range(mesh.ndim)), rings


def with_queries(allowed: Allowed, axes: Sequence[int]) -> Allowed:
    """`allowed` with loop q on these mesh axes."""
    return tuple(frozenset[Row]({"q"}) if axis in axes else rows for axis, rows in enumerate(allowed))


def with_row(alternatives: Sequence[Allowed], row: Row) -> tuple[Allowed, ...]:
    """The alternatives that allow this row on some mesh axis, restricted to it there."""
    return tuple(
        (*allowed[:axis], frozenset[Row]({row}), *allowed[axis + 1 :])
        for allowed in alternatives
        for axis, rows in enumerate(allowed)
        if rows is None or row in rows
    )


def axes_of_row(rows: Sequence[Row], row: Row) -> list[int]:
    """The mesh axes that have this row."""
    return [axis for axis, each in enumerate(rows) if each == row]
