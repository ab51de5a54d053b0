"""Rules become strategies: the classics come out by price, orders are kept, merged dims lie where their chunks do."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from helpers.single_device import rows
from hypothesis import given
from hypothesis import strategies as st

from dshard import Layout, Mesh, matmul
from dshard.core.call import Call
from dshard.core.executable import Executable, wrap_as
from dshard.core.observe import Decision
from dshard.core.operands import operand_of, plans_to
from dshard.core.spec import Spec, contiguous_stride, spec_of
from dshard.layout import Shape, parse_layout
from dshard.ops.composite import run_recorded
from dshard.ops.matmul.options import MatmulOptions, enter_options
from dshard.ops.matmul.rules import linear_rule, matmul_rule
from dshard.placements import Replicate, Shard, chunk
from dshard.rules.attention_loops import attention_rule
from dshard.rules.expand import Operand, Row, merges
from dshard.rules.matmul_loops import STORAGES, Loop, Schedule
from dshard.rules.rule import MOVES, PassThrough, Rule, linear
from dshard.rules.rule_notation import parse_rule
from dshard.rules.strategy import Constraints, Question, Strategy, StrategyChoice, completed_layout
from dshard.rules.strategy_choice import choose, strategies
from dshard.testing import distribute, meshes, simulated, whole
from dshard.testing.rule_rows import every_strategy
from dshard.topology import BYTES, FLAT_CPU

LINE = Mesh((4,), ("tp",))
GRID = Mesh((2, 2), ("dp", "tp"))
BIG = 1024


def chosen(rule: Rule, mesh: Mesh, out: Shape, *operands: tuple[str, Shape]) -> Strategy:
    laid = [Operand(parse_layout(text, mesh), shape, 4) for text, shape in operands]
    return choose(Question(rule, laid, [(out, 4)], FLAT_CPU)).strategy


MM = parse_rule("m k, k n -> m n", [(BIG, BIG), (BIG, BIG)])
SQUARE = (BIG, BIG)


# -- choices


@pytest.mark.parametrize(
    ("x", "w", "expected"),
    [
        ("tp:R", "tp:S(1)", "tp:R, tp:S(1) -> tp:S(1)"),  # column
        ("tp:S(1)", "tp:S(0)", "tp:S(1), tp:S(0) -> tp:P(sum)"),  # row
        ("tp:S(0)", "tp:R", "tp:S(0), tp:R -> tp:S(0)"),  # data
        ("tp:R", "tp:R", "tp:R, tp:R -> tp:R"),
    ],
)
def test_the_classics_move_nothing(x: str, w: str, expected: str) -> None:
    found = chosen(MM, LINE, SQUARE, (x, SQUARE), (w, SQUARE))

    assert str(found) == expected
    assert found.moves == 0


@pytest.mark.parametrize(
    ("x", "w", "out"),
    [
        ("dp:S(0) tp:R", "dp:R tp:S(1)", "dp:S(0) tp:S(1)"),
        ("dp:S(0) tp:S(1)", "dp:R tp:S(0)", "dp:S(0) tp:P(sum)"),
        ("dp:S(1) tp:S(1)", "dp:S(0) tp:S(0)", "dp:P(sum) tp:P(sum)"),
    ],
)
def test_axes_of_a_mesh_take_loops_of_their_own(x: str, w: str, out: str) -> None:
    found = chosen(MM, GRID, SQUARE, (x, SQUARE), (w, SQUARE))

    assert str(found) == f"{x}, {w} -> {out}"


def test_a_sharded_weight_is_gathered_where_the_batch_is_large() -> None:
    """FSDP: the batch stays, the smaller weight moves."""
    rule = parse_rule("m k, k n -> m n", [(2**16, 64), (64, 64)])
    found = chosen(rule, LINE, (2**16, 64), ("tp:S(0)", (2**16, 64)), ("tp:S(0)", (64, 64)))

    assert str(found) == "tp:S(0), tp:R -> tp:S(0)"


@pytest.mark.parametrize("x", ["dp:S(0) tp:R", "dp:R tp:S(0)"])
def test_a_product_with_gradients_repeats_no_work_that_its_operands_split(x: str) -> None:
    operands = [Operand(parse_layout(text, GRID), shape, 4) for text, shape in ((x, (8, 4)), ("dp:R tp:R", (4, 4)))]
    rule = matmul_rule((8, 4), (4, 4))
    axis = operands[0].layout.axes_of(0)[0]

    for gradients, repeated in (((False, False), True), ((True, True), False)):
        found = strategies(
            Question(rule, operands, [((8, 4), 4)], FLAT_CPU, Constraints(gradients=gradients, kept=(True, True)))
        )
        assert any(each.rows[axis] is None for each in found) == repeated


def test_nobody_shards_what_nobody_declared() -> None:
    operands = [Operand(parse_layout("tp:R", LINE), SQUARE, 4)] * 2

    assert [str(s) for s in strategies(Question(MM, operands, [(SQUARE, 4)], FLAT_CPU))] == ["tp:R, tp:R -> tp:R"]


def test_a_whole_factor_is_not_split() -> None:
    rule = parse_rule("b [h] -> b [h]", [SQUARE])
    operands = [Operand(parse_layout("tp:S(1)", LINE), SQUARE, 4)]

    assert [str(s) for s in strategies(Question(rule, operands, [(SQUARE, 4)], FLAT_CPU))] == ["tp:R -> tp:R"]


def test_the_cheapest_is_chosen() -> None:
    operands = [Operand(parse_layout(text, GRID), SQUARE, 4) for text in ("dp:S(1) tp:S(0)", "dp:S(1) tp:S(0)")]

    found = list(strategies(Question(MM, operands, [(SQUARE, 4)], FLAT_CPU)))

    assert len(found) > 4
    assert choose(Question(MM, operands, [(SQUARE, 4)], FLAT_CPU)).strategy.seconds == min(s.seconds for s in found)


def test_a_partial_result_is_charged_its_completion() -> None:
    found = chosen(MM, LINE, SQUARE, ("tp:S(1)", SQUARE), ("tp:S(0)", SQUARE))

    assert found.reduce > 0
    assert str(completed_layout(found.outputs[0])) == "tp:R"


@pytest.mark.parametrize(("operator", "passes"), [(linear(0), False), (MOVES, True)])
def test_results_of_a_partial_operand_are_charged_a_latency_each_and_its_pieces_one(
    operator: tuple[PassThrough, ...], passes: bool
) -> None:
    """As the gradients of a norm, which are used apart; all pieces of one tensor may be reduced together."""
    shapes = [(32, 64), (64,), (64,)]
    rule = parse_rule("t n -> t n, n, n", [(32, 64)], shapes, passes=operator)

    operands = [Operand(parse_layout("tp:P(sum)", LINE), (32, 64), 4)]
    found = choose(Question(rule, operands, [(shape, 4) for shape in shapes], FLAT_CPU)).strategy

    assert bool(found.outputs[0].partial_axes()) == passes


def test_an_order_of_mesh_axes_is_kept() -> None:
    rule = parse_rule("a b -> a b", [(7, 3)])
    text = "dp:S(0) tp:S(0); 0:tp,dp"

    assert str(chosen(rule, GRID, (7, 3), (text, (7, 3)))) == f"{text} -> {text}"


def test_what_is_kept_in_place_stays() -> None:
    rule = parse_rule("a b, a b -> a b", [SQUARE, SQUARE])
    operands = [Operand(parse_layout(text, LINE), SQUARE, 4) for text in ("tp:R", "tp:S(0)")]
    kept = operands[0].layout

    found = choose(Question(rule, operands, [(SQUARE, 4)], FLAT_CPU, Constraints(keep=kept))).strategy

    assert found.inputs[0] == found.outputs[0] == kept


def test_reductions_that_do_not_commute_are_no_strategy() -> None:
    rule = parse_rule("a b -> ", [(6, 6)], reduce="max")
    alone = Rule(rule.inputs, rule.outputs, reduce=rule.reduce, passes=())
    operands = [Operand(parse_layout("dp:S(0) tp:P(sum)", GRID), (6, 6), 4)]

    for found in strategies(Question(alone, operands, [((), 4)], FLAT_CPU)):
        assert {str(p) for p in found.outputs[0].placements} <= {"R", "P(max)"}


# -- merged dims


@given(meshes(max_axes=2), st.lists(st.integers(0, 6), min_size=2, max_size=3), st.data())
def test_merged_factors_lie_where_the_chunks_do(mesh: Mesh, sizes: list[int], data: st.DataObject) -> None:
    names = tuple("abc"[: len(sizes)])
    axes = data.draw(st.lists(st.sampled_from(range(mesh.ndim)), unique=True, min_size=1))
    takers = [data.draw(st.sampled_from(names)) for _ in axes]
    order = {name: tuple(axis for axis, taker in zip(axes, takers, strict=True) if taker == name) for name in names}
    order = {name: found for name, found in order.items() if found}

    lies = merges(names, order, dict(zip(names, sizes, strict=True)), mesh)

    assert lies == merged_by_hand(names, order, sizes, mesh)


def merged_by_hand(names: tuple[str, ...], order: dict[str, tuple[int, ...]], sizes: list[int], mesh: Mesh) -> bool:
    """Compare the elements that each rank has of the factors with its chunk of the merged dim, one by one."""
    axes = [axis for name in names for axis in order.get(name, ())]
    numbers = torch.arange(prod(sizes)).reshape(sizes)
    for at in mesh.coordinates():
        part = numbers
        for dim, name in enumerate(names):
            for axis in order.get(name, ()):
                piece = chunk(part.shape[dim], mesh.shape[axis], at[axis])
                part = part.narrow(dim, piece.start, len(piece)) if piece else part.narrow(dim, 0, 0)
        held = range(prod(sizes))
        for axis in axes:
            piece = chunk(len(held), mesh.shape[axis], at[axis])
            held = held[piece.start : piece.stop]
        if part.flatten().tolist() != list(held):
            return False
    return True


# -- joint operators: every strategy, gradients included


def reals(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


JOINT: dict[str, tuple[Any, Any, list[torch.Tensor]]] = {
    "matmul": (matmul_rule, torch.matmul, [reals(5, 2, 3), reals(3, 7)]),
    "matmul batches": (matmul_rule, torch.matmul, [reals(3, 1, 5, 2), reals(2, 2, 3)]),
    "matmul vector": (matmul_rule, torch.matmul, [reals(5, 3), reals(3)]),
    "linear": (linear_rule, F.linear, [reals(5, 2, 3), reals(7, 3)]),
    "attention": (
        lambda *shapes: attention_rule(shapes, gqa=False),
        F.scaled_dot_product_attention,
        [reals(2, 3, 5, 4), reals(2, 3, 6, 4), reals(2, 3, 6, 2), reals(5, 6)],
    ),
}


@pytest.mark.parametrize(("name", "mesh"), one_way_each(JOINT, [Mesh((3,)), GRID]), ids=str)
def test_every_strategy_of_a_joint_operator_is_right(name: str, mesh: Mesh) -> None:
    make_rule, local, values = JOINT[name]
    leaves = [x.clone().requires_grad_() for x in values]
    expected = local(*leaves)
    incoming = reals(*expected.shape)
    expected.backward(incoming)
    rule = make_rule(*(tuple(x.shape) for x in values))
    for strategy in every_strategy(rule, call_of(values, expected.detach(), mesh), mesh):
        with simulated(mesh):
            operands = [distribute(x, given).requires_grad_() for x, given in zip(values, strategy.inputs, strict=True)]
            out = run_recorded(executable_of(rule, strategy, local, operands, expected), *operands)
            out.backward(distribute(incoming, out.layout.cotangent()))

        torch.testing.assert_close(whole(out), expected.detach(), msg=lambda text, s=strategy: f"{s}: {text}")
        for x, leaf in zip(operands, leaves, strict=True):
            torch.testing.assert_close(whole(x.grad), leaf.grad, msg=lambda text, s=strategy: f"{s}: {text}")


def executable_of(rule: Rule, strategy: Strategy, local: Any, operands: list[Any], out: torch.Tensor) -> Executable:
    specs, result = [x._spec for x in operands], spec(out, strategy.outputs[0])
    plans = plans_to(specs, strategy.inputs, FLAT_CPU)
    operands = tuple(map(operand_of, specs))
    choice = StrategyChoice(Question(rule, operands, (), FLAT_CPU), strategy)
    decision = Decision("joint", operands, FLAT_CPU, choice, plans)
    positions = range(len(operands))
    return Executable(decision, lambda at: local, [result], positions, wrap_as(result), gradients=strategy.gradients)


def call_of(values: list[torch.Tensor], out: torch.Tensor, mesh: Mesh) -> Call:
    layout = Layout(mesh, (Replicate(),) * mesh.ndim)
    specs = tuple(spec(x, layout) for x in values)
    return Call(torch.ops.aten.matmul.default, specs, {}, specs, (out,))


def spec(x: torch.Tensor, layout: Layout) -> Spec:
    shape = tuple(x.shape)
    return spec_of(layout, shape, contiguous_stride(shape), x.dtype, x.device)


def test_where_nothing_costs_anything_a_choice_ends() -> None:
    mesh = Mesh((2, 2, 2), ("x", "y", "z"))
    rule = parse_rule("m n -> m n", [(0, 0)])

    found = choose(Question(rule, [Operand(Layout(mesh, (Shard(0),) * 3), (0, 0), 8)], [((0, 0), 8)], BYTES)).strategy

    assert found.seconds == 0


@pytest.mark.parametrize(
    ("loops", "layout"),
    one_way_each((loops for loops in product(STORAGES, repeat=2) if "m" in loops), ["dp:R tp:R", "dp:S(0) tp:R"]),
    ids="".join,
)
def test_a_vector_under_any_schedule_is_multiplied_as_on_one_device(loops: tuple[Loop, Loop], layout: str) -> None:
    """It has no rows, so an axis whose loop shards them shards nothing."""
    x, w = rows(5), rows(5, 3)
    for stored in product(*(STORAGES[loop] for loop in loops)):
        with simulated(GRID):
            out = matmul(
                distribute(x, parse_layout(layout, GRID)),
                distribute(w, parse_layout("dp:R tp:S(1)", GRID)),
                strategy=Schedule(loops, stored),
            )
            torch.testing.assert_close(whole(out), x @ w)


@pytest.mark.parametrize(
    ("row", "layouts"),
    [
        ("k", ("dp:S(1) tp:S(1)", "dp:R tp:S(0)")),  # they agree at one level: blocks have other rows
        (PassThrough(frozenset({0}), ("sum",)), ("dp:R tp:S(0)", "dp:R tp:R")),  # nothing is partial
    ],
    ids=["contraction", "sum"],
)
def test_rows_that_a_plan_asks_for_are_followed_where_operands_have_them(row: Row, layouts: tuple[str, str]) -> None:
    a, b = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    with simulated(GRID):
        x, y = (distribute(t, parse_layout(text, GRID)) for t, text in zip((a, b), layouts, strict=True))
        leave = enter_options(MatmulOptions(among=((frozenset({row}),) * 2,)))
        try:
            torch.testing.assert_close(whole(x @ y), a @ b)
        finally:
            leave()
