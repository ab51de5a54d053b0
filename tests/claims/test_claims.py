"""Claims on the products of Megatron, Mesh-TensorFlow and Tesseract, measured on simulated ranks."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.measured_matmuls import Measured, Sizes, collectives, measure, reals, received
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from dshard import Layout, Mesh, Replicate, Shard, matmul, trace, use_topology
from dshard.functional import linear
from dshard.layout import parse_layout
from dshard.ops.matmul.rules import matmul_rule
from dshard.redistribute import plan
from dshard.rules.expand import Operand
from dshard.rules.matmul_loops import STRATEGIES, schedules
from dshard.rules.strategy import Constraints, Question
from dshard.rules.strategy_choice import strategies
from dshard.testing import distribute, parts, simulated, whole
from dshard.topology import BYTES

# -- Megatron


def mlp(x: Any, up: Any, down: Any) -> Any:
    return F.linear(F.gelu(F.linear(x, up)), down)


@pytest.mark.parametrize("named", [True, False], ids=["by name", "by itself"])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_megatron_reduces_once_each_way(p: int, named: bool) -> None:
    """Claim M1: columns, then rows; one all_reduce forward and one backward, also where nobody names the strategies."""
    mesh = Mesh((p,), ("tp",))
    values = [reals(2, 12), reals(12 * p, 12), reals(12, 12 * p)]
    dense = [t.clone().requires_grad_() for t in values]
    expected = mlp(*dense)
    grad = reals(*expected.shape, seed=1)
    expected.backward(grad)
    with simulated(mesh), use_topology(BYTES):
        where = [Layout(mesh, (placement,)) for placement in (Replicate(), Shard(0), Shard(1))]
        x, up, down = laid = [distribute(t, w).requires_grad_() for t, w in zip(values, where, strict=True)]
        with trace() as forward:
            hidden = F.gelu(linear(x, up, strategy="column" if named else None))
            y = linear(hidden, down, strategy="row" if named else None, out_placements=[Replicate()])
        given = distribute(grad, y.layout)
        with trace() as backward:
            y.backward(given)
        found = [whole(t.detach()) for t in (y, x.grad, up.grad, down.grad)]

    assert collectives(forward) == collectives(backward) == {"all_reduce tp": 1}
    assert [t.grad.layout for t in laid] == [t.layout for t in laid]
    for mine, theirs in zip(found, (expected.detach(), *(t.grad for t in dense)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


# -- Mesh-TensorFlow


def test_no_product_has_all_three_split_and_sends_nothing() -> None:
    """Claim T1 (Optimus, section 2.3): on two axes one step cannot keep A, B and C all without replicas."""
    mesh = Mesh((2, 3), ("x", "y"))
    split = [Layout(mesh, placed) for placed in product((Shard(0), Shard(1)), repeat=2)]
    shape = (12, 12)
    sent = []
    for a, b in product(split, repeat=2):
        operands = [Operand(layout, shape, 8) for layout in (a, b)]
        for c in split:
            found = strategies(
                Question(matmul_rule(shape, shape), operands, [(shape, 8)], BYTES, Constraints(result=c))
            )
            for one in found:
                pairs = zip((a, b, one.outputs[0]), (*one.inputs, c), strict=True)
                sent.append(sum(plan(src, dst, shape, 8, BYTES).busiest() for src, dst in pairs))

    assert len(sent) > 500
    assert min(sent) > 0
    assert all(s.volume(mesh, *shape, 12) > 0 for s in schedules(2) if not {"R", "P"} & set(s.stored))
    assert any(s.volume(mesh, *shape, 12) == 0 for s in schedules(2))  # with replicas there are some


# -- Tesseract

DEPTH = ("dep", "row", "col")
X, W = "dep:S(0) row:S(0) col:S(1)", "dep:R row:S(0) col:S(1)"
SIZES: Sizes = (24, 12, 36)


def tesseract(shape: tuple[int, ...], sizes: Sizes = SIZES) -> Measured:
    return measure(Mesh(shape, DEPTH), "tesseract", sizes, (X, W))


@pytest.mark.parametrize(("shape", "sizes"), [((2, 2, 2), SIZES), ((2, 2, 2), (7, 5, 9)), ((4, 4, 4), (32, 16, 48))])
def test_tesseract_is_exact_and_reduces_its_weight_once(shape: tuple[int, ...], sizes: Sizes) -> None:
    """Claim E1: [q, q, d] with row block i + k q; the weight's gradient is all-reduced over the depth exactly once."""
    found = tesseract(shape, sizes)

    assert found.error < 1e-10
    assert found.layouts == (X, W, X, X, W)
    assert collectives(found.backward)["all_reduce dep"] == 1
    assert not any("dep" in name for name in collectives(found.forward))


