"""Options for running a matmul in panels: which loop is cut into how many panels, and how they are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from dshard.errors import StrategyError
from dshard.validate import as_int

Transport: TypeAlias = Literal["collective", "broadcast", "ring", "symmetric"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
PANELS = (1, 2, 4, 8, 16)
"""The numbers of panels that "auto" chooses from; one is the matmul in bulk."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A matmul in panels of one of its loops: a panel is multiplied while the next one is in flight.

    The tensors that have the loop are cut, the one without it stays: C for k, A for n, B for m. `axis` None takes the
    loop whose tensors move the most bytes. With "collective" each panel has a slice of every rank's local tensor; with
    "broadcast" one rank after the other sends its local tensor, in `panels` panels, as in SUMMA; with "ring" ranks send
    on the panels that they have multiplied, `panels` for each rank: the collective matmul of one mesh axis (Wang et
    al., ASPLOS 2023), Cannon's algorithm on two; with "symmetric" GPUs on one host read each other's memory, in torch's
    kernels that multiply chunk by chunk what they gather, or reduce-scatter what they multiply, whatever `panels`. A
    matmul without a ring, or not of the form of such a kernel, runs in panels by collectives.

    Raises:
        StrategyError: no panels, or no such loop or transport.
    """

    panels: int
    axis: Literal["m", "n", "k"] | None = None
    transport: Transport = "collective"

    def __post_init__(self) -> None:
        if type(self.panels) is not int:
            object.__setattr__(self, "panels", _count(self.panels))
        if self.panels < 1:
            raise StrategyError(f"{self.panels} panels: a stream has at least one")
        if self.axis not in ("m", "n", "k", None):
            raise StrategyError(f"{self.axis!r} is no loop of a product: stream m, n or k")
        if self.transport not in TRANSPORTS:
            raise StrategyError(f"there is no transport {self.transport!r}: use {', '.join(TRANSPORTS)}")


@dataclass(frozen=True, slots=True)
class AutoPanels:
    """A number of panels chosen by price: the one in `PANELS` that takes the fewest seconds; one panel means in bulk.

    Symmetric memory is one more choice, on topologies that say that NVLink joins the ranks on one host. The choice is
    limited to those whose buffers take at most `limit` bytes on a rank, or else to the smallest buffers. It is made
    for each gradient anew.
    """

    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is None:
            return
        object.__setattr__(self, "limit", as_int(self.limit, "buffer_bytes", StrategyError))
        if self.limit < 0:
            raise StrategyError(f"buffer_bytes={self.limit}: buffers take no less than nothing")


def _count(panels: object) -> int:
    try:
        return as_int(panels, "panels", StrategyError)
    except StrategyError:
        raise StrategyError(f"panels={panels!r}: give a number of them, or 'auto'") from None


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
