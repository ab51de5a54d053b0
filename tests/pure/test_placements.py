"""Placements, their notation, and the one function that splits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.errors import LayoutError, NotationError
from dshard.placements import (
    REDUCE_OPS,
    Partial,
    Placement,
    Replicate,
    Shard,
    chunk,
    cotangent,
    format_placements,
    parse_placement,
    parse_placements,
)
from dshard.testing import placements

SIZES, COUNTS = st.integers(0, 40), st.integers(1, 9)


@given(SIZES, COUNTS)
def test_chunks_cover_the_range_in_order(size: int, n: int) -> None:
    assert [i for part in range(n) for i in chunk(size, n, part)] == list(range(size))


@given(SIZES, COUNTS)
def test_chunks_are_those_of_torch(size: int, n: int) -> None:
    ours = [list(chunk(size, n, i)) for i in range(n)]
    theirs = [part.tolist() for part in torch.arange(size).chunk(n)]

    assert [part for part in ours if part] == [part for part in theirs if part]


@given(SIZES, COUNTS)
def test_chunks_never_grow(size: int, n: int) -> None:
    lengths = [len(chunk(size, n, i)) for i in range(n)]

    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == -(-size // n)


@given(placements(5, partial=REDUCE_OPS))  # type: ignore[arg-type]
def test_a_placement_is_read_as_it_is_written(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement


@given(st.lists(placements(5, partial=REDUCE_OPS), max_size=4))  # type: ignore[arg-type]
def test_placements_are_read_as_they_are_written(given_ones: list[Placement]) -> None:
    names = [f"axis{i}" for i in range(len(given_ones))]

    assert parse_placements(format_placements(given_ones)) == tuple(given_ones)
    assert parse_placements(format_placements(given_ones, names), names) == tuple(given_ones)


def test_a_partial_sum_is_the_default() -> None:
    assert parse_placement("P") == Partial() == Partial("sum")


def test_placements_are_values() -> None:
    assert Shard(1) == Shard(dim=1) != Shard(0)
    assert {Replicate(), Replicate(), Partial(), Partial("sum")} == {Replicate(), Partial()}
    with pytest.raises(AttributeError):
        Shard(0).dim = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("placement", "gradient"),
    [(Shard(2), Shard(2)), (Replicate(), Replicate()), (Partial(), Replicate()), (Partial("max"), Replicate())],
)
def test_where_a_gradient_belongs(placement: Placement, gradient: Placement) -> None:
    assert cotangent(placement) == gradient


@pytest.mark.parametrize("text", ["", "S", "S()", "S(a)", "S(0", "Shard(0)", "P(mean)", "P()", "r", "R R"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(NotationError, match=r"is no placement: write R, S\(dim\) or P\(op\) with op one of sum, avg"):
        parse_placement(text)


@pytest.mark.parametrize("text", ["tp:R dp:R", "dp:R", "dp:R tp:R x:R", "R R", "dp=R tp=R"])
def test_mesh_axes_are_named_in_order(text: str) -> None:
    with pytest.raises(NotationError, match="must name the mesh axes dp, tp, in this order, as in 'axis:S"):
        parse_placements(text, ["dp", "tp"])


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"Partial\('mean'\): the reduction must be one of sum, avg, product, max, min"
    ):
        Partial("mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", ["0", 1.0, None, True])
def test_a_dim_is_an_int(dim: object) -> None:
    assert Shard(1).dim == 1  # which equals two of these

    with pytest.raises(LayoutError, match=r"the tensor dim must be an int, such as Shard\(0\)"):
        Shard(dim)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", [Shard(2), Shard(dim=-1), Replicate(), Partial(), Partial(reduce_op="max")])
def test_equal_placements_are_one_object(placement: Placement) -> None:
    assert parse_placement(str(placement)) is placement
    assert copy.deepcopy(placement) is pickle.loads(pickle.dumps(placement)) is copy.copy(placement) is placement
