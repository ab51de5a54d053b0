"""Seconds and buffers of a matmul that runs in panels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PanelCost:
    """A matmul in `panels` panels: seconds of the forward pass, and the most bytes that the first rank has in buffers.

    Buffers hold what is gathered, sent and received; not the stored operands, nor the result.
    """

    panels: int
    seconds: float
    buffer_bytes: int
