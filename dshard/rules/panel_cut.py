"""Choose the factor of a matmul to cut into panels, and the indices of each panel."""

from __future__ import annotations

from collections.abc import Sequence

from dshard.layout import Layout
from dshard.redistribute import Plan
from dshard.redistribute.panel import Ranges, cuts, slices, summa_panels
from dshard.rules.matmul_loops import factors_of
from dshard.rules.panel_stream import Stream
from dshard.rules.rule import Rule, Term


def factor_of(rule: Rule, stream: Stream, plans: Sequence[Plan], sizes: dict[str, int]) -> str | None:
    """The factor to cut into panels: among the allowed loops, the most communicated; None if nothing is communicated.

    Nor are there panels of tensors that are sharded in blocks. Among equals, one that is not contracted, as its panels
    need not be summed, and the largest.
    """
    if have_blocks(plans):
        return None
    terms = (*rule.inputs, *rule.outputs)
    moved = [plan.busiest() for plan in plans]
    best: tuple[int, bool, int] = (0, False, 0)
    best_factor = None
    for loop, factors in factors_of(rule).items():
        for factor in sorted(f for f in factors if isinstance(f, str)):
            volume = sum(n for n, term in zip(moved, terms, strict=True) if (factor,) in term)
            key = (volume, loop != "k", sizes[factor])
            if volume and key > best and stream.axis in (None, loop):
                best, best_factor = key, factor
    return best_factor


def have_blocks(plans: Sequence[Plan]) -> bool:
    """Whether one of the plans is of a tensor that is sharded in blocks."""
    return any(plan.src.blocks or plan.dst.blocks for plan in plans)


def panels_of(
    factor: str, size: int, terms: Sequence[Term], plans: Sequence[Plan], stream: Stream
) -> tuple[Ranges, ...]:
    """The panels of a factor of this size: the same index ranges for all tensors with the factor."""
    ends: list[tuple[Layout, int]] = []
    split: list[tuple[Layout, int]] = []
    for i, (term, plan) in enumerate(zip(terms, plans, strict=True)):
        if (factor,) in term:
            dim = term.index((factor,))
            stored, computed = (plan.src, plan.dst) if i < 2 else (plan.dst, plan.src)
            split.append((computed, dim))
            ends += [(stored, dim)] if plan.steps else []
    bounds = cuts(size, split)
    points = cuts(size, [*split, *ends])
    if stream.transport == "broadcast":
        return summa_panels(points, bounds, stream.panels)
    return slices(points, stream.panels)
