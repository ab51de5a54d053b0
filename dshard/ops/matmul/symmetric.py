"""Matmuls fused with a collective: torch's kernels for GPUs on one host, which read each other's memory.

A rank multiplies the chunk that it holds while it copies that of another, or copies the terms of one chunk while it
computes those of the next (torch.distributed._symmetric_memory). One tensor goes this way, the others are redistributed
in bulk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dshard.comm import (
    Factor,
    Program,
    Request,
    Session,
    Transfer,
    device_mesh_of,
    has_only_shape,
    on_one_host,
    planned_backend,
    simulated_ranks,
    steps_of,
)
from dshard.errors import StrategyError
from dshard.layout import Shape
from dshard.mesh import Coordinate, Mesh
from dshard.ops.matmul.panel_executor import PanelExecutor, PlannedMatmul
from dshard.placements import Partial, Replicate, Shard
from dshard.redistribute import Plan
from dshard.rules.matmul_loops import factors_of
from dshard.rules.panel_stream import Stream
from dshard.rules.rule import Rule, Term
from dshard.topology import Topology
from dshard.torch_private import is_there, late

_BULK = Stream(1)
_OPERATORS = "torch.distributed._symmetric_memory"
"""The module that defines the operators: prices ask whether it is there, executors load it."""


@dataclass(frozen=True, slots=True)
class FusedMatmul:
    """A matmul as torch's kernel computes it: `rows` and `summed` dims of the left operand, `columns` of the right one.

    `tensor` is gathered along the mesh axis, or is the result (2) and reduce-scattered; `left` is the number of the
    left operand, `dim` that of the rows, or of the columns after them, which are gathered or scattered.
    """

    tensor: int
    axis: str
    left: int
    dim: int
    rows: Term
    summed: Term
    columns: Term

    @property
    def factor(self) -> str:
        """The factor whose chunks are gathered or scattered."""
        (name,) = (*self.rows, *self.columns)[self.dim]
        return name

    def copies_left(self, rule: Rule) -> bool:
        """Whether the left operand is copied: rows before `dim` go behind it, and a chunk to gather is contiguous."""
        ordered = rule.inputs[self.left] == (*self.rows, *self.summed)
        return 0 < self.dim < len(self.rows) or (self.tensor != 2 and not ordered)

    def copies_result(self, rule: Rule) -> bool:
        """Whether the result is copied: after a gather rows before `dim` are behind it, and columns are always last."""
        return rule.outputs[0] != (*self.rows, *self.columns) or (self.tensor != 2 and self.dim > 0)


def check_symmetric(stream: Stream, mesh: Mesh, topology: Topology) -> None:
    """Refuse symmetric memory where the processes of a mesh, or this torch, have none."""
    if not (_has_symmetric_memory(mesh, topology) and _has_loaded()):
        who = "simulated ranks" if simulated_ranks() is not None else f"backend {planned_backend(mesh).name!r}"
        raise StrategyError(
            f"{stream} on the mesh ({mesh}) with {who}: symmetric memory is that of GPUs over NCCL; "
            "use the transport 'collective' or 'ring', or panels='auto', which takes what there is"
        )


def _has_symmetric_memory(mesh: Mesh, topology: Topology) -> bool:
    """Whether the processes of a mesh have symmetric memory; without any, whether those of the topology do."""
    is_planned = device_mesh_of(mesh) is mesh and topology.backend == "nccl"
    if not (is_planned or planned_backend(mesh).multiplies) or simulated_ranks() is not None:
        return False
    return is_there(_OPERATORS)


def _has_loaded() -> bool:
    try:
        late(_OPERATORS)
    except ImportError:
        return False
    return True


def fused_matmul(matmul: PlannedMatmul, loop: str | None = None) -> FusedMatmul | None:
    """The kernel for the most communicated tensor that one takes; None if there is none.

    A kernel takes a floating dtype, and equal chunks along one mesh axis, whose ranks NVLink joins on one host, as far
    as the topology and torchrun tell; chunks to gather of a multiple of 16 bytes. Batches of matmuls have none, nor
    have operands gathered along a summed dim.
    """
    (rule, plans, dtype, topology, _), mesh = matmul, matmul.mesh
    terms = a, b, out = matmul.terms
    if not _has_symmetric_memory(mesh, topology) or not dtype.is_floating_point or dtype.itemsize == 1:
        return None
    if list(mesh.ranks) != sorted(mesh.ranks) or any(len(names) != 1 for term in terms for names in term):
        return None
    if set(a) & set(b) & set(out):
        return None
    allowed = {(f,) for each, names in factors_of(rule).items() if loop in (None, each) for f in names}
    for i in sorted(range(3), key=lambda i: -plans[i].busiest()):
        moved = _moved(plans[i], dtype, topology, reduces=i == 2)
        if moved is None or (factor := terms[i][moved[1]]) not in allowed:
            continue
        for left in (i,) if i < 2 else (0, 1) if out[0] in a else (1, 0):
            mine, other = (a, b) if left == 0 else (b, a)
            rows, columns = (tuple([name for name in out if name in term]) for term in (mine, other))
            summed = tuple([name for name in mine if name not in out])
            dims = rows if i < 2 or len(columns) > 1 else (*rows, *columns)
            if rows and columns and summed and factor in dims and {*summed, *columns} == set(other):
                return FusedMatmul(i, moved[0], left, dims.index(factor), rows, summed, columns)
    return None


def changed_axis(plan: Plan, *, reduces: bool) -> int | None:
    """The only axis on which a plan gathers, or reduce-scatters a partial sum; None if it does anything else."""
    pairs = enumerate(zip(plan.src.placements, plan.dst.placements, strict=True))
    changed = [axis for axis, (a, b) in pairs if a != b]
    if len(changed) != 1 or not plan.busiest():
        return None
    (axis,) = changed
    full, sharded = (plan.src, plan.dst) if reduces else (plan.dst, plan.src)
    before = Partial() if reduces else Replicate()
    placement = sharded.placements[axis]
    if full.placements[axis] != before or not isinstance(placement, Shard):
        return None
    return axis if full.replace(axis, placement) == sharded else None


def _moved(plan: Plan, dtype: torch.dtype, topology: Topology, *, reduces: bool) -> tuple[str, int] | None:
    """The mesh axis and dim of a plan whose one step gathers, or reduce-scatters, equal chunks on one host."""
    axis, mesh = changed_axis(plan, reduces=reduces), plan.src.mesh
    if axis is None or len(plan.steps) > 1:
        return None
    chunks, name = plan.dst if reduces else plan.src, mesh.names[axis]
    placement = chunks.placements[axis]
    assert isinstance(placement, Shard)
    most, least = (chunks.local_shape(plan.shape, at) for at in ((0,) * mesh.ndim, tuple(n - 1 for n in mesh.shape)))
    # few rows are gathered through a switch, in vectors of 16 bytes, and torch does not look whether they fit
    aligned = reduces or prod(most) * dtype.itemsize % 16 == 0
    if chunks.axes_of(placement.dim)[-1] != axis or most != least or not prod(least) or not aligned:
        return None
    joined = topology.nodes(mesh, (name,)) in (None, (1, "nvlink")) and on_one_host(mesh, name)
    return (name, placement.dim) if joined else None


class KernelCall(NamedTuple):
    """A rank's call of a kernel: the collective that it stands for, and where the rank's part of the bias begins.

    `sizes` are those of the result, `left` those of the left operand as it is multiplied, in the kernel's order.
    """

    transfer: Transfer
    sizes: Shape
    left: Shape
    bias: int


class SymmetricExecutor(PanelExecutor):
    """A matmul fused with the all_gather of an operand, or with the reduce_scatter of the result."""

    def __init__(self, matmul: PlannedMatmul, stream: Stream, fused: FusedMatmul) -> None:
        super().__init__(matmul, _BULK)
        self.in_bulk = PanelExecutor(matmul, _BULK)
        self.stream, self.fused, moved = stream, fused, matmul.plans[fused.tensor]
        self.uncut = tuple(i != fused.tensor for i in range(3))
        self.chunks = moved.dst if fused.tensor == 2 else moved.src
        self.bias_at = self.chunks if fused.tensor == 2 else matmul.plans[2].src
        rows, columns = (*fused.rows, *fused.summed), (*fused.summed, *fused.columns)
        self.left = [self.terms[fused.left].index(names) for names in rows]
        self.right = [self.terms[1 - fused.left].index(names) for names in columns]
        self.back = [(*fused.rows, *fused.columns).index(names) for names in self.terms[2]]
        self.whole = None if fused.tensor == 2 else fused.tensor
        self.calls: dict[Coordinate, KernelCall] = {}

    def transient_bytes(self, at: Coordinate) -> int:
        """The most bytes of buffers that the rank at `at` holds at once, those that torch allocates in the kernel too.

        An all_gather has all chunks and one that others read, a reduce_scatter two of these.
        """
        fused, mesh = self.fused, self.mesh
        chunks = mesh.shape[mesh.axis(fused.axis)] + (2 if fused.tensor == 2 else 1)
        chunk = prod(self.chunks.local_shape(self.plans[fused.tensor].shape, at))
        return super().transient_bytes(at) + chunks * chunk * self.dtype.itemsize

    def whole_program(
        self, at: Coordinate, space: Session, tensors: Sequence[Tensor], *, whole: bool = False
    ) -> Program[tuple[Tensor, ...]]:
        """The program of one rank, to its local result and, with `whole`, the gathered operand."""
        gathered: list[Tensor] | None = [] if whole and self.whole is not None else None
        rest = yield from self.program(at, space, tensors, gathered)
        return ((yield from rest), *(gathered or ()))

    def program(
        self, at: Coordinate, space: Session, tensors: Sequence[Tensor], gathered: list[Tensor] | None = None
    ) -> Program[Program[Tensor]]:
        """Run the kernel, which ends on the current stream; returns the program of the rest.

        `gathered` receives the gathered operand.
        """
        if space.runtime is None and not has_only_shape(tensors[0]):  # ranks that are simulated beside processes
            todo = self.in_bulk.compiled(at, None)
            uncut, bias = yield from todo.moved(space, tensors)
            total = self.multiply(*uncut)
            if gathered is not None:
                gathered.append(uncut[self.fused.tensor])
        else:
            todo = self.compiled(at, space.runtime)
            uncut, bias = yield from todo.moved(space, tensors)
            total, bias = yield from self._multiplied_in_kernel(at, uncut, bias, gathered)
        return (yield from self.ending(todo, total, bias, space))

    def _multiplied_in_kernel(
        self, at: Coordinate, uncut: Sequence[Tensor], bias: Tensor | None, gathered: list[Tensor] | None
    ) -> Program[tuple[Tensor, Tensor | None]]:
        """The result as the kernel leaves it, and the bias to add to it."""
        fused, call = self.fused, self.calls.get(at) or self._call(at)
        x = uncut[fused.left].permute(self.left).flatten(len(fused.rows))
        y = uncut[1 - fused.left].permute(self.right).flatten(len(fused.summed)).flatten(0, len(fused.summed) - 1)
        out = x.new_empty(call.sizes) if has_only_shape(x) else None
        factor = Factor(y, fused.dim, self.whole is not None, gathered)
        wait = yield Request(call.transfer, x, out, factor=factor)
        total = wait().view(call.sizes).permute(self.back).contiguous()
        if gathered is not None:
            whole = gathered.pop() if gathered else x.new_empty(call.left)
            gathered.append(whole.view(call.left).permute([self.left.index(i) for i in range(len(call.left))]))
        return total, None if bias is None else bias.narrow(0, call.bias, total.shape[-1])

    def _call(self, at: Coordinate) -> KernelCall:
        end, moved, left = self.plans[2], self.plans[self.fused.tensor], self.plans[self.fused.left]
        (transfer,) = steps_of(moved, None, at, self.dtype, planned_backend(self.mesh))
        assert isinstance(transfer, Transfer)
        before, region = end.src.region(end.shape, at)[-1], self.bias_at.region(end.shape, at)
        sizes = tuple([len(region[self.back.index(i)]) for i in range(len(region))])
        operand = left.dst.local_shape(left.shape, at)
        call = KernelCall(transfer, sizes, tuple([operand[i] for i in self.left]), region[-1].start - before.start)
        self.calls[at] = call
        return call
