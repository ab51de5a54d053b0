"""All schedules of a product: values and both gradients are those of one device, bytes and messages the closed form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from dshard import DTensor, Mesh, Schedule, matmul, trace, use_topology
from dshard.ops.matmul import schedules
from dshard.testing import distribute, simulated, whole
from dshard.topology import BYTES
from dshard.trace import Trace

MESHES = {"4": Mesh((4,), ("x",)), "2x3": Mesh((2, 3), ("x", "y")), "2x2x2": Mesh((2, 2, 2), ("x", "y", "z"))}


THOROUGH = settings().max_examples > 100


def picked(name: str) -> list[Schedule]:
    """All schedules of a mesh; of the thousand of three axes every 37th, but all of them where tests are thorough."""
    axes = MESHES[name].ndim
    return list(schedules(axes))[:: 1 if THOROUGH or axes < 3 else 37]


CASES = [(name, schedule) for name in MESHES for schedule in picked(name)]


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def multiplied(schedule: Schedule, mesh: Mesh, given: list[Tensor]) -> tuple[list[DTensor], Trace]:
    """A, B, C and both gradients on simulated ranks, and what was sent going forward."""
    a, b, grad = given
    stored_a, stored_b, stored_c = schedule.layouts(mesh)
    x, y = distribute(a, stored_a).requires_grad_(), distribute(b, stored_b).requires_grad_()
    with trace() as sent:
        c = matmul(x, y, strategy=schedule)
    c.backward(distribute(grad, stored_c.cotangent()))
    return [x, y, c, x.grad, y.grad], sent


def operands(m: int, k: int, n: int) -> list[Tensor]:
    return [reals(m, k), reals(k, n), reals(m, n)]


@pytest.mark.parametrize(("name", "schedule"), CASES, ids=str)
def test_every_schedule_gives_the_dense_product_and_gradients(name: str, schedule: Schedule) -> None:
    mesh = MESHES[name]
    for sizes in ((24, 12, 36), (5, 7, 3)):
        a, b, grad = given = operands(*sizes)
        expected = [a, b, a @ b, grad @ b.mT, a.mT @ grad]
        with simulated(mesh):
            found, _ = multiplied(schedule, mesh, given)
            wholes = [whole(x.detach()) for x in found]

        for mine, right in zip(wholes, expected, strict=True):
            torch.testing.assert_close(mine, right, atol=1e-10, rtol=1e-10)
        assert found[2].layout == schedule.layouts(mesh)[2]
        assert [found[3].layout, found[4].layout] == [found[0].layout, found[1].layout]


@pytest.mark.parametrize(("name", "schedule"), CASES, ids=str)
def test_every_schedule_moves_its_closed_form(name: str, schedule: Schedule) -> None:
    mesh, sizes = MESHES[name], (48, 24, 72)
    given = operands(*sizes)
    with simulated(mesh), use_topology(BYTES):
        _, sent = multiplied(schedule, mesh, given)

    assert sum(event.nbytes for event in sent.events) == pytest.approx(8 * schedule.volume(mesh, *sizes))
