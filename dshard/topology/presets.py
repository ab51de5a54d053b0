"""Presets of common machines, with the figures of their makers; bandwidths are bytes per second in one direction.

Makers often state the sum of both directions (NVLink "600 GB/s"): half of it stands here. Collectives that NCCL chooses
an algorithm for are priced by its own figures (`dshard.topology.algorithms`); latencies of messages on GPU networks are
those of one step of a ring there (LL128): NVLink 1.9 us, PCIe 2.5 us, network 4.0 us. None of this is measured: a real
network gives less, see `Measured`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Literal, NamedTuple, TypeAlias

from dshard.errors import TopologyError
from dshard.topology.algorithms import Algorithm, nccl_algorithms
from dshard.topology.links import Device, Layer, Matrix
from dshard.validate import as_int, suggestion

Backend: TypeAlias = Literal["gloo", "nccl", "xla"]


class Preset(NamedTuple):
    """The fields of a topology except its name and measured figures."""

    layers: tuple[Layer, ...]
    device: Device
    backend: Backend
    source: str
    algorithms: tuple[Algorithm, ...] = ()


CPU = Device("cpu", flops=(("float32", 5e10),), memory_bandwidth=1e10, launch=5e-6)
"""A CPU core, in round figures."""

CUDA = Device("cuda", flops=(("bfloat16", 3e14),), memory_bandwidth=2e12, launch=5e-6)
"""A recent GPU, in round figures close to those of an A100."""

# NVIDIA A100 80GB datasheet: dense rates; float32 without TF32, as torch has it by default; SXM 2,039 GB/s.
A100 = Device(
    "NVIDIA A100 80GB SXM",
    flops=(("bfloat16", 312e12), ("float16", 312e12), ("tf32", 156e12), ("float32", 19.5e12), ("float64", 19.5e12)),
    memory_bandwidth=2.039e12,
    launch=5e-6,
    memory=80e9,
)
# NVIDIA A100 80GB datasheet, PCIe column: 1,935 GB/s.
A100_PCIE = Device("NVIDIA A100 80GB PCIe", A100.flops, memory_bandwidth=1.935e12, launch=5e-6, memory=80e9)
# NVIDIA H100 SXM datasheet and architecture white paper: dense rates; 3.35 TB/s.
H100 = Device(
    "NVIDIA H100 80GB SXM",
    flops=(
        ("bfloat16", 989.4e12),
        ("float16", 989.4e12),
        ("float8", 1978.9e12),
        ("tf32", 494.7e12),
        ("float32", 66.9e12),
        ("float64", 66.9e12),
    ),
    memory_bandwidth=3.35e12,
    launch=5e-6,
    memory=80e9,
)
# NVIDIA GB200 NVL72 specifications, a 72nd of the rack, half of the rates with sparsity: 360 PFLOPS FP16, 720 FP8, 180
# TF32; 5,760 TFLOPS FP32, 2,880 FP64; 13.4 TB of 576 TB/s.
GB200 = Device(
    "NVIDIA GB200 (one GPU)",
    flops=(
        ("bfloat16", 2.5e15),
        ("float16", 2.5e15),
        ("float8", 5e15),
        ("tf32", 1.25e15),
        ("float32", 80e12),
        ("float64", 40e12),
    ),
    memory_bandwidth=8e12,
    launch=5e-6,
    memory=186e9,
)
_OF_MATMULS = "optimized matmuls reach 80 to 90 % of the peak"
EFFICIENCY: dict[str, tuple[float, str]] = {
    A100.name: (0.85, f"{_OF_MATMULS} (Dao, FlashAttention-2, arXiv 2307.08691, section 1)"),
    A100_PCIE.name: (0.85, f"{_OF_MATMULS} (Dao, FlashAttention-2, arXiv 2307.08691, section 1)"),
    H100.name: (0.85, f"{_OF_MATMULS} (Shah et al., FlashAttention-3, arXiv 2407.08608, section 1)"),
}
"""The share of a device's stated rate that large matmuls reach, with its source; of others nothing is known."""
# Jouppi et al., TPU v4 (arXiv 2304.01433), table 4: 275 TFLOPS bfloat16, 32 GiB of 1,200 GB/s.
TPU_V4 = Device("TPU v4", flops=(("bfloat16", 275e12),), memory_bandwidth=1.2e12, launch=1e-6, memory=2**35)


