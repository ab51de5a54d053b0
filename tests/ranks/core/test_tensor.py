"""The contract of DTensor: it is the whole tensor, wherever its parts lie."""

from __future__ import annotations

import copy
import io
import pickle
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard import (
    DeviceMesh,
    DTensor,
    Layout,
    Mesh,
    MixedError,
    Partial,
    Replicate,
    ShapeError,
    Shard,
    distribute_module,
    distribute_tensor,
)
from dshard.layout import Shape, layout_of
from dshard.testing import RankPool, distribute, dtensors, layouts, meshes, shapes, simulated, whole, whole_numbers

GRID = Mesh((2, 2), ("dp", "tp"))
X = torch.arange(15.0).view(5, 3)


def placed(x: Tensor, *placements: Any) -> DTensor:
    return distribute(x, Layout(GRID, placements))


# -- made, and taken apart


@given(dtensors())
def test_a_dtensor_has_the_whole_tensors_properties(x: DTensor) -> None:
    value = whole(x)

    assert (x.shape, x.dtype, x.ndim, x.numel(), x.size()) == (
        value.shape,
        value.dtype,
        value.ndim,
        value.numel(),
        value.size(),
    )
    assert x.stride() == value.stride()
    assert x.is_contiguous()
    assert layout_of(x.layout.mesh, x.placements, x.ndim) == x.layout  # strided ones say the order of the axes
    assert x.device == value.device


@given(meshes(max_axes=2), shapes(max_dims=3), st.data())
def test_distributing_and_gathering_keeps_the_tensor(mesh: Mesh, shape: Shape, data: st.DataObject) -> None:
    layout = data.draw(layouts(mesh, len(shape), partial=()))
    value = whole_numbers(shape)
    default = Layout(mesh, layout.placements)
    with simulated(mesh):
        x = distribute_tensor(value, mesh, layout.placements)

        assert x.layout == default
        assert torch.equal(whole(x), value)
        assert all(torch.equal(part, value) for part in dshard.comm.rank_tensors.unstack(x.full_tensor()).values())


@given(meshes(max_axes=2), shapes(max_dims=3), st.data())
def test_parts_make_the_tensor_again(mesh: Mesh, shape: Shape, data: st.DataObject) -> None:
    layout = data.draw(layouts(mesh, len(shape)))
    value = whole_numbers(shape)
    with simulated(mesh):
        x = distribute(value, Layout(mesh, layout.placements))
        again = DTensor.from_local(x.to_local(), mesh, layout.placements, run_check=True)

        assert again.shape == x.shape
        assert torch.equal(whole(again), value)


def test_without_placements_a_tensor_is_replicated() -> None:
    with simulated(GRID):
        assert distribute_tensor(X, GRID).placements == (Replicate(), Replicate())
        assert DTensor.from_local(X, GRID).placements == (Replicate(), Replicate())


def test_negative_dims_are_understood() -> None:
    with simulated(GRID):
        assert distribute_tensor(X, GRID, [Shard(-1), Replicate()]).placements == (Shard(1), Replicate())


def test_what_is_distributed_is_a_leaf_of_its_own() -> None:
    source = X.clone().requires_grad_()
    with simulated(GRID):
        x = distribute_tensor(source, GRID, [Shard(0), Replicate()])

        assert x.is_leaf
        assert x.requires_grad
        with torch.no_grad():
            source.zero_()
        assert whole(x.detach()).equal(X)


def test_a_dtensor_laid_out_right_is_distributed_already() -> None:
    with simulated(GRID):
        x = distribute_tensor(X, GRID, [Shard(0), Replicate()])

        assert distribute_tensor(x, GRID, [Shard(0), Replicate()]) is x


def test_the_source_rank_decides_what_is_sent() -> None:
    with simulated(2):
        mesh = Mesh((2,), ("x",))
        stacked = dshard.comm.stack({0: torch.zeros(4), 1: torch.ones(4)})

        values = {
            source: whole(distribute_tensor(stacked, mesh, [Shard(0)], src_data_rank=source)).tolist()
            for source in (0, 1, None)
        }

    assert values == {0: [0.0] * 4, 1: [1.0] * 4, None: [0.0, 0.0, 1.0, 1.0]}


