"""Experts as nested loops: y[t] = sum over e of w[t, e] f_e(x[t]); each mesh axis shards one loop.

Loop t moves experts: each rank has its own tokens, and needs the parameters of all experts. Loop e moves tokens: each
rank has some experts, and what they add to every token is a partial sum, for e is not in the result. Loop f, over the
inner features of each expert, leaves a partial sum too. Two axes with loop e are one folded axis.

The "ragged" form of loop e gathers no tokens: each goes once to every other rank that has one of its experts, and one
row, their weighted sum, comes back. Sizes of these messages are known on the host only after an exchange of counts.
With a "hop" along one axis, of slow links perhaps, and "ragged" along others a token goes once to each other host, and
from there to ranks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Literal, TypeAlias

from dshard.caches import cached
from dshard.errors import NotationError, ShapeError, StrategyError
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Shard
from dshard.routing import Routing
from dshard.rules.expand import Allowed, Row
from dshard.rules.named_loops import LoopTable, NamedLoops
from dshard.rules.rule import Chosen, Rule
from dshard.rules.rule_notation import parse_rule

ExpertLoop: TypeAlias = Literal["t", "e", "f", "ragged", "hop"]
ExpertLoops: TypeAlias = tuple[ExpertLoop | None, ...]
"""A loop for each mesh axis, None for any."""
RequestedLoops: TypeAlias = str | ExpertLoops | None
"""A name of the table below, loops, or None for the cheapest of all."""
UNIFORM = Routing.uniform()
OPERANDS = 3
"""The operands before the parameters: tokens, indices of their experts, and weights of these."""


EXPERTS: LoopTable[ExpertLoop] = LoopTable(
    "experts",
    ("t", "e", "f", "ragged", "hop"),
    "('t', 'ragged')",
    {
        "tokens": NamedLoops("x", ("t",), "data parallel; with experts stored split, FSDP"),
        "expert": NamedLoops("x", ("e",), "tokens gathered: Megatron's allgather, vLLM's default; whole: AllReduceEP"),
        "ragged": NamedLoops("x", ("ragged",), "GShard, Switch, DeepEP: only the tokens that are needed"),
        "split experts": NamedLoops("x", ("f",), "Megatron within each expert"),
        "ragged x split experts": NamedLoops("e f", ("ragged", "f"), "expert parallel outside, Megatron within"),
        "tokens x ragged": NamedLoops("t e", ("t", "ragged"), "expert parallel within replicas of the experts"),
        "ragged x ragged": NamedLoops("a b", ("ragged", "ragged"), "one folded axis of both"),
        "hop x ragged": NamedLoops("hosts e", ("hop", "ragged"), "DeepEP, Tutel: a token once to each host, then on"),
    },
)


@cached("rules", 4096)
def expert_rule(shapes: tuple[Shape, ...], text: str, routing: Routing = UNIFORM) -> Rule:
    """The rule of a layer of experts: of tokens, indices and weights of their experts, and parameters as in `text`.

    `text` has a term for each parameter: e are experts, d features of tokens, f inner features, (2 f) two parts of
    these that are packed along a dim, and names in brackets are split over no axis. Inner features are split only if
    every parameter has them: what one without them adds, such as the last bias, would be added on each rank. `routing`
    says how tokens are expected to be spread over experts.

    Raises:
        NotationError: a term for each parameter is missing, or one without e, or with another name.
        ShapeError: the shapes do not fit.

    >>> print(expert_rule(((8, 4), (8, 2), (8, 2), (6, 5, 4), (6, 4, 5)), "e f d, e d f"))
    t [d], t [k], t [k], e f [d], e [d] f -> t [d]
    >>> print(expert_rule(((8, 4), (8, 2), (8, 2), (6, 5, 4), (6, 4)), "e f d, e d"))
    t [d], t [k], t [k], e [f] [d], e [d] -> t [d]
    >>> print(expert_rule(((8, 4), (8, 2), (8, 2), (6, 10, 4), (6, 4, 5)), "e (2 f) d, e d f"))
    t [d], t [k], t [k], e ([2] f) [d], e [d] f -> t [d]
    """
    check_expert_rule(text, len(shapes) - OPERANDS)
    terms, unsharded = text.split(","), ["d"]
    if not all("f" in re.findall(r"\w+", term) for term in terms):
        unsharded.append("f")
    for name in unsharded:
        text = re.sub(rf"(?<![\w\[]){name}(?!\w)", f"[{name}]", text)
    check_operands(shapes)
    lead = ("", "t", "b t")[len(shapes[0]) - 1] if len(shapes[0]) < 4 else "... b t"
    tokens = f"{lead} [d], {lead} [k], {lead} [k]"
    try:
        rule = parse_rule(f"{tokens}, {text} -> {lead} [d]", shapes, (shapes[0],), loops=True)
    except (NotationError, ShapeError) as error:
        raise ShapeError(
            f"experts of tokens {shapes[0]}, by the rule {text!r} of parameters of {', '.join(map(str, shapes[3:]))}: "
            f"{error}"
        ) from error
    return replace(rule, chosen=Chosen("k", "e", routing))


def check_operands(shapes: Sequence[Shape]) -> None:
    """Check the shapes of tokens, indices and weights.

    Raises:
        ShapeError: indices and weights differ, or are not of these tokens.
    """
    tokens, index, weight = shapes[:OPERANDS]
    if index != weight:
        raise ShapeError(
            f"experts: index has shape {index} and weight {weight}; each token has a weight for each of its experts: "
            "give both the shape (tokens..., k)"
        )
    if not tokens or not index or tokens[:-1] != index[:-1]:
        raise ShapeError(
            f"experts: x has shape {tokens} and index {index}; give x as (tokens..., d) and index as (tokens..., k)"
        )


def check_expert_rule(text: str, parameters: int) -> None:
    """Check the terms of the parameters.

    Raises:
        NotationError: there is not one for each parameter, or one without e, or with another name.
    """
    terms = [re.findall(r"\[?\w+\]?", term) for term in text.split(",")]
    if len(terms) != parameters:
        raise NotationError(
            f"experts: the rule {text!r} has {len(terms)} terms, but there are {parameters} parameters; give a term "
            "for each, as 'e f d, e d f'"
        )
    for term in terms:
        others = [name for name in term if name not in ("e", "d", "f") and name[0] != "[" and not name.isdecimal()]
        if "e" not in term or others:
            raise NotationError(
                f"experts: the term '{' '.join(term)}' of the rule {text!r}: each parameter has e, the experts, "
                "perhaps d, the features of tokens, and f, the inner features; write other dims in brackets, as [g]"
            )


Levels: TypeAlias = tuple[tuple[int, ...], ...]
"""The mesh axes of the exchanges of the ragged form, one after the other."""
Way: TypeAlias = tuple[Allowed, Levels]
"""The rows that each mesh axis may have, and the levels of the ragged form."""


def ways_of(requested: RequestedLoops, rule: Rule, tokens: Layout) -> tuple[Way, ...]:
    """The ways to assign the requested loops to mesh axes, of tokens in this layout.

    Axes without a loop may have any. There the ragged form is tried, too: on each set of axes that shard tokens.

    Raises:
        StrategyError: too many loops for the mesh, or the ragged form on an axis of ranks that do not shard tokens.
    """
    ways = [way for loops in EXPERTS.assignments(requested, tokens.mesh) for way in _ways(loops, rule, tokens)]
    if not ways:
        raise StrategyError(
            f"experts={requested!r} of tokens laid out [{tokens}]: the ragged form sends tokens from the ranks that "
            "have them; shard them over its mesh axis, or give that loop e"
        )
    return tuple(dict.fromkeys(ways))


def _ways(loops: Mapping[int, ExpertLoop | None], rule: Rule, tokens: Layout) -> Iterator[Way]:
    """The ways in which mesh axes have these loops."""
    of_tokens = frozenset[Row]([name for dim in rule.inputs[0][:-1] for name in dim])
    rows = {"t": of_tokens, "e": frozenset[Row]({"e"}), "f": frozenset[Row]({"f"})}
    axes, last = range(tokens.mesh.ndim), len(rule.inputs[0]) - 1
    loops = _between_ranks(loops, tokens.mesh)
    split = {axis for axis in axes if tokens.mesh.shape[axis] > 1 and _dim(tokens, axis) < last}
    asked = {loop: [axis for axis in axes if loops.get(axis) == loop] for loop in ("ragged", "hop")}
    if not split.issuperset([*asked["ragged"], *asked["hop"]]) or (asked["hop"] and not asked["ragged"]):
        return
    for more in _subsets([axis for axis in sorted(split) if loops.get(axis) is None]):
        for levels in _levels(asked["hop"], [*asked["ragged"], *more], more):
            sent = {axis for level in levels for axis in level}
            given = {axis: "e" if axis in sent else loops.get(axis) for axis in axes}
            yield tuple([None if (loop := given[axis]) is None else rows[loop] for axis in axes]), levels


def _between_ranks(loops: Mapping[int, ExpertLoop | None], mesh: Mesh) -> Mapping[int, ExpertLoop | None]:
    """The loops without exchanges along an axis of one rank, as the same program has on a larger mesh.

    A hop before none is the whole exchange.
    """
    sent: dict[int, ExpertLoop | None] = {axis: loop for axis, loop in loops.items() if loop in ("ragged", "hop")}
    here = {axis: loop if mesh.shape[axis] > 1 else None for axis, loop in sent.items()}
    if "ragged" in sent.values() and "ragged" not in here.values():
        here = {axis: "ragged" if loop == "hop" else loop for axis, loop in here.items()}
    return {**loops, **here}


def _levels(hops: Sequence[int], ragged: Sequence[int], free: Sequence[int]) -> Iterator[Levels]:
    """The exchanges along these axes, of which one that is `free` may be a hop before the others."""
    before = tuple([(axis,) for axis in hops])
    if not ragged:
        yield before
        return
    yield (*before, tuple(sorted(ragged)))
    for axis in free if len(ragged) > 1 else ():
        yield (*before, (axis,), tuple(sorted({*ragged} - {axis})))


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return (more for n in range(len(axes) + 1) for more in combinations(axes, n))


def _dim(layout: Layout, axis: int) -> int:
    """The tensor dim that a mesh axis shards; one behind all where it shards none."""
    placement = layout.placements[axis]
    return placement.dim if isinstance(placement, Shard) else sys.maxsize
