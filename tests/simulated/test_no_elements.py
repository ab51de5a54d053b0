"""Operators on tensors without elements are those of one device, values and gradients, in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.single_device import Function, Tensors, assert_same_as_single_device, rows

from dshard import Layout, Mesh, Shard
from dshard.testing import distribute, simulated

MESH = Mesh((3,), ("x",))


def grown(*shape: int) -> torch.Tensor:
    return rows(*shape).requires_grad_()


CASES: dict[str, tuple[Function, Tensors]] = {
    "group norm, no batch": (lambda x, w: F.group_norm(x, 2, w), (grown(0, 4, 3), grown(4))),
    "group norm, no channels": (lambda x, w: F.group_norm(x, 2, w), (grown(2, 0, 3), grown(0))),
    "group norm, no positions": (lambda x, w, b: F.group_norm(x, 2, w, b), (grown(2, 4, 0), grown(4), grown(4))),
    "convolution, no channels": (F.conv2d, (grown(2, 0, 5, 5), grown(3, 0, 2, 2), grown(3))),
    "convolution in groups, no channels": (lambda x, w: F.conv1d(x, w, groups=2), (grown(2, 0, 5), grown(4, 0, 2))),
    "convolution, no batch": (F.conv2d, (grown(0, 2, 5, 5), grown(3, 2, 2, 2), grown(3))),
    "nearest, no batch": (lambda x: F.interpolate(x, scale_factor=2), (grown(0, 3, 4, 4),)),
    "nearest of one dim, no batch": (lambda x: F.interpolate(x, size=3), (grown(0, 3, 4),)),
    "nearest-exact, no batch": (lambda x: F.interpolate(x, size=(3, 5), mode="nearest-exact"), (grown(0, 3, 4, 4),)),
    **{
        f"{loss.__name__}, {reduction}, no batch": (partial(loss, reduction=reduction), (grown(0, 3), grown(0, 3)))
        for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss)
        for reduction in ("mean", "sum", "none")
    },
    "embedding, no rows": (lambda w, i: F.embedding(i, w, padding_idx=0), (grown(0, 3), torch.zeros(0).long())),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_one_device(name: str) -> None:
    call, tensors = CASES[name]
    try:
        call(*tensors)
    except RuntimeError as error:
        pytest.skip(f"this torch refuses it on one device: {error}")
    assert_same_as_single_device((call, tensors), MESH, seed=name)


REFUSED: dict[str, tuple[Callable[..., Any], Tensors]] = {
    "no positions": (lambda x, w: F.conv2d(x, w, padding=1), (rows(2, 3, 0, 5), rows(3, 3, 1, 1))),
    "transposed, no positions": (F.conv_transpose2d, (rows(2, 3, 0, 5), rows(3, 3, 1, 1))),
    "transposed, no channels": (F.conv_transpose2d, (rows(2, 0, 5, 5), rows(0, 3, 2, 2))),
    "kernel without positions": (F.conv2d, (rows(2, 3, 5, 5), rows(3, 3, 0, 2))),
    "nearest, no channels": (lambda x: F.interpolate(x, size=(3, 5)), (rows(2, 0, 4, 4),)),
    "nearest, no positions": (lambda x: F.interpolate(x, size=(3, 5)), (rows(2, 3, 0, 4),)),
    "bicubic, no positions": (lambda x: F.interpolate(x, size=(3, 5), mode="bicubic"), (rows(2, 3, 0, 4),)),
    "adaptive pooling, no positions": (lambda x: F.adaptive_avg_pool2d(x, 2), (rows(2, 3, 0, 4),)),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", REFUSED)
def test_what_one_device_refuses_is_refused_before_any_rank_runs(name: str, dim: int) -> None:
    call, tensors = REFUSED[name]
    with pytest.raises(RuntimeError):
        call(*tensors)
    with simulated(MESH):
        shards = [distribute(x, Layout(MESH, (Shard(dim),))) for x in tensors]
        with pytest.raises(RuntimeError) as met:
            call(*shards)
    assert hasattr(met.value, "_raised_by_all")
