"""SUMMA's three forms are closed under differentiation: Optimus, equations 1 to 3, and algorithms 1 to 3."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.measured_matmuls import ITEMSIZE, measure, reals
from torch import Tensor

from dshard import DeviceMesh, DTensor, Mesh, Replicate, Schedule, init_device_mesh, matmul, trace, use_topology
from dshard.testing import RankPool, distribute, simulated, whole
from dshard.topology import BYTES

AB = Schedule(("m", "n"), ("k", "k"))
ABT = Schedule(("m", "k"), ("n", "n"))
ATB = Schedule(("k", "n"), ("m", "m"))
SUMMA = {"AB": AB, "ABt": ABT, "AtB": ATB}
names = pytest.mark.parametrize("name", SUMMA)


@names
@pytest.mark.parametrize("q", [2, 3, 4])
@pytest.mark.parametrize("sizes", [(24, 12, 36), (7, 5, 9), (2, 11, 3)], ids=str)
def test_summa_is_exact_whatever_the_sizes(name: str, q: int, sizes: tuple[int, int, int]) -> None:
    """Claim S1: the three algorithms on q x q ranks, where q divides the sizes and where it does not."""
    mesh = Mesh((q, q), ("row", "col"))
    x, w, y = SUMMA[name].layouts(mesh)

    found = measure(mesh, SUMMA[name], sizes, (x, w))

    assert found.error < 1e-10
    assert found.layouts == tuple(map(str, (x, w, y, x, w)))


def product(form: str, a: DTensor, b: DTensor) -> tuple[DTensor, float]:
    """The matrices by one of the three algorithms, all stored in blocks [S(0), S(1)], and the elements received."""
    left, right = (a.t() if form == "AtB" else a), (b.t() if form == "ABt" else b)
    with trace() as sent:
        c = matmul(left, right, strategy=SUMMA[form])
    return c, sent.nbytes / ITEMSIZE


DERIVATIVES = {  # of C in A and in B: the form, and the operands
    "AB": (("ABt", "gb"), ("AtB", "ag")),
    "ABt": (("AB", "gb"), ("AtB", "ga")),
    "AtB": (("ABt", "bg"), ("AB", "ag")),
}


@names
@pytest.mark.parametrize("q", [2, 3, 4])
def test_each_gradient_is_one_of_the_three_forms(name: str, q: int) -> None:
    """Claim S2, equations 1 to 3: with blocks everywhere; each product moves its own operands, twice the forward."""
    mesh = Mesh((q, q), ("row", "col"))
    m, k, n = 2 * q, 3 * q, 5 * q
    shape_a, shape_b = ((k, m) if name == "AtB" else (m, k)), ((n, k) if name == "ABt" else (k, n))
    values = {"a": reals(*shape_a), "b": reals(*shape_b), "g": reals(m, n)}
    with simulated(mesh), use_topology(BYTES):
        blocks = AB.layouts(mesh)[0]
        given = {letter: distribute(value, blocks) for letter, value in values.items()}
        c, forward = product(name, given["a"].requires_grad_(), given["b"].requires_grad_())
        c.backward(given["g"])
        expected = {letter: given[letter].grad for letter in "ab"}
        backward = 0.0
        with torch.no_grad():
            for letter, (form, operands) in zip("ab", DERIVATIVES[name], strict=True):
                grad, volume = product(form, *(given[o].detach() for o in operands))
                backward += volume

                assert grad.layout == expected[letter].layout == blocks
                torch.testing.assert_close(whole(grad), whole(expected[letter]), atol=1e-12, rtol=0)

    assert c.layout == blocks
    assert backward == pytest.approx(2 * forward)


def penalty(function: Any, a: Tensor, b: Tensor) -> list[Any]:
    """First and second derivatives: the gradients of a function, and of the norm of these gradients."""
    out = function(a, b).tanh().sum()
    grads = torch.autograd.grad(out, [a, b], create_graph=True)
    sum((grad * grad).sum() for grad in grads).backward()
    return [grads[0].detach(), grads[1].detach(), a.grad, b.grad]


@names
@pytest.mark.parametrize("q", [2, 3])
def test_second_derivatives_are_those_of_one_device(name: str, q: int) -> None:
    """Claim S2: the derivatives of a form are forms, which have derivatives too; on sizes that q does not divide."""
    mesh, x, w = Mesh((q, q), ("row", "col")), reals(7, 5), reals(5, 8)
    dense = penalty(torch.matmul, x.clone().requires_grad_(), w.clone().requires_grad_())
    with simulated(mesh):
        where = SUMMA[name].layouts(mesh)[:2]
        laid = [distribute(t, layout).requires_grad_() for t, layout in zip((x, w), where, strict=True)]
        found = penalty(lambda a, b: matmul(a, b, strategy=SUMMA[name]), *laid)
        wholes = [whole(t) for t in found]

    for mine, right in zip(wholes, dense, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-11, rtol=1e-11)
    assert [t.layout for t in found] == [t.layout for t in laid] * 2


@cache
def real_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "col"))


def numerically(name: str) -> bool:
    """Torch's own check of both derivatives, of plain operands that are laid out, multiplied and put together again."""
    schedule = SUMMA[name]
    x, w, _ = (layout.placements for layout in schedule.layouts(Mesh((2, 2), ("row", "col"))))

    def function(a: Tensor, b: Tensor) -> Tensor:
        everywhere = [Replicate(), Replicate()]
        left = DTensor.from_local(a, real_mesh(), everywhere).redistribute(placements=x)
        right = DTensor.from_local(b, real_mesh(), everywhere).redistribute(placements=w)
        return matmul(left, right, strategy=schedule).full_tensor()

    given = reals(3, 1).requires_grad_(), reals(1, 2).requires_grad_()
    return torch.autograd.gradcheck(function, given) and torch.autograd.gradgradcheck(function, given)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("name", SUMMA)
def test_gradcheck_agrees(ranks: RankPool, name: str) -> None:
    """Claim S2, numerically, on real ranks."""
    assert ranks.run(numerically, name) == [True] * 4
