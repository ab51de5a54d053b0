"""How a tensor gets from a layout on one mesh to a layout on another: planned once, then printed, priced and run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dshard.errors import MeshError
from dshard.layout import Layout, Shape
from dshard.placements import Partial, Replicate
from dshard.redistribute import Plan, plan
from dshard.reshard.chain import Chain, whole_span
from dshard.reshard.tasks import pending_axes, tasks
from dshard.topology import Topology


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """How a tensor of global `shape` gets from `src` to `dst`, on another mesh.

    `first`, if any, runs on the source mesh, then `chains` send from mesh to mesh, then `last`, if any, runs on the
    destination mesh. What a rank of both meshes holds already it keeps.
    """

    src: Layout
    dst: Layout
    shape: Shape
    itemsize: int
    first: Plan | None
    chains: tuple[Chain, ...]
    last: Plan | None

    @property
    def held(self) -> Layout:
        """The layout on the source mesh from which the chains send."""
        return self.src if self.first is None else self.first.dst

    @property
    def landed(self) -> Layout:
        """The layout on the destination mesh to which the chains send."""
        return self.dst if self.last is None else self.last.src

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of either mesh: those that take part."""
        return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))


def plan_reshard(
    src: Layout, dst: Layout, shape: Sequence[int], itemsize: int, topology: Topology, *, seed: int = 0
) -> ReshardPlan:
    """The plan from `src` to `dst` for a tensor of global `shape` with elements of `itemsize` bytes.

    Raises:
        MeshError: meshes of different device types.
        LayoutError: a layout shards a dim that the tensor does not have.
    """
    return _plan(src, dst, tuple(shape), itemsize, topology, seed)


@lru_cache(maxsize=4096)
def _plan(src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology, seed: int) -> ReshardPlan:
    if src.mesh.device_type != dst.mesh.device_type:
        raise MeshError(
            f"cannot reshard from the mesh ({src.mesh}) on {src.mesh.device_type} to the mesh ({dst.mesh}) on "
            f"{dst.mesh.device_type}: move the local tensors to one type of device first"
        )
    src.check(shape)
    dst.check(shape)
    whole = _settled(src)
    first = None if whole == src else plan(src, whole, shape, itemsize, topology)
    landed = _settled(dst)
    last = None if landed == dst else plan(landed, dst, shape, itemsize, topology)
    load: Counter[int] = Counter()
    chains = []
    for task in tasks(whole, landed, shape):
        for rank in task.receivers:
            sender = min(task.holders[0], key=lambda holder: load[holder])
            load[sender] += len(whole_span(task.region))
            chains.append(Chain(task.region, whole_span(task.region), (sender, rank), "send"))
    return ReshardPlan(src, dst, shape, itemsize, first, tuple(chains), last)


def _settled(layout: Layout) -> Layout:
    """The layout with each pending reduction completed."""
    if not pending_axes(layout) and not layout.partial_axes():
        return layout
    done = tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements)
    return Layout(layout.mesh, done, layout.order)
