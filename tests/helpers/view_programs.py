"""Generated programs that write through chains of views, before and after their base and other views are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor

Function: TypeAlias = Callable[..., Any]
Shape: TypeAlias = tuple[int, ...]
SHAPES: tuple[Shape, ...] = ((6, 4), (5, 3), (4, 2, 3), (8,), (3, 1, 5), (2, 6), (1, 7), (4, 4))


@dataclass(frozen=True)
class Step:
    """One line, of a `kind`: it makes a view, writes to a value, or adds to the differentiated total."""

    kind: str
    text: str
    make: Callable[[list[Any], Any], Any]
    recorded: bool = True


@dataclass(frozen=True)
class Program:
    """Steps on a base that is a leaf of this shape, or computed from one."""

    shape: Shape
    steps: tuple[Step, ...]
    leaf: bool

    def __str__(self) -> str:
        lines = [f"{step.text}{'' if step.recorded else '  # no_grad'}" for step in self.steps]
        return "; ".join([f"x {self.shape}, h = {'x' if self.leaf else 'x * 1'}", *lines])

    def run(self, x: Any, y: Any) -> list[Any]:
        """Run the steps; return the differentiated total and the values at the end."""
        values: list[Any] = [x if self.leaf else x * 1]
        total = x.sum() * 0
        for step in self.steps:
            with nullcontext() if step.recorded else torch.no_grad():
                out = step.make(values, y)
            if step.kind == "view":
                values.append(out)
            elif step.kind == "use":
                total = total + out
        for i, value in enumerate(values):
            total = total + (value * (value.detach() + i)).sum()
        return [total, *values]


def program(draw: Random) -> Program:
    """Draw a program, which one device may refuse."""
    shape = draw.choice(SHAPES)
    leaf = draw.random() < 0.15
    shapes, steps = [shape], []
    for _ in range(draw.randrange(2, 7)):
        kind = draw.choice(("view", "view", "view", "write", "write", "use"))
        at = draw.randrange(max(0, len(shapes) - 3), len(shapes)) if draw.random() < 0.7 else 0
        recorded = draw.random() < 0.85 and not (leaf and kind == "write")
        if kind == "view":
            text, make, new = draw_view(shapes[at], draw)
            steps.append(Step(kind, f"v{len(shapes)} = v{at}{text}", partial(_view, at, make), recorded))
            shapes.append(new)
        elif kind == "write":
            text, make = draw.choice(WRITES)
            steps.append(Step(kind, f"v{at}{text}", partial(_write, at, make), recorded))
        else:
            text, make = draw.choice(USES)
            steps.append(Step(kind, f"use v{at}{text}", partial(_view, at, make)))
    at = draw.randrange(len(shapes))
    text, make = draw.choice(WRITES)
    steps.append(Step("write", f"v{at}{text}", partial(_write, at, make), not leaf))
    return Program(shape, tuple(steps), leaf)


def _view(at: int, make: Function, values: list[Any], y: Any) -> Any:
    return make(values[at])


def _write(at: int, make: Function, values: list[Any], y: Any) -> Any:
    return make(values[at], y)


WRITES: tuple[tuple[str, Function], ...] = (
    (".mul_(2)", lambda v, y: v.mul_(2)),
    (".add_(1)", lambda v, y: v.add_(1)),
    (".relu_()", lambda v, y: v.relu_()),
    (".zero_()", lambda v, y: v.zero_()),
    (".fill_(3)", lambda v, y: v.fill_(3)),
    ("[...] = 2", lambda v, y: v.__setitem__(Ellipsis, 2.0)),
    ("[..., 0] = 5", lambda v, y: v.__setitem__((Ellipsis, 0), 5.0) if v.dim() and v.shape[-1] else None),
    ("[0] = 5", lambda v, y: v.__setitem__(0, 5.0) if v.dim() and v.shape[0] else None),
    ("[1:] *= 3", lambda v, y: v[1:].mul_(3) if v.dim() else None),
    (".add_(y)", lambda v, y: v.add_(y.sum())),
    (".mul_(y)", lambda v, y: v.mul_(y[0])),
    (".copy_(y)", lambda v, y: v.copy_(y[1].expand(v.shape))),
    (".clamp_(-1, 1)", lambda v, y: v.clamp_(-0.5, 0.5)),
    (".addcmul_(y, y)", lambda v, y: v.addcmul_(y[0], y[1])),
)
USES: tuple[tuple[str, Function], ...] = (
    (".sum()", lambda v: v.sum()),
    (" * 2", lambda v: (v * 2).sum()),
    (" + 1", lambda v: ((v + 1).reshape(-1)[::2] * 0.5).sum()),
    (".mean(0)", lambda v: v.mean(0).sum() if v.numel() else v.sum()),
    (".clone().sin()", lambda v: v.clone().sin().sum()),
)


def draw_view(shape: Shape, draw: Random) -> tuple[str, Function, Shape]:
    """Draw a view of a tensor of `shape`: its text, its function, and the view's shape."""
    while True:
        text, make = draw.choice(VIEWS)(shape, draw)
        if make is None:
            continue
        try:
            view = make(torch.empty(shape, device="meta"))
        except (RuntimeError, IndexError, ValueError):
            continue
        return text, make, tuple(view.shape)


