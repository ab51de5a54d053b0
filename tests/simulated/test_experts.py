"""A layer of experts equals one device in all layouts, by each choice of loops, whatever its routing."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import dshard
from dshard import (
    ArgumentError,
    DTensor,
    Layout,
    Mesh,
    NotationError,
    Partial,
    Replicate,
    Routing,
    ShapeError,
    Shard,
    StrategyError,
    explain,
    trace,
    use_strategy,
)
from dshard.core.context import static_sizes
from dshard.explain.report_values import Explanation
from dshard.testing import distribute, simulated, whole
from tests.helpers.expert_cases import drawn, far_from_one_device, forced, rounded_errors

MESH = Mesh((4,), ("x",))
SPLIT, WHOLE = Layout(MESH, (Shard(0),)), Layout(MESH, (Replicate(),))


def check(seed: int, large: bool = False) -> int:
    """Check the case of a seed under all loops, and return how many were possible."""
    case, possible = drawn(seed, large), 0
    with simulated(case.mesh):
        for loops in forced(case):
            far = far_from_one_device(case, loops)
            assert far is None or far < 1e-11, f"seed {seed}, loops {loops}: {far:.1e} from one device: {case}"
            assert loops is not None or far is not None, f"seed {seed}: nothing was chosen: {case}"
            possible += far is not None
    return possible


def test_experts_equal_one_device_by_every_loop() -> None:
    assert sum(map(check, (2, 3, 6, 7))) > 15


def test_tokens_are_split_over_several_axes_in_one_order() -> None:
    case = drawn(210, large=True)  # tokens are stored in the order of the mesh, their indices in another
    with simulated(case.mesh):
        far = far_from_one_device(case, ("ragged", "f", "t"))
    assert far is not None
    assert far < 1e-11


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 3000, 50))
def test_generated_experts_equal_one_device_by_every_loop(first: int) -> None:
    for seed in range(first, first + 50):
        check(seed, large=True)


def operands(t: int = 8, d: int = 4, f: int = 6, e: int = 4, k: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def reals(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    index = torch.rand((t, e), generator=generator).topk(k).indices
    return [reals(t, d), index, reals(t, k), reals(e, f, d), reals(e, d, f)]


def laid_out(tensors: list[Tensor], layouts: list[Layout]) -> list[Any]:
    laid = [distribute(t, layout) for t, layout in zip(tensors, layouts, strict=True)]
    return [t.requires_grad_(t.is_floating_point()) for t in laid]


@pytest.mark.parametrize("loops", ["tokens", "expert", "ragged", "split experts"])
def test_experts_without_tokens_get_zeros_as_gradients(loops: str) -> None:
    tensors = operands()
    tensors[1] = tensors[1] * 0 + torch.tensor([0, 1])
    with simulated(MESH):
        laid = laid_out(tensors, [SPLIT] * 5)
        dshard.experts(dshard.mlp_experts(), *laid, loops=loops).sum().backward()
        for parameter in laid[3:]:
            gradient = whole(parameter.grad)
            assert gradient[:2].abs().min() > 0
            assert gradient[2:].eq(0).all()


@pytest.mark.parametrize("loops", ["tokens", "expert", "ragged", "split experts"])
def test_gradients_of_gradients_equal_one_device(loops: str) -> None:
    def penalty(tensors: list[Any], loops: str | None) -> list[Any]:
        floats = [t for t in tensors if t.is_floating_point()]
        out = dshard.experts(dshard.mlp_experts(torch.tanh), *tensors, loops=loops)
        first = torch.autograd.grad(out.square().sum(), floats, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), floats))

    tensors = operands()
    expected = penalty([t.requires_grad_(t.is_floating_point()) for t in tensors], None)
    with simulated(MESH):
        found = penalty(laid_out([t.detach() for t in tensors], [SPLIT] * 5), loops)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(mine), right)


@pytest.mark.parametrize(
    ("loops", "shape"),
    [("ragged", (1,)), (("ragged", "t"), (1, 2)), (("hop", "ragged"), (2, 1)), (("hop", "ragged"), (1, 2)),
     (("hop", "ragged"), (1, 1)), ((None, "ragged"), (2, 1))],
)  # fmt: skip
def test_exchanges_along_an_axis_of_one_rank_are_none(loops: Any, shape: tuple[int, ...]) -> None:
    mesh = Mesh(shape, ("x", "y")[: len(shape)])
    tensors, split = operands(), Layout(mesh, (Shard(0),) * len(shape))
    expected = dshard.experts(dshard.mlp_experts(), *tensors)
    with simulated(mesh):
        found = dshard.experts(dshard.mlp_experts(), *laid_out(tensors, [split] * 5), loops=loops)
        torch.testing.assert_close(whole(found), expected)


def test_whole_tokens_of_split_experts_leave_a_partial_sum() -> None:
    with simulated(MESH):
        laid = laid_out(operands(), [WHOLE] * 3 + [SPLIT] * 2)
        with trace() as sent:
            out = dshard.experts(dshard.mlp_experts(), *laid, loops="expert")
    assert sent.events == []
    assert out.placements == (Partial(),)


def test_many_tokens_move_experts_and_few_move_themselves() -> None:
    def loops_of(tokens: int) -> str:
        x, w = torch.empty(tokens, 64, device="meta"), torch.empty(64, 512, 64, device="meta")
        index = torch.empty(tokens, 4, dtype=torch.long, device="meta")
        given = [x, index, torch.empty(tokens, 4, device="meta"), w, w.transpose(1, 2).contiguous()]
        laid = [DTensor.from_local(t.tensor_split(4)[0], MESH, [Shard(0)], shape=t.shape) for t in given]
        report = explain(lambda: dshard.experts(dshard.mlp_experts(), *laid))
        (call,) = report.operators
        return call.chosen.name

    assert loops_of(4 * 256) == "x:ragged"
    assert loops_of(4 * 262144) == "x:t"


@pytest.mark.parametrize("loops", ["tokens", "expert", "ragged", "split experts", "tokens x ragged", "hop x ragged"])
def test_low_precision_is_as_exact_as_on_one_device(loops: str) -> None:
    mesh = Mesh((2, 2), ("x", "y")) if " x " in loops else MESH
    with simulated(mesh):
        errors = rounded_errors(mesh, loops)
    assert len(errors) == 5
    assert all(mine < min(2**-7, 1.25 * alone) for mine, alone in errors)  # of which sums over ranks round once more


def test_a_trace_tells_how_tokens_were_spread() -> None:
    tensors = operands(t=13)
    index, held = tensors[1], [range(r, r + 1) for r in range(4)]
    tokens = [range(r * 4, min(13, r * 4 + 4)) for r in range(4)]
    needs = [
        [sum(any(e in held[r] for e in index[t]) for t in tokens[source]) for source in range(4)] for r in range(4)
    ]
    with simulated(MESH), trace() as sent:
        for loops in ("ragged", "expert", "tokens"):
            dshard.experts(dshard.mlp_experts(), *laid_out(tensors, [SPLIT] * 5), loops=loops)

    ragged, expert, moved = sent.experts
    assert [call.loops for call in sent.experts] == ["x:ragged", "x:e", "x:t"]
    assert ragged.by_expert() == expert.by_expert() == moved.by_expert() == index.flatten().bincount().tolist()
    assert ragged.rows == max(sum(row) - row[rank] for rank, row in enumerate(needs))
    assert expert.rows is moved.rows is None
    assert sum(call.nbytes for call in sent.experts) == sent.nbytes
    assert (ragged.tokens, ragged.all_ranks, ragged.held, moved.held) == (4, True, tuple(held), (range(4),))
    busiest = f"{max(ragged.by_expert()) * 4 / 26:.2f}"
    assert busiest in sent.summary().splitlines()[-3]
    assert json.loads(sent.to_json())["experts"][0]["tokens_by_expert"] == ragged.by_expert()
    assert Routing.of(ragged.by_expert()).shares(4, 2) == pytest.approx([n / 26 for n in ragged.by_expert()])


def test_a_backward_pass_of_the_ragged_form_sends_for_experts() -> None:
    with simulated(MESH):
        out = dshard.experts(dshard.mlp_experts(), *laid_out(operands(), [SPLIT] * 5), loops="ragged")
        with trace() as sent:
            out.backward(distribute(torch.ones(8, 4, dtype=torch.float64), SPLIT))

    assert [(event.op, event.collective) for event in sent.events] == [("experts", "all_to_all")] * 2
    assert sent.experts == []


def kept_in_order(index: Tensor, weight: Tensor, capacity: int) -> Tensor:
    """The weights, zero where an expert has as many tokens before."""
    taken, kept = dict[int, int](), weight.clone()
    for token, row in enumerate(index.tolist()):
        for slot, expert in enumerate(row):
            taken[expert] = taken.get(expert, 0) + 1
            if taken[expert] > capacity:
                kept[token, slot] = 0
    return kept


CAPACITIES = [*product([None, "tokens", "expert", "split experts"], [False, True]), ("ragged", False)]  # which asks


@pytest.mark.parametrize(("loops", "static"), CAPACITIES)
def test_a_capacity_keeps_the_first_tokens_on_every_mesh(loops: str | None, static: bool) -> None:
    for capacity in (1, 3, 20):
        tensors = operands(13)
        x, index, weight, *parameters = (t.requires_grad_(t.is_floating_point()) for t in tensors)
        kept = kept_in_order(index, weight.detach(), capacity)
        right = dshard.experts(dshard.mlp_experts(), x, index, weight * (kept != 0), *parameters)
        right.square().sum().backward()
        with simulated(MESH), static_sizes() if static else nullcontext():
            laid = laid_out([t.detach() for t in tensors], [SPLIT] * 5)
            out = dshard.experts(dshard.mlp_experts(), *laid, loops=loops, capacity=capacity)
            out.square().sum().backward()
            torch.testing.assert_close(whole(out.detach()), right.detach())
            for mine, theirs in zip(laid, tensors, strict=True):
                if mine.requires_grad:
                    torch.testing.assert_close(whole(mine.grad), theirs.grad)


def test_sizes_that_are_static_change_nothing() -> None:
    for seed in range(6):
        case = drawn(seed)
        with simulated(case.mesh), static_sizes():
            far = far_from_one_device(case, None)
        assert far is not None
        assert far < 1e-11, f"seed {seed}: {far:.1e} from one device: {case}"


def explained(routing: Routing, tokens: int = 4096, width: int = 64) -> Explanation:
    x, w = torch.empty(tokens, width, device="meta"), torch.empty(8, 512, width, device="meta")
    index, weight = torch.empty(tokens, 2, dtype=torch.long, device="meta"), torch.empty(tokens, 2, device="meta")
    given = [x, index, weight, w, w.transpose(1, 2).contiguous()]
    laid = [DTensor.from_local(t.tensor_split(4)[0], MESH, [Shard(0)], shape=t.shape) for t in given]
    with use_strategy(routing=routing):
        (call,) = explain(lambda: dshard.experts(dshard.mlp_experts(), *laid)).operators
    return call


def test_what_torch_leaves_in_rows_behind_the_last_end_counts_for_nothing() -> None:
    def run(tensors: list[Any]) -> list[Tensor]:
        out = dshard.experts(dshard.mlp_experts(), *tensors, loops="expert")
        out.square().sum().backward()
        return [whole(x) if isinstance(x, DTensor) else x for x in (out, *(t.grad for t in tensors if t.requires_grad))]

    tensors = [t.float() if t.is_floating_point() else t for t in operands(f=8)]  # of which torch has a grouped product
    expected = run([t.clone().requires_grad_(t.is_floating_point()) for t in tensors])
    torch.use_deterministic_algorithms(True)  # which fills with NaN what is not written
    try:
        with simulated(MESH), static_sizes():
            torch.testing.assert_close(run(laid_out(tensors, [SPLIT] * 5)), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_routing_prices_the_busiest_rank() -> None:
    even, skewed = explained(Routing.uniform()), explained(Routing.of([8, 8, 1, 1, 1, 1, 1, 1]))
    found = {call: {each.name: each for each in call.candidates} for call in (even, skewed)}
    # of two experts of a token rank 0 has 16 of 22 pairs, so each token needs it
    assert found[skewed]["x:ragged"].bytes_moved > 1.3 * found[even]["x:ragged"].bytes_moved
    assert found[skewed]["x:ragged"].compute_seconds > 1.5 * found[even]["x:ragged"].compute_seconds
    assert found[skewed]["x:t"].compute_seconds == pytest.approx(found[even]["x:t"].compute_seconds)


@pytest.mark.parametrize(("tokens", "name"), [(1024, "x:ragged"), (262144, "x:t")])
@pytest.mark.parametrize("routing", [Routing.uniform(), Routing.zipf(0.5)], ids=str)
def test_what_is_chosen_is_the_cheapest_and_near_the_bound(tokens: int, name: str, routing: Routing) -> None:
    call = explained(routing, tokens, width=1024)
    seconds = {each.name: each.gather_seconds + each.compute_seconds + each.reduce_seconds for each in call.candidates}
    fewest = min(call.candidates, key=lambda each: each.bytes_moved)

    assert call.chosen.name == name == fewest.name
    assert seconds[name] == min(seconds.values())
    assert call.chosen.bound_ratio is not None
    skew = {"uniform": 1.0, "zipf(0.5)": 1.3}[str(routing)]  # the busiest rank over the mean, of which the bound is
    assert 1.0 <= call.chosen.bound_ratio <= (1.05 * skew if name == "x:ragged" else 1.05)


def test_a_routing_of_other_experts_is_refused() -> None:
    with pytest.raises(ShapeError, match="a Routing of 3 counts for a layer of 8 experts"):
        explained(Routing.of([1, 2, 3]))


def test_loops_may_be_requested_for_a_block() -> None:
    with simulated(MESH), use_strategy(experts="tokens"):
        laid = laid_out(operands(), [SPLIT] * 5)
        with trace() as sent:
            dshard.experts(dshard.mlp_experts(), *laid)
    assert {event.collective for event in sent.events} == {"all_gather"}


def test_a_body_may_be_any_function_of_rows() -> None:
    tensors = operands()

    def body(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return rows * 2

    right = dshard.experts(body, *tensors)
    torch.testing.assert_close(right, tensors[0] * 2 * tensors[2].sum(1, keepdim=True))
    with simulated(MESH):
        torch.testing.assert_close(whole(dshard.experts(body, *laid_out(tensors, [SPLIT] * 5)).detach()), right)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_indices_may_be_whole_numbers_of_any_dtype(dtype: torch.dtype) -> None:
    x, index, *rest = operands()
    right = dshard.experts(dshard.mlp_experts(), x, index, *rest)
    torch.testing.assert_close(dshard.experts(dshard.mlp_experts(), x, index.to(dtype), *rest), right)
    with simulated(MESH):
        for loops in ("ragged", "expert", "tokens"):
            laid = laid_out([x, index.to(dtype), *rest], [SPLIT] * 5)
            found = dshard.experts(dshard.mlp_experts(), *laid, loops=loops)
            torch.testing.assert_close(whole(found.detach()), right)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "weights of another shape": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w[:, :1], u, d),
        ShapeError,
        "index has shape (8, 2) and weight (8, 1)",
    ),
    "indices of other tokens": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x[:4], i, w, u, d),
        ShapeError,
        "x has shape (4, 4) and index (8, 2)",
    ),
    "numbers of experts that differ": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w, u[:3], d),
        ShapeError,
        "the factor 'e' of the rule",
    ),
    "a term too few": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w, u, d, rule="e f d"),
        NotationError,
        "has 1 terms, but there are 2 parameters",
    ),
    "a term without e": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w, u, d, rule="e f d, d f"),
        NotationError,
        "each parameter has e, the experts",
    ),
    "another name": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w, u, d, rule="e g d, e d g"),
        NotationError,
        "write other dims in brackets, as [g]",
    ),
    "no parameter": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w),
        ShapeError,
        "experts without parameters",
    ),
    "indices that are no whole numbers": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, w, w, u, d),
        TypeError,
        "give the numbers of experts, as whole numbers",
    ),
    "a body that drops a row": (
        lambda x, i, w, u, d: dshard.experts(lambda rows, *_: rows[1:], x, i, w, u, d),
        ShapeError,
        "it returns a row for each that it is given",
    ),
    "an unknown name": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w, u, d, loops="raged"),
        StrategyError,
        "ragged",
    ),
    "two loops for one axis": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w, u, d, loops=("t", "e")),
        StrategyError,
        "2 loops for the mesh (x=4)",
    ),
    "ragged tokens that are whole": (
        lambda x, i, w, u, d: dshard.experts(
            dshard.mlp_experts(), x.redistribute(placements=[Replicate()]), i, w, u, d, loops="ragged"
        ),
        StrategyError,
        "the ragged form sends tokens from the ranks that have them",
    ),
    "an index of no expert": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i + 3, w, u, d, loops="ragged"),
        IndexError,
        "there are 4, from 0 to 3",
    ),
    "no capacity": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w, u, d, capacity=0),
        ArgumentError,
        "capacity of an expert, in tokens: 0",
    ),
    "another way beyond": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i, w, u, d, capacity=4, beyond="skip"),
        ArgumentError,
        "beyond",
    ),
    "more tokens than the capacity": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i * 0, w, u, d, capacity=15, beyond="raise"),
        ShapeError,
        "expert 0 gets 16 tokens, 1 more than its capacity of 15",
    ),
    "a negative index": (
        lambda x, i, w, u, d: dshard.experts(dshard.mlp_experts(), x, i - 4, w, u, d, loops="tokens"),
        IndexError,
        "there are 4, from 0 to 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with simulated(MESH):
        laid = [distribute(t, SPLIT) for t in operands()]
        with pytest.raises(kind, match=re.escape(message)):
            call(*laid)
