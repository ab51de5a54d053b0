"""What connects the ranks, and what a rank computes: the machine's figures live here and nowhere else.

`values` has links, layers of the network, devices and measured figures; `model` the `Topology` made of them; `sharing`
how the groups of some mesh axes share it, and `wiring` the links between pairs of units; `presets` machines that people
have; `files` JSON.
"""

from __future__ import annotations

from functools import lru_cache

from dshard.topology.links import COLLECTIVES, Collective, Device, Layer, Link, Measured
from dshard.topology.network import Topology
from dshard.topology.presets import CPU, CUDA, PRESETS, Backend

__all__ = [
    "BYTES",
    "COLLECTIVES",
    "FLAT_CPU",
    "FLAT_CUDA",
    "PRESETS",
    "Backend",
    "Collective",
    "Device",
    "Layer",
    "Link",
    "Measured",
    "Topology",
    "default_topology",
]

FLAT_CPU = Topology.flat(2e9, 100e-6, name="flat-cpu", device=CPU, backend="gloo", source="round figures")
FLAT_CUDA = Topology.flat(1e11, 10e-6, name="flat-cuda", device=CUDA, backend="nccl", source="round figures")

BYTES = Topology.preset("bytes")
"""On this network a plan's seconds are the bytes that its busiest rank receives: the cheapest moves the fewest."""


@lru_cache(maxsize=64)
def default_topology(device_type: str, ranks_per_host: int | None = None) -> Topology:
    """The topology assumed for ranks that compute on `device_type`, until one is given.

    With `ranks_per_host`, the ranks of a host see the usual link, and hosts are joined by 10 Gb/s Ethernet on CPUs and
    by a 200 Gb/s network on GPUs.
    """
    flat = FLAT_CUDA if device_type == "cuda" else FLAT_CPU
    if ranks_per_host is None:
        return flat
    inside = flat.layers[0]
    outside = (25e9, 20e-6) if device_type == "cuda" else (1.25e9, 200e-6)
    layers = (Layer("host", None, *outside), Layer("rank", ranks_per_host, inside.group_bandwidth, inside.latency))
    return Topology(f"{ranks_per_host}-{device_type}-hosts", layers, flat.device, flat.backend, source="round figures")
