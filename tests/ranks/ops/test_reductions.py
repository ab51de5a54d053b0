"""Reductions, norms, products with something added, losses: as single-device torch has them, however operands lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import THOROUGH, one_way_each
from helpers.single_device import Case, Function, as_tuple, assert_same_as_single_device, on_one_device, rows
from torch import Tensor

from dshard import DTensor, Layout, Mesh, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dshard.comm import CommEvent, listen
from dshard.placements import ReduceOp
from dshard.testing import RankPool, distribute, simulated, whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),
    pytest.mark.filterwarnings("ignore:.*degrees of freedom"),
    pytest.mark.filterwarnings("ignore:at..frobenius_norm"),
]
LINE = Mesh((4,), ("x",))
SQUARE = Mesh((2, 2), ("x", "y"))
HAS_AMINMAX = torch.__version__ >= "2.12"
"""Whether torch has the derivative of `aminmax`."""


def reals(*shape: int) -> Tensor:
    return rows(*shape).requires_grad_()


def chances(*shape: int) -> Tensor:
    return rows(*shape).cos().sigmoid()


def of(function: Function, *inputs: Tensor) -> Case:
    """A case; with no inputs, of a matrix whose rows do not divide and whose last chunk is empty."""
    return function, inputs or (reals(5, 3),)


norm = torch.linalg.vector_norm

REDUCTIONS: dict[str, Case] = {
    "sum": of(lambda x: x.sum()),
    "sum of rows": of(lambda x: x.sum(-1)),
    "sum kept": of(lambda x: x.sum((0, 1), keepdim=True)),
    "sum of a scalar": of(lambda x: x.sum(-1), reals()),
    "sum of no dims": of(lambda x: x.sum(()), reals(5, 3)),
    "sum of integers": of(lambda x: x.sum(0), torch.arange(15).view(5, 3)),
    "sum as float": of(lambda x: x.sum(0, dtype=torch.float32), torch.arange(15).view(5, 3)),
    "sum of truths": of(lambda x: x.sum(0), rows(5, 3) > 0),
    "sum of nothing": of(lambda x: x.sum(0), reals(0, 3)),
    "nansum": of(lambda x: torch.where(x > 0, x, torch.nan).nansum(0)),
    "mean": of(lambda x: x.mean()),
    "mean of columns": of(lambda x: x.mean(0, keepdim=True)),
    "mean of dims": of(lambda x: x.mean((0, -1)), reals(5, 2, 3)),
    "mean of nothing": of(lambda x: x.mean(0), reals(0, 3)),
    "mean of halves": of(lambda x: x.mean(), torch.full((7, 2000), 1.5, dtype=torch.bfloat16)),
    "nanmean": of(lambda x: x.nanmean(1)),
    "prod": of(lambda x: x.prod()),
    "prod of columns": of(lambda x: x.prod(0, keepdim=True)),
    "amax": of(lambda x: x.amax()),
    "amax of columns": of(lambda x: x.amax(0)),
    "amax with nan": of(lambda x: torch.where(x > 0.9, torch.nan, x).amax(0)),
    "amin": of(lambda x: x.amin((0, -1), keepdim=True)),
    "amax of a number": of(lambda x: x.amax(-1), torch.tensor(2.0, dtype=torch.float64)),
    "amin of a number, its dim kept": of(lambda x: x.amin(-1, keepdim=True), torch.tensor(2.0, dtype=torch.float64)),
    "amax of bytes": of(lambda x: x.amax(0), torch.arange(15, dtype=torch.uint8).view(5, 3)),
    "amin of integers": of(lambda x: x.amin(), torch.arange(15).view(5, 3)),
    "amax of truths": of(lambda x: x.amax(0), rows(5, 3) > 0),
    "max": of(lambda x: x.max()),
    "min": of(lambda x: x.min()),
    "max of two": of(lambda x, y: torch.max(x, y), reals(5, 3), rows(3).cos()),
    **(
        {
            "aminmax": of(lambda x: torch.aminmax(x)),
            "aminmax of columns": of(lambda x: torch.aminmax(x, dim=0, keepdim=True)),
        }
        if HAS_AMINMAX
        else {}
    ),
    "any": of(lambda x: (x > 0.9).any()),
    "any of columns": of(lambda x: (x > 0).any(0, keepdim=True)),
    "any of numbers": of(lambda x: x.any((0, 1))),
    "any of no dims": of(lambda x: torch.any(x, dim=())),
    "all": of(lambda x: (x > -2).all()),
    "all of bytes": of(lambda x: x.all(0), torch.arange(15, dtype=torch.uint8).view(5, 3)),
    "count_nonzero": of(lambda x: (x > 0).count_nonzero()),
    "count_nonzero of columns": of(lambda x: (x > 0).count_nonzero(0)),
}

ALONG: dict[str, Case] = {
    "max of a dim": of(lambda x: x.max(0)),
    "min of a dim": of(lambda x: x.min(-1, keepdim=True)),
    "argmax": of(lambda x: x.argmax()),
    "argmax kept": of(lambda x: x.argmax(-1, keepdim=True)),
    "argmin": of(lambda x: x.argmin(0)),
    "sort": of(lambda x: x.sort(0, descending=True)),
    "sort stable": of(lambda x: x.sort(dim=-1, stable=True)),
    "argsort": of(lambda x: x.argsort(0)),
    "msort": of(lambda x: x.msort()),
    "topk": of(lambda x: x.topk(2, 0)),
    "topk of all": of(lambda x: x.topk(3)),
    "kthvalue": of(lambda x: x.kthvalue(2, 0)),
    "median": of(lambda x: x.median()),
    "median of a dim": of(lambda x: x.median(0)),
    "nanmedian": of(lambda x: x.nanmedian(-1)),
    "mode": of(lambda x: x.mode(0)),
    "cumsum": of(lambda x: x.cumsum(-2)),
    "cumsum as float": of(lambda x: x.cumsum(1, dtype=torch.float32), torch.arange(15).view(5, 3)),
    "cumprod": of(lambda x: x.cumprod(0)),
    "cummax": of(lambda x: x.cummax(0)),
    "cummin": of(lambda x: x.cummin(1)),
    "logcumsumexp": of(lambda x: x.logcumsumexp(0)),
    "cumsum of a scalar": of(lambda x: x.cumsum(0), reals()),
}

DECOMPOSED: dict[str, Case] = {
    "var": of(lambda x: x.var()),
    "var of rows": of(lambda x: x.var(1)),
    "var of columns": of(lambda x: x.var(0, keepdim=True)),
    "var with correction": of(lambda x: x.var((0, 1), correction=0)),
    "var of one": of(lambda x: x.detach().var(0), reals(1, 3)),
    "var of complex numbers": of(lambda x: x.var(0), torch.complex(rows(5, 3), rows(5, 3).cos())),
    "var_mean": of(lambda x: torch.var_mean(x, 0)),
    "std": of(lambda x: x.std(-1)),
    "std_mean": of(lambda x: torch.std_mean(x, correction=2)),
    "norm": of(lambda x: x.norm()),
    "norm of a dim": of(lambda x: x.norm(1, 0)),
    "norm as double": of(lambda x: x.norm(2, 0, dtype=torch.float64), torch.arange(15.0).view(5, 3)),
    "vector norm": of(lambda x: norm(x, 3.5, (0,), keepdim=True)),
    "inf norm": of(lambda x: norm(x, inf)),
    "-inf norm": of(lambda x: norm(x, -inf, -1)),
    "1 norm": of(lambda x: norm(x, 1, 0)),
    "0 norm": of(lambda x: norm(x.detach(), 0)),
    "half norm": of(lambda x: norm(x, 0.5, 1)),
    "norm of nothing": of(lambda x: norm(x.detach(), 2), reals(0, 3)),
    "norm of complex numbers": of(lambda x: norm(x, 2), torch.complex(rows(5, 3), rows(5, 3).cos())),
    "matrix norm": of(lambda x: torch.linalg.matrix_norm(x)),
    "dist": of(lambda x, y: torch.dist(x, y, 3), reals(5, 3), rows(5, 3).cos()),
    "logsumexp": of(lambda x: x.logsumexp(0)),
    "logsumexp kept": of(lambda x: (x * 800).logsumexp((0, 1), keepdim=True)),
    "logsumexp of -inf": of(lambda x: x.logsumexp(0), torch.full((5, 3), -inf, dtype=torch.float64)),
    "trace": of(lambda x: x.trace()),
    "item": of(lambda x: x.detach().amax().item()),
    "float": of(lambda x: float((x.detach() > 0).sum())),
    "equal": of(lambda x: torch.equal(x, x + 0)),
    "not equal": of(lambda x: torch.equal(x, x.abs())),
    "equal of other shapes": of(lambda x: torch.equal(x, x[0])),
    "allclose": of(lambda x: torch.allclose(x, x + 1e-12)),
    "is_same_size": of(lambda x: torch.is_same_size(x, x.sum(0))),
}

ADDED: dict[str, Case] = {
    "addmm": of(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), reals(5, 4), reals(5, 3), reals(3, 4)),
    "addmm of a row": of(torch.addmm, reals(4), reals(5, 3), reals(3, 4)),
    "addmm of nan": of(
        lambda c, a, b: torch.addmm(c, a, b, beta=0), torch.full((1, 4), torch.nan).double(), reals(5, 3), reals(3, 4)
    ),
    "addmm of integers": of(torch.addmm, *(torch.arange(9).view(3, 3),) * 3),
    "addmm of nothing": of(torch.addmm, reals(5, 4), reals(5, 0), reals(0, 4)),
    "addmm in place": of(lambda c, a, b: c.clone().addmm_(a, b, beta=2), rows(5, 4), rows(5, 3), rows(3, 4)),
    "addmv": of(lambda c, a, b: torch.addmv(c, a, b, beta=3), reals(5), reals(5, 3), reals(3)),
    "addr": of(lambda c, a, b: torch.addr(c, a, b, alpha=3), reals(5, 3), reals(5), reals(3)),
    "baddbmm": of(lambda c, a, b: torch.baddbmm(c, a, b, beta=3), reals(4), reals(2, 3, 5), reals(2, 5, 4)),
    "addbmm": of(lambda c, a, b: torch.addbmm(c, a, b, beta=3), reals(3, 4), reals(2, 3, 5), reals(2, 5, 4)),
}


def on_chances(loss: Function, reduction: str, x: Tensor, target: Tensor) -> Tensor:
    """A loss that takes numbers between 0 and 1."""
    found: Tensor = loss(x.sigmoid(), target, reduction=reduction)
    return found


def losses(reduction: str) -> dict[str, Case]:
    """Every loss with this reduction."""
    plain = ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "binary_cross_entropy", "kl_div")
    two = {name: of(partial(on_chances, getattr(F, name), reduction), reals(5, 3), chances(5, 3)) for name in plain}
    logits = F.binary_cross_entropy_with_logits
    more = {
        "soft_margin_loss": of(
            lambda x, y: F.soft_margin_loss(x, y, reduction=reduction), reals(5, 3), rows(5, 3).cos().sign()
        ),
        "smooth_l1_loss with beta": of(
            lambda x, y: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.1), reals(5, 3), chances(5, 3)
        ),
        "huber_loss with delta": of(
            lambda x, y: F.huber_loss(x, y, reduction=reduction, delta=0.1), reals(5, 3), chances(5, 3)
        ),
        "binary_cross_entropy with weight": of(
            lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y, w, reduction=reduction),
            reals(5, 3),
            chances(5, 3),
            chances(3),
        ),
        "binary_cross_entropy_with_logits": of(
            lambda x, y, w, p: logits(x, y, w, pos_weight=p, reduction=reduction),
            reals(5, 3),
            chances(5, 3),
            chances(5, 1),
            chances(3),
        ),
    }
    return {f"{name} {reduction}": case for name, case in (two | more).items()}


CASES = REDUCTIONS | ALONG | DECOMPOSED | ADDED | losses("none") | losses("mean") | losses("sum")


@pytest.mark.parametrize(("name", "mesh"), one_way_each(CASES, [LINE, SQUARE]), ids=str)
def test_they_are_those_of_one_device(name: str, mesh: Mesh) -> None:
    most = 2 if mesh == SQUARE else None
    assert_same_as_single_device(CASES[name], mesh, seed=name, most=most if THOROUGH else 1)


@pytest.mark.parametrize(("name", "op"), one_way_each(REDUCTIONS, ["avg", "product", "max", "min"]))
def test_reductions_of_partial_operands_equal_one_device(name: str, op: ReduceOp) -> None:
    assert_same_as_single_device(REDUCTIONS[name], Mesh((2,), ("x",)), ops=(op,), seed=name, most=1)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_reductions_on_more_meshes_equal_one_device(name: str, shape: tuple[int, ...]) -> None:
    mesh = Mesh(shape, ("x", "y", "z")[: len(shape)])
    assert_same_as_single_device(CASES[name], mesh, ops=("sum", "avg", "max"), seed=name, most=100)


@pytest.mark.parametrize("function", [torch.var, torch.std], ids=["var", "std"])
def test_variance_far_from_zero_is_accurate(function: Function) -> None:
    x = rows(7, 5) + 1e4
    with simulated(LINE):
        found = whole(function(distribute(x, Layout(LINE, (Shard(0),))), 0))

    torch.testing.assert_close(found, function(x, 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "reduction"),
    [
        (lambda x: x.sum(0), "sum"),
        (lambda x: x.mean(0), "avg"),
        (lambda x: x.cumsum(0), "sum"),
        (lambda x: x.amax(0), "max"),
        (lambda x: x.amin(0), "min"),
        (lambda x: x.prod(0), "product"),
    ],
    ids=["sum", "mean", "cumsum", "amax", "min", "prod"],
)
def test_a_partial_operand_stays_partial_where_it_may(function: Function, reduction: ReduceOp) -> None:
    with simulated(LINE):
        x = distribute(rows(4, 3), Layout(LINE, (Partial(reduction),)))

        assert function(x).placements == (Partial(reduction),)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * inf,
        lambda x: x / 0,
        lambda x: x.clone().mul_(-inf),
        lambda x: torch.add(x, x, alpha=inf),
        lambda x: torch._foreach_mul([x], inf)[0],
        lambda x: torch._foreach_div([x], [0.0])[0],
    ],
    ids=["mul", "div", "mul_", "add", "list", "lists"],
)
def test_a_partial_operand_is_completed_before_numbers_that_are_not_finite(function: Function) -> None:
    value = rows(4, 3)
    with simulated(LINE):
        x = distribute(value, Layout(LINE, (Partial("sum"),)))

        assert (x * 2.0).placements == (x / 3).placements == (x * 0).placements == x.placements
        assert (
            torch._foreach_div([x], [2.0])[0].placements == torch._foreach_mul([x], 0.5)[0].placements == x.placements
        )
        torch.testing.assert_close(whole(function(x)), function(value))
        assert (x * 2.0).placements == x.placements


def test_a_reduction_sends_nothing_until_it_is_needed() -> None:
    events: list[CommEvent] = []
    with simulated(SQUARE), listen(events.append):
        x = distribute(rows(501, 301), Layout(SQUARE, (Shard(0), Shard(1))))
        squares = x.square().sum((0, 1), keepdim=True)

        assert (str(squares.layout), events) == ("x:P(sum) y:P(sum)", [])
        squares.item()
        assert {event.nbytes for event in events} <= {0, 8, 3 * 8}, "one number of eight bytes from each other rank"
        x.square().sum()
        assert (events[-1].collective, events[-1].nbytes) == ("all_reduce", 3 * 8), (
            "a number is reduced when it is made"
        )


def test_a_split_contraction_adds_the_bias_once_and_sends_nothing() -> None:
    events: list[CommEvent] = []
    bias, a, b = rows(4), rows(5, 8), rows(8, 4)
    with simulated(LINE), listen(events.append):
        left, right = distribute(a, Layout(LINE, (Shard(1),))), distribute(b, Layout(LINE, (Shard(0),)))
        out = torch.addmm(distribute(bias, Layout(LINE, (Replicate(),))), left, right)

        assert (out.placements, events) == ((Partial("sum"),), [])
        torch.testing.assert_close(whole(out), torch.addmm(bias, a, b))


def test_every_rank_is_told_the_same_number() -> None:
    with simulated(LINE):
        x = distribute(rows(6), Layout(LINE, (Shard(0),)))

        assert bool((x.sum() > 0).all()) is bool(rows(6).sum() > 0)
        assert float(x.sum()) == pytest.approx(float(rows(6).sum()), abs=1e-15)
        assert int(distribute(torch.tensor(7), Layout(LINE, (Partial("sum"),)))) == 7


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.amax(0),
        lambda x: x.max(),
        lambda x: x.argmax(0),
        lambda x: x.sum(2),
        lambda x: x.var(-3),
        lambda x: norm(x, inf),
        lambda x: norm(x, 2, 5),
        lambda x: x.long().mean(),
        lambda x: x.long().var(),
        lambda x: x.topk(1, 0),
    ],
    ids=["amax", "max", "argmax", "sum", "var", "inf norm", "norm", "mean", "var of integers", "topk"],
)
def test_what_torch_refuses_is_refused(function: Function) -> None:
    x = rows(0, 3)
    with pytest.raises((RuntimeError, IndexError)):
        function(x)

    with simulated(LINE), pytest.raises((RuntimeError, IndexError)):
        function(distribute(x, Layout(LINE, (Shard(0),))))


def test_extremes_of_empty_parts_change_nothing() -> None:
    x = torch.tensor([-3, -5], dtype=torch.int8)
    with simulated(LINE):
        laid: DTensor = distribute(x, Layout(LINE, (Shard(0),)))

        assert (laid.amax().item(), laid.amin().item(), laid.max().item()) == (-3, -5, -3)
        assert not (laid > 0).any().item()
        assert (laid < 0).all().item()


@pytest.mark.ranks
def test_real_ranks_agree(ranks: RankPool) -> None:
    assert ranks.run(_differing) == [[]] * 4


def _differing() -> list[str]:
    """The cases that are not as on one device, on this rank."""
    mesh, found = init_device_mesh("cpu", (4,)), []
    for name, (function, (x, *rest)) in (REDUCTIONS | ALONG | DECOMPOSED).items():
        if not rest and x.dim():
            expected = as_tuple(function(x.detach()))
            actual = as_tuple(function(distribute_tensor(x.detach(), mesh, [Shard(0)])))
            whole = [out.full_tensor() if isinstance(out, DTensor) else out for out in actual]
            if not all(map(_close, whole, expected)):
                found.append(name)
    return found


def _close(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=1e-12, equal_nan=True)
    return bool(found == pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_partial_extreme_is_completed_for_a_product_and_for_its_gradient(op: ReduceOp) -> None:
    mesh = Mesh((4,))
    a, b = (rows(10, 5, 10).requires_grad_(), rows(10, 10, 5).requires_grad_())
    expected, cotangents, gradients = on_one_device(torch.bmm, (a, b))
    with simulated(mesh):
        x = distribute(a.detach(), Layout(mesh, (Partial(op),))).requires_grad_()
        y = distribute(b.detach(), Layout(mesh, (Shard(0),))).requires_grad_()
        out = torch.bmm(x, y)
        out.backward(distribute(cotangents[0], out.layout.cotangent()))

        for found, right in zip((out.detach(), x.grad, y.grad), (expected[0], *gradients), strict=True):
            torch.testing.assert_close(whole(found), right)


EXTREMES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "index_reduce": lambda x, i, y: x.index_reduce(0, i, y, "amax"),
    "index_reduce_": lambda x, i, y: x.clone().index_reduce_(0, i, y, "amin"),
    "scatter_reduce": lambda x, i, y: x.scatter_reduce(0, i.unsqueeze(1).expand(16, 16), y, "amax"),
    "amax": lambda x, i, y: y.amax(0),
    "amin": lambda x, i, y: x + y.amin(1),
    **({"aminmax": lambda x, i, y: x - torch.aminmax(y, dim=0).max} if HAS_AMINMAX else {}),
}


def gradients_of_extremes_of_sums() -> dict[str, list[float]]:
    """How far recorded gradients are from one device, where an operand is a sum of terms that are rounded."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    x, terms = torch.randn(16, 16, dtype=torch.float64), torch.randn(4, 16, 16, dtype=torch.float64)
    i, found = torch.randint(16, (16,)), {}
    for name, call in EXTREMES.items():
        laid = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        summed = DTensor.from_local(terms[dist.get_rank()], mesh, [Partial()]).requires_grad_()
        alone = x.clone().requires_grad_(), summed.detach().full_tensor().requires_grad_()
        index = distribute_tensor(i, mesh, [Shard(0)])
        ours = torch.autograd.grad(
            call(laid, index, summed).sum(), (laid, summed), create_graph=True, allow_unused=True
        )
        theirs = torch.autograd.grad(call(alone[0], i, alone[1]).sum(), alone, allow_unused=True)
        pairs = [(a.detach().full_tensor(), b) for a, b in zip(ours, theirs, strict=True) if b is not None]
        found[name] = [float((a - b).abs().max()) for a, b in pairs]
    return found


@pytest.mark.ranks
def test_gradients_of_extremes_find_them_in_sums_that_round(ranks: RankPool) -> None:
    for found in ranks.run(gradients_of_extremes_of_sums):
        assert all(far < 1e-12 for each in found.values() for far in each), found
