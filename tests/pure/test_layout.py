"""Layouts: which part of a tensor each rank holds, and how this is written."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import product
from math import prod
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.errors import LayoutError, MeshError, NotationError
from dshard.layout import Layout, Shape, layout_of, parse_layout, replicated
from dshard.mesh import Mesh
from dshard.placements import REDUCE_OPS, Partial, Replicate, Shard
from dshard.testing import layouts, meshes, shapes

MESH = Mesh((2, 2), ("dp", "tp"))


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[Layout, Shape]:
    shape = draw(shapes())
    return draw(layouts(draw(meshes()), len(shape), partial=REDUCE_OPS)), shape  # type: ignore[arg-type]


@given(laid_out())
def test_each_element_is_held_once_for_each_replica(case: tuple[Layout, Shape]) -> None:
    layout, shape = case
    replicas = prod(n for n, p in zip(layout.mesh.shape, layout.placements, strict=True) if not isinstance(p, Shard))

    held = Counter(index for at in layout.mesh.coordinates() for index in product(*layout.region(shape, at)))

    assert held == Counter(dict.fromkeys(product(*map(range, shape)), replicas))


@given(laid_out())
def test_local_shapes_are_those_of_the_regions(case: tuple[Layout, Shape]) -> None:
    layout, shape = case
    sizes = [prod(layout.local_shape(shape, at)) for at in layout.mesh.coordinates()]

    for at in layout.mesh.coordinates():
        assert layout.local_shape(shape, at) == tuple(map(len, layout.region(shape, at)))
    assert layout.local_numel(shape) == max(sizes)


@given(laid_out())
def test_nested_shards_are_chunks_of_chunks(case: tuple[Layout, Shape]) -> None:
    layout, shape = case
    for at in layout.mesh.coordinates():
        for dim, size in enumerate(shape):
            held = torch.arange(size)
            for axis in layout.axes_of(dim):
                pieces = held.chunk(layout.mesh.shape[axis])
                held = pieces[at[axis]] if at[axis] < len(pieces) else held[:0]
            assert list(layout.dim_range(dim, size, at)) == held.tolist()


@given(laid_out())
def test_a_layout_is_read_as_it_is_written(case: tuple[Layout, Shape]) -> None:
    layout, _ = case

    assert parse_layout(str(layout), layout.mesh) == layout


@given(laid_out())
def test_layouts_are_values(case: tuple[Layout, Shape]) -> None:
    layout, _ = case
    same = Layout(layout.mesh, layout.placements, layout.order)

    assert (same, hash(same)) == (layout, hash(layout))
    assert pickle.loads(pickle.dumps(layout)) == layout


@given(laid_out())
def test_the_gradient_is_laid_out_like_the_tensor_and_replicated_where_that_is_partial(
    case: tuple[Layout, Shape],
) -> None:
    layout, shape = case
    gradient = layout.cotangent()

    assert not gradient.partial_axes()
    assert all(gradient.region(shape, at) == layout.region(shape, at) for at in layout.mesh.coordinates())
    assert gradient.cotangent() == gradient


@given(meshes(), st.data())
def test_layouts_that_differ_on_one_rank_are_those_under_which_each_rank_holds_the_same(
    mesh: Mesh, data: st.DataObject
) -> None:
    one, other = (data.draw(layouts(mesh, 2, partial=())) for _ in range(2))
    shape = (prod(mesh.shape) * 2,) * 2  # so large that chunks are the same by no chance
    same = [one.region(shape, at) == other.region(shape, at) for at in mesh.coordinates()]

    assert one.differs_on_one_rank(other) == all(same)


@given(laid_out(), st.data())
def test_a_replaced_placement_comes_last_in_its_dim(case: tuple[Layout, Shape], data: st.DataObject) -> None:
    layout, shape = case
    axis = data.draw(st.sampled_from(range(layout.mesh.ndim)))
    placement = data.draw(st.sampled_from([Replicate(), *map(Shard, range(len(shape)))]))

    changed = layout.replace(axis, placement)

    assert changed.placements[axis] == placement
    for dim in range(len(shape)):
        others = tuple(a for a in layout.axes_of(dim) if a != axis)
        assert changed.axes_of(dim) == (*others, *([axis] if placement == Shard(dim) else []))


def test_the_default_order_is_left_to_right() -> None:
    default = Layout(MESH, (Shard(0), Shard(0)))

    assert default == Layout(MESH, (Shard(0), Shard(0)), ((0, (0, 1)),))
    assert default != Layout(MESH, (Shard(0), Shard(0)), ((0, (1, 0)),))
    assert default.order == ()
    assert default.names_of(0) == ("dp", "tp")


def test_an_order_says_who_splits_first() -> None:
    layout = parse_layout("dp:S(0) tp:S(0); 0:tp,dp", MESH)

    assert str(layout) == "dp:S(0) tp:S(0); 0:tp,dp"
    assert [layout.region((5,), at) for at in MESH.coordinates()] == [
        (range(2),),
        (range(3, 4),),
        (range(2, 3),),
        (range(4, 5),),
    ]


def test_negative_dims_count_from_the_end() -> None:
    assert layout_of(MESH, (Shard(-1), Shard(-3)), 3) == Layout(MESH, (Shard(2), Shard(0)))


def test_replicated_is_whole_everywhere() -> None:
    assert replicated(MESH) == Layout(MESH, (Replicate(), Replicate()))


@pytest.mark.parametrize(("dim", "legal"), [(2, r"S\(-2\) to S\(1\) or R"), (-3, r"S\(-2\) to S\(1\) or R")])
def test_a_dim_out_of_range_is_refused(dim: int, legal: str) -> None:
    with pytest.raises(LayoutError, match=rf"S\({dim}\) is out of range: the tensor has 2 dims; use {legal}"):
        layout_of(MESH, (Shard(dim), Replicate()), 2)


def test_a_scalar_has_no_dim_to_shard() -> None:
    with pytest.raises(LayoutError, match=r"S\(0\) is out of range: the tensor has 0 dims; use R$"):
        layout_of(MESH, (Shard(0), Replicate()), 0)


def test_a_layout_refuses_a_shape_with_too_few_dims() -> None:
    with pytest.raises(LayoutError, match=r"S\(2\) is out of range for shape \(3, 3\): the tensor has 2 dims"):
        Layout(MESH, (Shard(2), Replicate())).check((3, 3))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_is_one_placement_for_each_mesh_axis(count: int) -> None:
    with pytest.raises(LayoutError, match=rf"{count} placements .* for the mesh \(dp=2 tp=2\): give 2, one for each"):
        Layout(MESH, (Replicate(),) * count)


def test_what_is_no_placement_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"0 is no placement: use Shard\(dim\), Replicate\(\) or Partial\(op\)"):
        Layout(MESH, (0, Replicate()))  # type: ignore[arg-type]


def test_reductions_that_do_not_commute_are_refused() -> None:
    assert Layout(MESH, (Partial("sum"), Partial("avg")))
    with pytest.raises(LayoutError, match=r"\[P\(sum\) P\(max\)\] has partial placements of different reductions"):
        Layout(MESH, (Partial("sum"), Partial("max")))


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 1, 2), (0, 2)])
def test_an_order_names_the_axes_that_shard_the_dim(order: tuple[int, ...]) -> None:
    with pytest.raises(
        LayoutError, match=r"of tensor dim 0 must name the mesh axes that shard it, \(0, 1\), once each"
    ):
        Layout(MESH, (Shard(0), Shard(0)), ((0, order),))


@given(laid_out(), st.randoms())
def test_axes_that_split_a_dim_together_do_so_one_after_the_other(case: tuple[Layout, Shape], chance: Random) -> None:
    layout, shape = case
    idle = [axis for axis, p in enumerate(layout.placements) if not isinstance(p, Shard)]
    chance.shuffle(idle)
    for dim in range(len(shape)):
        expected = layout
        for axis in idle:
            expected = expected.replace(axis, Shard(dim))
        assert layout.split(dim, idle) == expected


@pytest.mark.parametrize("axes", [(0,), (1, 1), (1, 0)])
def test_an_axis_splits_one_dim_once(axes: tuple[int, ...]) -> None:
    with pytest.raises(
        LayoutError, match=r"mesh axis [01] of \[dp:S\(0\) tp:R\] shards a dim: give axes that shard none"
    ):
        Layout(MESH, (Shard(0), Replicate())).split(1, axes)


@pytest.mark.parametrize("text", ["dp:S(0) tp:S(0); tp,dp", "dp:S(0) tp:S(0); x:tp,dp", "dp:S(0)", "dp:S(0) tp:Q"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(NotationError):
        parse_layout(text, MESH)


def test_an_order_of_unknown_axes_is_refused() -> None:
    with pytest.raises(MeshError, match="has no axis 'pp'"):
        parse_layout("dp:S(0) tp:S(0); 0:pp,dp", MESH)
