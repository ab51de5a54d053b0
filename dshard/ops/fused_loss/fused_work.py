"""The local work of a fused cross entropy, in seconds: its own operators, run without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import Program, run_without_data
from dshard.core.local_work import seconds_of_local_work
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.ops.fused_loss.chunked_loss import ChunkedLoss, Joining
from dshard.placements import Replicate, Shard
from dshard.topology import Topology

_MESH = Mesh((2, 2, 2), ("rows", "classes", "features"))
"""A mesh that stands for any: the operators of a rank depend on what is joined, not on how many ranks join it."""


def local_loss(loss: ChunkedLoss, classes: int) -> ChunkedLoss:
    """What a rank with so many classes computes, the same for all meshes on which it joins the same."""
    joining = loss.joining
    assert joining is not None
    joined = enumerate((joining.rows, joining.classes, joining.features))
    of_rows, of_classes, of_features = ((axis,) if axes else () for axis, axes in joined)
    stands_for = Joining(_MESH, of_rows, of_classes, of_features, joining.topology)
    options = replace(loss.options, classes=classes * (2 if of_classes else 1))
    held = Layout(_MESH, (Replicate(), Shard(0) if of_classes else Replicate(), Replicate()))
    return replace(loss, options=options, joining=stands_for, classes=held)


@dataclass(frozen=True, slots=True)
class LocalWork:
    """The operators of the rank with the most rows and classes, for local operands of these shapes and dtypes.

    The first operands are x, weight and target; those `needed` get a gradient.
    """

    loss: ChunkedLoss
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    needed: tuple[bool, ...]
    topology: Topology

    def seconds(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass."""
        return _seconds(self)

    def forward(self, rows: int) -> float:
        """Seconds of the forward pass of so many rows."""
        loss = replace(self.loss, most=rows)
        return self._of(partial(loss.program, self.of_operands), self.operands(rows))

    def backward(self, rows: int) -> float:
        """Seconds of the backward pass of so many rows."""
        if not any(self.needed):
            return 0.0
        loss, wide = replace(self.loss, most=rows), torch.empty(rows, device="meta")
        if loss.options.reduction == "none":
            return self._of(partial(loss.gradients, self.of_operands), [wide, *self.operands(rows)])
        x, weight, _, *rest = self.operands(rows)
        kept = [t for t, is_needed in zip((x, weight, *rest[:1]), self.of_operands, strict=False) if is_needed]
        number = wide.new_empty((), dtype=torch.float32 if x.dtype.itemsize < 4 else x.dtype)
        gradients = [t.to(number.dtype) if i or not self.needed[0] else t for i, t in enumerate(kept)]
        dtypes = [t.dtype for t in kept]
        return seconds_of_local_work(lambda: loss.scaled(number, number, *gradients, dtypes=dtypes), self.topology)

    @property
    def of_operands(self) -> tuple[bool, bool, bool]:
        """Whether x, weight and bias get a gradient."""
        return self.needed[0], self.needed[1], self.loss.has_bias and self.needed[3]

    def operands(self, rows: int) -> list[Tensor]:
        """Local operands without data, of so many rows."""
        (x, *_), (weight, _, *rest) = self.shapes, self.shapes[1:]
        shapes = ((rows, x[-1]), weight, (rows,), *rest)
        return [
            torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, self.dtypes, strict=True)
        ]

    def _of(self, make: Callable[..., Program[tuple[Tensor, ...]]], tensors: list[Tensor]) -> float:
        assert self.loss.joining is not None
        at = (0,) * self.loss.joining.mesh.ndim
        return seconds_of_local_work(lambda: run_without_data(make, tensors, at), self.topology)


@cached("local work", 4096)
def _seconds(work: LocalWork) -> tuple[float, float]:
    """All chunks but the last have equally many rows, so that a few are run."""
    rows, size = prod(work.shapes[0][:-1]), work.loss.size
    chunks, rest = divmod(rows, size)
    if chunks < 2:
        return work.forward(rows), work.backward(rows)
    first = work.forward(size)
    forward = first + (chunks - 1) * (work.forward(2 * size) - first)
    if rest:
        forward += work.forward(size + rest) - first
    if work.loss.options.reduction != "none":
        return forward, work.backward(rows)
    first = work.backward(size)
    backward = first + (chunks - 1) * (work.backward(2 * size) - first)
    return forward, backward + (work.backward(size + rest) - first if rest else 0.0)
