"""What a forward pass writes to weights that are gathered for it is written to the stored ones, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dshard import DTensor, LayoutError, init_device_mesh, parallelize
from dshard.parallel import Precision
from dshard.testing import RankPool

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


def dark(write: Callable[[], object]) -> None:
    with torch.no_grad():
        write()


def assign(weight: Tensor, value: Tensor) -> None:
    weight.data = value


def swap(weight: Tensor) -> None:
    before = weight.data
    weight.data = before * 2
    weight.data.mul_(0.5)
    weight.data = before * weight.data.sign()


def scaled(weight: Tensor) -> None:
    weight.data.mul_(0.9)


def local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight.detach()


BEFORE: dict[str, Callable[[Tensor], object]] = {
    "clamped": lambda w: dark(lambda: w.clamp_(-0.1, 0.1)),
    "copied over": lambda w: w.data.copy_(F.normalize(w.data, dim=1)),
    "assigned": lambda w: assign(w, w.data.clamp(-0.1, 0.1)),
    "assigned and written": lambda w: swap(w),
    "by a view": lambda w: dark(lambda: w.view(-1).mul_(0.9)),
    "by a view of data": lambda w: w.data.t()[1:].mul_(0.9),
    "by data of a view": lambda w: w[1:].data.zero_(),
    "detached": lambda w: w.detach().mul_(0.9),
    "data of what is detached": lambda w: w.detach()[0].data.mul_(0.9),
    "out": lambda w: dark(lambda: torch.mul(w.detach(), 0.9, out=w)),
    "an entry": lambda w: dark(lambda: w.__setitem__((0, slice(1, 3)), 0.5)),
    "a list": lambda w: dark(lambda: torch._foreach_mul_([w], 0.9)),
    "where": lambda w: dark(lambda: w.masked_fill_(w > 0.2, 0.2)),
    "initialised": lambda w: nn.init.constant_(w, 0.1),
    "as a local tensor": lambda w: local(w).mul_(0.9),
    "an optimiser": lambda w: stepped(w),
    "nothing": lambda w: None,
}
"""Writes to a weight before it is used."""
AFTER: dict[str, Callable[[Tensor, Tensor], object]] = {
    "its data": lambda w, out: w.data.mul_(0.9),
    "counted": lambda w, out: dark(lambda: w.mul_(0.9)),
    "in a hook": lambda w, out: out.requires_grad and out.register_hook(lambda grad: scaled(w)),
}
"""Writes to a weight after it was used, to the result `out`."""


def stepped(weight: Tensor) -> None:
    p = weight.detach().requires_grad_()
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], 0.05).step()


class Layer(nn.Module):
    def __init__(self, rows: int, write: str) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(5, rows), write

    def forward(self, x: Tensor) -> Tensor:
        if self.write in BEFORE:
            BEFORE[self.write](self.linear.weight)
        out = self.linear(x)
        if self.write in AFTER:
            AFTER[self.write](self.linear.weight, out)
        return out


class Net(nn.Module):
    """Layers of these writes, blocks of their own after one of the model's own; the last has fewer rows than ranks."""

    def __init__(self, writes: Sequence[str], recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.recomputes = Layer(5, writes[0]), recomputes
        self.layers = nn.ModuleList([*(Layer(5, write) for write in writes[1:]), Layer(3, writes[0])])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x.tanh())
        return x


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norms = nn.Linear(5, 4), nn.Embedding(9, 5, max_norm=0.5)
        self.book = nn.Parameter(X[:, :4].clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(self.norms(torch.arange(6, device="cpu")) + x)
        places = torch.cdist(z, self.book).argmin(-1)
        with torch.no_grad():
            counts = F.one_hot(places, 6).to(z.dtype)
            self.book.lerp_(counts.t() @ z, 0.1)
        return z + (F.embedding(places, self.book) - z).detach()


def trained(net: str, strategy: str) -> None:
    """Three steps that are those of one device, and an evaluation."""
    torch.manual_seed(0)
    model = NETS[net]()
    reference = copy.deepcopy(model)
    shape, names = ((2, 2), ("d", "t")) if "megatron" in strategy else ((4,), ("d",))
    parallelize(model, init_device_mesh("cpu", shape, mesh_dim_names=names), strategy, X)
    optimisers = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1) for each in (model, reference)
    ]
    for step in range(3):
        outs = []
        for each, optimiser in zip((model, reference), optimisers, strict=True):
            optimiser.zero_grad()
            outs.append(each(X * (step + 1)))
            outs[-1].square().mean().backward()
            optimiser.step()
        compare(model, reference, outs)
    model.eval(), reference.eval()
    with torch.no_grad():
        compare(model, reference, [model(X), reference(X)])


def compare(model: nn.Module, reference: nn.Module, outs: list[Any]) -> None:
    torch.testing.assert_close(outs[0].full_tensor(), outs[1])
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, msg=name)  # type: ignore[operator]
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)  # type: ignore[union-attr]


NETS: dict[str, Callable[[], nn.Module]] = {
    "written": lambda: Net(["clamped", *BEFORE, "its data", "in a hook"]),
    "recomputed": lambda: Net(["clamped", "copied over", "as a local tensor"], recomputes=True),
    "codebook": Codebook,
    **{write: lambda write=write: Net([write, write]) for write in (*BEFORE, "its data", "in a hook")},  # type: ignore[misc]
}
QUICK = {("fsdp", "written"), ("fsdp", "codebook"), ("fsdp x megatron", "recomputed")}


@pytest.mark.parametrize(
    ("strategy", "net"),
    [
        pytest.param(strategy, net, marks=[] if (strategy, net) in QUICK else pytest.mark.thorough)
        for strategy in ("data", "fsdp", "fsdp x megatron")
        for net in NETS
    ],
)
def test_writes_in_a_forward_pass_are_those_of_one_device(ranks: RankPool, strategy: str, net: str) -> None:
    ranks.run(trained, net, strategy)


def refused() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model = nn.Sequential(Layer(5, "nothing"), Layer(5, "counted"))
    parallelize(model, mesh, "fsdp", X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a weight of shape"):
        model(X).sum().backward()
    stored = model[1].linear.weight
    model[1].linear.register_forward_hook(lambda module, args, out: dark(lambda: stored.mul_(2)))
    with pytest.raises(LayoutError, match="was written to by a reference from outside"):
        model(X)
    assert model[1].linear.weight is stored


def test_writes_that_a_backward_pass_cannot_know_are_refused(ranks: RankPool) -> None:
    ranks.run(refused)


def half() -> None:
    """Where a write to a copy in half precision leaves a number as it was, the stored one keeps its precision."""
    model = nn.Sequential(Layer(7, "clamped"))
    weight = model[0].linear.weight.detach().clone()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    parallelize(model, mesh, "fsdp", X, precision=Precision(torch.bfloat16))
    model(X)
    found = model[0].linear.weight.full_tensor()
    assert found.dtype is torch.float32
    bound = torch.tensor(0.1).bfloat16().float()
    is_clamped = weight.bfloat16().float().abs() > bound
    assert found.equal(torch.where(is_clamped, bound * weight.sign(), weight))
    assert 0 < is_clamped.sum() < weight.numel()


def test_a_write_in_half_precision_leaves_other_numbers_alone(ranks: RankPool) -> None:
    ranks.run(half)