def ring(n: int, bandwidth: float) -> Matrix:
    """Pair bandwidths of `n` units, each joined with the next, and the last with the first."""
    return tuple(tuple(bandwidth if (i - j) % n in (1, n - 1) else 0.0 for j in range(n)) for i in range(n))


def torus_layers(shape: Sequence[int], bandwidth: float, latency: float) -> tuple[Layer, ...]:
    """The layers of a torus, rings of rings: a link of `bandwidth` between neighbours along each dim."""
    layers = []
    for i, n in enumerate(as_int(size, "shape", TopologyError, least=1) for size in shape):
        joined = prod(shape[i + 1 :]) * bandwidth  # each rank below has a link of its own to the next unit
        pair = ring(n, joined) if n > 2 else joined
        layers.append(Layer(f"dim {i}", n, min(n - 1, 2) * joined or joined, latency, pair))
    return tuple(layers)


def _cpu(nodes: int, ranks: int | None) -> Preset:
    """The preset cpu: hosts on 10 Gb/s Ethernet; a single host has any number of ranks."""
    source = (
        "in a host: round figures for gloo over loopback, not from a datasheet; between hosts: 10 Gb/s Ethernet "
        "(IEEE 802.3ae), 200 us"
    )
    inside = Layer("rank", ranks, group_bandwidth=2e9, latency=100e-6)
    if nodes == 1:
        return Preset((inside,), CPU, "gloo", source)
    inside = Layer("rank", ranks or 8, inside.group_bandwidth, inside.latency)
    return Preset((Layer("host", nodes, group_bandwidth=1.25e9, latency=200e-6), inside), CPU, "gloo", source)


def _pcie(nodes: int, ranks: int | None) -> Preset:
    """The preset pcie: two sockets with half of the GPUs each, one NIC for all."""
    source = (
        "PCIe 4.0 x16: 16 GT/s x 16 lanes x 128/130 = 31.5 GB/s (PCI-SIG); three UPI links of 11.2 GT/s = 22.4 GB/s "
        "each (Intel Xeon Scalable, 3rd generation); one HDR InfiniBand NIC: 200 Gb/s; A100 80GB datasheet"
    )
    layers = (
        Layer("socket", 2, group_bandwidth=67.2e9, latency=2.5e-6, rank_bandwidth=31.5e9, hardware="pcie"),
        Layer("gpu", _half("pcie", ranks), group_bandwidth=31.5e9, latency=2.5e-6, hardware="pcie"),
    )
    return Preset(_nodes(nodes, 25e9) + layers, A100_PCIE, "nccl", source, nccl_algorithms("ampere"))


def _nvlink_pairs(nodes: int, ranks: int | None) -> Preset:
    """The preset nvlink-pairs: pairs of GPUs joined by NVLink bridges, the pairs by PCIe; one NIC for all."""
    source = (
        "NVLink bridges of the A100 PCIe: 600 GB/s in both directions; PCIe 4.0 x16: 31.5 GB/s for each GPU (PCI-SIG); "
        "one HDR InfiniBand NIC: 200 Gb/s; A100 80GB datasheet"
    )
    layers = (
        Layer(
            "pair",
            _half("nvlink-pairs", ranks),
            group_bandwidth=63e9,
            latency=2.5e-6,
            rank_bandwidth=31.5e9,
            hardware="pcie",
        ),
        Layer("gpu", 2, group_bandwidth=300e9, latency=1.9e-6, hardware="nvlink"),
    )
    return Preset(_nodes(nodes, 25e9) + layers, A100_PCIE, "nccl", source, nccl_algorithms("ampere"))


def _dgx_a100(nodes: int, ranks: int | None) -> Preset:
    """The preset dgx-a100: all GPUs on NVSwitch, a NIC for each."""
    source = "DGX A100 datasheet: third-generation NVLink, 600 GB/s in both directions; 8 x 200 Gb/s HDR InfiniBand"
    return Preset(_switched(nodes, ranks or 8, nvlink=300e9, nic=25e9), A100, "nccl", source, nccl_algorithms("ampere"))


