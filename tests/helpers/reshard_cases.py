"""The nine cases of "On Optimizing the Communication of Model Parallelism" (table 2), and reshards at random."""

from __future__ import annotations

from math import prod
from typing import TypeAlias

from hypothesis import strategies as st

from dshard import Layout, Mesh, Replicate, Shard
from dshard.layout import Shape
from dshard.placements import Placement, ReduceOp
from dshard.testing import layouts, shapes
from dshard.topology import Topology
from dshard.topology.links import Layer

Case: TypeAlias = tuple[Layout, Layout, Shape]
R, S = Replicate(), Shard
HOST = 4
"""Ranks of a host."""

WHOLE = (1024, 1024, 512)
TABLE: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[Placement, ...], tuple[Placement, ...], Shape]] = {
    "1": ((2, 4), (2, 4), (S(0), R), (S(0), R), WHOLE),
    "2": ((2, 4), (2, 4), (R, R), (S(0), R), WHOLE),
    "3": ((2, 4), (2, 4), (S(1), R), (S(0), R), WHOLE),
    "4": ((2, 4), (2, 4), (S(1), S(1)), (S(0), S(0)), WHOLE),
    "5": ((2, 4), (2, 4), (R, S(0)), (S(0), R), WHOLE),
    "6": ((2, 4), (3, 4), (S(0), R), (S(0), R), (3072, 1024, 170)),
    "6 uneven": ((2, 4), (3, 4), (S(0), R), (S(0), R), WHOLE),
    "7": ((1, 4), (2, 4), (R, S(0)), (R, R), WHOLE),
    "8": ((1, 4), (2, 4), (R, S(0)), (R, R), WHOLE),
    "8 of the paper": ((2, 3), (3, 2), (R, S(0)), (R, R), WHOLE),
    "9": ((2, 4), (2, 4), (S(1), R), (S(2), R), WHOLE),
}


def case_of(name: str, *, scale: int = 1, per_host: int = HOST) -> Case:
    """The layouts of a case, source hosts before destination hosts, and its shape, each size divided by `scale`."""
    source, target, src, dst, shape = TABLE[name]
    return (
        Layout(_mesh(source, 0, per_host), src),
        Layout(_mesh(target, source[0], per_host), dst),
        tuple(size // scale for size in shape),
    )


def _mesh(shape: tuple[int, int], first: int, per_host: int) -> Mesh:
    ranks = ((first + host) * per_host + i for host in range(shape[0]) for i in range(shape[1]))
    return Mesh(shape, ("host", "gpu"), tuple(ranks))


def paper_network(per_host: int = HOST, *, cards: int = 1) -> Topology:
    """The network of the paper's model: a byte a second for each host, links within hosts that take no time."""
    card = None if cards == 1 else 1.0
    return Topology("paper", (Layer("host", None, 1.0 * cards, rank_bandwidth=card), Layer("gpu", per_host, 1e29)))


@st.composite
def meshes_of(draw: st.DrawFn, world: int) -> Mesh:
    """A mesh of some ranks of a world, in any order."""
    shape = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple).filter(lambda sizes: prod(sizes) <= world)
    )
    ranks = draw(st.permutations(range(world)))[: prod(shape)]
    return Mesh(shape, ("x", "y")[: len(shape)], tuple(ranks))


@st.composite
def reshards(draw: st.DrawFn, mesh: st.SearchStrategy[Mesh], partial: tuple[ReduceOp, ...] = ("sum",)) -> Case:
    """Layouts on two meshes, which may be disjoint, overlap, or have the same ranks; one kind of reduction."""
    shape = draw(shapes(max_dims=3))
    op = draw(st.sampled_from(partial))
    meshes = draw(st.tuples(mesh, mesh).filter(lambda pair: pair[0] != pair[1]))
    src, dst = (draw(layouts(where, len(shape), partial=(op,))) for where in meshes)
    return src, dst, shape
