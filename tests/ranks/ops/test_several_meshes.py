"""Optimisers and gradient clipping over parameters on several meshes, plain ones and torch's equal one device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.single_device import rows
from torch import Tensor
from torch.distributed import tensor as torch_tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from dshard import (
    DTensor,
    Layout,
    Mesh,
    MeshError,
    MixedError,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from dshard.comm import DeviceMesh
from dshard.testing import RankPool, distribute, simulated, whole

SHAPES = [(5, 3), (4, 4), (3,), (2, 6), (7,), ()]
OPTIMISERS: list[Callable[..., Optimizer]] = [
    lambda p, **how: SGD(p, lr=0.1, momentum=0.9, **how),
    lambda p, **how: Adam(p, lr=0.1, amsgrad=True, **how),
    lambda p, **how: AdamW(p, lr=0.1, **how),
    lambda p, **how: Adagrad(p, lr=0.1, **how),
    lambda p, **how: RMSprop(p, lr=0.1, momentum=0.5, centered=True, **how),
]
WAYS = ({"foreach": False}, {"foreach": True}, {"fused": True})


def on_many_meshes() -> list[Any]:
    """Parameters on a mesh, on another of the same ranks and on both slices, of torch's class, and plain ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    values = [rows(*shape) for shape in SHAPES]
    return [
        Parameter(distribute_tensor(values[0], mesh["tp"], [Shard(0)])),
        Parameter(torch_tensor.distribute_tensor(values[1], mesh["dp"], [torch_tensor.Shard(1)])),
        Parameter(values[2]),
        Parameter(distribute_tensor(values[3], mesh, [Shard(0), Replicate()])),
        Parameter(distribute_tensor(values[4], line, [Shard(0)])),
        Parameter(values[5]),
    ]


def with_gradients(params: list[Any]) -> list[Any]:
    for i, p in enumerate(params):
        p.grad = None
        (p.square().sum() * (i + 1) + p.sin().sum()).backward()
    return params


def whole_of(x: Any) -> Tensor:
    value: Tensor = x.full_tensor() if isinstance(x, DTensor | torch_tensor.DTensor) else x.detach()
    return value


def check(found: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(whole_of(mine), theirs.detach(), rtol=1e-12, atol=1e-12)


def clipped() -> None:
    params, plain = on_many_meshes(), [Parameter(rows(*shape)) for shape in SHAPES]
    classes = [type(p) for p in params]
    for kind, foreach in product((1.0, 2.0, inf), (None, True, False)):
        with_gradients(params), with_gradients(plain)
        gradients = [p.grad for p in plain]
        norms = [get_total_norm([p.grad for p in ps], kind, foreach=foreach) for ps in (params, plain)]
        check(norms[:1], norms[1:])
        for ps, norm in zip((params, plain), norms, strict=True):
            clip_grads_with_norm_(ps, 3.0, norm, foreach=foreach)
        check([p.grad for p in params], gradients)
        norms = [clip_grad_norm_(ps, 2.0, kind, foreach=foreach) for ps in (params, plain)]
        check(norms[:1], norms[1:])
        check([p.grad for p in params], gradients)
        found: list[Any] = [p.grad for p in params]
        assert [type(grad) for grad in found] == [Tensor if kind is Parameter else kind for kind in classes]


def trained() -> None:
    for make, how in product(OPTIMISERS, WAYS):
        if how == {"fused": True} and make is OPTIMISERS[-1]:  # torch has no fused RMSprop
            continue
        params, plain = on_many_meshes(), [Parameter(rows(*shape)) for shape in SHAPES]
        steps = [make(ps, **how) for ps in (params, plain)]
        for _ in range(3):
            for ps, optimiser in zip((params, plain), steps, strict=True):
                with_gradients(ps)
                optimiser.step()
        check(params, plain)


def apart() -> None:
    """Meshes of other ranks, of which a rank may lack the number, and entries of both kinds."""
    mesh = init_device_mesh("cpu", (4,))
    two = DeviceMesh("cpu", [0, 1])
    number = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
    if dist.get_rank() < 2:
        x = distribute_tensor(torch.ones(4), two, [Shard(0)], src_data_rank=None)
        for refused in (lambda: x * number, lambda: torch._foreach_mul([x], number)):
            with pytest.raises(MeshError, match=r"operands on the meshes .* redistribute them to one mesh first"):
                refused()
    y = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(MixedError):
        torch._foreach_add([y, torch.ones(2)], [torch.ones(4), torch.ones(2)])
    number.requires_grad_()
    with pytest.raises(MeshError):
        number * distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2, 2)), [Shard(0), Replicate()])
    with pytest.raises(MixedError):
        torch.ones(4).mul_(number)


@pytest.mark.ranks
@pytest.mark.parametrize("program", [clipped, pytest.param(trained, marks=pytest.mark.thorough), apart])
def test_parameters_on_several_meshes(ranks: RankPool, program: Callable[[], None]) -> None:
    ranks.run(program)


def test_the_norm_over_meshes_of_the_same_simulated_ranks() -> None:
    square, line = Mesh((2, 2), ("dp", "tp")), Mesh((4,), ("ep",))
    with simulated(square):
        a = Parameter(distribute(torch.randn(8, 8), Layout(square, (Shard(0), Replicate()))))
        b = Parameter(distribute(torch.randn(8, 8), Layout(line, (Shard(0),))))
        params: list[Any] = [a, b, Parameter(torch.randn(4))]
        for p in params:
            p.grad = torch.ones_like(p)
        norm: Any = clip_grad_norm_(params, 1.0)
        assert norm.item() == pytest.approx((64 + 64 + 4) ** 0.5)
        assert isinstance(norm, DTensor)
        torch.testing.assert_close(whole(b.grad), torch.full((8, 8), 132**-0.5), rtol=1e-5, atol=0)
