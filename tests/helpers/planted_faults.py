"""Modules that do something else where they are laid out: faults that people make, each planted in a small model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import DTensor, Partial, Replicate, Shard, register_rule
from helpers.compared_models import WIDTH, Residual

Run = Callable[["Planted", Any], Any]


class Planted(nn.Module):
    """Runs `right` on plain tensors and `wrong` on distributed ones."""

    def __init__(self, right: Run, wrong: Run) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.right, self.wrong, self.calls = right, wrong, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return (self.wrong if isinstance(x, DTensor) else self.right)(self, x)


class Model(nn.Module):
    def __init__(self, planted: Planted) -> None:
        super().__init__()
        self.before, self.planted, self.after = Residual(dropout=0.1), planted, Residual(dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.planted(self.before(x)))  # type: ignore[no-any-return]


class Siblings(Model):
    """The planted module has its input in common with others."""

    def __init__(self, planted: Planted) -> None:
        super().__init__(planted)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(x + self.first(x) * self.planted(x) + self.last(x))  # type: ignore[no-any-return]


class Twice(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.planted(self.planted(self.before(x))))  # type: ignore[no-any-return]


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Any, by: float) -> Any:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.by, None


def local(x: Any, *placements: Any) -> Tensor:
    return x.redistribute(placements=placements or x.placements).to_local()  # type: ignore[no-any-return]


def joined(part: Tensor, like: Any, placement: Any, shape: Any = None) -> DTensor:
    return DTensor.from_local(part, like.device_mesh, [placement], shape=shape or like.shape)


def along(dim: int, function: Callable[[Tensor], Tensor]) -> Run:
    """`function` of each rank's part along a dim, as if parts knew nothing of each other."""
    return lambda self, x: joined(function(local(x, Shard(dim))), x, Shard(dim))


def both(function: Callable[[Tensor], Tensor], dim: int) -> tuple[Run, Run]:
    return lambda self, x: function(x), along(dim, function)


def statistics_of_rank(self: Any, x: Any) -> Any:
    with torch.no_grad():
        of_rank = local(x).mean((0, 1)) if isinstance(x, DTensor) else x.mean((0, 1))
        (self.mean.to_local() if isinstance(x, DTensor) else self.mean).copy_(of_rank)
    return x * 1


def wrong_rows(self: Any, x: Any) -> Any:
    mesh = x.device_mesh
    rows = local(x, Replicate()).chunk(mesh.size())[(mesh.get_local_rank() + 1) % mesh.size()]
    return joined(rows, x, Shard(0))


def bias_in_each_term(self: Any, x: Any) -> Any:
    rank = x.device_mesh.get_local_rank()
    product = local(x, Shard(2)) @ local(self.weight, Shard(1)).mT + (local(self.bias) if rank >= 0 else 0)
    return joined(product, x, Partial()).redistribute(placements=[Replicate()])


def of_local_generator(self: Any, x: Any) -> Any:
    generator = torch.Generator().manual_seed(x.device_mesh.get_local_rank())
    part = local(x)
    return joined(part * (torch.rand(part.shape, generator=generator) > 0.1), x, x.placements[0])


def drawn_twice(self: Any, x: Any) -> Any:
    F.dropout(x, 0.1)
    return F.dropout(x, 0.1)


def linear(self: Any, x: Any) -> Any:
    return F.linear(x, self.weight, self.bias)


def gradient_of_rank(self: Any, x: Any) -> Any:
    return joined(F.linear(local(x), local(self.weight), self.bias.to_local(grad_placements=[Partial()])), x, Shard(0))


def positions_of_rank(self: Any, x: Any) -> Any:
    part = local(x, Shard(1))
    return joined(part + torch.arange(part.shape[1], dtype=part.dtype)[:, None], x, Shard(1))


@torch.library.custom_op("planted::normed", mutates_args=())
def normed(x: Tensor) -> Tensor:
    return x / x.abs().amax(0, keepdim=True)


normed.register_fake(torch.empty_like)
normed.register_autograd(lambda ctx, grad: grad)
register_rule("planted::normed", "b s d -> b s d")


def second_call(self: Any, x: Any) -> Any:
    return linear(self, x) * (1.0 if self.calls % 2 else 1.1)


FAULTS: dict[str, tuple[Run, Run, str]] = {
    "a mean without its reduction": (
        lambda self, x: x - x.mean(0, keepdim=True),
        lambda self, x: x - joined(local(x).mean(0, keepdim=True), x, Replicate(), (1, *x.shape[1:])),
        "output",
    ),
    "a maximum of the rank": (
        lambda self, x: x - x.amax(0, keepdim=True),
        lambda self, x: x - joined(local(x).amax(0, keepdim=True), x, Replicate(), (1, *x.shape[1:])),
        "output",
    ),
    "rows of another rank": (lambda self, x: x * 1, wrong_rows, "output"),
    "statistics of the rank": (statistics_of_rank, statistics_of_rank, "output"),
    "dropout drawn twice": (lambda self, x: F.dropout(x, 0.1), drawn_twice, "output"),
    "a mask of each rank's generator": (lambda self, x: x * 1, of_local_generator, "output"),
    "a bias in each term": (linear, bias_in_each_term, "output"),
    "a norm of the local features": (*both(lambda x: F.layer_norm(x, x.shape[-1:]), 2), "output"),
    "a softmax of the local features": (*both(lambda x: x.softmax(-1), 2), "output"),
    "a cumulative sum of the local tokens": (*both(lambda x: x.cumsum(1), 1), "output"),
    "a convolution without neighbours": (*both(lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT, 1), "output"),
    "positions of the rank": (
        lambda self, x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None],
        positions_of_rank,
        "output",
    ),
    "a rule that forgets a reduction": (lambda self, x: normed(x), lambda self, x: normed(x), "output"),
    "features in another order": (
        lambda self, x: x.unflatten(-1, (4, -1)).flatten(-2),
        lambda self, x: x.unflatten(-1, (4, -1)).mT.flatten(-2),
        "output",
    ),
    "a second call that differs": (linear, second_call, "output"),
    "a gradient cut off": (lambda self, x: x + x.tanh(), lambda self, x: x + x.detach().tanh(), "gradient"),
    "a gradient scaled": (linear, lambda self, x: Scaled.apply(linear(self, x), 4.0), "gradient"),
    "a gradient scaled beside others": (linear, lambda self, x: linear(self, Scaled.apply(x, 1.5)), "gradient"),
    "a weight's gradient of the rank": (linear, gradient_of_rank, "gradient"),
    "a weight's gradient scaled": (
        linear,
        lambda self, x: F.linear(x, Scaled.apply(self.weight, 0.25), self.bias),
        "gradient",
    ),
    "no gradient of a bias": (linear, lambda self, x: F.linear(x, self.weight, self.bias.detach()), "gradient"),
}
"""What the module `planted` does alone and laid out, and the direction in which it differs first."""


def model_with(name: str) -> Model:
    right, wrong, _ = FAULTS[name]
    torch.manual_seed(4)
    kind = Siblings if "beside" in name else Twice if "second call" in name else Model
    return kind(Planted(right, wrong))
