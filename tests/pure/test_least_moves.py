"""Lower bounds of moves between all layouts: none is above the price of the plan, and most of them are that price."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard import Mesh, Topology
from dshard.layout import Layout
from dshard.placements import Partial, Replicate, Shard
from dshard.planning import move_prices
from dshard.planning import move_prices as module
from dshard.planning.move_prices import MovePrices, least_moves
from dshard.redistribute.layout_state import State
from dshard.redistribute.plan import plan_price
from dshard.redistribute.space import Space, space_of

MESHES = [Mesh((4,), ("x",)), Mesh((2, 4), ("x", "y")), Mesh((2, 3), ("x", "y")), Mesh((2, 1, 8), ("x", "y", "z"))]
TOPOLOGIES = [Topology.preset("dgx-h100", nodes=2), Topology.preset("cpu"), Topology.preset("bytes")]
SHAPES = [(64, 1024), (5, 7), (8, 6, 32), (1, 5), (4096,), (0, 4)]


def every_layout(mesh: Mesh, ndim: int) -> list[Layout]:
    words = [Replicate(), Partial("sum"), *map(Shard, range(ndim))]
    return [Layout(mesh, placements) for placements in product(words, repeat=mesh.ndim)]


def states_of(space: Space) -> list[State]:
    return [space.state_of(layout) for layout in every_layout(space.mesh, len(space.shape))]


@given(
    st.sampled_from(MESHES),
    st.sampled_from(TOPOLOGIES),
    st.sampled_from(SHAPES),
    st.sampled_from([1, 2, 8]),
    st.data(),
)
def test_no_plan_takes_less(
    mesh: Mesh, topology: Topology, shape: tuple[int, ...], itemsize: int, data: st.DataObject
) -> None:
    space = space_of(mesh, topology, shape, itemsize)
    states = data.draw(st.lists(st.sampled_from(states_of(space)), min_size=2, max_size=8, unique=True))
    least = least_moves(space, states)

    assert least is not None
    for (i, src), (j, dst) in product(enumerate(states), repeat=2):
        assert float(least[i, j]) <= plan_price(src, dst, space).seconds * (1 + 1e-9)


def test_most_bounds_are_the_prices() -> None:
    space = space_of(Mesh((4, 8)), Topology.preset("dgx-h100", nodes=4), (4096, 8192), 2)
    states = states_of(space)
    least = least_moves(space, states)

    assert least is not None
    exact = [
        float(least[i, j]) >= plan_price(a, b, space).seconds * (1 - 1e-9)
        for (i, a), (j, b) in product(enumerate(states), repeat=2)
    ]
    assert sum(exact) > 0.9 * len(exact)


def test_too_many_layouts_are_not_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, topology = Mesh((2, 4)), Topology.preset("cpu")
    monkeypatch.setattr(module, "STATES", 10)
    space = space_of(mesh, topology, (64, 32), 4)
    assert least_moves(space, states_of(space)) is None

    prices = MovePrices(mesh, topology, (64, 32), 4)
    all_of_them = prices.add(every_layout(mesh, 2))
    prices.ask(all_of_them, all_of_them)
    prices.bound()
    each = [[space.least(src, dst) for dst in states_of(space)] for src in states_of(space)]
    assert prices.seconds.tolist() == each


@pytest.mark.parametrize("topology", TOPOLOGIES[:2])
def test_moves_to_and_from_blocks_are_bounded(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_prices, "FEW", 0)
    mesh, shape = Mesh((2, 4)), (64, 24)
    words = [Replicate(), Shard(0), Shard(1)], [Replicate(), Shard(0), Shard(1, blocks=3)]
    layouts = dict.fromkeys([Layout(mesh, x) for each in words for x in product(each, repeat=2)])
    prices = MovePrices(mesh, topology, shape, 2)
    numbers = prices.add(layouts)
    prices.ask(numbers, numbers)
    prices.bound()
    pairs = [(i, j) for i in range(len(layouts)) for j in range(len(layouts))]
    least = [float(prices.seconds[pair]) for pair in pairs]
    for pair in pairs:
        prices.price(*pair)
    exact = [float(prices.seconds[pair]) for pair in pairs]

    assert all(some <= seconds * (1 + 1e-9) for some, seconds in zip(least, exact, strict=True))
    assert sum([some > 0.99 * seconds for some, seconds in zip(least, exact, strict=True)]) > len(pairs) / 2


def test_a_price_stays_where_more_is_bounded() -> None:
    mesh, topology = Mesh((4, 8)), Topology.preset("dgx-h100", nodes=4)
    prices = MovePrices(mesh, topology, (4096, 8192), 2)
    first = prices.add(every_layout(mesh, 1))
    prices.ask(first, first)
    prices.bound()
    prices.price(1, 2)
    before = float(prices.seconds[1, 2])
    both = prices.add(every_layout(mesh, 2))
    prices.ask(both, both)
    prices.bound()

    assert float(prices.seconds[1, 2]) == before
    assert bool((prices.seconds + torch.eye(len(prices.layouts)) > 0).all())
