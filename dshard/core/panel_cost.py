"""What a matmul takes in a number of panels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PanelCost:
    """A product in so many panels: seconds going forward, and the most bytes that the first rank has in buffers.

    Buffers hold what is gathered, sent and received; not what is stored, nor the product as it is made.
    """

    panels: int
    seconds: float
    buffer_bytes: int
