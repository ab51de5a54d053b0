"""Claims on ATP's two linear layers, on Google's 2-D layout and on the 3-D one of Colossal-AI, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.measured_matmuls import collectives, measure, reals, received
from torch import Tensor

from dshard import Layout, Mesh, Schedule, matmul, trace, use_topology
from dshard.layout import parse_layout
from dshard.rules.matmul_loops import STRATEGIES
from dshard.testing import distribute, simulated, whole
from dshard.topology import BYTES
from dshard.trace import Trace

MESHES = [(2, 2), (4, 2), (2, 4), (8, 8)]
COLUMN_FIRST, ROW_FIRST = Schedule(("n", "k"), ("R", "P")), Schedule(("k", "n"), ("P", "R"))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(
    ("schedule", "x", "raw", "raw_grad", "forward", "backward"),
    [
        (COLUMN_FIRST, "d1:R d2:S(1)", "d1:S(1) d2:P(sum)", "d1:P(sum) d2:S(1)", "d2", "d1"),
        (ROW_FIRST, "d1:S(1) d2:R", "d1:P(sum) d2:S(1)", "d1:S(1) d2:P(sum)", "d1", "d2"),
    ],
    ids=["column-first", "row-first"],
)
def test_atp_leaves_a_sum_on_one_axis_forward_and_on_the_other_backward(
    shape: tuple[int, int], schedule: Schedule, x: str, raw: str, raw_grad: str, forward: str, backward: str
) -> None:
    """Claim A3 (ATP, figure 5): what each layer leaves partial, and on which axis that is then reduced.

    The paper's text has the axes the other way round than its equation 2 and its code; these are the equation's.
    """
    mesh, value, weight = Mesh(shape, ("d1", "d2")), reals(6, 16), reals(16, 24)
    seen: list[Layout] = []
    with simulated(mesh), use_topology(BYTES):
        a = distribute(value, parse_layout(x, mesh)).requires_grad_()
        w = distribute(weight, schedule.layouts(mesh)[1]).requires_grad_()
        inner = a * 1
        inner.register_hook(lambda grad: seen.append(grad.layout))
        with trace() as sent:
            y = matmul(inner, w, strategy=schedule)
            there = [str(y.layout), not sent.events]
            y = y.redistribute(placements=Schedule(schedule.loops, ("R", "R")).layouts(mesh)[2].placements)
        given = distribute(torch.ones(6, 24, dtype=torch.float64), y.layout)
        with trace() as back:
            y.backward(given)
        found = [whole(t.detach()) for t in (y, a.grad, w.grad)]

    assert there == [raw, True]
    assert str(seen[0]) == raw_grad
    ones = torch.ones(6, 24, dtype=torch.float64)
    for mine, right in zip(found, (value @ weight, ones @ weight.mT, value.mT @ ones), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-11, rtol=1e-11)
    assert collectives(sent) == {f"all_reduce {forward}": 1}
    assert collectives(back) == {f"all_reduce {backward}": 1}


@dataclass(frozen=True, slots=True)
class Block:
    """What a block of two linear layers came to, and what it sent."""

    values: list[Tensor]
    layouts: list[Layout]
    stored: list[Layout]
    forward: Trace
    backward: Trace


def block(mesh: Mesh, first: str | Schedule, second: str | Schedule, function: Callable[[Any], Any]) -> Block:
    """Two products with a function between them, each operand stored as its schedule says, gathers kept."""
    up, down = (STRATEGIES[s].schedule if isinstance(s, str) else s for s in (first, second))
    (at_x, at_up, _), (_, at_down, at_y) = up.layouts(mesh), down.layouts(mesh)
    with simulated(mesh), use_topology(BYTES):
        laid = [distribute(t, at).requires_grad_() for t, at in zip(operands(), (at_x, at_up, at_down), strict=True)]
        x, w1, w2 = laid
        with trace() as forward:
            y = matmul(function(matmul(x, w1, strategy=first, saved="moved")), w2, strategy=second, saved="moved")
        given = distribute(torch.ones(y.shape, dtype=torch.float64), y.layout)
        with trace() as backward:
            y.backward(given)
        values = [whole(t.detach()) for t in (y, *(t.grad for t in laid))]
    stored = [at_x, at_up, at_down, at_y]
    return Block(values, [*(t.grad.layout for t in laid), y.layout], stored, forward, backward)


def operands() -> list[Tensor]:
    return [reals(32, 16), reals(16, 48), reals(48, 16)]


def assert_dense(found: Block, function: Callable[[Any], Any]) -> None:
    x, up, down = dense = [t.requires_grad_() for t in operands()]
    y = function(x @ up) @ down
    y.sum().backward()
    for mine, right in zip(found.values, (y.detach(), *(t.grad for t in dense)), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-10, rtol=1e-10)
    assert found.layouts == found.stored


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_an_atp_mlp_moves_nothing_between_its_layers(shape: tuple[int, int]) -> None:
    """Claim A4 (ATP, section 3.2): column-first then row-first needs f3 and f4 alone, and as many going back."""
    found = block(Mesh(shape, ("d1", "d2")), "column-first", "row-first", F.gelu)

    assert_dense(found, F.gelu)
    assert collectives(found.forward) == collectives(found.backward) == {"all_reduce d1": 1, "all_reduce d2": 1}
    (d1, d2), (m, h, ffn) = shape, (32, 16, 48)
    assert received(found.forward) == 2 * (d2 - 1) * m * ffn // (d1 * d2) + 2 * (d1 - 1) * m * h // (d1 * d2)


# -- claim D1


@pytest.mark.parametrize("q", [2, 4])
def test_colossal_s_3d_layers_exchange_two_axes_and_move_nothing_between(q: int) -> None:
    """Claim D1, the linear part: what one layer leaves is what the next one, with `in` and `out` exchanged, takes."""
    mesh = Mesh((q, q, q), ("out", "in", "w"))
    first, second = Schedule(("k", "n", "m"), ("m", "m", "k")), Schedule(("n", "k", "m"), ("m", "m", "k"))
    assert first.layouts(mesh)[2] == second.layouts(mesh)[0]
    assert first.layouts(mesh)[0] == second.layouts(mesh)[2]

    found = block(mesh, first, second, torch.tanh)

    assert_dense(found, torch.tanh)
    gathers = {"all_gather in": 1, "all_gather w": 2, "all_gather out": 1}
    assert collectives(found.forward) == {**gathers, "reduce_scatter in": 1, "reduce_scatter out": 1}
    assert collectives(found.backward)["reduce_scatter w"] == 2
    m, h, ffn = 32, 16, 48
    volume = (q - 1) * 2 * (m * h + h * ffn + m * ffn) / q**3
    assert received(found.forward) == received(found.backward) == volume


# -- claim A11


def weight_stationary(tokens: int, hidden: int, x: int, y: int) -> float:
    """Elements received in a feed-forward block, forward, with both weights split over both axes and stationary."""
    mesh = Mesh((x, y), ("x", "y"))
    up, down = Schedule(("k", "n"), ("n", "k")), Schedule(("n", "k"), ("k", "n"))
    assert STRATEGIES["weight-stationary"].schedule == up
    return up.volume(mesh, tokens, hidden, 4 * hidden) + down.volume(mesh, tokens, 4 * hidden, hidden)


@pytest.mark.parametrize("chips", [16, 64, 256, 1024])
def test_google_s_two_dimensional_layout_costs_8_over_the_root_of_n(chips: int) -> None:
    """Claim A11 (Pope et al.): at best x = sqrt(n) / 2, with 8 B L E / sqrt(n) less the parts a rank has: 10 B L E / n.

    That is ATP's mesh (2 q, q / 2) with q = sqrt(n): it is the other axis, y = 2 q, that splits the wide dim.
    """
    q, tokens, hidden = int(chips**0.5), 4096, 4096
    grids = {x: weight_stationary(tokens, hidden, x, chips // x) for x in (2**i for i in range(chips.bit_length()))}

    assert min(grids, key=lambda x: grids[x]) == q // 2
    assert grids[q // 2] == pytest.approx(tokens * hidden * (8 / q - 10 / chips))


def test_the_weight_stationary_block_moves_that() -> None:
    """Claim A11, measured on (2, 8); here the feed-forward block is three times as wide."""
    mesh = Mesh((2, 8), ("x", "y"))
    up, down = Schedule(("k", "n"), ("n", "k")), Schedule(("n", "k"), ("k", "n"))

    found = block(mesh, up, down, torch.tanh)

    assert_dense(found, torch.tanh)
    assert received(found.forward) == up.volume(mesh, 32, 16, 48) + down.volume(mesh, 32, 48, 16)
    stored = up.layouts(mesh)[:2]
    assert received(measure(mesh, up, (32, 16, 48), stored).forward) == up.volume(mesh, 32, 16, 48)
