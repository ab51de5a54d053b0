"""Operators whose arguments leave nothing to do: the same values and gradients, in every layout, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch import Tensor

import dshard
from dshard import DeviceMesh, DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor
from dshard.testing import RankPool, distribute, simulated, whole
from dshard.testing.rule_rows import layouts_of

Function: TypeAlias = Callable[[Any], Any]
THOROUGH = settings().max_examples > 100
SHAPE = (5, 3)


def counted(x: Any, n: int) -> Any:
    """0 to n - 1, beside `x`."""
    return torch.ones_like(x.detach().reshape(-1)[:n], dtype=torch.int64).cumsum(0) - 1


NO_OPS: dict[str, Function] = {
    "narrow 0": lambda x: x.narrow(0, 0, 5),
    "narrow -1": lambda x: torch.narrow(x, -1, 0, 3),
    "narrow named": lambda x: x.narrow(dim=0, start=0, length=5),
    "narrow of t": lambda x: x.t().narrow(1, 0, 5).t(),
    "narrow twice": lambda x: x.narrow(0, 0, 5).narrow(1, 0, 3),
    **({"narrow_copy": lambda x: torch.narrow_copy(x, 0, 0, 5)} if torch.__version__ >= "2.12" else {}),
    "slice": lambda x: x[:],
    "slice 0:5": lambda x: x[0:5, 0:3],
    "slice to -": lambda x: x[-5:, -3:],
    "slice beyond": lambda x: x[:100, -100:],
    "slice of t": lambda x: x.mT[:, :5].mT,
    "slice ...": lambda x: x[...],
    "slice None": lambda x: x[None][0],
    "slice by arange": lambda x: x[torch.arange(5).tolist()],
    "select of one": lambda x: x.unsqueeze(0).select(0, 0),
    "expand": lambda x: x.expand(5, 3),
    "expand -1": lambda x: x.expand(-1, -1),
    "expand_as": lambda x: x.expand_as(x),
    "broadcast_to": lambda x: x.broadcast_to((5, 3)),
    "view": lambda x: x.view(5, 3),
    "view -1": lambda x: x.view(-1, 3),
    "view_as": lambda x: x.view_as(x),
    "reshape": lambda x: x.reshape(5, 3),
    "reshape of t": lambda x: x.t().reshape(3, 5).t(),
    "flatten": lambda x: x.flatten(0, 0),
    "unflatten": lambda x: x.unflatten(1, (3,)),
    "unflatten 1": lambda x: x.unflatten(0, (5, 1)).flatten(0, 1),
    "permute": lambda x: x.permute(0, 1),
    "transpose": lambda x: x.transpose(0, 0),
    "swapaxes": lambda x: x.swapaxes(-1, 1),
    "movedim": lambda x: x.movedim(0, 0),
    "moveaxis": lambda x: torch.moveaxis(x, (0, 1), (0, 1)),
    "squeeze": lambda x: x.squeeze(),
    "squeeze dim": lambda x: x.squeeze(0),
    "squeeze dims": lambda x: x.squeeze((0, 1)),
    "roll 0": lambda x: x.roll(0, 0),
    "roll all": lambda x: x.roll((5, 3), (0, 1)),
    "roll -": lambda x: x.roll(-5, 0),
    "roll none": lambda x: x.roll(0),
    "flip ()": lambda x: x.flip(()),
    "flip twice": lambda x: x.flip(0).flip(0),
    "rot90 0": lambda x: x.rot90(0),
    "rot90 4": lambda x: x.rot90(4),
    "repeat 1": lambda x: x.repeat(1, 1),
    "tile 1": lambda x: x.tile(1),
    "tile ()": lambda x: x.tile(()),
    "repeat_interleave 1": lambda x: x.repeat_interleave(1, 0),
    "pad 0": lambda x: F.pad(x, (0, 0, 0, 0)),
    "pad ()": lambda x: F.pad(x, ()),
    "pad back": lambda x: F.pad(F.pad(x, (0, 0, 1, 0)), (0, 0, -1, 0)),
    "cat of one": lambda x: torch.cat([x]),
    "cat of one -1": lambda x: torch.cat([x], -1),
    "cat with nothing": lambda x: torch.cat([x, x[:0]]),
    "stack of one": lambda x: torch.stack([x])[0],
    "hstack of one": lambda x: torch.hstack([x]),
    "split of one": lambda x: x.split(5)[0],
    "split beyond": lambda x: x.split(100, 1)[0],
    "split sizes": lambda x: x.split([5])[0],
    "split of t": lambda x: x.t().split(5, 1)[0].t(),
    "chunk 1": lambda x: x.chunk(1)[0],
    "chunk 1 of dim 1": lambda x: x.chunk(1, 1)[0],
    "tensor_split 1": lambda x: x.tensor_split(1)[0],
    "unbind of one": lambda x: x.unsqueeze(0).unbind(0)[0],
    "index_select all": lambda x: x.index_select(0, counted(x, 5)),
    "index all": lambda x: x[counted(x, 5)],
    "take_along_dim": lambda x: x.take_along_dim(counted(x, 3).view(1, 3), 1),
    "gather": lambda x: x.gather(1, counted(x, 3).expand(5, 3)),
    "to dtype": lambda x: x.to(torch.float64),
    "to x": lambda x: x.to(x),
    "type_as": lambda x: x.type_as(x),
    "double": lambda x: x.double(),
    "cpu": lambda x: x.cpu(),
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "positive": lambda x: +x,
    "resolve": lambda x: x.resolve_conj().resolve_neg(),
    "real": lambda x: torch.real(x),
    "conj": lambda x: x.conj(),
    "diff 0": lambda x: x.diff(0),
    "cumsum of one": lambda x: x.unsqueeze(0).cumsum(0)[0],
    "cumprod of one": lambda x: x.unsqueeze(1).cumprod(1).squeeze(1),
    "sum of one": lambda x: x.unsqueeze(0).sum(0),
    "mean of one": lambda x: x.unsqueeze(-1).mean(-1),
    "amax of one": lambda x: x.unsqueeze(-1).amax(-1),
    "logsumexp of one": lambda x: x.unsqueeze(-1).logsumexp(-1),
    "sort of one": lambda x: x.unsqueeze(0).sort(0).values[0],
    "topk of one": lambda x: x.unsqueeze(0).topk(1, 0).values[0],
    "unfold": lambda x: x.unfold(0, 5, 1)[0].t(),
    "as_strided": lambda x: x.as_strided((5, 3), (3, 1)) if x.is_contiguous() else x,
    "tril": lambda x: x.tril(5),
    "triu": lambda x: x.triu(-5),
    "diagonal": lambda x: x.diag_embed().diagonal(0, -2, -1),
    "dropout 0": lambda x: F.dropout(x, 0.0),
    "dropout eval": lambda x: F.dropout(x, 0.5, training=False),
    "add 0": lambda x: x.add(0),
    "mul 1": lambda x: x.mul(1),
    "pow 1": lambda x: x.pow(1),
    "clamp": lambda x: x.clamp(-1e9, 1e9),
    "masked_fill": lambda x: x.masked_fill(x > 1e9, 0.0),
    "where": lambda x: torch.where(x < 1e9, x, x),
    "slice_scatter": lambda x: x.slice_scatter(x, 0, 0, 5),
    "select_scatter": lambda x: x.select_scatter(x.select(0, 1), 0, 1),
    "index_add": lambda x: x.index_add(0, counted(x, 0), x[:0]),
    "interpolate": lambda x: F.interpolate(x[None], size=3)[0],
    "pool": lambda x: F.avg_pool1d(x[None], 1)[0],
    "atleast": lambda x: torch.atleast_2d(x),
    "ravel": lambda x: x.ravel().view(5, 3),
    "identity": lambda x: torch.nn.Identity()(x),
}
"""Functions that return what they are given, each for a tensor of `SHAPE`."""


def value() -> Tensor:
    return torch.arange(1.0, 16, dtype=torch.float64).sin().view(SHAPE)


def weights() -> Tensor:
    return torch.arange(15, dtype=torch.float64).cos().view(SHAPE)


def fails(function: Function, x: Any, weight: Any, same: Callable[[Any, Tensor], bool]) -> list[str]:
    """What is wrong with the value, or the gradient, for a leaf and for what is computed from it."""
    try:
        outs = [function(x), function(x * 1)]
        (grad,) = torch.autograd.grad((outs[0] * weight).sum() + (outs[1] * weight).sum(), x)
        with torch.no_grad():
            outs.append(function(x))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    found = [f"value {i}" for i, out in enumerate(outs) if not same(out.detach(), value())]
    return found if same(grad, 2 * weights()) else [*found, "gradient"]


def same_whole(x: Any, expected: Tensor) -> bool:
    full = whole(x) if isinstance(x, DTensor) else x
    return full.shape == expected.shape and torch.allclose(full, expected, atol=1e-12)


def same_parts(x: Any, expected: Tensor) -> bool:
    """The same by what this rank holds, so that a rank that finds it different keeps none waiting."""
    if any(isinstance(placement, Partial) for placement in x.placements):
        x = x.redistribute(placements=[Replicate()] * len(x.placements))
    part = distribute_tensor(expected, x.device_mesh, x.placements, src_data_rank=None).to_local()
    return x.shape == expected.shape and torch.allclose(x.to_local(), part, atol=1e-12)


def test_they_are_no_ops() -> None:
    for name, function in NO_OPS.items():
        assert not fails(function, value().requires_grad_(), weights(), same_whole), name


SHAPES = [(3,), pytest.param((4,), marks=pytest.mark.thorough), pytest.param((2, 2), marks=pytest.mark.thorough)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_ops_on_simulated_ranks(shape: tuple[int, ...]) -> None:
    mesh, found = Mesh(shape), []
    layouts = layouts_of(value(), mesh)
    for i, (name, function) in enumerate(NO_OPS.items()):
        for layout in layouts if len(shape) == 1 and THOROUGH else layouts[i % 6 :: 6]:
            with simulated(mesh):
                x = distribute(value(), layout).requires_grad_()
                wrong = fails(function, x, distribute(weights(), layout.cotangent()), same_whole)
            found += [f"{name} [{layout}]: {each}" for each in wrong]
    assert not found, "\n".join(found)


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return dshard.init_device_mesh("cpu", shape)


ONE_AXIS = ([Shard(0)], [Shard(1)], [Replicate()])
TWO_AXES = ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)], [Replicate(), Shard(0)])


def wrong_on_ranks(shape: tuple[int, ...], every: bool) -> list[str]:
    """What fails when it is met first, when what it comes to is learned, and from then on."""
    found = []
    for i, (name, function) in enumerate([*NO_OPS.items()][:: 1 if every else 5]):
        layouts = ONE_AXIS if len(shape) == 1 else TWO_AXES
        for placements in layouts if every or name.startswith("narrow") else layouts[i % 3 :][:1]:
            for turn in range(3):
                x = distribute_tensor(value(), mesh_of(shape), placements, src_data_rank=None).requires_grad_()
                weight = distribute_tensor(weights(), mesh_of(shape), placements, src_data_rank=None)
                wrong = fails(function, x, weight, same_parts)
                found += [f"{name} {placements} {turn}: {each}" for each in wrong]
    return found


@pytest.mark.ranks
def test_no_ops_on_ranks(ranks: RankPool) -> None:
    assert ranks.run(wrong_on_ranks, (4,), False, timeout=120) == [[]] * 4


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_no_ops_on_ranks_in_every_layout(ranks: RankPool, shape: tuple[int, ...]) -> None:
    assert ranks.run(wrong_on_ranks, shape, True, timeout=300) == [[]] * 4
