"""Generated layers of experts: sizes, routings and layouts; and what one device makes of them, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dshard
from dshard import Layout, Mesh, Partial, Placement, Replicate, Shard, StrategyError
from dshard.comm import plain
from dshard.rules.expert_loops import EXPERTS, ExpertLoops
from dshard.testing import distribute, whole

MESHES = (
    Mesh((2,), ("x",)),
    Mesh((4,), ("x",)),
    Mesh((3,), ("x",)),
    Mesh((2, 2), ("x", "y")),
    Mesh((3, 2), ("x", "y")),
)
LARGE = (Mesh((2, 1, 2), ("x", "y", "z")), Mesh((2, 2, 2), ("x", "y", "z")), Mesh((8,), ("x",)))
GATED, PLAIN, BIASED = "e f d, e f d, e d f", "e f d, e d f", "e f d, e f, e d f, e d"


@dataclass(frozen=True)
class ExpertCase:
    """Operands of a layer of experts, their layouts, and its rule."""

    mesh: Mesh
    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]
    rule: str
    routing: str

    def __str__(self) -> str:
        shapes = [tuple(t.shape) for t in self.tensors]
        return f"{self.routing}, {self.rule!r} of {shapes} on ({self.mesh}): {', '.join(map(str, self.layouts))}"


def body_of(rule: str) -> dshard.ExpertBody:
    """The body of experts of a rule."""
    return dshard.mlp_experts(torch.tanh) if rule != BIASED else dshard.ExpertBody(biased)


def biased(rows: Tensor, ends: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """Experts with biases, one by one, those without rows left out."""
    parts, start = [], 0
    for i, end in enumerate(ends.tolist()):
        if end > start:
            hidden = torch.tanh(F.linear(rows[start:end], up[i], up_bias[i]))
            parts.append(F.linear(hidden, down[i], down_bias[i]))
        start = end
    return torch.cat([*parts, rows[start:]])


def one_by_one(rule: str, tensors: tuple[Tensor, ...]) -> Tensor:
    """The layer on one device: every expert of every token, times the weight that the token gives it."""
    x, index, weight, *parameters = tensors
    total = torch.zeros_like(x)
    for i in range(parameters[0].shape[0]):
        if rule == BIASED:
            up, up_bias, down, down_bias = (p[i] for p in parameters)
            out = F.linear(torch.tanh(F.linear(x, up, up_bias)), down, down_bias)
        else:
            *ups, down = (p[i] for p in parameters)
            hidden = torch.tanh(F.linear(x, ups[0]))
            for up in ups[1:]:
                hidden = hidden * F.linear(x, up)
            out = F.linear(hidden, down)
        total = total + out * (weight * (index == i)).sum(-1, keepdim=True)
    return total


def drawn(seed: int, large: bool = False) -> ExpertCase:
    """The case of a seed."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    mesh = rng.choice((*MESHES, *LARGE) if large else MESHES)
    d, f = rng.choice([1, 2, 4]), rng.choice([1, 4, 6])
    total = rng.choice([1, 2, 3, 5, 8, *([16, 33, 64] if large else [])])
    k = rng.randint(1, min(total, 8))
    lead = rng.choice([(0,), (1,), (3,), (13,), (8,), (2, 3), (5, 4)])
    rule = rng.choice([GATED, PLAIN, BIASED])

    def reals(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    sizes = {"e": total, "f": f, "d": d}
    parameters = [reals(*(sizes[name] for name in term.split())) for term in rule.split(",")]
    routing = rng.choice(["uniform", "zipf", "one hot expert", "few experts"])
    index = _routed(routing, (*lead, k), total, generator)
    tensors = (reals(*lead, d), index, reals(*lead, k), *parameters)
    layouts = tuple(_layout(rng, mesh, t) for t in tensors)
    return ExpertCase(mesh, tensors, layouts, rule, routing)


def _routed(routing: str, shape: tuple[int, ...], total: int, generator: torch.Generator) -> Tensor:
    """Experts of each token, different ones."""
    scores = torch.rand((*shape[:-1], total), dtype=torch.float64, generator=generator)
    rank = torch.arange(1.0, total + 1, dtype=torch.float64)
    match routing:
        case "zipf":  # exponential clocks: the first k that ring are drawn by their rates, without repetition
            scores = scores.clamp_min(1e-9).log() * rank
        case "one hot expert":
            scores = scores + (rank == total)
        case "few experts":
            scores = scores + 2.0 * (rank <= shape[-1])
        case _:
            pass
    return scores.topk(shape[-1]).indices


def _layout(rng: Random, mesh: Mesh, x: Tensor) -> Layout:
    """A layout of `x`: dims sharded, in any order of the axes, replicated or, for floats, partial."""
    choices: list[Placement] = [Replicate(), *map(Shard, range(x.dim()))]
    if x.is_floating_point():
        choices.append(Partial())
    layout = Layout(mesh, tuple(rng.choice(choices) for _ in mesh.shape))
    turned = tuple((dim, layout.axes_of(dim)[::-1]) for dim in layout.sharded_dims())
    return rng.choice([layout, Layout(mesh, layout.placements, turned)])


def forced(case: ExpertCase) -> Iterator[ExpertLoops | None]:
    """None for the choice, and the loops of all candidates on one axis, or of some on several."""
    yield None
    every = [*product(EXPERTS.loops, repeat=case.mesh.ndim)]
    yield from Random(str(case)).sample(every, min(10, len(every)))


def far_from_one_device(case: ExpertCase, loops: ExpertLoops | None) -> float | None:
    """The greatest difference of values and gradients from one device, relative; None where loops are impossible."""
    leaves = tuple(t.clone().requires_grad_(t.is_floating_point()) for t in case.tensors)
    expected = one_by_one(case.rule, leaves)
    grad = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).view(expected.shape)
    expected.backward(grad)
    laid = [distribute(t, layout) for t, layout in zip(case.tensors, case.layouts, strict=True)]
    laid = [t.requires_grad_(t.is_floating_point()) for t in laid]
    try:
        out = dshard.experts(body_of(case.rule), *laid, rule=case.rule, loops=loops)
    except StrategyError:
        return None
    assert out.shape == expected.shape
    out.backward(distribute(grad, out.layout.cotangent()))
    pairs = [(out.detach(), expected.detach())]
    for mine, right in zip(laid, leaves, strict=True):
        if mine.requires_grad:
            assert mine.grad is not None, "a parameter without gradient"
            pairs.append((mine.grad, torch.zeros_like(right) if right.grad is None else right.grad))
    return max(_difference(whole(a), b) for a, b in pairs)


