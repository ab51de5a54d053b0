"""NCCL's algorithms and protocols, with the latencies and bandwidths by which NCCL itself chooses among them.

NCCL prices each algorithm (ring, tree, in the NVLink switch) with each protocol (LL, LL128, Simple) and takes the
cheapest: so does `dshard.cost`, by the same figures. They are those of NCCL 2.28, src/graph/tuning.cc (latencies and
bounds of bandwidth by GPU) and src/graph/topo.h (bandwidth of one NVLink: 20.0, 20.6 and 40.0 GB/s); the channels, 12
on Ampere and 16 later, are those that AutoParallel's model of the same source has (meta-pytorch/autoparallel,
cost_models/nccl_cost_model.py). Between nodes the hosts are taken to have Intel CPUs, as there.

Left out are NCCL's corrections of trees at medium sizes, by which more bytes take less time; the longer steps of large
rings between nodes, and the host's work for each; and algorithms that need a network that reduces (CollNet), or one
rank on each node (PAT).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from typing_extensions import assert_never

from dshard.errors import TopologyError
from dshard.topology.links import Collective, Hardware, check_name, check_number
from dshard.validate import as_tuple, shown

Kind: TypeAlias = Literal["ring", "tree", "nvls", "nvls-tree"]
Generation: TypeAlias = Literal["ampere", "hopper", "blackwell"]
COLLECTIVES_OF: dict[Kind, tuple[Collective, ...]] = {
    "ring": ("all_gather", "reduce_scatter", "all_reduce", "broadcast"),
    "tree": ("all_reduce",),
    "nvls": ("all_gather", "reduce_scatter", "all_reduce"),
    "nvls-tree": ("all_reduce",),
}
"""The collectives that algorithms of each kind run."""
NODES = 3
"""Bandwidths differ on one node, on two, and on more."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm of NCCL with one protocol: the seconds of its steps, and its share of a link's bandwidth.

    Attributes:
        kind: "ring"; "tree", of an all_reduce; "nvls", in the switch of one node; "nvls-tree", in switches and a tree
            of nodes.
        protocol: For people: "LL", "LL128" or "Simple".
        base: Seconds to begin.
        nvlink, pcie, network: Seconds of one step over each.
        alone: Seconds of one step between nodes that have one rank each.
        lanes: Bytes per second of all channels of a GPU together.
        share: The part of a link's bandwidth that carries data: on one node, on two, on more.
        most: Bytes per second that are not exceeded: on one node, on two, on more; 0 where it does not run.

    Raises:
        TopologyError: a value that no algorithm has, with the field's name.
    """

    kind: Kind
    protocol: str
    base: float
    nvlink: float
    pcie: float
    network: float
    alone: float
    lanes: float
    share: tuple[float, ...]
    most: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise TopologyError(f"kind: {self.kind!r} is none; use {', '.join(get_args(Kind))}")
        check_name("protocol", self.protocol)
        for field in ("base", "nvlink", "pcie", "network", "alone"):
            check_number(field, getattr(self, field), zero=True)
        check_number("lanes", self.lanes)
        for field in ("share", "most"):
            values = as_tuple(getattr(self, field), field, f"give {NODES} numbers", TopologyError)
            if len(values) != NODES:
                raise TopologyError(f"{field}: {shown(values)}: give {NODES} numbers: on one node, on two, on more")
            for value in values:
                check_number(field, value, zero=True)
            object.__setattr__(self, field, values)

    def bandwidth(self, link: float, nodes: int) -> float:
        """Return the algorithm's bytes per second on links of `link` bytes per second; 0 where it does not run."""
        i = min(nodes, NODES) - 1
        return min(self.share[i] * min(link, self.lanes), self.most[i])

    def runs(self, nodes: int, inside: Hardware | None) -> bool:
        """Whether the algorithm runs in groups on this many nodes, with ranks in a node connected by `inside`."""
        if self.protocol == "LL128" and inside == "pcie":
            return False
        match self.kind:
            case "ring" | "tree":
                return True
            case "nvls":
                return nodes == 1 and inside == "nvlink"
            case "nvls-tree":
                return nodes > 1 and inside == "nvlink"
            case _:
                assert_never(self.kind)

    def step(self, inside: Hardware | None) -> float:
        """Return the seconds of a step within a node, 0 if each node has one rank."""
        if inside is None:
            return 0.0
        return self.nvlink if inside == "nvlink" else self.pcie if inside == "pcie" else self.network

    def __str__(self) -> str:
        return f"{self.kind}, {self.protocol}"


