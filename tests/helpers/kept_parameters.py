"""Programs that keep parameters of a model, and go on with them after it is laid out; each returns tensors."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dshard import DTensor, implicit_replication

LayOut = Callable[[], object]
Program = Callable[[nn.Sequential, LayOut], list[Tensor]]
X = torch.randn(4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(3))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def backward(model: nn.Module) -> None:
    model(X).square().sum().backward()


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


# -- references


def reads(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    old = list(model.parameters())
    lay_out()
    w, b = old[:2]
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad and p.grad is None for p in old)
    assert [(p.shape, len(p), p.numel(), p.dtype) for p in old] == [
        (p.shape, len(p), p.numel(), p.dtype) for p in model.parameters()
    ]
    model.again = model[0]
    model[0].again = w  # which is registered as the parameter that it is
    assert len(list(model.parameters())) == 4
    assert repr(w) == repr(model[0].weight)
    with implicit_replication():
        layers = [F.linear(X, w, b), F.layer_norm(model[0](X), (7,), b), torch.addmm(b, X, w.t())]
    return [*layers, w + 1, 2 * w, w[1:3], w.detach(), w.data, torch.where(w > 0, w, 0.0), torch.cat([w, w])]


def writes(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    old = list(model.parameters())
    lay_out()
    version = old[0]._version
    with torch.no_grad():
        old[0].mul_(2)
        kept = old[1]
        kept += 1
        old[2].copy_(torch.ones(3, 7, dtype=torch.double))
        torch._foreach_add_(old, [p.detach() * 2 for p in old], alpha=0.5)
    assert old[0]._version > version
    old[0].data.add_(1)
    old[1].data = old[1].data * 2
    old[3].data.copy_(old[3].data + 1)
    nn.init.constant_(old[2], 0.5)
    return list(model.parameters())


def gradients_of_old(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    old = list(model.parameters())
    lay_out()
    out = [*torch.autograd.grad(model(X).square().sum(), old), *torch.autograd.grad(old[0].square().sum(), old[0])]
    model(X).square().sum().backward(inputs=old[:2])
    torch.autograd.backward(model(X).square().sum(), inputs=old[1:3])
    assert old[3].grad is None
    model[2].bias.grad = torch.zeros_like(old[3])
    sum(p.square().sum() for p in old).backward()  # type: ignore[union-attr]
    with implicit_replication():
        (F.linear(X, old[0]).sum() + F.linear(model[0](X), old[2], old[3]).sum()).backward()
    norm = nn.utils.clip_grad_norm_(old, 0.5)
    out += [norm, *[g.clone() for g in gradients(model)]]
    old[0].grad.zero_()
    out.append(model[0].weight.grad)
    old[0].grad = None
    assert model[0].weight.grad is None
    old[1].requires_grad = False
    assert not model[0].bias.requires_grad
    return out


def weakly_held(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    held = [weakref.ref(p) for p in model.parameters()]
    lay_out()
    backward(model)
    return [p().grad for p in held]  # type: ignore[union-attr, misc]


def in_another_model(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    beside = nn.Linear(5, 7).double()
    beside.weight = model[0].weight
    lay_out()
    backward(model)
    with implicit_replication():
        beside(X).sum().backward()
    return [beside.weight.grad, model[0].weight.grad]  # type: ignore[list-item]


# -- what hangs on parameters


def gradient_that_was_there(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    backward(model)
    model[2].bias.grad = None
    lay_out()
    assert model[2].bias.grad is None
    backward(model)
    return gradients(model)


class Tagged(nn.Parameter):
    """A parameter of a class of the user's own."""


