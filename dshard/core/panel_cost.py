"""Seconds and buffers of a matmul that runs in panels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dshard.rules.panel_stream import Transport


@dataclass(frozen=True, slots=True)
class PanelCost:
    """A matmul in `panels` panels: seconds of the forward pass, and the peak bytes of the first rank's buffers.

    Buffers hold gathered, sent and received elements; not the stored operands, nor the result. With the transport
    "symmetric" a kernel cuts the panels, and `panels` is one.
    """

    panels: int
    seconds: float
    buffer_bytes: int
    transport: Transport = "collective"


@dataclass(frozen=True, slots=True)
class Panels:
    """The number of panels that a matmul runs in, their transport, and a function of the cost of each choice."""

    costs: Callable[[], tuple[PanelCost, ...]] = tuple
    run_in: int = 1
    transport: Transport = "collective"


IN_BULK = Panels()
