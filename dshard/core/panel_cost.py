"""Seconds and buffers of a matmul that runs in panels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PanelCost:
    """A matmul in `panels` panels: seconds of the forward pass, and the most bytes that the first rank has in buffers.

    Buffers hold what is gathered, sent and received; not the stored operands, nor the result.
    """

    panels: int
    seconds: float
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Panels:
    """The number of panels that a matmul runs in, and what it takes in each number worth trying, when asked."""

    costs: Callable[[], tuple[PanelCost, ...]] = tuple
    run_in: int = 1


IN_BULK = Panels()
