"""ATP's search for the best mesh (d1, d2) of N devices for a transformer layer on a topology.

Adaptive tensor parallelism (arXiv 2301.08658) has activations replicated on d1 and sharded on d2. Weights alternate
between column-first (d1:S(1) d2:S(0)), whose product is partial on d2, and row-first (d1:S(0) d2:S(1)), whose product
is partial on d1. Redistributions follow from these layouts; each is planned and priced like any other. On a topology
without latencies this is the paper's equation 2 with the bandwidths of its equations 3 and 4. (N, 1) is the layout of
Megatron-LM. The search is pure: no processes, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from dshard.errors import ShapeError, StrategyError
from dshard.layout import parse_layout
from dshard.mesh import Mesh
from dshard.redistribute import Plan, plan
from dshard.topology import Link, Topology
from dshard.topology.network import check_topology
from dshard.validate import as_int, as_tuple, check_one_of, check_type

Form: TypeAlias = Literal["all_reduce", "reduce_scatter"]
"""Whether sums with a sharded consumer are all-reduced first, as in the paper, or reduce-scattered to its layout."""

BETWEEN_BLOCKS, WITHIN_BLOCKS, BY_HEADS = "d1:R d2:S(1)", "d1:S(1) d2:R", "d1:S(1) d2:S(1)"
"""The layouts of activations between blocks, between the linear layers of a block, and of attention by heads."""

SUM_D1, SUM_D2 = "d1:P(sum) d2:S(1)", "d1:S(1) d2:P(sum)"


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes of a transformer layer that its redistributions depend on.

    Attributes:
        hidden: The hidden size h; the four linear layers are h x 3h, h x h, h x ffn and ffn x h.
        tokens: Batch times sequence length.
        layers: The number of layers.
        itemsize: Bytes for each element.
        ffn: The width of the feed-forward block; 4 h unless given.

    Raises:
        ShapeError: a size that is not above zero.
    """

    hidden: int
    tokens: int
    layers: int = 1
    itemsize: int = 2
    ffn: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "tokens", "layers", "itemsize", "ffn"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_int(getattr(self, name), name, ShapeError))
        sizes = (self.hidden, self.tokens, self.layers, self.itemsize, self.width)
        if min(sizes) < 1:
            raise ShapeError(f"{self}: all sizes of a transformer must be above zero")

    @property
    def width(self) -> int:
        """The width of the feed-forward block."""
        return 4 * self.hidden if self.ffn is None else self.ffn


@dataclass(frozen=True, slots=True)
class Move:
    """One redistribution of activations or their gradients in each layer, and its mesh axis."""

    name: str
    axis: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """The cost of one mesh: seconds and bytes of one training step, forward and backward, of the busiest rank.

    `links` are those of an all_reduce on d1 and on d2; measured links say so.
    """

    mesh: Mesh
    moves: tuple[Move, ...]
    layers: int
    nbytes: int
    links: tuple[Link, Link]

    @property
    def name(self) -> str:
        """The name in the paper: ATP-i is the mesh (N / i, i)."""
        return f"ATP-{self.mesh.shape[1]}"

    @property
    def seconds(self) -> float:
        """Seconds of communication in one training step, on both mesh axes."""
        return self.layers * sum(move.plan.seconds for move in self.moves)

    def seconds_on(self, axis: str) -> float:
        """Seconds of communication in one training step on mesh axis `axis`."""
        return self.layers * sum(move.plan.seconds for move in self.moves if move.axis == axis)

    def __str__(self) -> str:
        parts = ", ".join(f"{axis} {self.seconds_on(axis) * 1e3:.3f} ms" for axis in self.mesh.names)
        return f"{self.name}  ({self.mesh})  {self.seconds * 1e3:.3f} ms: {parts}"


