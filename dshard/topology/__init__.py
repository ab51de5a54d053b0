"""The network and devices of a machine; every bandwidth, latency and rate in the package comes from here.

`links` has links, layers of the network, devices and measured figures; `network` the `Topology` made of them; `sharing`
computes how the groups of some mesh axes share it, and the links between pairs of units; `algorithms` has those of
NCCL; `presets` common machines; `json_files` reads and writes JSON.
"""

from __future__ import annotations

from dshard.caches import cached
from dshard.topology.algorithms import Algorithm, nccl_algorithms
from dshard.topology.links import COLLECTIVES, Collective, Device, Layer, Link, Measured
from dshard.topology.network import Topology
from dshard.topology.presets import CPU, CUDA, PRESETS, Backend

__all__ = [
    "BYTES",
    "COLLECTIVES",
    "FLAT_CPU",
    "FLAT_CUDA",
    "PRESETS",
    "Algorithm",
    "Backend",
    "Collective",
    "Device",
    "Layer",
    "Link",
    "Measured",
    "Topology",
    "default_topology",
    "nccl_algorithms",
]

FLAT_CPU = Topology.flat(2e9, 100e-6, name="flat-cpu", device=CPU, backend="gloo", source="round figures")
FLAT_CUDA = Topology.flat(1e11, 10e-6, name="flat-cuda", device=CUDA, backend="nccl", source="round figures")

BYTES = Topology.preset("bytes")
"""A network on which a plan's seconds are the bytes that its busiest rank receives: the cheapest sends the fewest."""


@cached("network", 64)
def default_topology(device_type: str, ranks_per_host: int | None = None) -> Topology:
    """The topology assumed for ranks that compute on `device_type` where none is given.

    With `ranks_per_host`, the ranks of a host have the default link, and hosts are joined by 10 Gb/s Ethernet on CPUs
    and by a 200 Gb/s network on GPUs.
    """
    flat = FLAT_CUDA if device_type == "cuda" else FLAT_CPU
    if ranks_per_host is None:
        return flat
    inside = flat.layers[0]
    outside = (25e9, 20e-6) if device_type == "cuda" else (1.25e9, 200e-6)
    layers = (Layer("host", None, *outside), Layer("rank", ranks_per_host, inside.group_bandwidth, inside.latency))
    return Topology(f"{ranks_per_host}-{device_type}-hosts", layers, flat.device, flat.backend, source="round figures")
