"""Seconds and buffers of a matmul that runs in panels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PanelCost:
    """A matmul in `panels` panels: seconds of the forward pass, and the peak bytes of the first rank's buffers.

    Buffers hold gathered, sent and received elements; not the stored operands, nor the result.
    """

    panels: int
    seconds: float
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Panels:
    """The number of panels that a matmul runs in, and a function of the cost of each number worth trying."""

    costs: Callable[[], tuple[PanelCost, ...]] = tuple
    run_in: int = 1


IN_BULK = Panels()