@dataclass(frozen=True, slots=True)
class _Figures:
    """NCCL's figures of a generation of GPUs in GB/s, per channel unless noted, on one node, two and more."""

    channels: int
    nvlink: float
    ll: tuple[float, float, float]  # of all channels
    ring_ll128: float
    tree: tuple[float, float, float]
    tree_ll128: tuple[float, float, float]
    nvls_tree: tuple[float, float, float]
    nvls: float  # the part of NVLink that a switch makes use of


_FIGURES: dict[Generation, _Figures] = {
    "ampere": _Figures(
        12, 20.0, (87.7, 39.0, 20.4), 20.0, (24.0, 23.6, 17.8), (20.0, 20.0, 20.0), (0.0, 0.0, 0.0), 0.0
    ),
    "hopper": _Figures(
        16, 20.6, (141.0, 39.0, 20.4), 36.7, (38.7, 41.4, 36.0), (36.7, 36.7, 29.0), (0.0, 57.7, 45.5), 0.85
    ),
    "blackwell": _Figures(
        16, 40.0, (282.0, 39.0, 20.4), 73.4, (70.0, 42.8, 24.0), (55.6, 31.67, 20.0), (0.0, 96.0, 43.1), 0.74
    ),
}
_US, _GB = 1e-6, 1e9
_LINE = 120 / 128
"""The part of a line of LL128 that is data."""


def nccl_algorithms(generation: Generation) -> tuple[Algorithm, ...]:
    """Return NCCL's algorithms on a generation of GPUs, as NCCL prices them."""
    g = _FIGURES[generation]
    lanes, ring128 = g.channels * g.nvlink * _GB, g.channels * g.ring_ll128 * _GB
    ll = tuple(rate * _GB for rate in g.ll)
    tree, tree128, over_nodes = (
        tuple(g.channels * rate * _GB for rate in rates) for rates in (g.tree, g.tree_ll128, g.nvls_tree)
    )
    lines = (7 / 9, _LINE, _LINE)

    def algorithm(
        kind: Kind, protocol: str, us: tuple[float, ...], share: tuple[float, ...], most: tuple[float, ...]
    ) -> Algorithm:
        base, nvlink, pcie, network, alone = (each * _US for each in us)
        return Algorithm(kind, protocol, base, nvlink, pcie, network, alone, lanes, share, most)

    in_switch = lanes * g.nvls * (g.channels - 1) / g.channels
    everywhere = (
        algorithm("ring", "LL", (6.6, 0.6, 1.0, 2.7, 5.0), (0.5,) * NODES, ll),
        algorithm("ring", "LL128", (14.0, 1.9, 2.5, 4.0, 8.5), (0.92,) * NODES, (ring128,) * NODES),
        algorithm("ring", "Simple", (8.4, 3.4, 5.7, 14.0, 14.0), (1.0,) * NODES, (lanes,) * NODES),
        algorithm("tree", "LL", (6.8, 0.6, 1.0, 5.0, 5.0), (0.92 / 3.8,) * NODES, _least([t / 3.8 for t in tree], ll)),
        algorithm(
            "tree",
            "LL128",
            (14.0, 1.25, 1.9, 8.5, 8.5),
            tuple(0.92 * line for line in lines),
            _least([t * line for t, line in zip(tree, lines, strict=True)], tree128),
        ),
        algorithm("tree", "Simple", (8.4, 4.0, 4.0, 14.0, 14.0), (0.92,) * NODES, tree),
    )
    if not g.nvls:
        return everywhere
    both_ways = _least([2 * in_switch] * NODES, over_nodes)
    return (
        *everywhere,
        algorithm("nvls", "Simple", (0.0, 25.0, 0.0, 0.0, 0.0), (in_switch / lanes, 0.0, 0.0), (in_switch, 0.0, 0.0)),
        algorithm("nvls-tree", "Simple", (0.0, 25.0, 0.0, 14.0, 14.0), (0.0, 2.0, 1.0), both_ways),
    )


def _least(a: list[float], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(min, a, b))
