"""A product of given sizes on a mesh that need not exist: every way to run it, priced.

Each mesh axis takes one loop, m, n or k, or none. The tensor without that loop moves there: an operand is stored whole
or in parts that are gathered, the product is reduced to all or to parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from dshard.cost import work_seconds
from dshard.errors import LayoutError, ShapeError
from dshard.explain.price import Moved, candidate, combined, moved
from dshard.explain.values import Candidate, Explanation, why_chosen
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.ops.bound import matmul_lower_bound
from dshard.ops.matmul import matmul_rule
from dshard.ops.settings import current
from dshard.ops.strategy import Operand, choose, strategies
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.topology import Topology


class Product(NamedTuple):
    """The sizes of `m x k @ k x n`, and where it runs."""

    m: int
    k: int
    n: int
    mesh: Mesh
    dtype: torch.dtype
    topology: Topology


class Loop(NamedTuple):
    """What one mesh axis does: the loop it splits, and the loop over which the tensor without it is stored there."""

    loop: str | None
    stored: str | None = None

    def name(self) -> str:
        """As in a table.

        >>> Loop("m", "k").name(), Loop("k").name(), Loop(None).name()
        ('m[B:k]', 'k', '-')
        """
        if self.loop is None:
            return "-"
        return self.loop if self.stored is None else f"{self.loop}[{MOVING[self.loop]}:{self.stored}]"


MOVING = {"m": "B", "n": "A", "k": "C"}
DIMS = {"A": "mk", "B": "kn", "C": "mn"}
LOOPS = (
    Loop(None),
    *(Loop(loop, stored) for loop, moving in MOVING.items() for stored in (None, *DIMS[moving])),
)
"""The ten choices for one mesh axis."""
LEGEND = (
    "m, n, k: the loop that a mesh axis splits; m[B:k]: B is stored split over k there, and gathered; "
    "k[C:n]: the product is reduced to parts of n"
)


def explain_matmul(
    m: int,
    k: int,
    n: int,
    mesh: Mesh,
    topology: Topology | None = None,
    *,
    a: Layout | None = None,
    b: Layout | None = None,
    dtype: torch.dtype = torch.bfloat16,
    one_copy: bool = False,
) -> Explanation:
    """The ways to multiply `m` x `k` by `k` x `n` on `mesh`, from cheapest to dearest. No processes, no tensors.

    With the layouts `a` and `b` of the operands: what `a @ b` considers, and chooses. Without them: every loop and
    storage of every mesh axis, the operands lying where that way wants them; with `one_copy`, only those in which each
    tensor is stored once. Without a `topology`, the one in use.

    Raises:
        LayoutError: only one of `a` and `b`, or one that does not fit.
        ShapeError: a size below one.
        TopologyError: the topology has not so many ranks.
    """
    if min(m, k, n) < 1:
        raise ShapeError(f"a product of {m} x {k} by {k} x {n}: all sizes must be above zero")
    why = current().why_topology(mesh) if topology is None else "as given"
    asked = Product(m, k, n, mesh, dtype, current().topology_of(mesh) if topology is None else topology)
    if a is None and b is None:
        candidates = sorted(_ways(asked), key=lambda c: (c.seconds, c.bytes_moved, c.peak_bytes, c.name))
        candidates = [c for c in candidates if c.one_copy or not one_copy]
        return _explained(asked, why, ("A", "B"), candidates, candidates[0])
    if a is None or b is None:
        raise LayoutError(f"only the layout of {'b' if a is None else 'a'} is given: give both, or neither to search")
    return _explained(asked, why, (f"A [{a}]", f"B [{b}]"), *_given(asked, a, b))


def _explained(
    asked: Product, why: str, operands: tuple[str, str], candidates: list[Candidate], chosen: Candidate
) -> Explanation:
    m, k, n, mesh, dtype, topology = asked
    described = tuple(
        f"{name} {shape} {str(dtype).removeprefix('torch.')} on {mesh}"
        for name, shape in zip(operands, ((m, k), (k, n)), strict=True)
    )
    rule = str(matmul_rule((m, k), (k, n)))
    reason = why_chosen(chosen, candidates)
    return Explanation(
        "matmul", described, rule, topology.name, str(topology), why, tuple(candidates), len(candidates), chosen, reason
    )


def _given(asked: Product, a: Layout, b: Layout) -> tuple[list[Candidate], Candidate]:
    """What the library considers for operands that lie like this, and what it takes."""
    m, k, n, _, dtype, topology = asked
    operands = (Operand(a, (m, k), dtype.itemsize), Operand(b, (k, n), dtype.itemsize))
    outputs = (((m, n), dtype.itemsize),)
    rule = matmul_rule((m, k), (k, n))
    priced = sorted(strategies(rule, operands, outputs, topology), key=lambda s: (s.seconds, s.moves))
    found = {strategy: candidate(rule, strategy, operands, outputs, topology) for strategy in priced}
    return list(found.values()), found[choose(rule, operands, outputs, topology)]


def _ways(asked: Product) -> Iterator[Candidate]:
    """Every loop and storage of every mesh axis, the operands lying where that way wants them."""
    mesh, itemsize = asked.mesh, asked.dtype.itemsize
    bound = matmul_lower_bound(asked.m, asked.k, asked.n, mesh.size) * itemsize
    for loops in product(LOOPS, repeat=mesh.ndim):
        a, b, c = (_moved(asked, tensor, loops) for tensor in DIMS)
        yield combined(
            " ".join(f"{axis}:{loop.name()}" for axis, loop in zip(mesh.names, loops, strict=True)),
            f"{a.plan.src}, {b.plan.src} -> {c.plan.dst}",
            (a.plan.seconds + b.plan.seconds, _compute(asked, loops, a, b, c), c.plan.seconds),
            (a, b),
            (c,),
            bound,
        )


def _moved(asked: Product, tensor: str, loops: tuple[Loop, ...]) -> Moved:
    """How one tensor moves: from where it is stored to where the work is, or the product from there."""
    placements = [_placements(tensor, loop) for loop in loops]
    stored, worked = (_layout(asked.mesh, placements, i) for i in range(2))
    ends = (worked, stored) if tensor == "C" else (stored, worked)
    m, k = (getattr(asked, loop) for loop in DIMS[tensor])
    return moved(*ends, (m, k), asked.dtype.itemsize, asked.topology)


def _placements(tensor: str, loop: Loop) -> tuple[Placement, Placement]:
    """Where a tensor is stored on one mesh axis, and where it is worked on."""
    dims = DIMS[tensor]
    if loop.loop is None:
        return Replicate(), Replicate()
    if loop.loop in dims:
        return Shard(dims.index(loop.loop)), Shard(dims.index(loop.loop))
    stored = Replicate() if loop.stored is None else Shard(dims.index(loop.stored))
    return stored, Partial("sum") if tensor == "C" else Replicate()


def _layout(mesh: Mesh, placements: list[tuple[Placement, Placement]], which: int) -> Layout:
    """On each dim the axes that split the work come first, so that what is gathered or reduced is contiguous."""
    order = []
    for dim in range(2):
        axes = [axis for axis, both in enumerate(placements) if both[which] == Shard(dim)]
        if axes:
            order.append((dim, tuple(sorted(axes, key=lambda axis: placements[axis][0] != placements[axis][1]))))
    return Layout(mesh, tuple(both[which] for both in placements), tuple(order))


def _compute(asked: Product, loops: tuple[Loop, ...], a: Moved, b: Moved, c: Moved) -> float:
    """Seconds of the local product."""
    taken = [loop.loop for loop in loops]
    ranks = (prod(n for n, loop in zip(asked.mesh.shape, taken, strict=True) if loop == wanted) for wanted in MOVING)
    local = [-(-getattr(asked, loop) // n) for loop, n in zip(MOVING, ranks, strict=True)]
    dtype = str(asked.dtype).removeprefix("torch.")
    return work_seconds(2.0 * prod(local), a.after + b.after + c.before, asked.topology, dtype)
