"""Parameters, modules and factories."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard import DTensor, Layout, Mesh, Replicate, Shard, distribute_module, distribute_tensor
from dshard.dispatch import function_table
from dshard.layout import Shape
from dshard.testing import cuda_contract, distribute, layouts, meshes, shapes, simulated, whole, whole_numbers
from dshard.torch_private import decomposition_table

GRID = Mesh((2, 2), ("dp", "tp"))
X = torch.arange(15.0).view(5, 3)


def placed(x: Tensor, *placements: Any) -> DTensor:
    return distribute(x, Layout(GRID, placements))


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


# -- factories


@given(meshes(max_axes=2, permuted=False), shapes(max_dims=3), st.data())
def test_factories_make_whole_tensors(mesh: Mesh, shape: Shape, data: st.DataObject) -> None:
    laid: Any = {"device_mesh": mesh, "placements": data.draw(layouts(mesh, len(shape), partial=())).placements}
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
        placements = data.draw(layouts(mesh, len(shape), partial=())).placements
        with simulated(mesh):
            dshard.manual_seed(7)
            values.append([whole(make(shape, device_mesh=mesh, placements=placements)) for _ in range(2)])

    for first, second in values[1:]:
        assert torch.equal(first, values[0][0])
        assert torch.equal(second, values[0][1])
    if values[0][0].numel() > 3:
        assert not torch.equal(*values[0])


@pytest.mark.parametrize("placements", list(itertools.product((Shard(0), Replicate()), repeat=2)))
@pytest.mark.parametrize("table", [Shard(0), Shard(1), Replicate()])
def test_gradients_of_rows_are_divided_by_all_their_lookups(table: Any, placements: tuple[Any, ...]) -> None:
    indices, rows, terms = torch.tensor([0, 3, 2, 1, 1, 3, 1]), torch.randn(4, 3).double(), torch.randn(7, 3).double()
    alone = rows.clone().requires_grad_()
    (F.embedding(indices, alone, scale_grad_by_freq=True) * terms).sum().backward()
    with simulated(GRID):
        ours = distribute_tensor(rows, GRID, [table, Replicate()]).requires_grad_()
        picked = F.embedding(distribute_tensor(indices, GRID, placements), ours, scale_grad_by_freq=True)
        (picked * distribute_tensor(terms, GRID, [Replicate(), Replicate()])).sum().backward()
        torch.testing.assert_close(whole(ours.grad), alone.grad)


def test_an_lstm_is_split_in_single_precision_as_in_double() -> None:
    """torch has a fused LSTM for CPUs, of single and half precision: one operator, which cannot be split."""

    def sent(dtype: torch.dtype) -> list[tuple[str, object]]:
        torch.manual_seed(0)
        module, x = nn.LSTM(3, 4, num_layers=2, batch_first=True).to(dtype), torch.randn(5, 3, 3).to(dtype)
        expected, laid = module(x)[0], copy.deepcopy(module)
        with simulated(GRID), dshard.implicit_replication():
            distribute_module(laid, GRID)
            with dshard.trace() as traced:
                found = laid(placed(x, Shard(0), Replicate()))[0]

            torch.testing.assert_close(whole(found), expected)
        return [(event.op, event.axis) for event in traced.events]

    assert sent(torch.float32) == sent(torch.float64)
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_taken_apart_on_gpus(kind: Any, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would run cuDNN there, or a fused cell: one operator, which cannot be split."""
    torch.manual_seed(0)
    module, x = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True).double(), torch.randn(5, 6, 3).double()
    apart: list[str] = []

    class Decompositions(dict[Any, Any]):
        def __getitem__(self, overload: Any) -> Any:
            apart.append(str(overload).split(".")[1])
            return super().__getitem__(overload)

    monkeypatch.setattr(function_table, "decomposition_table", Decompositions(decomposition_table))

    def run(module: nn.Module, x: Any) -> list[Any]:
        lengths = torch.tensor([6, 4, 3, 3, 1])
        out = module(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True) if is_packed else x)[0]
        out = (out.data if is_packed else out).sin()
        out.sum().backward()
        return [out, *(p.grad for p in module.parameters())]

    expected, laid = run(copy.deepcopy(module), x), copy.deepcopy(module)
    with simulated(GRID), dshard.implicit_replication(), cuda_contract():
        distribute_module(laid, GRID)
        found = run(laid, placed(x, Shard(0), Replicate()))
        torch.testing.assert_close([whole(y) for y in found], expected)

    assert apart == [{nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}[kind]]


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_is_taken_apart_on_gpus(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would run cuDNN's there, which cannot be split."""
    function, enabled = torch.batch_norm, list[bool]()
    monkeypatch.setattr(torch, "batch_norm", lambda *args: (enabled.append(args[-1]), function(*args))[1])
    x, mean, var = X, torch.zeros(3), torch.ones(3)
    expected = F.batch_norm(x, mean.clone(), var.clone(), training=training)
    with simulated(GRID):
        whole_rows = Replicate() if training else Shard(0)
        laid = [placed(x, whole_rows, Shard(1)), *(placed(t.clone(), Replicate(), Replicate()) for t in (mean, var))]
        torch.testing.assert_close(whole(F.batch_norm(*laid, training=training)), expected)

    assert enabled == [torch.backends.cudnn.enabled, False]
    assert torch.backends.cudnn.enabled


def test_a_synchronised_batch_norm_is_that_of_all_rows() -> None:
    """torch's own asks for plain tensors on GPUs, also while a plan is made."""
    module = nn.SyncBatchNorm(3)
    expected, model = nn.BatchNorm1d(3)(X), nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
    with simulated(GRID), dshard.implicit_replication():
        distribute_module(module, GRID)
        torch.testing.assert_close(whole(module(placed(X, Shard(0), Replicate()))), expected)

    assert dshard.plan_model(model, GRID, "data", torch.empty(8, 4, device="meta")).parameters