def rounded_errors(mesh: Mesh, loops: str) -> list[tuple[float, float]]:
    """Relative errors of a layer in bf16, of this and of one device: its values, and gradients of x, weights, up, down.

    They are those from the same numbers in fp64, so that only what a layer rounds itself counts.
    """
    split = Layout(mesh, (Shard(0),) * mesh.ndim)

    def there_and_back(tensors: list[Any], grad: Any) -> list[Tensor]:
        tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        out = dshard.experts(dshard.mlp_experts(), *tensors, loops=loops)
        out.backward(grad)
        results = [out.detach(), *(t.grad for t in tensors if t.requires_grad)]
        return [whole(each) if isinstance(each, dshard.DTensor) else each for each in results]

    with plain():  # not on each simulated rank
        generator = torch.Generator().manual_seed(0)
        index = torch.rand((96, 16), generator=generator).topk(8).indices
        shapes = (96, 32), (96, 8), (16, 64, 32), (16, 32, 64), (96, 32)
        drawn = (torch.randn(shape, generator=generator) / shape[-1] ** 0.25 for shape in shapes)
        x, weight, up, down, grad = (each.bfloat16() for each in drawn)
        given = [x, index, weight, up, down]
        exact = there_and_back([t.double() if t.is_floating_point() else t for t in given], grad.double())
        alone = there_and_back(given, grad)
    found = there_and_back([distribute(t, split) for t in given], distribute(grad, split))
    assert {each.dtype for each in (*alone, *found)} == {torch.bfloat16}
    with plain():
        return [
            (
                float((mine.double() - right).norm() / right.norm()),
                float((theirs.double() - right).norm() / right.norm()),
            )
            for mine, theirs, right in zip(found, alone, exact, strict=True)
        ]


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0)) if b.numel() else 0.0
