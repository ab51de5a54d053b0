"""What connects the ranks, and what a rank computes: the machine's constants live here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dshard.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Link:
    """What one rank sees of the network along one mesh axis: seconds for each message, bytes per second."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ShapeError(
                f"{self}: a link needs a latency of at least 0 seconds and a bandwidth above 0 bytes per second"
            )


@dataclass(frozen=True, slots=True)
class Topology:
    """A flat network: all pairs of ranks share one kind of link.

    `flops` are floating-point operations per second of one rank, `memory_bandwidth` bytes per second to its memory,
    `launch` seconds to start one local operation.
    """

    name: str
    uniform: Link
    flops: float
    memory_bandwidth: float
    launch: float

    def bytes_only(self) -> Topology:
        """The same network without latency, launches or copies: on it the cheapest plan is that of the fewest bytes."""
        return replace(self, uniform=Link(0.0, self.uniform.bandwidth), memory_bandwidth=float("inf"), launch=0.0)

    def link(self, axes: tuple[str, ...]) -> Link:
        """The link that a collective along `axes` uses."""
        del axes  # all axes of a flat network are alike
        return self.uniform


FLAT_CPU = Topology("flat-cpu", Link(50e-6, 2e9), flops=5e10, memory_bandwidth=1e10, launch=5e-6)
FLAT_CUDA = Topology("flat-cuda", Link(10e-6, 1e11), flops=3e14, memory_bandwidth=2e12, launch=5e-6)


def default_topology(device_type: str) -> Topology:
    """The topology assumed for ranks that compute on `device_type`, until one is given."""
    return FLAT_CUDA if device_type == "cuda" else FLAT_CPU
