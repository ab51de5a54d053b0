"""Price a matmul in panels: seconds, from the prices of its steps on one panel, and bytes in buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from dshard.caches import cached
from dshard.core.panel_cost import PanelCost
from dshard.cost import work_seconds
from dshard.layout import Shape
from dshard.ops.matmul.panel_executor import PanelExecutor
from dshard.redistribute import Plan
from dshard.rules.expand import Operand, sizes_of
from dshard.rules.panel_cut import factor_of
from dshard.rules.panel_stream import PANELS, Stream
from dshard.rules.rule import Rule, Term
from dshard.topology import Topology

Plans = tuple[Plan, Plan, Plan]
BULK = Stream(1)


@cached("prices in panels", 4096)
def in_panels(rule: Rule, plans: Plans, dtype: torch.dtype, topology: Topology) -> tuple[PanelCost, ...]:
    """The prices of the matmul in bulk, then in each number of panels worth trying; in bulk alone if nothing is cut.

    `plans` redistribute both operands and the result.
    """
    return tuple(_in_panels(rule, plans, dtype, topology))


def cheapest(costs: Sequence[PanelCost], limit: int | None = None) -> PanelCost:
    """The fastest price whose buffers are within `limit` bytes, or else the price with the smallest buffers.

    Of two equally fast ones, that with fewer panels.
    """
    fits = [each for each in costs if limit is None or each.buffer_bytes <= limit]
    if fits:
        return min(fits, key=lambda each: (each.seconds, each.panels))
    return min(costs, key=lambda each: (each.buffer_bytes, each.panels))


def _in_panels(rule: Rule, plans: Plans, dtype: torch.dtype, topology: Topology) -> Iterator[PanelCost]:
    operands = [Operand(plan.src, plan.shape, dtype.itemsize) for plan in plans[:2]]
    sizes = sizes_of(rule, operands, [(plans[2].shape, dtype.itemsize)])
    factor = factor_of(rule, BULK, plans, sizes)
    for panels in PANELS if factor is not None else PANELS[:1]:
        if factor is not None and panels > sizes[factor]:
            return
        run = PanelExecutor(rule, plans, dtype, Stream(panels), None)
        seconds = _seconds(rule, plans, dtype, topology, factor, panels)
        yield PanelCost(panels, seconds, run.transient_bytes((0,) * plans[0].src.mesh.ndim))


def _seconds(
    rule: Rule, plans: Plans, dtype: torch.dtype, topology: Topology, factor: str | None, panels: int
) -> float:
    """Seconds of a matmul in panels: communication of one panel overlaps with the local matmul of another.

    A panel is multiplied while the next is gathered and the one before is reduced; tensors that are not cut move alone.
    The first panel is gathered and the last one multiplied and reduced alone; in between the slower of communication
    and multiplying counts.
    """
    terms = (*rule.inputs, rule.outputs[0])
    cut = [factor is not None and (factor,) in term for term in terms]
    shapes = [_panel(plan.shape, term, factor, panels) for plan, term in zip(plans, terms, strict=True)]
    alone = sum(plan.seconds for plan, is_cut in zip(plans, cut, strict=True) if not is_cut)
    moves = [
        plan.seconds_on(topology, dtype.itemsize, shape) if is_cut else 0.0
        for plan, shape, is_cut in zip(plans, shapes, cut, strict=True)
    ]
    into, out = sum(moves[:2]), moves[2]
    work = _work(rule, plans, shapes, dtype, topology)
    return alone + into + (panels - 1) * max(into + out, work) + work + out


def _panel(shape: Shape, term: Term, factor: str | None, panels: int) -> Shape:
    return tuple(-(-n // panels) if names == (factor,) else n for n, names in zip(shape, term, strict=True))


def _work(rule: Rule, plans: Plans, shapes: Sequence[Shape], dtype: torch.dtype, topology: Topology) -> float:
    """Seconds of the local matmul of tensors of these global shapes, in the destination layouts of the plans."""
    layouts = (plans[0].dst, plans[1].dst, plans[2].src)
    local = [layout.local_shape(shape, (0,) * layout.mesh.ndim) for layout, shape in zip(layouts, shapes, strict=True)]
    sizes = {
        name: n
        for term, shape in zip((*rule.inputs, rule.outputs[0]), local, strict=True)
        for names, n in zip(term, shape, strict=True)
        for name in names
    }
    nbytes = sum(map(prod, local)) * dtype.itemsize
    return work_seconds(2.0 * prod(sizes.values()), nbytes, topology, str(dtype).removeprefix("torch."))
