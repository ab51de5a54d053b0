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
from dshard.layout import Shape
from dshard.testing import (
    RankPool,
    distribute,
    dtensors,
    layouts,
    meshes,
    shapes,
    simulated,
    whole,
    whole_numbers,
)

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
    assert x.placements == x.layout.placements
    assert x.device == value.device


@given(meshes(max_axes=2), shapes(max_dims=3), st.data())
def test_distributing_and_gathering_keeps_the_tensor(mesh: Mesh, shape: Shape, data: st.DataObject) -> None:
    layout = data.draw(layouts(mesh, len(shape), pending=()))
    value = whole_numbers(shape)
    default = Layout(mesh, layout.placements)
    with simulated(mesh):
        x = distribute_tensor(value, mesh, layout.placements)

        assert x.layout == default
        assert torch.equal(whole(x), value)
        assert all(torch.equal(part, value) for part in unstacked(x.full_tensor()).values())


@given(meshes(max_axes=2), shapes(max_dims=3), st.data())
def test_parts_make_the_tensor_again(mesh: Mesh, shape: Shape, data: st.DataObject) -> None:
    layout = data.draw(layouts(mesh, len(shape)))
    value = whole_numbers(shape)
    with simulated(mesh):
        x = distribute(value, Layout(mesh, layout.placements))
        again = DTensor.from_local(x.to_local(), mesh, layout.placements)

        assert again.shape == x.shape
        assert torch.equal(whole(again), value)


def unstacked(x: Any) -> dict[int, Tensor]:
    found: dict[int, Tensor] = x._local_tensors
    return found


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
    with simulated(2) as _:
        mesh = Mesh((2,), ("x",))
        stacked = dshard.comm.stack({0: torch.zeros(4), 1: torch.ones(4)})

        values = {
            source: whole(distribute_tensor(stacked, mesh, [Shard(0)], src_data_rank=source)).tolist()
            for source in (0, 1, None)
        }

    assert values == {0: [0.0] * 4, 1: [1.0] * 4, None: [0.0, 0.0, 1.0, 1.0]}


# -- gradients across


@given(dtensors(), st.data())
def test_gradients_of_leaves_lie_like_the_leaves(x: DTensor, data: st.DataObject) -> None:
    other = data.draw(layouts(x.layout.mesh, x.ndim))
    value = whole(x)
    with simulated(x.layout.mesh):
        x.requires_grad_()
        y = dshard.autograd.redistribute(x, other)
        (x * x + 3 * y).backward(distribute(torch.ones(x.shape, dtype=x.dtype), x.layout.cotangent()))

        assert x.grad is not None
        assert x.grad.layout == x.layout.cotangent()
        torch.testing.assert_close(whole(x.grad), 2 * value + 3)


def test_gradients_accumulate_in_place() -> None:
    with simulated(GRID):
        x = placed(X, Shard(0), Shard(1)).requires_grad_()
        for _ in range(2):
            (x * 2).sum().backward()

        assert x.grad.layout == x.layout
        assert whole(x.grad).equal(torch.full_like(X, 4.0))


def test_to_local_takes_its_gradient_as_said() -> None:
    """By default the local gradient lies like the tensor; as a pending sum, the ranks' terms add up."""
    with simulated(GRID):
        for laid, expected in (((Replicate(),) * 2, 1.0), ((Partial(), Replicate()), 2.0), ((Partial(),) * 2, 4.0)):
            x = placed(X, Replicate(), Replicate()).requires_grad_()
            x.to_local(grad_placements=laid).sum().backward()

            assert whole(x.grad).equal(torch.full_like(X, expected))


def test_full_tensor_takes_its_gradient_as_said() -> None:
    with simulated(GRID):
        x = placed(X, Shard(0), Replicate()).requires_grad_()
        x.full_tensor(grad_placements=[Partial(), Replicate()]).sum().backward()

        assert x.grad.layout == x.layout
        assert whole(x.grad).equal(torch.full_like(X, 2.0))


def test_from_local_gives_its_gradient_as_said() -> None:
    with simulated(GRID):
        for laid, expected in ((None, [1.0] * 4), ([Replicate(), Partial()], [1.0, 0.0, 1.0, 0.0])):
            local = dshard.comm.stack({rank: torch.ones(2) for rank in range(4)}).requires_grad_()
            x = DTensor.from_local(local, GRID, [Replicate(), Replicate()], grad_placements=laid)
            x.sum().backward()

            assert [grad[0].item() for grad in unstacked(local.grad).values()] == expected


