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
