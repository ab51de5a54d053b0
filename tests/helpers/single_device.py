"""Comparison of operators on distributed tensors in any layouts with one device: values, dtypes and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from random import Random
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from dshard import DTensor, Layout, Mesh, Partial, Replicate, Shard
from dshard.placements import ReduceOp
from dshard.testing import distribute, simulated, whole

Function: TypeAlias = Callable[..., Any]
Tensors: TypeAlias = tuple[Tensor, ...]
Case: TypeAlias = tuple[Function, Tensors]


def rows(*shape: int) -> Tensor:
    """Return distinct numbers of both signs."""
    return torch.arange(1, prod(shape) + 1, dtype=torch.float64).sin().reshape(shape)


def layouts(mesh: Mesh, ndim: int, *ops: ReduceOp) -> list[Layout]:
    """List the layouts with every dim sharded, replicated or partial on every axis, with one reduction in each."""
    distinct: dict[Layout, None] = {}
    for op in ops or (None,):
        one = [Replicate(), *map(Shard, range(ndim)), *([Partial(op)] if op else [])]
        distinct |= {Layout(mesh, placements): None for placements in product(one, repeat=mesh.ndim)}
    return list(distinct)


def choices(inputs: Tensors, mesh: Mesh, ops: Sequence[ReduceOp], seed: str) -> list[list[Layout]]:
    """Layouts of all operands, shuffled: each of the one that has most, the others drawn."""
    draw = Random(f"{seed}{ops}")
    ordered = [op for op in ops if op not in ("max", "min")]
    shuffled = [layouts(mesh, x.ndim, *(ordered if x.is_complex() else ops)) for x in inputs]
    for options in shuffled:
        draw.shuffle(options)
    return [[options[i % len(options)] for options in shuffled] for i in range(max(map(len, shuffled)))]


def assert_same_as_single_device(
    case: Case,
    mesh: Mesh,
    *,
    ops: Sequence[ReduceOp] = ("sum",),
    seed: str = "",
    most: int | None = None,
    rtol: float = 1e-12,
) -> None:
    """Assert values and gradients equal to those of one device, for `most` layouts or all."""
    function, inputs = case
    expected, cotangents, gradients = on_one_device(function, inputs)
    with simulated(mesh):
        for laid in choices(inputs, mesh, ops, seed)[:most]:
            leaves = [distribute(x, layout) for x, layout in zip(inputs, laid, strict=True)]
            for x, leaf in zip(inputs, leaves, strict=True):
                leaf.requires_grad_(x.requires_grad)
            outputs = as_tuple(function(*leaves))
            for out, value in zip(outputs, expected, strict=True):
                assert_same(out, value, rtol)
            backward([out for out in outputs if requires_grad(out)], cotangents)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                assert_same(leaf.grad, gradient, rtol)


def on_one_device(function: Function, inputs: Tensors) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
    """Return the outputs, the incoming gradients of differentiable ones, and the gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs = as_tuple(function(*leaves))
    with_grad = [out for out in outputs if requires_grad(out)]
    cotangents = [torch.arange(out.numel()).double().cos().to(out.dtype).view(out.shape) for out in with_grad]
    if with_grad:
        torch.autograd.backward(with_grad, cotangents)
    values = [out.detach() if isinstance(out, Tensor) else out for out in outputs]
    return values, cotangents, [leaf.grad for leaf in leaves]


def backward(outputs: Sequence[DTensor], cotangents: Sequence[Tensor]) -> None:
    """Run the backward pass from these gradients of the outputs."""
    incoming = [distribute(x, out.layout.cotangent()) for x, out in zip(cotangents, outputs, strict=True)]
    if incoming:
        torch.autograd.backward(outputs, incoming)


def requires_grad(out: Any) -> bool:
    return isinstance(out, Tensor) and out.requires_grad


def as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def assert_same(actual: Any, expected: Any, rtol: float) -> None:
    """Assert that a tensor has the expected value, shape and dtype, or that another value is equal."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, DTensor)
        torch.testing.assert_close(whole(actual.detach()), expected, rtol=rtol, atol=rtol, equal_nan=True)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=rtol)
    else:
        assert actual == expected