def attributes(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    model[0].weight = Tagged(model[0].weight.data)
    old = model[0].weight
    old.no_weight_decay, model[2].bias.group = True, "head"  # type: ignore[assignment]
    lay_out()
    assert model[0].weight.no_weight_decay is old.no_weight_decay is True
    assert model[2].bias.group == "head"
    assert isinstance(old, Tagged)
    return [old]


def hooks(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    seen: list[Tensor] = []
    w, b = model[0].weight, model[2].weight
    removed, doubled = w.register_hook(lambda g: seen.append(g.clone())), w.register_hook(lambda g: g * 2)
    b.register_hook(lambda g: seen.append(g.clone()))
    b.requires_grad_(False)
    after = w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    lay_out()
    b.requires_grad_(True)
    backward(model)
    assert len(seen) == 3
    removed.remove()
    after.remove()
    w.register_hook(lambda g: seen.append(g.clone()))
    backward(model)
    assert len(seen) == 5
    doubled.remove()
    backward(model)
    return [*seen, *gradients(model)]


def steps_in_backward(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    optimizers = {p: SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    lay_out()
    backward(model)
    backward(model)
    return list(model.parameters())


# -- optimisers and averages


def optimizer_before(make: Callable[..., Optimizer], plain_steps: int) -> Program:
    def program(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
        head = list(model[2].parameters())
        optimizer = make([{"params": list(model[0].parameters())}, {"params": head, "lr": 0.03}], lr=0.1)
        train(model, optimizer, plain_steps)
        lay_out()
        train(model, optimizer, 3)
        return list(model.parameters())

    return program


def in_two_models(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    beside = nn.Linear(5, 7).double()
    beside.weight = model[0].weight
    lay_out()
    optimizer = SGD(list(dict.fromkeys([*model.parameters(), *beside.parameters()])), 0.1)
    train(model, optimizer, 2)  # one step of the weight that both have
    return list(model.parameters())


def with_closure(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    lay_out()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return list(model.parameters())


def average_of_old(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    old = list(model.parameters())
    shadows = [p.detach().clone() for p in old]
    optimizer = SGD(old, 0.1)
    lay_out()
    for _ in range(2):
        train(model, optimizer, 1)
        with torch.no_grad():
            shadows[0].mul_(0.5).add_(old[0], alpha=0.5)
            shadows[1] *= 0.5
            shadows[1] += old[1].data / 2
            torch._foreach_lerp_(shadows[2:], list(model.parameters())[2:], 0.5)
    assert not any(isinstance(each, DTensor) for each in shadows)
    return shadows


def averaged_model(before: bool, **options: Any) -> Program:
    def program(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
        average = AveragedModel(model, **options) if before else None
        lay_out()
        average = average or AveragedModel(model, **options)
        optimizer = SGD(model.parameters(), 0.1)
        for _ in range(3):
            train(model, optimizer, 1)
            average.update_parameters(model)
        return list(average.module.parameters())

    return program


# -- copies


def copies(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    old = list(model.parameters())
    lay_out()
    copied, of_old = copy.deepcopy((model, old))
    assert all(a is b for a, b in zip(copied.parameters(), of_old, strict=True))
    file = io.BytesIO()
    torch.save({"old": old, "new": list(model.parameters())}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(a is b for a, b in zip(loaded["old"], loaded["new"], strict=True))
    return [*of_old, *loaded["old"]]


def buffers(model: nn.Sequential, lay_out: LayOut) -> list[Tensor]:
    model.register_buffer("table", torch.zeros(3, dtype=torch.double))
    table, view = model.table, model.table[1:]
    lay_out()
    with torch.no_grad():
        model.table.add_(1)
        table.mul_(2)
    return [model.table, table, view]


SIMULATED: dict[str, Program] = {
    each.__name__: each
    for each in (
        *(reads, writes, gradients_of_old, weakly_held, in_another_model, gradient_that_was_there, hooks),
        *(steps_in_backward, in_two_models, with_closure, average_of_old),
    )
} | {
    "SGD after plain steps": optimizer_before(lambda p, lr: SGD(p, lr, momentum=0.9), 2),
    "AdamW after plain steps": optimizer_before(AdamW, 2),
    "Adam without lists after plain steps": optimizer_before(lambda p, lr: Adam(p, lr, foreach=False), 1),
    "Adagrad": optimizer_before(Adagrad, 0),
    "Adafactor after plain steps": optimizer_before(torch.optim.Adafactor, 1),
}
ON_RANKS: dict[str, Program] = {
    "attributes": attributes,
    "copies": copies,
    "buffers": buffers,
    "weakly held": weakly_held,
    "average of old": average_of_old,
    "AdamW after plain steps": optimizer_before(AdamW, 1),
    "average before": averaged_model(True),
    "average after": averaged_model(False),
    "moving average before": averaged_model(True, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True),
}
