"""Meshes as pure values."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshard.errors import MeshError
from dshard.mesh import Mesh
from dshard.testing import meshes
from dshard.topology import COLLECTIVES, Collective, Topology


@given(meshes())
def test_a_rank_sits_where_its_coordinate_says(mesh: Mesh) -> None:
    assert [mesh.coordinate(rank) for rank in mesh.ranks] == list(mesh.coordinates())
    assert [mesh.rank(at) for at in mesh.coordinates()] == list(mesh.ranks)


@given(meshes(permuted=False))
def test_the_last_axis_varies_fastest(mesh: Mesh) -> None:
    assert mesh.ranks == tuple(range(mesh.size))
    assert list(mesh.coordinates()) == sorted(mesh.coordinates())


@given(meshes(), st.data())
def test_the_groups_of_some_axes_partition_the_ranks(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.names), unique=True))

    groups = {mesh.group(axes, at) for at in mesh.coordinates()}

    assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
    assert all(mesh.rank(at) in mesh.group(axes, at) for at in mesh.coordinates())
    assert {len(group) for group in groups} == {_size(mesh, axes)}


def _size(mesh: Mesh, axes: Sequence[str]) -> int:
    size = 1
    for name in axes:
        size *= mesh.shape[mesh.axis(name)]
    return size


def test_a_group_follows_the_order_of_its_axes() -> None:
    mesh = Mesh((2, 3), ("dp", "tp"))

    assert mesh.group(["dp", "tp"], (0, 0)) == (0, 1, 2, 3, 4, 5)
    assert mesh.group(["tp", "dp"], (0, 0)) == (0, 3, 1, 4, 2, 5)


@given(meshes(), st.data())
def test_the_axis_that_folds_several_has_their_groups(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.permutations(mesh.names))[: data.draw(st.integers(1, mesh.ndim))]

    folded = mesh.folded(axes, "folded")

    assert folded.shape[folded.axis("folded")] == _size(mesh, axes)
    for rank in mesh.ranks:
        assert folded.group(["folded"], folded.coordinate(rank)) == mesh.group(axes, mesh.coordinate(rank))
        for axis in set(mesh.names) - set(axes):
            assert folded.group([axis], folded.coordinate(rank)) == mesh.group([axis], mesh.coordinate(rank))
    again = folded.unfolded("folded", {axis: mesh.shape[mesh.axis(axis)] for axis in axes})
    for rank in mesh.ranks:
        places = dict(zip(mesh.names, mesh.coordinate(rank), strict=True))
        assert dict(zip(again.names, again.coordinate(rank), strict=True)) == places


@given(meshes(), st.data())
def test_neighbours_that_are_folded_and_unfolded_are_the_mesh_again(mesh: Mesh, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, mesh.ndim - 1))
    axes = mesh.names[first : data.draw(st.integers(first + 1, mesh.ndim))]

    folded = mesh.folded(axes, axes[0])

    assert folded.ranks == mesh.ranks
    assert folded.unfolded(axes[0], {axis: mesh.shape[mesh.axis(axis)] for axis in axes}) == mesh


@given(meshes(max_ranks=16), st.data(), st.sampled_from(COLLECTIVES))
def test_a_folded_axis_has_the_link_of_the_axes(mesh: Mesh, data: st.DataObject, collective: Collective) -> None:
    axes = mesh.names[: data.draw(st.integers(1, mesh.ndim))]
    topology = Topology.preset("dgx-h100", nodes=8, ranks=2)
    folded = mesh.folded(axes, "folded")

    assert topology.nodes(folded, ["folded"]) == topology.nodes(mesh, axes)
    if collective != "exchange":  # whose bytes may all pass along the slowest of several axes
        assert topology.link(folded, ["folded"], collective) == topology.link(mesh, axes, collective)


@given(meshes())
def test_meshes_are_values(mesh: Mesh) -> None:
    same = Mesh(mesh.shape, mesh.names, mesh.ranks)

    assert mesh == same
    assert hash(mesh) == hash(same)
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert mesh != Mesh(mesh.shape, mesh.names, mesh.ranks, "cuda")


def test_lists_are_as_good_as_tuples() -> None:
    assert Mesh([2, 2], ["a", "b"]) == Mesh((2, 2), ("a", "b"))  # type: ignore[arg-type]


def test_names_and_ranks_have_defaults() -> None:
    mesh = Mesh((2, 3))

    assert (mesh.names, mesh.ranks, mesh.device_type) == (("d0", "d1"), (0, 1, 2, 3, 4, 5), "cpu")
    assert (str(mesh), mesh.size, mesh.ndim) == ("d0=2 d1=3", 6, 2)


def test_a_large_mesh_needs_no_processes() -> None:
    mesh = Mesh((64, 8, 8), ("dp", "x", "y"))

    assert mesh.coordinate(4095) == (63, 7, 7)
    assert 4095 in mesh
    assert 4096 not in mesh


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((),), r"a mesh of shape \(\): give each axis at least one rank, as in Mesh"),
        (((2, 0),), r"a mesh of shape \(2, 0\): give each axis at least one rank"),
        (((2, -1),), r"a mesh of shape \(2, -1\): give each axis at least one rank"),
        (((2.0,),), r"a mesh of shape \(2.0,\): give each axis at least one rank"),
        (((2, 2), ("a",)), r"2 mesh axes cannot be called \('a',\): give each axis its own name"),
        (((2, 2), ("a", "a")), r"2 mesh axes cannot be called \('a', 'a'\): give each axis its own name"),
        (((2,), ("a b",)), r"mesh axis names \('a b',\): a name is one word"),
        (((2,), ("",)), r"a name is one word"),
        (((2,), ("a:",)), r"a name is one word"),
        (((2, 2), ("a", "b"), (0, 1, 2)), r"a mesh of shape \(2, 2\) needs 4 different ranks, got 0, 1, 2"),
        (((2,), ("a",), (1, 1)), r"a mesh of shape \(2,\) needs 2 different ranks, got 1, 1"),
    ],
)
def test_what_is_no_mesh_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Mesh(*arguments)


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(MeshError, match=r"the mesh \(dp=2 tp=4\) has no axis 'pp'; its axes are dp, tp"):
        Mesh((2, 4), ("dp", "tp")).axis("pp")


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(MeshError, match=r"rank 2 is not in the mesh \(dp=2\), whose ranks are 0, 1"):
        Mesh((2,), ("dp",)).coordinate(2)


GRID = Mesh((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dp", "x"), r"the axes to fold: 'dp' is no sequence: give names, as in mesh.folded\(\('dp', 'tp'\), 'ep'\)"),
        (((), "x"), r"cannot fold \(\) of the mesh \(dp=2 tp=4\): give one or more of its axes, each once"),
        ((("dp", "dp"), "x"), r"cannot fold \('dp', 'dp'\) of the mesh .*: give one or more of its axes, each once"),
        ((("dp", "pp"), "x"), r"the mesh \(dp=2 tp=4\) has no axis 'pp'; its axes are dp, tp"),
        (
            (("dp",), "tp"),
            r"cannot fold \('dp',\) of the mesh \(dp=2 tp=4\) into 'tp', .* another axis: give another name",
        ),
        ((("dp",), "a b"), r"mesh axis names \('a b', 'tp'\): a name is one word"),
    ],
)
def test_what_cannot_be_folded_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        GRID.folded(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pp", {"a": 2}), r"the mesh \(dp=2 tp=4\) has no axis 'pp'; its axes are dp, tp"),
        (("tp", {"a": 2, "b": 3}), r"cannot unfold tp of .*, which has 4 ranks, into \(a=2 b=3\): .* product is 4"),
        (
            ("tp", {}),
            r"cannot unfold tp of the mesh \(dp=2 tp=4\), which has 4 ranks, into \(\): give sizes whose product",
        ),
        (("tp", {"a": 2.5}), r"the size of 'a': 2.5 is not a whole number above 0"),
        (("tp", {"a": -2, "b": -2}), r"the size of 'a': -2 is not a whole number above 0"),
        (
            ("tp", ("a", "b")),
            r"cannot unfold tp into \('a', 'b'\): give sizes whose product is 4, such as {'a': 4, 'b': 1}",
        ),
        (("tp", {"dp": 2, "b": 2}), r"cannot unfold tp of the mesh .* into 'dp', .* another axis: give another name"),
    ],
)
def test_what_cannot_be_unfolded_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        GRID.unfolded(*arguments)