def test_hooks_and_retained_gradients_see_dtensors() -> None:
    with simulated(GRID):
        seen = []
        x = placed(X, Shard(0), Replicate()).requires_grad_()
        y = x * 2
        y.retain_grad()
        y.register_hook(lambda grad: seen.append(type(grad)))
        y.sum().backward()

        assert seen == [DTensor]
        assert isinstance(y.grad, DTensor)


# -- numbers


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
def test_a_pending_number_is_reduced_before_it_is_read(op: Any) -> None:
    with simulated(GRID):
        x = distribute(torch.tensor(3.0), Layout(GRID, (Partial(op), Replicate())))

        assert x.item() == 3.0
        assert float(x) == 3.0
        assert int(x) == 3
        assert bool(x)
        assert x == 3.0
        assert f"{x:.1f}" == "3.0"


def test_comparisons_of_what_is_pending_are_those_of_the_whole() -> None:
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
                MixedError, match=r"a plain torch.Tensor of shape \(5, 3\) .* wrap it with distribute_tensor"
            ):
                call()


def test_numbers_and_scalar_tensors_count_as_replicated() -> None:
    with simulated(GRID):
        x = placed(X, Shard(0), Shard(1))
        for other in (2, 2.0, torch.tensor(2.0), torch.tensor(2)):
            assert whole(x * other).equal(X * 2)
            assert whole(other * x).equal(X * 2)
            assert (x * other).layout == x.layout


# -- modules


def test_a_parameter_stays_a_parameter() -> None:
    with simulated(GRID):
        parameter = distribute_tensor(nn.Parameter(X.clone()), GRID, [Shard(0), Replicate()])

        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert parameter.requires_grad
        assert not nn.Parameter(parameter.detach(), requires_grad=False).requires_grad


def test_gradients_of_parameters_lie_like_them() -> None:
    with simulated(GRID):
        weight = nn.Parameter(placed(X, Replicate(), Shard(1)))
        x = placed(whole_numbers((4, 3), torch.float32), Shard(0), Replicate())
        F.linear(x, weight).sum().backward()

        assert weight.grad.placements == (Replicate(), Shard(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(3, 6), nn.Linear(6, 2)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu()) * self.scale


def split_hidden(name: str, module: nn.Module, mesh: Any) -> None:
    if name == "hidden":
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Replicate(), Shard(0)]))


def test_a_module_is_laid_out_and_computes_the_same() -> None:
    torch.manual_seed(0)
    alone = Net()
    module = copy.deepcopy(alone)
    expected = alone(X)
    expected.sum().backward()
    with simulated(GRID):
        laid = distribute_module(
            module,
            GRID,
            split_hidden,
            input_fn=lambda mod, inputs, mesh: (distribute_tensor(inputs[0], mesh, [Shard(0), Replicate()]),),
            output_fn=lambda mod, out, mesh: out.redistribute(placements=[Replicate(), Replicate()]),
        )
        out = laid(X)
        out.sum().backward()

        assert laid is module
        assert out.placements == (Replicate(), Replicate())
        assert all(isinstance(p, DTensor) for p in (*module.parameters(), *module.buffers()))
        assert module.hidden.weight.placements == (Replicate(), Shard(0))
        assert module.out.weight.placements == (Replicate(), Replicate())
        torch.testing.assert_close(whole(out.detach()), expected.detach())
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert ours.grad.placements == ours.placements
            torch.testing.assert_close(whole(ours.grad), theirs.grad)


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


def test_only_leaves_are_deep_copied() -> None:
    with simulated(GRID), pytest.raises(ShapeError, match="only leaf DTensors can be deep-copied, as in torch"):
        copy.deepcopy(placed(X, Shard(0), Replicate()).requires_grad_() * 2)


def test_a_repr_speaks_the_one_notation() -> None:
    mesh = Mesh((1,), ("tp",))
    with simulated(mesh):
        x = distribute(torch.ones(2), Layout(mesh, (Shard(0),)))

    assert repr(x).startswith("DTensor((2,), torch.float32, [tp:S(0)] on (tp=1), local=")
    assert repr(x.requires_grad_()).endswith("requires_grad=True)")
    assert "grad_fn=" in repr(x * 2)


# -- factories


@given(meshes(max_axes=2, permuted=False), shapes(max_dims=3), st.data())
def test_factories_make_whole_tensors(mesh: Mesh, shape: Shape, data: st.DataObject) -> None:
    laid: Any = {"device_mesh": mesh, "placements": data.draw(layouts(mesh, len(shape), pending=())).placements}
    with simulated(mesh):
        for made, expected in (
            (dshard.zeros(shape, **laid), torch.zeros(shape)),
            (dshard.ones(*shape, dtype=torch.int32, **laid), torch.ones(shape, dtype=torch.int32)),
            (dshard.full(shape, 2.5, requires_grad=True, **laid), torch.full(shape, 2.5)),
        ):
            assert torch.equal(whole(made.detach()), expected)
            assert made.placements == laid["placements"]
        assert dshard.full(shape, 2.5, requires_grad=True, **laid).requires_grad
        assert dshard.empty(shape, **laid).shape == shape


