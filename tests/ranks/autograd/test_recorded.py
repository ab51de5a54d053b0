"""Calls that send nothing are recorded by torch on local tensors, and keep what autograd promises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import DeviceMesh, Replicate, Shard, distribute_tensor, use_topology
from dshard.comm import listen
from dshard.testing import RankPool
from dshard.topology import BYTES

WHOLE, SPLIT, FIRST, LAST = (
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Replicate(), Shard(0)],
    [Replicate(), Shard(1)],
)
LAYOUTS = {
    "megatron": [SPLIT, FIRST, WHOLE, LAST],
    "whole": [WHOLE] * 4,
    "mixed": [[Shard(1), Shard(2)], [Shard(1), Shard(0)], FIRST, [Shard(0), Shard(0)]],
}
Program = Callable[..., Any]
"""Of x [4, 8, 16], a [32, 16], n [16] and b [16, 32]: a scalar, or gradients that it asked for itself."""


def mlp(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    return (x + F.linear(F.gelu(F.linear(F.layer_norm(x, (16,), n), a)), b)).pow(2).mean()


def attention(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    h = F.layer_norm(x, (16,), n)
    q, k = (F.linear(h, a).unflatten(-1, (4, 8)).transpose(1, 2) for _ in range(2))
    mixed = ((q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ q).transpose(1, 2).flatten(-2)
    return (x + F.linear(mixed, b)).pow(2).sum()


def hooked(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    """Hooks on a tensor and a view that are used before and after."""
    y = x * 2
    z = y.exp()
    y.register_hook(lambda grad: grad * 3)
    u = (z + y).view(32, 16)
    v = u * u
    u.register_hook(lambda grad: grad * 0.5)
    return v.sum() + y.sum()


def retained(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> list[Tensor]:
    y = x * 2
    z = y * y
    y.retain_grad()
    u = y.view(-1, 16)
    t = u.tanh()
    for tensor in (u, z):
        tensor.retain_grad()
    (z.sum() + t.sum() + u.sum()).backward()
    return [y.grad, u.grad, z.grad]


def asked(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> list[Tensor]:
    y = x * 2
    z = y * y
    u = z.transpose(0, 1)
    return list(torch.autograd.grad((u * y.transpose(0, 1)).sum() + u.sum(), [y, z, u, x]))


def accumulated(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> list[Tensor]:
    y = x * 2
    u = (y * y).view(32, 16)
    (u * 2 + u.detach()).sum().backward(inputs=[y, u, x])
    return [y.grad, u.grad, x.grad]


def heard(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> list[Tensor]:
    y = x * 2
    z, found = y * y, []
    register_multi_grad_hook([y, z], found.extend)
    (z.sum() + y.sum()).backward()
    return found


def twice(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    grads = torch.autograd.grad(F.gelu(F.linear(x * x, a)).sum(), [x, a], create_graph=True)
    return sum((grad * grad).sum() for grad in grads)


def written(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    """Writes to a tensor, by a view and beside one, between its uses."""
    y = x * 2
    z = y * 3
    y.add_(1.0)
    v = (y * y).view(32, 16)
    v.mul_(2.0)
    w = x * 4
    u = w.view(32, 16)
    s = u * 3
    w[0] = 1.0
    return v.tanh().sum() + z.sum() + (u.tanh() + s).sum()


def cut_off(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    y = x * 2
    z = y.detach() * y
    w = x * 3
    t = w * 2
    w.detach_()
    with torch.no_grad():
        c, d = y * 2, y.view(32, 16)
    return (z + w * x + t + y * c).sum() + (d * 2).sum()


class Square(torch.autograd.Function):
    """What torch does not know of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def foreign(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    y = x * 2
    return (Square.apply(y) + y * 3).sum()


def recomputed(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    y = x * 2
    kept = checkpoint(lambda t: F.gelu(F.linear(F.layer_norm(t, (16,), n), a)), y, use_reentrant=False)
    return kept.sum() + checkpoint(lambda t: (t * 2).tanh().view(32, 16).exp(), y, use_reentrant=True).sum()


def exchanged(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    """Functions that exchange their operands, and operands of fewer dims."""
    y = a * 1
    return (2.0 - x * n + n[:1]).sum() + y.__rmatmul__(b * 1).pow(2).sum() + (n * n).__rpow__(n.exp()).sum()


def shared(x: Tensor, a: Tensor, n: Tensor, b: Tensor) -> Tensor:
    """One gradient of several leaves."""
    return (a + b.t()).sum() + (a * 2 + b.t()).sum() + (x + n).sum()


PROGRAMS: list[Program] = [mlp, attention, hooked, retained, asked, accumulated, heard, twice, written, cut_off]
PROGRAMS += [foreign, recomputed, exchanged, shared]


@cache
def mesh() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def values() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in ((4, 8, 16), (32, 16), (16,), (16, 32))]


def placed(layouts: list[Any]) -> list[Any]:
    return [distribute_tensor(v, mesh(), laid).requires_grad_() for v, laid in zip(values(), layouts, strict=True)]


def outcome(program: Program, leaves: list[Any]) -> list[Tensor | None]:
    """What comes out, and the gradients of the leaves, whole."""
    out = program(*leaves)
    if isinstance(out, Tensor):
        out.backward()
        out = [out.detach()]
    found = [*out, *(leaf.grad for leaf in leaves)]
    return [t.full_tensor() if isinstance(t, dshard.DTensor) else t for t in found]


def share_memory(x: Any, y: Any) -> bool:
    """Whether two gradients have elements in the same memory: reduced together they lie in one buffer."""
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for t in (x.to_local(), y.to_local())]
    return max(start for start, _ in spans) < min(end for _, end in spans)


def wrong(thorough: bool) -> list[str]:
    """Which programs come to something else than on one device, when they are met first or again."""
    found = []
    pairs = product(enumerate(PROGRAMS), enumerate(LAYOUTS.items()))
    for program, (name, layouts) in [(p, at) for (i, p), (j, at) in pairs if thorough or (i - j) % len(LAYOUTS) == 0]:
        expected = outcome(program, [v.clone().requires_grad_() for v in values()])
        for turn in range(2):
            leaves = placed(layouts)
            for i, (mine, right) in enumerate(zip(outcome(program, leaves), expected, strict=True)):
                alike = mine is right if mine is None or right is None else torch.allclose(mine, right, atol=1e-9)
                found += [] if alike else [f"{program.__name__} {name} {turn}: {i}"]
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
            apart = not any(share_memory(x, y) for x, y in combinations(grads, 2))
            found += [] if apart else [f"{program.__name__} {name} {turn}: gradients share memory"]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_recorded_calls_are_those_of_one_device(ranks: RankPool, thorough: bool) -> None:
    """Hooks, retained and asked gradients, second derivatives, writes and views, and what autograd does not see."""
    assert ranks.run(wrong, thorough) == [[]] * 4


def sent() -> list[list[tuple[str, str, int]]]:
    """What a step sends at first, again, and while it is traced."""
    found: list[list[tuple[str, str, int]]] = []
    dshard.clear_caches()
    for watch in (nullcontext, nullcontext, dshard.trace):
        heard: list[Any] = []
        for program in (mlp, attention):
            leaves = placed(LAYOUTS["megatron"])
            leaves[0] = leaves[0].detach()  # of which a partial gradient would be reduced after a norm, or never
            with use_topology(BYTES), watch(), listen(heard.append):
                outcome(program, leaves)
        found.append([(event.collective, event.axis, event.nbytes) for event in heard])
    return found


@pytest.mark.ranks
def test_what_is_sent_does_not_depend_on_what_was_met_before_or_on_who_watches(ranks: RankPool) -> None:
    """Else ranks that differ in that would wait for each other."""
    for first, again, traced in ranks.run(sent):
        assert len(first) > 0
        assert first == again == traced