def test_row_blocks_are_numbered_i_plus_k_q() -> None:
    """Claim E1 (Tesseract, section 3.1): rank (k, i, j) has row block i + k q of X, here with one row each."""
    d, q = 2, 3
    mesh = Mesh((d, q, q), DEPTH)
    layout = parse_layout(X, mesh)

    for k, i, j in product(range(d), range(q), range(q)):
        assert layout.region((d * q, q), (k, i, j)) == (range(i + k * q, i + k * q + 1), range(j, j + 1))


@pytest.mark.parametrize("d", [2, 4])
def test_depth_alone_is_data_parallelism(d: int) -> None:
    """Claim E1: [1, 1, d] has the layouts and the bytes of data parallelism."""
    mesh = Mesh((d,), ("dep",))
    data = measure(mesh, "data", SIZES, ("dep:S(0)", "dep:R"))

    found = tesseract((d, 1, 1))

    assert [[t.nbytes for t in run.backward.events] for run in (found, data)] == [[data.backward.nbytes]] * 2
    assert collectives(found.backward) == collectives(data.backward) == {"all_reduce dep": 1}
    assert found.forward.nbytes == data.forward.nbytes == 0
    assert tuple(layout.split()[0] for layout in found.layouts) == data.layouts


@pytest.mark.parametrize("q", [2, 3])
def test_no_depth_is_summa(q: int) -> None:
    """Claim E1: [q, q, 1] has the layouts and the bytes of SUMMA."""
    blocks = "row:S(0) col:S(1)"
    summa = measure(Mesh((q, q), DEPTH[1:]), "summa", SIZES, (blocks, blocks))

    found = tesseract((1, q, q))

    assert collectives(found.forward) == collectives(summa.forward)
    assert collectives(found.backward) == collectives(summa.backward)
    assert (found.forward.nbytes, found.backward.nbytes) == (summa.forward.nbytes, summa.backward.nbytes)
    assert tuple(layout.partition(" ")[2] for layout in found.layouts) == summa.layouts


@pytest.mark.parametrize("optimiser", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: AdamW(p, lr=0.1)])
def test_depth_replicas_stay_equal_to_the_bit(optimiser: Any) -> None:
    """Claim E1: after five steps the replicas of a weight are the same, and those of a single device."""
    mesh, x, w, target = Mesh((2, 2, 2), DEPTH), reals(16, 6), reals(6, 10), reals(16, 10, seed=3)
    dense = Parameter(w.clone())
    trained(dense, lambda weight: x @ weight, target, optimiser)
    with simulated(mesh):
        a, b = distribute(x, parse_layout(X, mesh)), Parameter(distribute(w, parse_layout(W, mesh)))
        trained(b, lambda weight: matmul(a, weight, strategy="tesseract"), distribute(target, a.layout), optimiser)
        held = parts(b.detach())
        value = whole(b.detach())

    by_block = [[held[mesh.rank((k, i, j))] for k in range(2)] for i in range(2) for j in range(2)]
    assert all(first.equal(second) for first, second in by_block)
    assert not any(one[0].equal(other[0]) for one, other in combinations(by_block, 2))
    torch.testing.assert_close(value, dense.detach(), atol=1e-12, rtol=1e-12)
    assert (value - w).abs().max() > 0.1


