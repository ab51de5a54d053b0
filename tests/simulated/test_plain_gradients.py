"""Plain tensors that need gradients among distributed ones: their gradients are plain, and those of one device."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor

from dshard import (
    DTensor,
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
)
from dshard.comm import DeviceMesh
from dshard.testing import RankPool, rank_pool, simulated

LINE = Mesh((2,), ("x",))
GRID = Mesh((2, 2), ("x", "y"))
LAYOUTS = [
    Layout(LINE, [Shard(0)]),
    Layout(LINE, [Partial()]),
    Layout(GRID, [Shard(1), Replicate()]),
    Layout(GRID, [Shard(0), Shard(0)]),
]


def put(x: Tensor, t: Tensor) -> Tensor:
    out = x * 1
    out[1, 2] = t.view(())
    return out


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t * x": lambda t, x: t * x,
    "x / t": lambda t, x: x / t.view(1, 1),
    "t - x": lambda t, x: t.sin() - x,
    "written": lambda t, x: (x * 1).mul_(t),
    "where": lambda t, x: torch.where(x > 0, x, t),
    "index_put": lambda t, x: x.index_put((torch.tensor(1), torch.tensor(2)), t.view(())),
    "put": lambda t, x: put(x, t),
    "masked_fill": lambda t, x: x.masked_fill(x > 0, t.view(())),
    "stack": lambda t, x: torch.stack([x.sum(), t.view(())]),
    "beside the sum": lambda t, x: t * 3 + x.sum(),
}
"""Programs of a plain number, of any dims, and a tensor."""

OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda t, x: F.linear(x, t),
    "add": lambda t, x: x + t[0],
    "norm": lambda t, x: F.layer_norm(x, (4,), t[0], t[1]),
}
"""Programs of a plain matrix of 3 x 4 numbers and a tensor, within `implicit_replication`."""


DATA = {
    shape: torch.linspace(-1.1, 1.3, math.prod(shape), dtype=torch.float64).add(0.3).sin().view(shape)
    for shape in [(), (1,), (3, 4), (5, 4)]
}
"""Numbers by their shape; random ones would differ between simulated ranks."""


def gradients(program: Callable[[Tensor, Tensor], Tensor], t: Tensor, x: Tensor) -> list[Tensor]:
    """Gradients of first and of second order, of `t` and of `x`, found by `grad` and by `backward`."""
    firsts = torch.autograd.grad(program(t, x).pow(2).sum(), (t, x), create_graph=True)
    assert not isinstance(firsts[0], DTensor)
    (firsts[0].pow(2).sum() + firsts[1].pow(2).sum()).backward()
    seconds = [t.grad, x.grad]
    return [(g.full_tensor() if isinstance(g, DTensor) else g).detach() for g in (*firsts, *seconds) if g is not None]


def equal_one_device(
    program: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], layout: Layout, on: DeviceMesh | None = None
) -> None:
    mesh = layout.mesh if on is None else on
    t, x = DATA[shape], DATA[5, 4]
    expected = gradients(program, t.clone().requires_grad_(), x.clone().requires_grad_())
    for _ in range(2):  # warm, the second time
        distributed = distribute_tensor(x, mesh, layout.placements).requires_grad_()
        given = t.clone().requires_grad_()
        actual = gradients(program, given, distributed)
        assert type(given.grad) is Tensor
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b if type(a) is Tensor else distribute_tensor(b, mesh).full_tensor())


@pytest.mark.parametrize(("name", "layout"), one_way_each(NUMBERS, LAYOUTS), ids=str)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_gradient_of_a_plain_number_is_plain(name: str, shape: tuple[int, ...], layout: Layout) -> None:
    with simulated(layout.mesh):
        equal_one_device(NUMBERS[name], shape, layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_the_gradient_of_what_counts_as_replicated_is_plain(name: str, layout: Layout) -> None:
    with simulated(layout.mesh), implicit_replication():
        equal_one_device(OTHERS[name], (3, 4), layout)


def test_without_data_it_is_planned() -> None:
    t = torch.tensor(2.0, requires_grad=True)
    x = DTensor.from_local(torch.empty(3, 4, device="meta"), LINE, [Shard(0)], shape=(6, 4))
    (t * x).sum().backward()
    assert t.grad is not None
    assert (type(t.grad), t.grad.shape, t.grad.device.type) == (Tensor, (), "cpu")


def on_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    for name in ("t * x", "put", "beside the sum"):
        equal_one_device(NUMBERS[name], (), LAYOUTS[2], mesh)
    with implicit_replication():
        equal_one_device(OTHERS["linear"], (3, 4), LAYOUTS[3], mesh)


@pytest.mark.ranks
def test_the_gradients_of_plain_tensors_on_ranks() -> None:
    pool: RankPool = rank_pool(4)
    pool.run(on_ranks)