@given(st.lists(meshes(max_axes=2, max_ranks=8), min_size=2, max_size=3), shapes(max_dims=2), st.data())
@pytest.mark.parametrize("make", [dshard.rand, dshard.randn])
def test_random_values_do_not_depend_on_the_mesh(
    make: Any, many: list[Mesh], shape: Shape, data: st.DataObject
) -> None:
    values = []
    for mesh in many:
        placements = data.draw(layouts(mesh, len(shape), pending=())).placements
        with simulated(mesh):
            dshard.manual_seed(7)
            values.append([whole(make(shape, device_mesh=mesh, placements=placements)) for _ in range(2)])

    for first, second in values[1:]:
        assert torch.equal(first, values[0][0])
        assert torch.equal(second, values[0][1])
    if values[0][0].numel() > 3:
        assert not torch.equal(*values[0])


# -- real ranks


@cache
def real_mesh() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def second_derivatives() -> list[float]:
    """The largest differences of first and second derivatives of linear and matmul from single-device."""
    torch.manual_seed(0)
    values = [torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)]
    found = []
    for function in (F.linear, lambda a, b: a @ b.t()):
        ours = [
            distribute_tensor(x, real_mesh(), laid).requires_grad_()
            for x, laid in zip(values, ([Shard(0), Shard(1)], [Replicate(), Shard(0)]), strict=True)
        ]
        theirs = [x.clone().requires_grad_() for x in values]
        for a, b in zip(penalty(function, *ours), penalty(function, *theirs), strict=True):
            found.append((a.full_tensor() - b).abs().max().item())
    return found


def penalty(function: Any, a: Tensor, b: Tensor) -> list[Tensor]:
    """The gradients of a norm of gradients."""
    out = function(a, b).tanh().sum()
    grads = torch.autograd.grad(out, [a, b], create_graph=True)
    sum((grad * grad).sum() for grad in grads).backward()
    return [grads[0].detach(), grads[1].detach(), a.grad, b.grad]


@pytest.mark.ranks
def test_second_derivatives_are_those_of_one_device(ranks: RankPool) -> None:
    for differences in ranks.run(second_derivatives):
        assert max(differences) < 1e-12


def pickled() -> list[Any]:
    """A DTensor and a parameter through pickle and torch.save, on each rank."""
    x = distribute_tensor(torch.arange(10.0), real_mesh(), [Shard(0), Replicate()])
    parameter = nn.Parameter(x)
    again = pickle.loads(pickle.dumps(parameter))
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)["x"]
    return [
        again.layout == x.layout,
        isinstance(again, nn.Parameter),
        again.device_mesh == real_mesh(),
        (again + loaded).full_tensor().tolist(),
    ]


@pytest.mark.ranks
def test_a_pickled_dtensor_comes_back_on_its_mesh(ranks: RankPool) -> None:
    assert ranks.run(pickled) == [[True, True, True, [2.0 * i for i in range(10)]]] * 4


def numbers() -> list[Any]:
    """What each rank reads of a pending number."""
    local = torch.tensor(float(dist.get_rank()))
    x = DTensor.from_local(local, real_mesh(), [Partial(), Partial()])
    return [x.item(), float(x), bool(x > 5), (x / 2).item()]


@pytest.mark.ranks
def test_every_rank_reads_the_same_number(ranks: RankPool) -> None:
    assert ranks.run(numbers) == [[6.0, 6.0, True, 3.0]] * 4


def empty_shards() -> list[Any]:
    """Attention whose batch leaves a rank without work: its backward pass meets the others nevertheless."""
    mesh = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    query, mask = torch.ones(2, 1, 3, 4, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    q = distribute_tensor(query, mesh, [Shard(0)]).requires_grad_()
    m = distribute_tensor(mask, mesh, [Replicate()]).requires_grad_()
    F.scaled_dot_product_attention(q, q, q * q, m).sum().backward()
    return [q.grad.full_tensor().sum().item(), m.grad.full_tensor().abs().sum().item()]


@pytest.mark.ranks
def test_a_rank_without_work_takes_part(ranks: RankPool) -> None:
    for total, masked in ranks.run(empty_shards):
        assert total == pytest.approx(48.0)
        assert masked == pytest.approx(0.0)
