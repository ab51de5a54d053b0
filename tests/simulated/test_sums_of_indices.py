"""Operators that add at indices which ranks share: each rank adds what it has, and the results are a partial sum."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from helpers.default_cases import one_way_each
from torch import Tensor

from dshard import Layout, Mesh, Partial, Replicate, Shard, trace
from dshard.placements import Placement
from dshard.testing import distribute, simulated, whole

MESH = Mesh((2, 3), ("a", "b"))
ROWS = torch.tensor([4, 0, 4, 1, 6, 4, 2])
CALLS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor, tuple[int, ...]]] = {
    "index_add": (lambda x, i, v: x.index_add(0, i, v, alpha=2), ROWS, (7, 5)),
    "index_add of columns": (lambda x, i, v: x.index_add(1, i, v), ROWS % 5, (8, 7)),
    "scatter_add": (lambda x, i, v: x.scatter_add(0, i, v), torch.stack([ROWS, ROWS + 1, ROWS], 1), (7, 3)),
    "index_put": (lambda x, i, v: x.index_put((i,), v, accumulate=True), ROWS, (7, 5)),
    "index_put of pairs": (lambda x, i, v: x.index_put((i, i % 5), v, accumulate=True), ROWS, (7,)),
    "index_put of a table": (lambda x, i, v: x.index_put((i,), v, accumulate=True), ROWS.view(7, 1) % 3, (7, 1, 5)),
    "index_put of one row": (lambda x, i, v: x.index_put((i,), v, accumulate=True), ROWS, (5,)),
}
OPERANDS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]


@pytest.mark.parametrize(
    ("name", "placements"), one_way_each(CALLS, [*product(OPERANDS, (Replicate(), Shard(0)))]), ids=str
)
def test_sums_are_those_of_one_device(name: str, placements: tuple[Placement, Placement]) -> None:
    """Indices and values sharded over both axes, the operand in any way: whole numbers, so that equal is equal."""
    call, index, shape = CALLS[name]
    torch.manual_seed(0)
    x, values = torch.randint(-9, 9, (8, 5)).double(), torch.randint(-9, 9, shape).double()
    expected = [t.clone().requires_grad_() for t in (x, values)]
    out = call(expected[0], index, expected[1])
    out.backward(incoming := torch.randint(-9, 9, out.shape).double())
    split = Layout(MESH, (Shard(0), Shard(0)))
    for shared in (Layout(MESH, (Replicate(), Shard(0))), Layout(MESH, (Shard(0), Replicate())), split):
        with simulated(MESH):
            operands = [
                distribute(t, layout).requires_grad_()
                for t, layout in ((x, Layout(MESH, placements)), (values, shared))
            ]
            found = call(operands[0], distribute(index, shared), operands[1])
            found.backward(distribute(incoming, found.layout.cotangent()))
            assert whole(found.detach()).equal(out.detach())
            for mine, theirs in zip(operands, expected, strict=True):
                assert whole(mine.grad).equal(theirs.grad)


@pytest.mark.parametrize("name", ["index_add", "scatter_add", "index_put"])
def test_many_values_are_added_where_they_are(name: str) -> None:
    """Nothing is sent; in place, and of truth values, all are gathered."""
    mesh = Mesh((4,), ("x",))
    call, _, _ = CALLS[name]
    with simulated(mesh):
        x = distribute(torch.zeros(8, 16), Layout(mesh, (Replicate(),)))
        values = distribute(torch.ones(512, 16), Layout(mesh, (Shard(0),)))
        index = torch.arange(512) % 8
        indices = distribute(
            index[:, None].expand(-1, 16).contiguous() if name == "scatter_add" else index, Layout(mesh, (Shard(0),))
        )
        with trace() as sent:
            found = call(x, indices, values)
        assert found.placements == (Partial("sum"),)
        assert not sent.events
        if name == "index_put":
            assert x.index_put_((indices,), values, accumulate=True).placements == (Replicate(),)
            is_set = distribute(torch.zeros(8, 16, dtype=torch.bool), Layout(mesh, (Replicate(),)))
            assert whole(is_set.index_put((indices,), values.bool(), accumulate=True)).all()


@pytest.mark.parametrize("name", ["index", "index_select", "gather"])
def test_the_gradient_of_a_lookup_is_reduced_not_gathered(name: str) -> None:
    """Of a table of 64 rows looked up 1,024 times: a reduce_scatter of 64 rows, as of an embedding."""
    mesh, looked_up = Mesh((4,), ("x",)), torch.arange(1024) % 64
    lookups: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "index": lambda x, i: x[i],
        "index_select": lambda x, i: x.index_select(0, i),
        "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, x.shape[1])),
    }
    split = Layout(mesh, (Shard(0),))
    with simulated(mesh):
        x = distribute(torch.rand(64, 32), split).requires_grad_()
        rows = lookups[name](x, distribute(looked_up, split))
        with trace() as sent:
            rows.backward(distribute(torch.ones(1024, 32), rows.layout.cotangent()))
        assert [(event.collective, event.nbytes) for event in sent.events] == [("reduce_scatter", 3 * 64 * 32 * 4 // 4)]
        assert whole(x.grad).equal(torch.full((64, 32), 16.0))


def test_a_number_takes_one_index() -> None:
    number, index, value = torch.tensor(2.0), torch.tensor([0]), torch.tensor(3.0)
    with simulated(MESH):
        for placement in (Replicate(), Shard(0)):
            indices = distribute(index, Layout(MESH, (placement, Replicate())))
            operands = [distribute(t, Layout(MESH, (Replicate(), Replicate()))) for t in (number, value)]
            assert whole(operands[0].index_add(0, indices, operands[1])).item() == 5