# -- numbers


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
def test_a_partial_number_is_reduced_before_it_is_read(op: Any) -> None:
    with simulated(GRID):
        x = distribute(torch.tensor(3.0), Layout(GRID, (Partial(op), Replicate())))

        assert x.item() == 3.0
        assert float(x) == 3.0
        assert int(x) == 3
        assert bool(x)
        assert x == 3.0
        assert f"{x:.1f}" == "3.0"


def test_comparisons_of_partial_tensors_are_those_of_their_sums() -> None:
    with simulated(GRID):
        x = placed(X, Partial(), Partial())

        assert whole(x > 7).equal(X > 7)
        assert whole(x.relu()).equal(X.relu())
        assert torch.equal(x, x.clone())
        assert torch.allclose(x, placed(X, Shard(0), Replicate()))


def test_more_than_one_number_is_no_number() -> None:
    with simulated(GRID), pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        placed(X, Shard(0), Replicate()).item()


# -- plain tensors


def test_plain_tensors_are_refused_with_the_way_out() -> None:
    with simulated(GRID):
        x = placed(X, Shard(0), Replicate())
        for call in (lambda: x + X, lambda: X @ x.t(), lambda: torch.cat([x, X]), lambda: F.linear(x, X)):
            with pytest.raises(
                MixedError, match=r"a plain torch.Tensor of shape \(5, 3\) .* wrap it with .*whole batches"
            ):
                call()


def test_plain_tensors_that_torch_makes_within_an_operator_are_alike() -> None:
    with simulated(GRID):
        for operator in (torch.masked.mean, torch.masked.var, torch.masked.std):
            kwargs = {} if operator is torch.masked.mean else {"unbiased": True}
            assert torch.allclose(
                whole(operator(placed(X, Shard(0), Replicate()), dim=None, **kwargs)), operator(X, dim=None, **kwargs)
            )


def test_numbers_and_scalar_tensors_count_as_replicated() -> None:
    with simulated(GRID):
        x = placed(X, Shard(0), Shard(1))
        for other in (2, 2.0, torch.tensor(2.0), torch.tensor(2)):
            assert whole(x * other).equal(X * 2)
            assert whole(other * x).equal(X * 2)
            assert (x * other).layout == x.layout


# -- copies


@given(dtensors())
def test_a_deep_copy_is_equal_and_independent(x: DTensor) -> None:
    with simulated(x.layout.mesh):
        value = whole(x)
        x.requires_grad_()

        twin = copy.deepcopy(x)
        with torch.no_grad():
            twin.zero_()

        assert twin.layout == x.layout
        assert twin.requires_grad
        assert torch.equal(whole(x.detach()), value)


def test_a_deep_copied_module_keeps_its_layouts() -> None:
    with simulated(GRID):
        module = distribute_module(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), GRID)
        module[1].weight = module[0].weight

        twin = copy.deepcopy(module)

        assert isinstance(twin[0].weight, nn.Parameter)
        assert twin[0].weight is twin[1].weight
        assert twin[0].weight is not module[0].weight
        assert twin[0].bias.layout == module[0].bias.layout


