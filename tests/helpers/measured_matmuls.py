"""Matmuls on simulated ranks: values, gradients, and traffic in forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dshard import DTensor, Layout, Mesh, Schedule, matmul, trace, use_topology
from dshard.layout import parse_layout
from dshard.ops.matmul.options import Saved
from dshard.testing import distribute, simulated, whole
from dshard.topology import BYTES
from dshard.trace import Trace

ITEMSIZE = 8
Sizes = tuple[int, int, int]


def reals(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def received(sent: Trace) -> float:
    """Return the number of elements that each rank received."""
    return sent.nbytes / ITEMSIZE


def collectives(sent: Trace) -> Counter[str]:
    """Count the collectives by kind and axis, as "all_gather row"."""
    return Counter(f"{event.collective} {event.axis}" for event in sent.events)


@dataclass(frozen=True, slots=True)
class Measured:
    """The layouts of Y = X W and its gradients, their error against dense ones, and the traffic of both passes."""

    layouts: tuple[str, ...]  # of X, W, Y, dX, dW
    error: float
    forward: Trace
    backward: Trace


def measure(
    mesh: Mesh, strategy: str | Schedule, sizes: Sizes, stored: Sequence[Layout | str], saved: Saved = "auto"
) -> Measured:
    """Run a matmul of X and W in the `stored` layouts, on a topology in which only bytes take time."""
    m, k, n = sizes
    x, w, grad = reals(m, k), reals(k, n), reals(m, n)
    layout_x, layout_w = (parse_layout(s, mesh) if isinstance(s, str) else s for s in stored)
    with simulated(mesh), use_topology(BYTES):
        a, b = distribute(x, layout_x).requires_grad_(), distribute(w, layout_w).requires_grad_()
        with trace() as forward:
            y = matmul(a, b, strategy=strategy, saved=saved)
        cotangent = distribute(grad, y.layout.cotangent())
        with trace() as backward:
            y.backward(cotangent)
        results: list[DTensor] = [a, b, y, a.grad, b.grad]
        wholes = [whole(t.detach()) for t in results]
    expected = [x, w, x @ w, grad @ w.mT, x.mT @ grad]
    error = max((mine - right).abs().max().item() for mine, right in zip(wholes, expected, strict=True))
    return Measured(tuple(str(t.layout) for t in results), error, forward, backward)
