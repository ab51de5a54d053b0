"""Price a matmul in panels: seconds, from the prices of its steps on one panel, and bytes in buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from dshard.caches import cached
from dshard.cost import copy_seconds, messages_seconds, work_seconds
from dshard.layout import Shape
from dshard.ops.matmul.panel_executor import PanelExecutor, PlannedMatmul
from dshard.ops.matmul.symmetric import FusedMatmul, SymmetricExecutor, fused_matmul
from dshard.rules.panel_cut import factor_of
from dshard.rules.panel_stream import PANELS, PanelCost, Stream
from dshard.rules.rule import Term

BULK = Stream(1)


def in_panels(matmul: PlannedMatmul) -> tuple[PanelCost, ...]:
    """The prices of the matmul in bulk, then in each number of panels worth trying; in bulk alone if nothing is cut.

    The last price is that of symmetric memory, on a topology that says that NVLink joins the ranks, on one host.
    """
    fused = fused_matmul(matmul)
    if fused is not None and matmul.topology.nodes(matmul.mesh, (fused.axis,)) is None:
        fused = None
    return _prices(matmul, fused)


@cached("prices in panels", 4096)
def _prices(matmul: PlannedMatmul, fused: FusedMatmul | None) -> tuple[PanelCost, ...]:
    return (*_in_panels(matmul), *([] if fused is None else [_in_a_kernel(matmul, fused)]))


def cheapest(costs: Sequence[PanelCost], limit: int | None = None) -> PanelCost:
    """The fastest price whose buffers are within `limit` bytes, or else the price with the smallest buffers.

    Of two equally fast ones, that with fewer panels.
    """
    fits = [each for each in costs if limit is None or each.buffer_bytes <= limit]
    if fits:
        return min(fits, key=lambda each: (each.seconds, each.panels))
    return min(costs, key=lambda each: (each.buffer_bytes, each.panels))


def _in_panels(matmul: PlannedMatmul) -> Iterator[PanelCost]:
    sizes = matmul.sizes()
    factor = factor_of(matmul.rule, BULK, matmul.plans, sizes)
    for panels in PANELS if factor is not None else PANELS[:1]:
        if factor is not None and panels > sizes[factor]:
            return
        nbytes = PanelExecutor(matmul, Stream(panels)).transient_bytes((0,) * matmul.mesh.ndim)
        yield PanelCost(panels, _seconds(matmul, factor, panels), nbytes)


def _seconds(matmul: PlannedMatmul, factor: str | None, panels: int) -> float:
    """Seconds of a matmul in panels: communication of one panel overlaps with the local matmul of another.

    A panel is multiplied while the next is gathered and the one before is reduced; tensors that are not cut move alone.
    The first panel is gathered and the last one multiplied and reduced alone; in between the slower of communication
    and multiplying counts.
    """
    plans, terms = matmul.plans, matmul.terms
    cut = [factor is not None and (factor,) in term for term in terms]
    shapes = [_panel(plan.shape, term, factor, panels) for plan, term in zip(plans, terms, strict=True)]
    alone = sum(plan.seconds for plan, is_cut in zip(plans, cut, strict=True) if not is_cut)
    moves = [
        plan.seconds_on(matmul.topology, matmul.dtype.itemsize, shape) if is_cut else 0.0
        for plan, shape, is_cut in zip(plans, shapes, cut, strict=True)
    ]
    into, out = sum(moves[:2]), moves[2]
    work = _work(matmul, shapes)
    return alone + into + (panels - 1) * max(into + out, work) + work + out


def _in_a_kernel(matmul: PlannedMatmul, fused: FusedMatmul) -> PanelCost:
    """The price of a matmul in a kernel of torch for symmetric memory.

    By `_pipelined_multi_all_gather_and_consume` of torch.distributed._symmetric_memory, on two streams that take turns:
    a rank copies its own chunk to where others read it, then multiplies it beside the first of n - 1 copies from peers,
    each chunk beside the copy of the next; three barriers. By `_pipelined_produce_and_all2all` it multiplies chunk
    after chunk, its own last, each beside the copy of the one before between two barriers; then n terms are summed.
    Where a switch multicasts, torch gathers up to 2,048 rows at once instead, and multiplies in bulk.
    """
    (rule, plans, dtype, topology, _), mesh = matmul, matmul.mesh
    n, scatters, itemsize = mesh.shape[mesh.axis(fused.axis)], fused.tensor == 2, dtype.itemsize
    shapes = [_panel(plan.shape, term, fused.factor, n) for plan, term in zip(plans, matmul.terms, strict=True)]
    received = plans[fused.tensor].busiest() * itemsize
    barrier, chunk = topology.link(mesh, (fused.axis,), "permute").latency, received / (n - 1)
    copy = messages_seconds(chunk, 1, topology.link(mesh, (fused.axis,), "all_to_all"))
    work = _work(matmul, shapes)
    if scatters:
        seconds = (n - 1) * max(copy + 2 * barrier, work) + work + 2 * barrier
        seconds += work_seconds(0.0, (n + 1) * chunk, topology)
    else:
        seconds = copy_seconds(chunk, topology) + 3 * barrier + (n - 1) * max(copy, work) + work
    run = SymmetricExecutor(matmul, Stream(1, transport="symmetric"), fused)
    left = plans[fused.left]
    copied = (left.dst if scatters else left.src).local_numel(left.shape) * fused.copies_left(rule)
    copied += run.bias_at.local_numel(plans[2].shape) * fused.copies_result(rule)
    seconds += copy_seconds(copied * itemsize, topology) if copied else 0.0
    alone = sum(plan.seconds for i, plan in enumerate(plans) if i != fused.tensor)
    return PanelCost(1, alone + seconds, run.transient_bytes((0,) * mesh.ndim), "symmetric")


def _panel(shape: Shape, term: Term, factor: str | None, panels: int) -> Shape:
    return tuple(-(-n // panels) if names == (factor,) else n for n, names in zip(shape, term, strict=True))


def _work(matmul: PlannedMatmul, shapes: Sequence[Shape]) -> float:
    """Seconds of the local matmul of tensors of these global shapes, in the destination layouts of the plans."""
    plans, dtype = matmul.plans, matmul.dtype
    layouts = (plans[0].dst, plans[1].dst, plans[2].src)
    local = [layout.largest_shape(shape) for layout, shape in zip(layouts, shapes, strict=True)]
    sizes = {
        name: n
        for term, shape in zip(matmul.terms, local, strict=True)
        for names, n in zip(term, shape, strict=True)
        for name in names
    }
    nbytes = sum(map(prod, local)) * dtype.itemsize
    return work_seconds(2.0 * prod(sizes.values()), nbytes, matmul.topology, str(dtype).removeprefix("torch."))