Drawn: TypeAlias = tuple[str, Function | None]


def _dim(shape: Shape, draw: Random) -> int:
    return draw.randrange(-len(shape), len(shape)) if shape else 0


def _transposed(shape: Shape, draw: Random) -> Drawn:
    a, b = _dim(shape, draw), _dim(shape, draw)
    return f".transpose({a}, {b})", lambda v: v.transpose(a, b)


def _named(shape: Shape, draw: Random) -> Drawn:
    if len(shape) == 2 and draw.random() < 0.6:
        return draw.choice([(".t()", lambda v: v.t()), (".mT", lambda v: v.mT), (".T", lambda v: v.T)])
    a, b = _dim(shape, draw), _dim(shape, draw)
    return draw.choice(
        [
            (f".swapaxes({a}, {b})", lambda v: v.swapaxes(a, b)),
            (f".movedim({a}, {b})", lambda v: v.movedim(a, b)),
        ]
    )


def _permuted(shape: Shape, draw: Random) -> Drawn:
    dims = list(range(len(shape)))
    draw.shuffle(dims)
    return f".permute({dims})", lambda v: v.permute(dims)


def _sliced(shape: Shape, draw: Random) -> Drawn:
    if not shape:
        return "", None
    dim = _dim(shape, draw)
    start, step = draw.randrange(0, shape[dim] + 1), draw.choice((1, 1, 2))
    end = draw.randrange(start, shape[dim] + 2)
    index = (slice(None),) * (dim % len(shape)) + (slice(start, end, step),)
    return f"[{':, ' * (dim % len(shape))}{start}:{end}:{step}]", lambda v: v[index]


def _narrowed(shape: Shape, draw: Random) -> Drawn:
    if not shape:
        return "", None
    dim = _dim(shape, draw)
    start = draw.choice((0, 0, 1))
    n = shape[dim] - start - draw.choice((0, 0, 1))
    return f".narrow({dim}, {start}, {n})", lambda v: v.narrow(dim, start, n)


def _selected(shape: Shape, draw: Random) -> Drawn:
    if not shape or not all(shape):
        return "", None
    dim = _dim(shape, draw)
    i = draw.randrange(-shape[dim], shape[dim])
    return f".select({dim}, {i})", lambda v: v.select(dim, i)


