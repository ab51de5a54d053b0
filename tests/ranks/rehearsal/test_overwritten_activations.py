"""Activations that a forward pass overwrites, as residual sums and ReLUs in place do: rehearsed as any other call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dshard
from dshard.testing import RankPool

Overwrite = Callable[[Tensor, Tensor], Tensor]


def add(x: Tensor, y: Tensor | float) -> Tensor:
    x += y
    return x


OVERWRITES: dict[str, Overwrite] = {
    "residual sum": add,
    "ReLU": lambda h, x: F.relu(h, inplace=True),
    "module": lambda h, x: nn.Hardswish(inplace=True)(h),
    "twice": lambda h, x: F.silu(add(add(h, x), 1.0), inplace=True),
    "itself": lambda h, x: add(h, h),
    "dropout": lambda h, x: F.dropout(h, inplace=True),
    "mask": lambda h, x: h.masked_fill_(x > 0, 0.5),
    "result not taken": lambda h, x: (h.add_(x), h * 2)[1],
    "held before": lambda h, x: (h, add(h, x))[0],
}


class Net(nn.Module):
    """Two layers, after each of which the activation is overwritten."""

    def __init__(self, overwrite: Overwrite) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
        self.overwrite = overwrite

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.overwrite(layer(x), x))
        return x


def trained(name: str, strategy: str, rehearse: bool) -> tuple[list[float], list[Tensor], str]:
    """The losses of four steps, the gradients, and the code of the record."""
    torch.manual_seed(0)
    net: Any = Net(OVERWRITES[name])
    x = torch.randn(7, 6, dtype=torch.float64)
    if strategy:
        dshard.parallelize(net, dshard.init_device_mesh("cpu", (4,)), strategy, x)
    dshard.manual_seed(1)
    with dshard.rehearsing(rehearse):
        losses = []
        for step in range(4):
            loss = (net(x * (step + 1)) ** 2).sum()
            loss.backward()
            losses.append(float(loss.detach()))
    grads = [p.grad.full_tensor() if strategy else p.grad for p in net.parameters()]
    return losses, grads, net.rehearsed.code if rehearse else ""


def differences() -> list[object]:
    """The writes whose rehearsed steps are not those of one device, or whose record is not whole."""
    found = list[object]()
    for name in OVERWRITES:
        for strategy in ("data", "megatron")[: 2 if name == "residual sum" else 1]:
            losses, grads, code = trained(name, strategy, True)
            if code.count("_tanh(args") < 2:
                found.append((name, strategy, "not recorded", code))
            for other in ("",) if name != "dropout" else (strategy,):
                of_other, grads_of_other, _ = trained(name, other, False)
                same = [torch.allclose(a, b, rtol=1e-12) for a, b in zip(grads, grads_of_other, strict=True)]
                if losses != pytest.approx(of_other, rel=1e-12) or not all(same):
                    found.append((name, strategy, other, losses, of_other))
    return found


def test_an_overwritten_activation_is_that_of_one_device(ranks: RankPool) -> None:
    assert ranks.run(differences) == [[]] * 4


class Ending(nn.Module):
    """A layer whose result autograd saves, overwritten within or not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.layer, self.relu = nn.Linear(6, 6), nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.layer(x))  # type: ignore[no-any-return]


def errors(inplace: bool, since: int) -> list[str]:
    """The errors of six backward passes before which, from one on, the program overwrites what the model has given."""
    net, x = Ending(inplace), torch.randn(8, 6)
    dshard.parallelize(net, dshard.init_device_mesh("cpu", (4,)), "data", x)
    found = []
    for step in range(6):
        out = net(x)
        if step >= since:
            out.add_(1.0)
        try:
            out.sum().backward()
        except RuntimeError as error:
            found.append(str(error)[:62])
    return found


@pytest.mark.parametrize("inplace", [True, False])
def test_a_write_behind_the_model_is_noticed(inplace: bool, ranks: RankPool) -> None:
    for since in (0, 2, 4):  # by Python, when its backward pass is derived, and when it has a program
        told = ranks.run(errors, inplace, since)[0]
        assert told == ["one of the variables needed for gradient computation has been m"[:62]] * (6 - since)


def hooked() -> list[float]:
    """What a hook of a result that the model has overwritten is called with, in six steps."""
    net, x, seen = Ending(True), torch.randn(8, 6), list[float]()
    dshard.parallelize(net, dshard.init_device_mesh("cpu", (4,)), "data", x)
    for _ in range(6):
        out = net(x)
        out.register_hook(lambda grad: seen.append(float(grad.sum())))
        out.sum().backward()
    return seen


def test_a_hook_of_an_overwritten_activation_is_called_once(ranks: RankPool) -> None:
    assert ranks.run(hooked) == [[48.0] * 6] * 4