def test_a_copy_has_the_gradient_and_attributes_that_torch_copies() -> None:
    with simulated(GRID):
        x: Any = placed(X, Shard(0), Replicate()).requires_grad_()
        parameter: Any = nn.Parameter(x.detach())
        for t in (x, parameter):
            t.tags = ["a"]
            (t * t).sum().backward()

        twin, twin_parameter = copy.deepcopy([x, parameter])

        assert torch.equal(whole(twin.grad), whole(x.grad))
        assert twin.grad is not x.grad
        assert twin_parameter.grad is None
        assert twin.tags == twin_parameter.tags == ["a"]
        assert twin.tags is not x.tags


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_deep_copies_share_memory_as_what_they_are_of(dim: int | None) -> None:
    def program(x: Tensor) -> list[Tensor]:
        parameter, x = nn.Parameter(x.clone()), x.clone()
        given = [x, x[1:4], x[1:4][:2, 1:], x.t(), parameter, parameter.detach()[1:3]]
        copied = copy.deepcopy(given)
        offsets = [t.storage_offset() for t in copied[:4]]
        with torch.no_grad():
            for i, t in enumerate(copied):
                t.mul_(i + 2)
        return [t.detach() for t in (*given, *copied, copy.deepcopy(copied[2]).add_(1))] + [torch.tensor(offsets)]

    expected = program(X)
    with simulated(GRID):
        out = program(placed(X, Replicate(), Replicate() if dim is None else Shard(dim)))
        for actual, value in zip(out, expected, strict=True):
            assert torch.equal(whole(actual) if isinstance(actual, DTensor) else actual, value)


def test_only_leaves_are_deep_copied() -> None:
    with simulated(GRID), pytest.raises(ShapeError, match="only leaf DTensors can be deep-copied, as in torch"):
        copy.deepcopy(placed(X, Shard(0), Replicate()).requires_grad_() * 2)


@pytest.mark.parametrize(("module", "answer"), [("transformers.models.ovis2", torch.strided), ("net", GRID)])
def test_the_layout_is_that_of_memory_to_code_that_gives_it_to_factories(module: str, answer: object) -> None:
    code: Any = {"__name__": module}
    exec("def layout(x): return x.layout", code)
    with simulated(GRID):
        layout = code["layout"](placed(X, Shard(0), Replicate()))
    assert getattr(layout, "mesh", layout) == answer


def test_a_repr_speaks_the_one_notation() -> None:
    mesh = Mesh((1,), ("tp",))
    with simulated(mesh):
        x = distribute(torch.ones(2), Layout(mesh, (Shard(0),)))

    assert repr(x).startswith("DTensor((2,), torch.float32, [tp:S(0)] on (tp=1), local=")
    assert repr(x.requires_grad_()).endswith("requires_grad=True)")
    assert "grad_fn=" in repr(x * 2)


# -- real ranks


@cache
def real_mesh() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def pickled() -> list[Any]:
    """A DTensor and a parameter through pickle and torch.save, on each rank."""
    x = distribute_tensor(torch.arange(10.0), real_mesh(), [Shard(0), Replicate()])
    parameter: Any = nn.Parameter(x)
    parameter.tags = ["a"]
    again = pickle.loads(pickle.dumps(parameter))
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)["x"]
    buffer.seek(0)
    assert torch.load(buffer, map_location="meta")["x"].is_meta
    view = x[1:7]
    viewed = pickle.loads(pickle.dumps([x, view]))  # x knows its view, which has memory of its own
    return [
        again.layout == x.layout and again.tags == ["a"],
        isinstance(again, nn.Parameter),
        again.device_mesh == real_mesh(),
        (again + loaded).full_tensor().tolist(),
        [y.full_tensor().equal(z.full_tensor()) for y, z in zip(viewed, [x, view], strict=True)],
    ]


@pytest.mark.ranks
def test_a_pickled_dtensor_comes_back_on_its_mesh(ranks: RankPool) -> None:
    assert ranks.run(pickled) == [[True, True, True, [2.0 * i for i in range(10)], [True, True]]] * 4


def numbers() -> list[Any]:
    """What each rank reads of a partial number."""
    local = torch.tensor(float(dist.get_rank()))
    x = DTensor.from_local(local, real_mesh(), [Partial(), Partial()])
    return [x.item(), float(x), bool(x > 5), (x / 2).item()]


@pytest.mark.ranks
def test_every_rank_reads_the_same_number(ranks: RankPool) -> None:
    assert ranks.run(numbers) == [[6.0, 6.0, True, 3.0]] * 4