def rank_meshes(
    devices: int,
    topology: Topology,
    transformer: Transformer,
    *,
    form: Form = "all_reduce",
    meshes: Iterable[tuple[int, int]] | None = None,
) -> tuple[MeshChoice, ...]:
    """Rank all meshes (d1, d2) of `devices` devices, or those of `meshes`, the cheapest first.

    Meshes differ only in the communication of their layouts; GEMMs take equally long on all. If a topology has measured
    figures for some meshes only, compare just those: computed figures are the makers' limits.

    Raises:
        TopologyError: a topology of another number of ranks.
        ShapeError: a mesh of another number of devices.
        StrategyError: no such form.
    """
    check_topology(topology)
    check_type(transformer, Transformer, "transformer", "give its sizes, as in Transformer(hidden=4096, tokens=8192)")
    check_one_of(form, get_args(Form), "form", StrategyError)
    devices = as_int(devices, "devices", ShapeError, least=1)
    topology.check(devices)
    shapes = [(d1, devices // d1) for d1 in range(1, devices + 1) if devices % d1 == 0] if meshes is None else [*meshes]
    for shape in shapes:
        pair = as_tuple(shape, "a mesh", "give its two sizes, such as (2, 4)", ShapeError)
        if len(pair) != 2:
            raise ShapeError(f"the mesh {pair} has {len(pair)} axes: give two sizes, d1 and d2")
        d1, d2 = pair
        if d1 * d2 != devices:
            raise ShapeError(
                f"the mesh ({d1}, {d2}) has {d1 * d2} devices, not {devices}: give d1 and d2 with that product"
            )
    choices = [_choice(Mesh(shape, ("d1", "d2")), topology, transformer, form) for shape in shapes]
    return tuple(sorted(choices, key=lambda choice: (choice.seconds, choice.mesh.shape[1])))


def _choice(mesh: Mesh, topology: Topology, transformer: Transformer, form: Form) -> MeshChoice:
    size = transformer.itemsize
    moves = tuple(
        Move(name, axis, plan(parse_layout(src, mesh), parse_layout(dst, mesh), shape, size, topology))
        for name, axis, src, dst, shape in _moves(transformer, form)
    )
    nbytes = transformer.layers * size * sum(move.plan.busiest() for move in moves)
    links = (topology.link(mesh, ["d1"], "all_reduce"), topology.link(mesh, ["d2"], "all_reduce"))
    return MeshChoice(mesh, moves, transformer.layers, nbytes, links)


def _moves(transformer: Transformer, form: Form) -> Iterator[tuple[str, str, str, str, tuple[int, int]]]:
    """Name, axis, source, destination and shape of each redistribution, forward and then backward.

    The attention core is sharded by heads over both axes, so its inputs are scattered and its result gathered.
    """
    t, h = transformer.tokens, transformer.hidden
    qkv, one, ffn = (t, 3 * h), (t, h), (t, transformer.width)
    yield from _into_core("f1 qkv", qkv, form)
    yield "gather of the core", "d2", BY_HEADS, WITHIN_BLOCKS, one
    yield "f2 output", "d1", SUM_D1, BETWEEN_BLOCKS, one
    yield "f3 feed-forward in", "d2", SUM_D2, WITHIN_BLOCKS, ffn
    yield "f4 feed-forward out", "d1", SUM_D1, BETWEEN_BLOCKS, one
    yield "gradient of feed-forward out", "d2", SUM_D2, WITHIN_BLOCKS, ffn
    yield "gradient of feed-forward in", "d1", SUM_D1, BETWEEN_BLOCKS, one
    yield from _into_core("gradient of output", one, form)
    yield "gather of the core's gradient", "d2", BY_HEADS, WITHIN_BLOCKS, qkv
    yield "gradient of qkv", "d1", SUM_D1, BETWEEN_BLOCKS, one


def _into_core(name: str, shape: tuple[int, int], form: Form) -> Iterator[tuple[str, str, str, str, tuple[int, int]]]:
    if form == "reduce_scatter":
        yield name, "d2", SUM_D2, BY_HEADS, shape
    else:
        yield name, "d2", SUM_D2, WITHIN_BLOCKS, shape
        yield f"scatter after {name}", "d2", WITHIN_BLOCKS, BY_HEADS, shape
