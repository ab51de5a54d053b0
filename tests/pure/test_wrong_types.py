"""Values of a wrong type are a TypeError, as in torch, and of dshard's own class of errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

import dshard
from dshard import DShardError, Layout, LayoutError, Mesh, MeshError, Partial, Replicate, ShapeError, Shard

MESH = Mesh((2,), ("x",))
WRONG: list[tuple[Callable[[], object], type[DShardError]]] = [
    (lambda: Shard("0"), LayoutError),  # type: ignore[arg-type]
    (lambda: Shard(0.5), LayoutError),  # type: ignore[arg-type]
    (lambda: Partial(3), LayoutError),  # type: ignore[arg-type]
    (lambda: Layout(MESH, ("S(0)",)), LayoutError),  # type: ignore[arg-type]
    (lambda: Layout(MESH, 3), LayoutError),  # type: ignore[arg-type]
    (lambda: Layout((2,), (Replicate(),)), LayoutError),  # type: ignore[arg-type]
    (lambda: Mesh("2"), MeshError),  # type: ignore[arg-type]
    (lambda: Mesh((2.5,)), MeshError),  # type: ignore[arg-type]
    (lambda: dshard.zeros("a", device_mesh=MESH), ShapeError),
    (lambda: dshard.zeros(2.5, device_mesh=MESH), ShapeError),
    (lambda: dshard.ones((2, None), device_mesh=MESH), ShapeError),
    (lambda: dshard.distribute_tensor(torch.ones(2), MESH, Shard(0)), LayoutError),
    (lambda: dshard.distribute_tensor(torch.ones(2), MESH, ["S(0)"]), LayoutError),
    (lambda: dshard.distribute_tensor(torch.ones(2), "x", [Shard(0)]), MeshError),  # type: ignore[arg-type]
]
VALUES: list[Callable[[], object]] = [
    lambda: Partial("mean"),  # type: ignore[arg-type]
    lambda: Mesh((0,)),
    lambda: Layout(MESH, (Shard(0), Shard(0))),
    lambda: dshard.zeros(-1, device_mesh=MESH),
]


@pytest.mark.parametrize(("call", "kind"), WRONG)
def test_wrong_types_are_type_errors(call: Callable[[], object], kind: type[DShardError]) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert type(caught.value).__name__ == kind.__name__


@pytest.mark.parametrize("call", VALUES)
def test_wrong_values_are_value_errors_alone(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the class is what is tested
        call()
    assert not isinstance(caught.value, TypeError)


def test_errors_of_wrong_types_are_pickled() -> None:
    with pytest.raises(LayoutError) as caught:
        Shard("0")  # type: ignore[arg-type]
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (type(caught.value), str(caught.value))