def trained(weight: Any, function: Any, target: Any, optimiser: Any) -> None:
    run = optimiser([weight])
    for _ in range(5):
        run.zero_grad()
        (function(weight) - target).square().mean().backward()
        run.step()


def test_solomonik_and_demmel_s_depth_is_another() -> None:
    """Claim E1: the depth of "2.5d" splits the contraction and reduces Y, that of Tesseract splits the rows."""
    mesh = Mesh((2, 2, 2), DEPTH)
    a, b, c = STRATEGIES["2.5d"].schedule.layouts(mesh)

    found = measure(mesh, "2.5d", SIZES, (a, b))

    assert (str(a), str(b)) == ("dep:S(1) row:S(0) col:S(1)", "dep:S(0) row:S(0) col:S(1)")
    assert found.error < 1e-10
    assert found.layouts[2] == str(c)
    assert collectives(found.forward)["all_reduce dep"] == 1
    assert not any("dep" in name for name in collectives(found.backward))


@pytest.mark.parametrize(("q", "d"), [(2, 1), (2, 2), (4, 2), (4, 4), (8, 1)])
def test_a_rank_holds_what_equations_7_to_10_say(q: int, d: int) -> None:
    """Claim E3: ab/p + bcd/p + ac/p with Tesseract, ab + bc/p + ac/p with Megatron."""
    p, (a, b, c) = q * q * d, (128, 64, 192)
    shapes = (a, b), (b, c), (a, c)
    mesh, line = Mesh((d, q, q), DEPTH), Mesh((p,), ("tp",))

    def held(layouts: tuple[Layout, ...]) -> int:
        return sum(layout.local_numel(shape) for layout, shape in zip(layouts, shapes, strict=True))

    assert held(STRATEGIES["tesseract"].schedule.layouts(mesh)) == a * b // p + b * c * d // p + a * c // p
    assert held(STRATEGIES["column"].schedule.layouts(line)) == a * b + b * c // p + a * c // p


# -- claim E4: 64 ranks as [4, 4, 4] or as [8, 8]


def layer(tokens: int, hidden: int) -> list[Sizes]:
    """The four products of a transformer layer."""
    pairs = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    return [(tokens, k, n) for k, n in pairs]


def trained_layer(strategy: str, mesh: Mesh, tokens: int, hidden: int) -> float:
    """Elements that each rank receives in a training step of the four products, their operands moved again."""
    schedule = STRATEGIES[strategy].schedule
    stored = schedule.layouts(mesh)[:2]
    runs = [measure(mesh, schedule, sizes, stored, saved="stored") for sizes in layer(tokens, hidden)]
    assert max(run.error for run in runs) < 1e-9
    return sum(received(run.forward) + received(run.backward) for run in runs)


@pytest.mark.parametrize(
    ("times", "sign"),
    [(3, 0), pytest.param(2, 1, marks=pytest.mark.thorough), pytest.param(4, -1, marks=pytest.mark.thorough)],
)
def test_depth_pays_where_the_tokens_are_over_three_times_the_width(times: int, sign: int) -> None:
    """Claim E4, which the paper makes without a condition: [4, 4, 4] moves less than [8, 8] iff T > 3 h."""
    hidden = 16
    deep = trained_layer("tesseract", Mesh((4, 4, 4), DEPTH), times * hidden, hidden)
    flat = trained_layer("summa", Mesh((8, 8), DEPTH[1:]), times * hidden, hidden)

    assert (deep > flat) - (deep < flat) == sign


def test_depth_moves_more_of_square_matrices() -> None:
    """Claim E4: all ranks together receive 15 n^2 elements on [4, 4, 4], and 14 n^2 on [8, 8]."""
    n = 32
    totals = []
    for name, mesh in (("tesseract", Mesh((4, 4, 4), DEPTH)), ("summa", Mesh((8, 8), DEPTH[1:]))):
        schedule = STRATEGIES[name].schedule
        found = measure(mesh, schedule, (n, n, n), schedule.layouts(mesh)[:2])
        totals.append(received(found.forward) * mesh.size)

    assert totals == [15 * n * n, 14 * n * n]
