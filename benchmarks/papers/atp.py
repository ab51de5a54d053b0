"""ATP (arXiv 2301.08658) as its paper has it: the redistributions of a transformer layer, priced by the planner.

Activations are replicated on d1 and sharded on d2. Weights alternate between column-first (d1:S(1) d2:S(0)), whose
product is partial on d2, and row-first (d1:S(0) d2:S(1)), whose product is partial on d1. On a topology without
latencies this is the paper's equation 2 with the bandwidths of its equations 3 and 4. (N, 1) is the layout of
Megatron-LM. The strategy "atp" of dshard splits attention by heads along d1 alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dshard.layout import parse_layout
from dshard.mesh import Mesh
from dshard.redistribute import plan
from dshard.topology import Topology

BETWEEN_BLOCKS, WITHIN_BLOCKS, BY_HEADS = "d1:R d2:S(1)", "d1:S(1) d2:R", "d1:S(1) d2:S(1)"
"""The layouts of activations between blocks, between the linear layers of a block, and of attention by heads."""

SUM_D1, SUM_D2 = "d1:P(sum) d2:S(1)", "d1:S(1) d2:P(sum)"


class Transformer(NamedTuple):
    """Sizes: the four linear layers are h x 3h, h x h, h x 4h and 4h x h; tokens are batch times sequence."""

    hidden: int
    tokens: int
    layers: int = 1
    itemsize: int = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A mesh, and seconds and bytes of one training step of the busiest rank."""

    mesh: Mesh
    seconds_on: dict[str, float]
    nbytes: int

    @property
    def name(self) -> str:
        """The name in the paper: ATP-i is the mesh (N / i, i)."""
        return f"ATP-{self.mesh.shape[1]}"

    @property
    def seconds(self) -> float:
        """Seconds of communication on both mesh axes."""
        return sum(self.seconds_on.values())


def rank_meshes(
    devices: int,
    topology: Topology,
    transformer: Transformer,
    *,
    scatters: bool = False,
    meshes: Iterable[tuple[int, int]] | None = None,
) -> tuple[Choice, ...]:
    """All meshes (d1, d2) of `devices` devices, or those of `meshes`, the cheapest first.

    Sums with a sharded consumer are all-reduced first, as in the paper, or with `scatters` reduced to its layout.
    """
    shapes = [(d, devices // d) for d in range(1, devices + 1) if devices % d == 0] if meshes is None else meshes
    choices = [_choice(Mesh(shape, ("d1", "d2")), topology, transformer, scatters) for shape in shapes]
    return tuple(sorted(choices, key=lambda choice: (choice.seconds, choice.mesh.shape[1])))


def _choice(mesh: Mesh, topology: Topology, sizes: Transformer, scatters: bool) -> Choice:
    seconds, received = dict.fromkeys(mesh.names, 0.0), 0
    for axis, src, dst, width in moves(sizes.hidden, scatters):
        layouts = parse_layout(src, mesh), parse_layout(dst, mesh)
        moved = plan(*layouts, (sizes.tokens, width), sizes.itemsize, topology)
        seconds[axis] += sizes.layers * moved.seconds
        received += moved.busiest()
    return Choice(mesh, seconds, sizes.layers * sizes.itemsize * received)


def moves(h: int, scatters: bool) -> Iterator[tuple[str, str, str, int]]:
    """Axis, source, destination and width of each redistribution of a layer, forward and then backward.

    The attention core is sharded by heads over both axes, so its inputs are scattered and its result gathered.
    """
    yield from _into_core(3 * h, scatters)  # f1, of queries, keys and values
    yield "d2", BY_HEADS, WITHIN_BLOCKS, h
    yield "d1", SUM_D1, BETWEEN_BLOCKS, h  # f2, of the output
    yield "d2", SUM_D2, WITHIN_BLOCKS, 4 * h  # f3, into the feed-forward block
    yield "d1", SUM_D1, BETWEEN_BLOCKS, h  # f4, out of it
    yield "d2", SUM_D2, WITHIN_BLOCKS, 4 * h
    yield "d1", SUM_D1, BETWEEN_BLOCKS, h
    yield from _into_core(h, scatters)
    yield "d2", BY_HEADS, WITHIN_BLOCKS, 3 * h
    yield "d1", SUM_D1, BETWEEN_BLOCKS, h


def _into_core(width: int, scatters: bool) -> Iterator[tuple[str, str, str, int]]:
    if scatters:
        yield "d2", SUM_D2, BY_HEADS, width
    else:
        yield "d2", SUM_D2, WITHIN_BLOCKS, width
        yield "d2", WITHIN_BLOCKS, BY_HEADS, width
