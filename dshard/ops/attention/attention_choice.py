"""The candidates of attention, priced: loops b, h and q by the rule; loop k, and heads of queries alone, beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dshard.core.context import planning_context
from dshard.core.observe import Decision, planned
from dshard.core.operands import operand_of, plan_to
from dshard.core.spec import Spec
from dshard.errors import CompileError, StrategyError
from dshard.layout import Layout, Shape
from dshard.ops.attention.local_attention import Options
from dshard.ops.attention.ring_price import RingCall, ring_strategies
from dshard.placements import Partial, Placement, Replicate
from dshard.redistribute import Plan, plan
from dshard.rules.attention_loops import (
    Asked,
    Keys,
    attention_rule,
    axes_of_row,
    is_grouped,
    ways_of,
    with_row,
    without_row,
)
from dshard.rules.attention_ring import Ring
from dshard.rules.expand import Allowed, expansions
from dshard.rules.strategy import Constraints, Strategy, cheapest, choose, completed_layout, returned_layout
from dshard.topology import Topology

Among: TypeAlias = Literal["all", "in a graph", "with dropout", "whole keys"]
"""The candidates: all; those without rings; and those of them in which every rank has all keys of its queries."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest way to run a call of attention: its decision and strategy, and what a rank has of the keys.

    Around the axes of the `ring` keys and values are sent; it has none where they are gathered.
    """

    decision: Decision
    strategy: Strategy
    keys: Keys
    end: Layout
    ring: Ring


def chosen(
    specs: Sequence[Spec],
    out: Tensor,
    options: Options,
    asked: Asked,
    needed: tuple[bool, ...],
    among: Among = "all",
) -> Choice:
    """The cheapest candidate for operands of these specs, of which those `needed` get a gradient.

    Raises:
        StrategyError: what is asked for cannot be, for these heads or on this mesh.
        CompileError: a ring in a compiled region.
    """
    shapes, layouts = [spec.shape for spec in specs], [spec.layout for spec in specs]
    topology = planning_context().topology_of(layouts[0].mesh)
    kinds: tuple[Keys, ...] = (
        ("whole", "split", "every head") if is_grouped(shapes, options.gqa) else ("whole", "split")
    )
    rules = {keys: attention_rule(shapes, options.gqa, keys, options.causal) for keys in kinds}
    ways, balanced = ways_of(asked, rules["split"], layouts)
    if len(shapes[0]) < 3 or shapes[0][-3] == 1:
        ways = tuple((allowed, ring) for allowed, ring in ways if without_row([allowed], "h"))
    allowed = tuple(rows for rows, ring in ways if not ring)
    if ways and not allowed:
        _refuse_ring(asked, among)
    rows_of: dict[Keys, tuple[Allowed, ...]] = {
        "whole": allowed,
        "split": () if among == "whole keys" else with_row(allowed, "k"),
        "every head": with_row(allowed, "h"),
    }
    operands, outputs = tuple(map(operand_of, specs)), ((tuple(out.shape), out.itemsize),)
    wanted = Constraints(gradients=needed, kept=(True,) * len(specs), returned=layouts[0])
    candidates: dict[Strategy, tuple[Keys, Ring]] = {}
    for keys, rule in rules.items():
        constraints = replace(wanted, among=rows_of[keys])
        if next(expansions(rule, operands, outputs, rows_of[keys]), None) is not None:
            strategy = choose(rule, operands, outputs, topology, constraints)
            candidates[_named(strategy, keys, specs, tuple(out.shape), topology)] = keys, Ring(())
    call = RingCall(rules["whole"], specs, outputs, options, wanted, topology)
    for rows, axes in ways if among == "all" else ():
        for ring in (Ring(axes, is_balanced) for is_balanced in _forms(balanced, specs, options) if axes):
            candidates |= dict.fromkeys(ring_strategies(call, rows, ring), ("whole", ring))
    if not candidates:
        raise StrategyError(_impossible(asked, specs))
    base, *others = candidates
    strategy = cheapest(base, others)
    keys, ring = candidates[strategy]
    plans = tuple(plan_to(spec, layout) for spec, layout in zip(specs, strategy.inputs, strict=True))
    end = returned_layout(strategy.outputs[0], layouts[0])
    return Choice(
        Decision(
            *("attention", operands, outputs, rules["whole"], strategy, plans, topology),
            wanted=replace(wanted, among=allowed),
            exchanges=strategy.exchanges,
            alternatives=tuple(each for each, how in candidates.items() if how != ("whole", Ring(()))),
            ends=(plan(strategy.outputs[0], end, tuple(out.shape), out.itemsize, topology),),
        ),
        strategy,
        keys,
        end,
        ring,
    )


def _refuse_ring(asked: Asked, among: Among) -> None:
    """Refuse a ring where there is none.

    Raises:
        CompileError: in a compiled region.
        StrategyError: with dropout.
    """
    match among:
        case "in a graph":
            raise CompileError(
                f"attention={asked!r} in a compiled region: a compiled graph keeps no exchange whose result a rank "
                "does not need; use 'context' or 'ulysses' there"
            )
        case "with dropout":
            raise StrategyError(f"attention={asked!r} with dropout: it needs whole scores; use 'context' or 'ulysses'")
        case "all" | "whole keys":
            pass


def _forms(balanced: bool | None, specs: Sequence[Spec], options: Options) -> tuple[bool, ...]:
    """Whether halves are swapped: nothing is gained by it without a causal mask.

    Raises:
        StrategyError: a balanced ring with a mask, whose rows lie as those of the queries.
    """
    if balanced and len(specs) > 3:
        raise StrategyError(
            "attention='balanced ring' with attn_mask: halves are swapped where is_causal says what is seen; use 'ring'"
        )
    if balanced is not None:
        return (balanced,)
    return (False, True) if options.causal else (False,)


def _named(strategy: Strategy, keys: Keys, specs: Sequence[Spec], shape: Shape, topology: Topology) -> Strategy:
    """The strategy as an alternative, where it is none of the rule; with loop k it sends what merges the results.

    In half precision the result is reduced in single precision, and rounded after it.
    """
    if keys == "whole":
        return strategy
    if keys == "every head":
        return replace(strategy, name="heads of queries")
    query = specs[0]
    itemsize = max(query.itemsize, torch.float32.itemsize)
    plans = _statistics(strategy, query, itemsize, topology)
    gather = strategy.gather + sum(each.seconds for each in plans)
    if itemsize > query.itemsize:
        end = completed_layout(returned_layout(strategy.outputs[0], query.layout))
        plans = (*plans, plan(strategy.outputs[0], end, shape, itemsize, topology))
        strategy = replace(strategy, outputs=(end,), ends=(end,), reduce=plans[-1].seconds)
    sent = tuple(collective for each in plans for collective in planned(each, itemsize, topology))
    return replace(strategy, name="split keys", exchanges=sent, gather=gather)


def _statistics(strategy: Strategy, query: Spec, itemsize: int, topology: Topology) -> tuple[Plan, ...]:
    """The reductions of a number for each row of the scores: its maximum, and the sum of exponentials."""
    layout, axes = strategy.inputs[0], axes_of_row(strategy.rows, "k")
    whole = _layout_with(layout, axes, Replicate())
    parts = (_layout_with(layout, axes, Partial(op)) for op in ("max", "sum"))
    return tuple(plan(part, whole, query.shape[:-1], itemsize, topology) for part in parts)


def _layout_with(layout: Layout, axes: Sequence[int], placement: Placement) -> Layout:
    """The layout with this placement on these mesh axes."""
    for axis in axes:
        layout = layout.replace(axis, placement)
    return layout


def _impossible(asked: Asked, specs: Sequence[Spec]) -> str:
    query, key = specs[0].shape, specs[1].shape
    heads = f"{query[-3]} query and {key[-3]} key heads" if len(query) > 2 and len(key) > 2 else "no heads"
    return (
        f"attention={asked!r} of {heads}, {query[-2]} queries and {key[-2]} keys on the mesh ({specs[0].layout.mesh}): "
        "no mesh axis can be given these loops; 'context' and 'split-keys' need no heads, or leave the choice to dshard"
    )
