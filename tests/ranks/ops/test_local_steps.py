"""Steps of optimisers on local tensors: to the bit those on distributed tensors, asked once for each parameter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.default_cases import one_way_each
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.testing import assert_close

from dshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, trace
from dshard.ops import optimiser_steps
from dshard.testing import RankPool

OPTIMISERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": partial(Adam, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.1),
    "adagrad": partial(Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "rmsprop": partial(RMSprop, lr=0.1, momentum=0.5, centered=True),
    "adadelta": partial(Adadelta, lr=0.1),
    "adamax": partial(Adamax, lr=0.1),
    "asgd": partial(ASGD, lr=0.1),
    "nadam": partial(NAdam, lr=0.1),
    "radam": partial(RAdam, lr=0.1),
    "rprop": partial(Rprop, lr=0.1),
}
FUSED = ("sgd", "momentum", "adam", "adamw", "adagrad")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "maximised": {"maximize": True},
    "a tensor as rate": {"foreach": False, "lr": torch.tensor(0.05)},
}
SHAPES = [(5, 3), (1, 4), (), (7,), (0, 2), (2,), (6, 1)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@contextmanager
def on_distributed_tensors() -> Iterator[None]:
    """Within the block, no step is taken on local tensors."""
    with patch.object(optimiser_steps, "_local_step", lambda *args: None):
        yield


@contextmanager
def counting(steps: list[object]) -> Iterator[None]:
    """Within the block, add each step that is taken on local tensors, or None for another."""
    take = optimiser_steps._local_step

    def counted(*args: Any) -> object:
        steps.append(take(*args))
        return steps[-1]

    with patch.object(optimiser_steps, "_local_step", counted):
        yield


def parameters() -> list[Any]:
    """Parameters sharded unevenly, replicated, without elements, on two meshes, in three dtypes."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts: list[Any] = [(line, [Shard(0)]), (line, [Replicate()]), (square, [Replicate(), Shard(0)])]
    rng, params = torch.Generator().manual_seed(0), []
    for i, (shape, dtype) in enumerate(zip(SHAPES, cycle(DTYPES), strict=False)):
        mesh, placements = layouts[i % 3] if shape else layouts[1]
        params.append(Parameter(distribute_tensor(torch.randn(shape, generator=rng).to(dtype), mesh, placements)))
    return params


def set_gradients(params: list[Any], step: int, all_at_once: bool) -> None:
    rng = torch.Generator().manual_seed(step)
    placements: Any
    for i, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=rng).to(p.dtype)
        mesh, placements = p.device_mesh, p.placements
        if i == 3 and step == 1:  # laid out as it came
            placements = [Replicate()] * mesh.ndim
        has_none = i == 4 and step != 2 and not all_at_once
        p.grad = None if has_none else distribute_tensor(gradient, mesh, placements)


def steps_of(name: str, way: str, n: int = 4) -> tuple[list[Any], Optimizer]:
    params = parameters()
    optimiser = OPTIMISERS[name]([{"params": params[:4]}, {"params": params[4:], "lr": 0.02}], **WAYS[way])
    for step in range(n):
        set_gradients(params, step, (name, way) == ("momentum", "fused"))  # else torch refuses
        optimiser.step()
    return params, optimiser


def described(x: object) -> object:
    """A state by its bits, class and layout."""
    if not isinstance(x, Tensor):
        return type(x), x
    local = x._local_tensor if isinstance(x, DTensor) else x
    return type(x), getattr(x, "placements", None), x.dtype, x.shape, x.stride(), local.tolist(), local.requires_grad


def compare(name: str, way: str) -> None:
    params, optimiser = steps_of(name, way)
    with on_distributed_tensors():
        expected, reference = steps_of(name, way)
    for p, q in zip(params, expected, strict=True):
        assert described(p.detach()) == described(q.detach()), (name, way)
        states = [
            {key: described(x) for key, x in each.state[of].items()} for each, of in ((optimiser, p), (reference, q))
        ]
        assert list(states[0].items()) == list(states[1].items()), (name, way)
        assert p._local_tensor.grad is None
    assert len(optimiser.state) == len(reference.state)
    assert deepcopy(optimiser.state_dict()).keys() == reference.state_dict().keys()


@pytest.mark.parametrize(("name", "way"), one_way_each(OPTIMISERS, list(WAYS), every=4))
def test_steps_equal_those_on_distributed_tensors(name: str, way: str, ranks: RankPool) -> None:
    ranks.run(compare, name, "default" if way == "fused" and name not in FUSED else way)


def network(optimiser: Callable[..., Optimizer], n: int = 39) -> tuple[list[Any], Optimizer]:
    """Parameters with gradients, and their optimiser after its first step."""
    mesh = init_device_mesh("cpu", (4,))
    params = [Parameter(distribute_tensor(torch.ones(4, 2) * i, mesh, [Shard(0)])) for i in range(n)]
    for p in params:
        p.grad = p.detach().cos()
    made = optimiser(params)
    made.step()
    return params, made