def _viewed(shape: Shape, draw: Random) -> Drawn:
    n = prod(shape)
    options = [(n,), (1, n), (n, 1), *((i, n // i) for i in (2, 3, 4) if n % i == 0), shape, (*shape, 1)]
    options += [(2, n // 4, 2)] if n % 4 == 0 else []
    new = draw.choice(options)
    return f".view({new})", lambda v: v.view(new)


def _flattened(shape: Shape, draw: Random) -> Drawn:
    return draw.choice(
        [
            (".flatten()", lambda v: v.view(-1)),
            (".unsqueeze(0)", lambda v: v.unsqueeze(0)),
            (".unsqueeze(-1)", lambda v: v.unsqueeze(-1)),
            (".squeeze()", lambda v: v.squeeze()),
        ]
    )


def _pieces(shape: Shape, draw: Random) -> Drawn:
    dim = _dim(shape, draw)
    if not shape or not shape[dim]:
        return "", None
    return draw.choice(
        [
            (f".unbind({dim})[-1]", lambda v: v.unbind(dim)[-1]),
            (f".chunk(2, {dim})[0]", lambda v: v.chunk(2, dim)[0]),
            (f".split(2, {dim})[-1]", lambda v: v.split(2, dim)[-1]),
            (f".tensor_split(2, {dim})[-1]", lambda v: v.tensor_split(2, dim)[-1]),
        ]
    )


def _strided(shape: Shape, draw: Random) -> Drawn:
    options: list[Drawn] = [(".expand(2, ...)", lambda v: v.expand(2, *v.shape))]
    if len(shape) > 1 and all(shape):
        offset = draw.choice((0, 1, -1))
        options.append((f".diagonal({offset})", lambda v: v.diagonal(offset)))
    if shape and min(shape) > 1:
        dim = _dim(shape, draw)
        options.append((f".unfold({dim}, 2, 1)", lambda v: v.unfold(dim, 2, 1)))
        options.append((f".unfold({dim}, 2, 2)", lambda v: v.unfold(dim, 2, 2)))
        options.append((".as_strided((2, 2), (1, 2), 1)", lambda v: v.as_strided((2, 2), (1, 2), 1)))
        options.append((".as_strided((2,), (1,))", lambda v: v.as_strided((2,), (1,))))
    return draw.choice(options)


VIEWS = (
    _transposed,
    _transposed,
    _named,
    _permuted,
    _sliced,
    _sliced,
    _narrowed,
    _selected,
    _viewed,
    _viewed,
    _flattened,
    _pieces,
    _strided,
)


def _plain(*texts: str, shape: Shape = (6, 4), leaf: bool = False) -> Program:
    """Return the program of these writes to the base `h`."""
    writes = [Step("write", f"h{text}", partial(_run, text), not leaf) for text in texts]
    return Program(shape, tuple(writes), leaf)


def _run(text: str, values: list[Any], y: Any) -> None:
    exec(f"h{text}", {"h": values[0], "y": y})  # the line as it reads


PLAIN: tuple[Program, ...] = tuple(
    _plain(text)
    for text in (
        ".t().mul_(2)",
        ".mT.mul_(2)",
        ".transpose(0, 1).relu_()",
        ".T[0] = 5",
        ".t()[2].zero_()",
        ".permute(1, 0).mul_(3)",
        ".swapaxes(0, 1).mul_(3)",
        ".t()[1:].mul_(2)",
        ".diagonal().mul_(y[0])",
        ".unfold(0, 2, 2).mul_(2)",
        ".as_strided((2, 4), (4, 1), 4).mul_(2)",
        ".select(1, 2).mul_(2)",
        ".t().as_strided((2,), (1,), 3).mul_(y[1])",
        "[2:].as_strided((2,), (3,)).mul_(2)",
        ".expand(2, 6, 4).add_(1)",
        ".unbind(0)[1].mul_(2)",
    )
)
"""Writes that a reader can tell what they do."""


def outcome(drawn: Program, x: Any, y: Any, full: Function) -> list[Tensor | None] | str:
    """Run a program; return its values and the gradients of x and y, or the error as text."""
    try:
        total, *values = drawn.run(x, y)
        total.backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return [full(v) for v in (total, *values, x.grad, y.grad)]


def leaves_of(drawn: Program) -> tuple[Tensor, Tensor]:
    """Return the leaves x and y of a program."""
    x = torch.arange(1.0, prod(drawn.shape) + 1, dtype=torch.float64).cos().view(drawn.shape).clone()
    return x, torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64)


def differs(mine: list[Tensor | None] | str, right: list[Tensor | None] | str, names: Sequence[str] = ()) -> str:
    """Describe how two outcomes differ; "" if they do not."""
    if isinstance(mine, str) or isinstance(right, str):
        both = isinstance(mine, str) and isinstance(right, str)
        return "" if both else f"raised {mine}" if isinstance(mine, str) else f"one device raised {right}"
    for i, (a, b) in enumerate(zip(mine, right, strict=True)):
        if (a is None) != (b is None):
            return f"output {i} of {len(right)}: {a} is not {b}"
        if a is not None and b is not None and (a.shape != b.shape or not torch.allclose(a, b, atol=1e-9)):
            return f"output {i} of {len(right)}: {a.tolist()} is not {b.tolist()}"
    return ""
