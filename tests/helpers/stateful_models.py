"""Models that keep state of their calls, each in another place; and models in which a module stands at two places."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TABLES: dict[int, Tensor] = {}
CALLS = 0


class Layer(nn.Module):
    """A linear layer; subclasses say what its forward pass keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Counter(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


class TableAttribute(Layer):
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.cos(torch.arange(len(x), dtype=x.dtype, device=x.device))[:, None]
        return self.linear(x) * self.table[: len(x)]


class TableBuffer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    forward = TableAttribute.forward


class LateBuffer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(8, device=x.device) * 2)
        return self.linear(x) * self.mask


class Losses(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.losses.append(y.square().mean())
        return y


class Queue(Layer):
    queue: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        before = y.detach() if self.queue is None else self.queue
        self.queue = y.detach()
        return y - before.mean(0)


class FirstCall(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(8)), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (y.std(0) + 1e-3))
            self.ready = True
        return y * self.scale


class FirstCallBuffer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Buffer(torch.zeros(8))
        self.ready = nn.Buffer(torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.ready == 0:
            self.shift.copy_(y.detach().mean(0))
            self.ready.fill_(1)
        return y - self.shift


class TablesInADict(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        if n not in self.tables:
            self.tables[n] = torch.tril(torch.ones(n, n, device=x.device))
        return self.tables[n] @ self.linear(x)


class Slots:
    __slots__ = ("calls", "last")

    def __init__(self) -> None:
        self.calls = 0


class Containers(Layer):
    """State in containers of all kinds, one in another, an object with slots, an iterator, an array and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.nested: dict[str, Any] = {
            "seen": {1},
            "kept": ([], deque([0, 1], maxlen=2)),
            "last": OrderedDict(a=1, b=2),
        }
        self.slots, self.numbers, self.array = Slots(), itertools.count(), np.zeros(2)
        self.steps = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shapes, window = self.nested["kept"]
        shapes.append(x.shape)
        window.append(len(shapes))
        self.nested["seen"].add(len(shapes) + 1)
        self.nested["last"].move_to_end("a")
        self.slots.calls += 1
        self.slots.last = x
        self.array[0] += next(self.numbers)
        self.steps += 1
        self.__dict__.setdefault("calls", []).append(self.slots.calls)
        return self.linear(x) * (self.slots.calls + float(self.array[0]) + self.steps)


class Generators(Layer):
    """Draws from generators of its own and of the program; the sums are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch, self.of_python = torch.Generator().manual_seed(1), random.Random(1)
        self.of_numpy, self.older = np.random.default_rng(1), np.random.RandomState(1)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        own = self.of_python.random() + self.of_numpy.random() + self.older.rand()
        shared = random.random() + np.random.rand() + torch.rand(()).item()
        self.drawn.append(own + shared + torch.rand((), generator=self.of_torch).item())
        return self.linear(x) * self.drawn[-1]


class OfTheClass(Layer):
    """State of the class, of the program, in a default argument, in attributes of a function and in a cache."""

    calls = 0
    tables: dict[int, Tensor] = {}  # noqa: RUF012 (which all of the class share)

    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 (which stays from call to call)
        global CALLS
        CALLS += 1
        type(self).calls += 1
        type(self).last = len(x)
        seen.append(self.calls)
        counted.calls = getattr(counted, "calls", 0) + 1
        if len(x) not in self.tables:
            self.tables[len(x)] = TABLES[len(x)] = torch.full((8,), 2.0, device=x.device)
        return self.linear(x) * self.tables[len(x)] * counted.calls * len(seen) * CALLS + scale(x.device, len(x))


def counted() -> None:
    """A function whose attribute counts."""


@lru_cache
def scale(device: torch.device, n: int) -> Tensor:
    """A table that is made once."""
    return torch.arange(8.0, device=device) / n


def closures() -> nn.Module:
    """A model with hooks that write to variables of a closure, to an object's attribute, and to a partial's list."""
    model, calls, largest, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), 0, None, []
    watcher = Counter()

    def count(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        nonlocal calls, largest
        calls, largest = calls + 1, out if largest is None else torch.maximum(out, largest)
        return out * calls

    model[0].register_forward_hook(count)
    model[1].register_forward_hook(partial(_note, seen))
    model[2].register_forward_hook(lambda module, args, out: out + watcher(args[0]))
    return model


def _note(seen: list[Any], module: nn.Module, args: Any, out: Tensor) -> None:
    seen.append(out)


class References(Layer):
    """Parameters of its own and of a teacher that is not registered, in attributes, a tuple and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.pair = [nn.Linear(8, 8)], (self.linear.weight, self.linear.bias)
        self.by_parameter = {self.linear.weight: 2.0}
        self.linear.weight.group = 3.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.pair
        known = self.by_parameter[weight] + weight.group  # type: ignore[attr-defined]
        with torch.no_grad():
            self.teacher[0].weight.mul_(0.5)
        return nn.functional.linear(x, weight, bias) * known + self.teacher[0](x).detach()


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x)).relu()


class Rotation(nn.Module):
    """A shared module that has buffers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Buffer(torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos()


def blocks_with(shared: nn.Module) -> nn.Module:
    """A model of blocks that all have the module `shared`."""
    return nn.Sequential(*(Block(shared) for _ in range(3)), nn.Linear(8, 8))


def at_two_places() -> nn.Module:
    """A model in which one layer stands at two places, and a list has another three times."""
    layer, other = nn.Linear(8, 8), nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.BatchNorm1d(8), nn.Sequential(*[other] * 3))


KEEPING: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        *(Counter, TableAttribute, TableBuffer, LateBuffer, Losses, Queue, FirstCall, FirstCallBuffer, TablesInADict),
        *(Containers, Generators, OfTheClass, References),
    )
} | {"closures": closures}
"""Models that keep state of a call, of inputs of 8 features."""

SHARED: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: blocks_with(nn.Linear(8, 8)),
    "activation": lambda: blocks_with(nn.PReLU()),
    "rotation": lambda: blocks_with(Rotation()),
    "norm": lambda: blocks_with(nn.BatchNorm1d(8)),
    "places": at_two_places,
}
"""Models in which one module stands at several places, of inputs of 8 features."""