def frames_of(call: Callable[[], object]) -> int:
    """The functions of Python that a call runs."""
    frames: list[str] = []
    sys.setprofile(lambda frame, event, arg: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(frames)


def frames_of_steps(name: str, way: str) -> None:
    """Beside torch's own code: the hash of a parameter and of its local tensor, which the states are keyed by."""
    make = partial(OPTIMISERS[name], **WAYS[way])
    params, optimiser = network(make)
    plain = [Parameter(torch.ones(4, 2)) for _ in params]
    for p in plain:
        p.grad = p.detach().cos()
    reference = make(plain)
    reference.step()

    assert frames_of(optimiser.step) <= frames_of(reference.step) + 2 * len(params) + 60


def hooks_and_closures() -> None:
    """Both may exchange gradients."""
    params, optimiser = network(OPTIMISERS["sgd"], 2)
    before = [p.full_tensor().clone() for p in params]

    def halve(optimiser: Optimizer, args: object, kwargs: object) -> None:
        for p in params:
            p.grad = p.grad * 0.5

    def closure() -> float:
        for p in params:
            p.grad = torch.ones_like(p)
        return 3.0

    optimiser.register_step_pre_hook(halve)
    for p in params:
        p.grad = torch.ones_like(p)
    steps: list[object] = []
    with counting(steps), torch.no_grad():
        optimiser.step()
        assert optimiser.step(closure) == 3.0

    assert None not in steps
    for p, x in zip(params, before, strict=True):
        torch.testing.assert_close(p.full_tensor(), x - 0.1 * 0.5 - 0.1)


def failing() -> None:
    params, optimiser = network(OPTIMISERS["adamw"], 2)
    optimiser.param_groups[0]["betas"] = ("none", 0.9)
    with pytest.raises(TypeError):
        optimiser.step()

    assert [p._local_tensor.grad for p in params] == [None, None]
    assert list(optimiser.state) == params[:2]


def counted_writes() -> None:
    for name in ("sgd", "adamw", "rmsprop"):
        params, optimiser = network(OPTIMISERS[name], 2)
        loss: Any = (params[0] * params[0]).sum()
        steps: list[object] = []
        with counting(steps):
            optimiser.step()
        assert None not in steps
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def late_momentum() -> None:
    """Torch's fused operator takes no such list, so by default each parameter is updated for itself."""
    params, optimiser = network(partial(SGD, lr=0.1, momentum=0.9), 1)
    late: Any = Parameter(torch.ones_like(params[0]).detach())
    optimiser.add_param_group({"params": [late]})
    late.grad = late.detach()
    optimiser.step()

    torch.testing.assert_close(late.full_tensor(), torch.full((4, 2), 0.9))


def watched() -> None:
    params, optimiser = network(OPTIMISERS["adamw"], 2)
    steps: list[object] = []
    with counting(steps):
        with trace():
            optimiser.step()
        params[0].grad = distribute_tensor(torch.ones(4, 2), params[0].device_mesh, [Replicate()])
        optimiser.step()

    assert steps == [None]


def scaled(name: str) -> None:
    values = []
    for here in (True, False):
        params, optimiser = network(partial(OPTIMISERS[name], fused=True), 3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for scale in (1.0, float("inf"), 2.0):
            optimiser.zero_grad()
            loss: Any = sum((p * p).sum() for p in params) * scale
            scaler.scale(loss).backward()
            scaler.unscale_(optimiser)
            clip_grad_norm_(params, 1.0)
            if here:
                scaler.step(optimiser)
            else:
                with on_distributed_tensors():
                    scaler.step(optimiser)
            scaler.update()
        values.append([p.full_tensor().tolist() for p in params])

    assert values[0] == values[1]


@pytest.mark.parametrize("name", ["momentum", "adamw", "rmsprop", "nadam"])
@pytest.mark.parametrize("way", ["default", "foreach"])
def test_a_step_asks_a_parameter_once(name: str, way: str, ranks: RankPool) -> None:
    ranks.run(frames_of_steps, name, way)


def test_a_step_runs_after_hooks_and_closures(ranks: RankPool) -> None:
    ranks.run(hooks_and_closures)


def test_a_step_that_fails_leaves_nothing_behind(ranks: RankPool) -> None:
    ranks.run(failing)


def half_precision(name: str, dtype: torch.dtype) -> None:
    values, gradient = torch.linspace(-1, 1, 300).to(dtype), torch.linspace(1, 2, 300).to(dtype)
    plain = Parameter(values.clone())
    sharded: Any = Parameter(distribute_tensor(values, init_device_mesh("cpu", (4,)), [Shard(0)]))
    for p in (plain, sharded):
        optimiser = OPTIMISERS[name]([p])
        for _ in range(2):
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if p is sharded else gradient.clone()
            optimiser.step()
    assert_close(sharded.full_tensor(), plain.detach(), rtol=0.02, atol=0.01)


def test_a_step_counts_as_a_write(ranks: RankPool) -> None:
    ranks.run(counted_writes)


def test_a_parameter_whose_momentum_begins_later(ranks: RankPool) -> None:
    ranks.run(late_momentum)


def test_steps_that_are_watched_are_of_distributed_tensors(ranks: RankPool) -> None:
    ranks.run(watched)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_gradient_scaler_steps_alike(name: str, ranks: RankPool) -> None:
    ranks.run(scaled, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_steps_as_on_one_device(dtype: torch.dtype, ranks: RankPool) -> None:
    ranks.run(half_precision, "momentum", dtype)
