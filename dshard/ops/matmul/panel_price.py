"""Price a matmul in panels: seconds, from the prices of its steps on one panel, and bytes in buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from dshard.caches import cached
from dshard.cost import collective_seconds, copy_seconds, work_seconds
from dshard.layout import Shape
from dshard.ops.matmul.panel_executor import PanelExecutor
from dshard.ops.matmul.symmetric import FusedMatmul, SymmetricExecutor, fused_matmul
from dshard.redistribute import Plan
from dshard.rules.expand import Operand, sizes_of
from dshard.rules.panel_cut import factor_of
from dshard.rules.panel_stream import PANELS, PanelCost, Stream
from dshard.rules.rule import Rule, Term
from dshard.topology import Topology

Plans = tuple[Plan, Plan, Plan]
BULK = Stream(1)


def in_panels(rule: Rule, plans: Plans, dtype: torch.dtype, topology: Topology) -> tuple[PanelCost, ...]:
    """The prices of the matmul in bulk, then in each number of panels worth trying; in bulk alone if nothing is cut.

    `plans` redistribute both operands and the result. The last price is that of symmetric memory, on a topology that
    says that NVLink joins the ranks, on one host.
    """
    fused = fused_matmul(rule, plans, dtype, topology)
    if fused is not None and topology.nodes(plans[0].src.mesh, (fused.axis,)) is None:
        fused = None
    return _prices(rule, plans, dtype, topology, fused)


@cached("prices in panels", 4096)
def _prices(
    rule: Rule, plans: Plans, dtype: torch.dtype, topology: Topology, fused: FusedMatmul | None
) -> tuple[PanelCost, ...]:
    in_a_kernel = [] if fused is None else [_in_a_kernel(rule, plans, dtype, topology, fused)]
    return (*_in_panels(rule, plans, dtype, topology), *in_a_kernel)


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


def _in_a_kernel(rule: Rule, plans: Plans, dtype: torch.dtype, topology: Topology, fused: FusedMatmul) -> PanelCost:
    """The price of a matmul in a kernel of torch for symmetric memory.

    By `_pipelined_multi_all_gather_and_consume` of torch.distributed._symmetric_memory, on two streams that take turns:
    a rank copies its own chunk to where others read it, then multiplies it beside the first of n - 1 copies from peers,
    each chunk beside the copy of the next; three barriers. By `_pipelined_produce_and_all2all` it multiplies chunk
    after chunk, its own last, each beside the copy of the one before between two barriers; then n terms are summed.
    Where a switch multicasts, torch gathers up to 2,048 rows at once instead, and multiplies in bulk.
    """
    mesh, moved = plans[0].src.mesh, plans[fused.tensor]
    n, scatters = mesh.shape[mesh.axis(fused.axis)], fused.tensor == 2
    terms, itemsize = (*rule.inputs, rule.outputs[0]), dtype.itemsize
    shapes = [_panel(plan.shape, term, fused.factor, n) for plan, term in zip(plans, terms, strict=True)]
    received = moved.busiest() * itemsize
    copy = collective_seconds("all_to_all", received, mesh, (fused.axis,), topology) / (n - 1)
    barrier, chunk = topology.link(mesh, (fused.axis,), "permute").latency, received / (n - 1)
    work = _work(rule, plans, shapes, dtype, topology)
    if scatters:
        seconds = (n - 1) * max(copy + 2 * barrier, work) + work + 2 * barrier
        seconds += work_seconds(0.0, (n + 1) * chunk, topology)
    else:
        seconds = copy_seconds(chunk, topology) + 3 * barrier + (n - 1) * max(copy, work) + work
    run, first = SymmetricExecutor(rule, plans, dtype, Stream(1, transport="symmetric"), None, fused), (0,) * mesh.ndim
    left = plans[fused.left]
    copied = prod((left.dst if scatters else left.src).local_shape(left.shape, first)) * fused.copies_left(rule)
    copied += prod(run.bias_at.local_shape(plans[2].shape, first)) * fused.copies_result(rule)
    seconds += copy_seconds(copied * itemsize, topology) if copied else 0.0
    alone = sum(plan.seconds for i, plan in enumerate(plans) if i != fused.tensor)
    return PanelCost(1, alone + seconds, run.transient_bytes(first), "symmetric")


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