def _dgx_h100(nodes: int, ranks: int | None) -> Preset:
    """The preset dgx-h100: all GPUs on NVSwitch, a NIC for each."""
    source = "DGX H100 datasheet: fourth-generation NVLink, 900 GB/s in both directions; 8 x 400 Gb/s ConnectX-7"
    return Preset(_switched(nodes, ranks or 8, nvlink=450e9, nic=50e9), H100, "nccl", source, nccl_algorithms("hopper"))


def _gb200_nvl72(nodes: int, ranks: int | None) -> Preset:
    """The preset gb200-nvl72: a node is a rack with all its GPUs on NVLink switches, a NIC for each."""
    source = "GB200 NVL72: fifth-generation NVLink, 1.8 TB/s in both directions for each GPU; 400 Gb/s ConnectX-7"
    return Preset(
        _switched(nodes, ranks or 72, nvlink=900e9, nic=50e9, node="rack"),
        GB200,
        "nccl",
        source,
        nccl_algorithms("blackwell"),
    )


def _tpu_torus(nodes: int, ranks: int | None) -> Preset:
    """The preset tpu-torus: a node is a cube of 4 x 4 x 4 chips; cubes are stacked along the torus's first dim."""
    if ranks not in (None, 64):
        raise TopologyError(f"ranks: a node of tpu-torus is a cube of 64 chips, not {ranks}; use Topology.torus(...)")
    source = (
        "TPU v4: a 3-D torus of six links for each chip (Jouppi et al., arXiv 2304.01433); 45 GB/s for each link and "
        "direction and about 1 us for each hop (How to Scale Your Model, jax-ml.github.io/scaling-book)"
    )
    return Preset(torus_layers((4 * nodes, 4, 4), 45e9, 1e-6), TPU_V4, "xla", source)


def _switched(nodes: int, ranks: int, *, nvlink: float, nic: float, node: str = "node") -> tuple[Layer, ...]:
    return (*_nodes(nodes, ranks * nic, nic, node), Layer("gpu", ranks, nvlink, latency=1.9e-6, hardware="nvlink"))


def _nodes(nodes: int, bandwidth: float, nic: float | None = None, name: str = "node") -> tuple[Layer, ...]:
    if nodes == 1:
        return ()
    return (Layer(name, nodes, bandwidth, latency=4e-6, rank_bandwidth=nic, hardware="network"),)


def _half(name: str, ranks: int | None) -> int:
    if ranks is not None and ranks % 2:
        raise TopologyError(f"ranks: a node of {name} has an even number of GPUs, not {ranks}")
    return (ranks or 8) // 2


def _bytes(nodes: int, ranks: int | None) -> Preset:
    """The preset bytes: only bytes on the network take time, so the cheapest plan sends the fewest."""
    source = "a byte that a rank receives takes a second; messages, copies and local work take none"
    device = Device("none", flops=(("float32", 1e24),), memory_bandwidth=inf, launch=0.0)
    return Preset(
        (Layer("rank", None if ranks is None else nodes * ranks, group_bandwidth=1.0),), device, "gloo", source
    )


PRESETS: dict[str, Callable[[int, int | None], Preset]] = {
    "cpu": _cpu,
    "pcie": _pcie,
    "nvlink-pairs": _nvlink_pairs,
    "dgx-a100": _dgx_a100,
    "dgx-h100": _dgx_h100,
    "gb200-nvl72": _gb200_nvl72,
    "tpu-torus": _tpu_torus,
    "bytes": _bytes,
}


def parts_of(name: str, nodes: int, ranks: int | None) -> Preset:
    """Return the fields of the preset called `name`, for these numbers of nodes and of ranks on each node."""
    if not isinstance(name, str) or name not in PRESETS:
        raise TopologyError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}{suggestion(name, PRESETS)}")
    nodes = as_int(nodes, "nodes", TopologyError, least=1)
    if ranks is not None:
        ranks = as_int(ranks, "ranks", TopologyError, least=1)
    return PRESETS[name](nodes, ranks)
