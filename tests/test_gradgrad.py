"""Gradients of gradients equal those of one device, however the operands and the gradients that come in lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from operator_samples import SAMPLES
from torch import Tensor
from torch._ops import OpOverload

import dshard
from dshard import DTensor, Mesh
from dshard.comm import bind, plain
from dshard.ops.moving import leaves, replace_leaves
from dshard.testing import RankPool, distribute, simulated, whole
from dshard.testing.choices import has_gradient, layouts_of

THOROUGH = settings().max_examples > 100
RTOL = 1e-6
"""Terms of a pending sum are random, those of samples in single precision exact to this."""
Lay = Callable[[Tensor], Tensor]
"""Where a tensor lies: on one device, as it is."""


def as_is(x: Tensor) -> Tensor:
    return x


def squares(tensors: Sequence[Any]) -> Tensor:
    """Their sum, real where the tensors are complex."""
    return sum((torch.view_as_real(t) if t.is_complex() else t).pow(2).sum() for t in tensors)  # type: ignore[return-value]


def derivatives(function: Callable[..., Any], args: Any, wanted: Sequence[bool], lay: Lay) -> list[Tensor | None]:
    """The gradients of `function`, and those of the sum of their squares, also in what came in for the outputs."""
    rest, inputs = iter(wanted), []

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        laid = lay(x.detach().clone())
        if next(rest):
            inputs.append(laid.requires_grad_())
        return laid

    args, kwargs = split(replace_leaves(args, leaf))
    outputs = [x for x in leaves(function(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    incoming = [lay(number(x, i)).requires_grad_() for i, x in enumerate(outputs)]
    first = torch.autograd.grad(outputs, inputs, incoming, create_graph=True, allow_unused=True)
    recorded = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    if not recorded:
        return list(first)
    total = squares(recorded)
    return [*first, *torch.autograd.grad(total, [*inputs, *incoming], allow_unused=True)]


def split(sample: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (sample[:-1], sample[-1]) if sample and isinstance(sample[-1], dict) else (sample, {})


def number(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)


def on_one_device(name: str) -> tuple[list[bool], list[Tensor | None]] | None:
    """Which operands have gradients, and all derivatives; None where torch has no second ones."""
    function, sample = SAMPLES[name]
    if isinstance(function, OpOverload) and function._schema.is_mutable:
        return None
    operands = [x for x in leaves(sample) if isinstance(x, Tensor)]
    choices = [[has_gradient(x) for x in operands]]
    choices += [[i == j and is_wanted for j, is_wanted in enumerate(choices[0])] for i in range(len(operands))]
    for wanted in choices:
        try:
            found = derivatives(function, sample, wanted, as_is) if any(wanted) else []
        except (RuntimeError, NotImplementedError):
            continue
        if len(found) > sum(wanted):
            return wanted, found
    return None


def differences(names: Sequence[str], mesh: Mesh, seed: int, draws: int = 1) -> list[str]:
    """Where a derivative on `mesh` is not that of one device; ("", the number of cases) at the end."""
    wrong, cases = [], 0
    for name in names:
        with plain():  # where ranks are simulated
            expected = on_one_device(name)
        draw = Random(f"{name} {seed}")
        for i in range(draws if expected is not None else 0):
            wanted, right = expected
            laid: list[str] = []

            def lay(x: Tensor, draw: Random = draw, laid: list[str] = laid, seed: int = i) -> Tensor:
                layout = draw.choice(layouts_of(x, mesh))
                laid.append(str(layout))
                return distribute(x, layout, seed=seed)

            cases += 1
            try:
                found = derivatives(*SAMPLES[name], wanted, lay)
                told = [f"derivative {k}" for k, pair in enumerate(zip(found, right, strict=True)) if not same(*pair)]
            except Exception as error:
                told = [f"{type(error).__name__}: {error}"]
            wrong += [f"{name} of {laid}: {what}" for what in told[:1]]
    return [*wrong, f"{cases} cases"]


def same(found: Any, right: Tensor | None) -> bool:
    if found is None or right is None:
        return all(x is None or not bool((whole(x) if isinstance(x, DTensor) else x).any()) for x in (found, right))
    with plain():
        return torch.allclose(whole(found), right, rtol=RTOL, atol=RTOL / 100, equal_nan=True)


def on_ranks(names: list[str], shape: tuple[int, ...], seed: int, draws: int) -> list[str]:
    return differences(names, bind(dshard.init_device_mesh("cpu", shape)), seed, draws)
