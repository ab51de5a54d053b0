"""Optimisers, gradient clipping and operators on lists equal single-device torch, however the parameters lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.default_cases import one_in, one_way_each
from helpers.single_device import rows
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import _foreach_supported_types

from dshard import (
    DTensor,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
)
from dshard.comm import CommEvent, listen
from dshard.core import wrapper
from dshard.ops import foreach
from dshard.testing import RankPool, distribute, parts, simulated, whole

LINE = Mesh((3,), ("x",))
SQUARE = Mesh((2, 2), ("x", "y"))
LAYOUTS = {
    "whole": Layout(LINE, (Replicate(),)),
    "rows": Layout(LINE, (Shard(0),)),
    "columns": Layout(LINE, (Shard(1),)),
    "blocks": Layout(SQUARE, (Shard(0), Shard(1))),
    "rows twice": Layout(SQUARE, (Shard(0), Shard(0))),
    "rows and whole": Layout(SQUARE, (Shard(0), Replicate())),
}
SPLIT = [LAYOUTS[name] for name in ("rows", "blocks", "rows twice", "rows and whole")]
SHAPES = [(5, 3), (1, 4), (2, 2)]
OPTIMISERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p, **how: SGD(p, lr=0.1, **how),
    "momentum": lambda p, **how: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, **how),
    "nesterov": lambda p, **how: SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True, **how),
    "adam": lambda p, **how: Adam(p, lr=0.1, weight_decay=0.1, **how),
    "amsgrad": lambda p, **how: Adam(p, lr=0.1, amsgrad=True, **how),
    "adamw": lambda p, **how: AdamW(p, lr=0.1, **how),
    "adagrad": lambda p, **how: Adagrad(p, lr=0.1, **how),
}
WAYS: dict[str, dict[str, bool]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}


def parameters(layout: Layout | None = None) -> list[Any]:
    tensors = [rows(*shape) for shape in SHAPES]
    return [Parameter(t if layout is None else distribute(t, layout)) for t in tensors]


def loss(params: Sequence[Any]) -> Any:
    return sum((p.square().sum() * (i + 1) + p.sin().sum() for i, p in enumerate(params)), start=torch.zeros(()))


def trained(params: list[Any], optimiser: Callable[..., Optimizer], how: dict[str, bool], steps: int = 3) -> list[Any]:
    run = optimiser(params, **how)
    for _ in range(steps):
        run.zero_grad()
        loss(params).backward()
        run.step()
    return params


def assert_equal(found: Sequence[Any], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(mine.detach()), theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "way"),
    one_way_each(OPTIMISERS, list(WAYS), every=2),
)
def test_optimisers_step_as_on_one_device(name: str, way: str) -> None:
    expected = trained(parameters(), OPTIMISERS[name], WAYS[way])

    for layout in SPLIT:
        with simulated(layout.mesh):
            found = trained(parameters(layout), OPTIMISERS[name], WAYS[way])

            assert_equal(found, expected)
            assert [p.layout for p in found] == [layout] * len(found)


@pytest.mark.parametrize("way", ["single", "foreach"])
def test_centred_rmsprop_steps_as_on_one_device(way: str) -> None:
    def centred(p: list[Any], **how: bool) -> Optimizer:
        return RMSprop(p, lr=0.1, momentum=0.5, centered=True, **how)

    expected = trained(parameters(), centred, WAYS[way])

    with simulated(SQUARE):
        assert_equal(trained(parameters(LAYOUTS["blocks"]), centred, WAYS[way]), expected)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_step_of_lists_sends_nothing(name: str) -> None:
    events: list[CommEvent] = []
    with simulated(LINE):
        params = parameters(LAYOUTS["rows"])
        loss(params).backward()
        with listen(events.append):
            OPTIMISERS[name](params, foreach=True).step()
            OPTIMISERS[name](params, fused=True).step()

    assert events == []


def test_lists_are_the_default_where_torch_has_them() -> None:
    assert DTensor in _foreach_supported_types


@pytest.mark.parametrize("kind", one_in(2, [1.0, 2.0, inf, 3.5]))
@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_clipped_as_on_one_device(kind: float, foreach: bool) -> None:
    max_norm = 0.5 if kind == 2.0 else 100.0
    plain = parameters()
    loss(plain).backward()
    expected = clip_grad_norm_(plain, max_norm, kind, foreach=foreach)

    for layout in SPLIT:
        with simulated(layout.mesh):
            params = parameters(layout)
            loss(params).backward()
            found = clip_grad_norm_(params, max_norm, kind, foreach=foreach)

            assert_equal([found], [expected])
            assert_equal([p.grad for p in params], [p.grad for p in plain])


@pytest.mark.parametrize("kind", [2.0, inf])
def test_the_norm_of_all_gradients_is_one_reduction(kind: float) -> None:
    events: list[CommEvent] = []
    with simulated(LINE):
        params = parameters(LAYOUTS["rows"])
        loss(params).backward()
        with listen(events.append):
            clip_grad_norm_(params, 1.0, kind)

    assert [(event.collective, event.nbytes) for event in events] == [("all_reduce", events[0].nbytes)]


@pytest.mark.parametrize("kind", [1.0, 2.0, inf])
def test_the_norm_of_gradients_in_several_layouts_is_reduced_once(kind: float) -> None:
    layouts = [LAYOUTS["blocks"], LAYOUTS["rows and whole"], Layout(SQUARE, (Replicate(), Replicate()))]
    plain, events = parameters(), list[CommEvent]()
    loss(plain).backward()
    expected = clip_grad_norm_(plain, 1.0, kind)
    with simulated(SQUARE):
        params = [Parameter(distribute(rows(*shape), layout)) for shape, layout in zip(SHAPES, layouts, strict=True)]
        loss(params).backward()
        with listen(events.append):
            found = clip_grad_norm_(params, 1.0, kind)

        assert_equal([found], [expected])
        assert_equal([p.grad for p in params], [p.grad for p in plain])
    assert [(event.collective, event.axis) for event in events] == [("all_reduce", "x,y")]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_a_step_makes_and_moves_nothing_for_a_parameter(name: str) -> None:
    with simulated(LINE):
        params = [p for _ in range(2) for p in parameters(LAYOUTS["rows"])]
        optimiser = OPTIMISERS[name](params)
        for step in range(3):
            loss(params).backward()
            with (
                patch.object(wrapper, "make", side_effect=wrapper.make) as made,
                patch.object(foreach, "redistribute_local", side_effect=foreach.redistribute_local) as moved,
            ):
                optimiser.step()
            optimiser.zero_grad(set_to_none=step == 0)
    assert made.call_count == moved.call_count == 0


def test_parameters_on_different_layouts() -> None:
    expected = trained(parameters(), OPTIMISERS["adam"], {"foreach": True})
    with simulated(SQUARE):
        layouts = [LAYOUTS["blocks"], LAYOUTS["rows twice"], Layout(SQUARE, (Replicate(), Replicate()))]
        params = [Parameter(distribute(rows(*shape), layout)) for shape, layout in zip(SHAPES, layouts, strict=True)]

        assert_equal(trained(params, OPTIMISERS["adam"], {"foreach": True}), expected)


def test_gradients_and_states_that_lie_elsewhere() -> None:
    """A fused step brings them to their parameters, and states back."""
    there, here = LAYOUTS["columns"], LAYOUTS["rows"]
    plain = [rows(5, 3), rows(5, 3).cos(), rows(5, 3).exp(), rows(5, 3).square()]
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    options = {**rates, "amsgrad": False, "maximize": False}
    with simulated(LINE):
        step = torch.tensor(3.0)
        laid = [distribute(x, layout) for x, layout in zip(plain, [here, there, there, here], strict=True)]
        torch._fused_adam_(*([x] for x in laid), [], [step], **options)
    torch._fused_adam_(*([x] for x in plain), [], [torch.tensor(3.0)], **options)

    assert_equal(laid, plain)
    assert [x.layout for x in laid] == [here, there, there, here]


class OwnSGD(SGD):
    """A program's own optimiser, whose steps are torch's."""


@pytest.mark.parametrize(
    ("name", "way"), [("momentum", "default"), ("adamw", "default"), ("adam", "single"), ("own", "fused")]
)
def test_plain_gradients_count_as_replicated(name: str, way: str) -> None:
    """A program may assign them; what a step makes of them is distributed, and the gradients stay as they are."""

    def stepped(params: list[Any]) -> list[Any]:
        make = OPTIMISERS.get(name, lambda p, **how: OwnSGD(p, lr=0.1, momentum=0.9, **how))
        run = make(params, **WAYS[way])
        for given in range(3):
            loss(params).backward()
            params[given].grad = plain = rows(*SHAPES[given]).cos()
            run.step()
            assert params[given].grad is plain
            run.zero_grad()
        return [*params, *(x for p in params for x in run.state[p].values() if x.dim())]

    with simulated(LINE):
        assert_equal(stepped(parameters(LAYOUTS["rows"])), stepped(parameters()))


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_views_of_parameters_and_states_follow_steps(name: str) -> None:
    with simulated(LINE):
        p = parameters(LAYOUTS["rows"])[0]
        run = OPTIMISERS[name]([p])
        for _ in range(2):
            loss([p]).backward()
            run.step()
            state = next(x for x in run.state[p].values() if x.dim())
            row, of_state = p[1:4], state[0]  # of sharded rows: with memory of their own
            loss([p]).backward()
            run.step()
            assert_equal([row, of_state], [whole(p.detach())[1:4], whole(state)[0]])


def test_a_fused_step_takes_plain_gradients_and_states() -> None:
    plain = [rows(5, 3), rows(5, 3).cos(), rows(5, 3).exp()]
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.0}
    options |= {"nesterov": False, "maximize": False, "is_first_step": False}
    given = [x.clone() for x in plain]
    with simulated(LINE):
        given[0] = distribute(given[0], LAYOUTS["rows"])
        with implicit_replication():
            torch._fused_sgd_(*([x] for x in given), **options)
    torch._fused_sgd_(*([x] for x in plain), **options)

    assert_equal(given[:1], plain[:1])
    torch.testing.assert_close(given[1:], plain[1:])


def test_a_partial_parameter_cannot_be_updated_by_a_fused_step() -> None:
    with simulated(LINE):
        parameter = distribute(rows(5, 3), Layout(LINE, (Partial(),)))
        with pytest.raises(LayoutError, match=r"laid out \[x:P\(sum\)\]: redistribute it"):
            trained([Parameter(parameter)], OPTIMISERS["adam"], {"fused": True})


def _addcmul_(xs: list[Any], ys: list[Any]) -> list[Any]:
    torch._foreach_addcmul_(xs, ys, ys, value=0.5)
    return xs


LISTS: dict[str, Callable[..., Any]] = {
    "add": lambda xs, ys: torch._foreach_add(xs, ys, alpha=2),
    "add a number": lambda xs, ys: torch._foreach_add(xs, 2.0),
    "sub": lambda xs, ys: torch._foreach_sub(xs, ys),
    "mul": lambda xs, ys: torch._foreach_mul(xs, ys),
    "mul numbers": lambda xs, ys: torch._foreach_mul(xs, [1.0, 2.0, 3.0]),
    "mul a scalar tensor": lambda xs, ys: torch._foreach_mul(xs, ys[0].sum()),
    "div": lambda xs, ys: torch._foreach_div(xs, 2.0),
    "neg": lambda xs, ys: torch._foreach_neg(xs),
    "exp": lambda xs, ys: torch._foreach_exp(xs),
    "pow": lambda xs, ys: torch._foreach_pow(2.0, xs),
    "sign": lambda xs, ys: torch._foreach_sign(torch._foreach_mul(xs, 0.0)),
    "maximum": lambda xs, ys: torch._foreach_maximum(xs, ys),
    "clamp": lambda xs, ys: torch._foreach_clamp_max(xs, 0.3),
    "lerp": lambda xs, ys: torch._foreach_lerp(xs, ys, 0.3),
    "addcdiv": lambda xs, ys: torch._foreach_addcdiv(xs, ys, torch._foreach_exp(xs), 2.0),
    "addcmul in place": _addcmul_,
    "norm": lambda xs, ys: torch._foreach_norm(xs),
    "norm as float": lambda xs, ys: torch._foreach_norm(torch._foreach_mul(xs, 1e3), 1, dtype=torch.float64),
    "norm of order 0": lambda xs, ys: torch._foreach_norm(xs, 0),
    "norm of order -inf": lambda xs, ys: torch._foreach_norm(xs, -inf),
    "max": lambda xs, ys: torch._foreach_max(xs),
}
MIXED = [
    [Layout(SQUARE, (a, b)), Layout(SQUARE, (c, d))]
    for a, b, c, d in [
        (Shard(0), Shard(1), Shard(0), Shard(1)),
        (Shard(0), Replicate(), Replicate(), Shard(0)),
        (Partial(), Replicate(), Partial(), Replicate()),
        (Partial(), Shard(0), Replicate(), Shard(0)),
        (Partial("avg"), Partial("avg"), Partial("avg"), Partial("avg")),
        (Partial("max"), Replicate(), Partial("max"), Replicate()),
        (Shard(0), Shard(0), Partial(), Shard(1)),
    ]
]


@pytest.mark.parametrize("name", one_in(4, LISTS))
def test_operators_on_lists_give_the_values_of_one_device(name: str) -> None:
    function = LISTS[name]
    expected = function([rows(*shape) for shape in SHAPES], [rows(*shape).cos() for shape in SHAPES])

    for mine, theirs in MIXED:
        with simulated(SQUARE):
            xs = [distribute(rows(*shape), mine) for shape in SHAPES]
            ys = [distribute(rows(*shape).cos(), theirs) for shape in SHAPES]

            assert_equal(function(xs, ys), expected)


def test_lists_of_scalars_among_tensors() -> None:
    with simulated(LINE):
        xs = [distribute(rows(5, 3), LAYOUTS["rows"])]

        assert_equal(torch._foreach_mul(xs, [torch.tensor(2.0)]), [rows(5, 3) * 2])


def test_a_partial_sum_passes_through_a_list_only_where_that_is_linear() -> None:
    events: list[CommEvent] = []
    partial = Layout(LINE, (Partial(),))
    with simulated(LINE), listen(events.append):
        xs = [distribute(rows(4), partial), distribute(rows(2, 3), partial)]

        assert [x.layout for x in torch._foreach_mul(xs, 3.0)] == [partial, partial]
        assert events == []
        assert_equal(torch._foreach_exp(xs), [rows(4).exp(), rows(2, 3).exp()])


@pytest.mark.parametrize("where", [0, 4])
def test_all_ranks_learn_of_a_gradient_that_is_not_finite(where: int) -> None:
    with simulated(LINE):
        bad = torch.zeros(5, dtype=torch.float32).index_fill(0, torch.tensor(where), inf)
        grads = [distribute(bad, LAYOUTS["rows"]), distribute(torch.ones(5), LAYOUTS["rows"])]
        found = distribute(torch.zeros(()), LAYOUTS["whole"])
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))

        assert [float(t) for t in parts(found).values()] == [1.0] * 3
        assert_equal(grads[1:], [torch.ones(5) / 2])


@pytest.mark.ranks
def test_optimisers_on_real_ranks(ranks: RankPool) -> None:
    assert ranks.run(_largest_error) == [0.0] * 4


def _largest_error() -> float:
    mesh = init_device_mesh("cpu", (4,))
    expected = trained(parameters(), OPTIMISERS["adamw"], {"foreach": True})
    params = [Parameter(distribute_tensor(rows(*shape), mesh, [Shard(0)])) for shape in SHAPES]
    row = params[0][1]
    found = trained(params, OPTIMISERS["adamw"], {"foreach": True})
    pairs = zip([*found, row], [*expected, expected[0][1]], strict=True)
    errors = [(mine.full_tensor() - theirs).abs().max() for mine, theirs in pairs]
    return round(float(max(errors)), 12)
