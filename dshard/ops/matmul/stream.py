"""What it means to stream a product: which loop is cut into how many panels, how they move, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dshard.errors import StrategyError

Transport: TypeAlias = Literal["collective", "broadcast", "ring"]
TRANSPORTS: tuple[Transport, ...] = ("collective", "broadcast", "ring")


@dataclass(frozen=True, slots=True)
class Stream:
    """A product in panels of one of its loops: a panel is multiplied while the next one moves.

    The tensors that have the loop are cut, the one without it stays: C for k, A for n, B for m. `axis` None takes the
    loop whose tensors move the most bytes. By "collective" each panel has a slice of what every rank holds; by
    "broadcast" one rank after the other sends what it holds, in `panels` panels, as in SUMMA; by "ring" ranks pass
    on what they have multiplied, in `panels` panels for each rank: the collective matmul of one mesh axis (Wang et al.,
    ASPLOS 2023), Cannon's algorithm on two.

    Raises:
        StrategyError: no panels, or no such loop or transport.
    """

    panels: int
    axis: Literal["m", "n", "k"] | None = None
    transport: Transport = "collective"

    def __post_init__(self) -> None:
        if self.panels < 1:
            raise StrategyError(f"{self.panels} panels: a stream has at least one")
        if self.axis not in ("m", "n", "k", None):
            raise StrategyError(f"{self.axis!r} is no loop of a product: stream m, n or k")
        if self.transport not in TRANSPORTS:
            raise StrategyError(f"there is no transport {self.transport!r}: use {', '.join(TRANSPORTS)}")


def streamed_seconds(move: float, compute: float, panels: int, latency: float = 0.0, launch: float = 0.0) -> float:
    """Seconds of a product in so many panels, of which one is multiplied while the next moves.

    `move` and `compute` are seconds of the product in bulk, of which `latency` and `launch` are spent on each panel
    anew. The first panel is moved and the last one multiplied alone; in between the slower of the two counts.

    >>> streamed_seconds(4.0, 4.0, 1), streamed_seconds(4.0, 4.0, 4)
    (8.0, 5.0)
    """
    w = latency + (move - latency) / panels
    g = launch + (compute - launch) / panels
    return w + (panels - 1) * max(w, g) + g


def best_panels(move: float, compute: float, latency: float = 0.0, launch: float = 0.0) -> int:
    """The number of panels, of 1, 2, 4 and 8, that takes the fewest seconds.

    >>> best_panels(4.0, 4.0), best_panels(4.0, 4.0, latency=4.0)
    (8, 1)
    """
    return min((1, 2, 4, 8), key=lambda panels: streamed_seconds(move, compute, panels, latency, launch))
