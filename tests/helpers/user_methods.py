"""Methods of training, and looks at a model, as people write them: quantised weights, per-sample gradients, pruning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import prune
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import dshard
from helpers.user_loops import LayOut, Perceptron, classified
from helpers.user_models import trained


class Quantized(nn.Module):
    """Weights rounded as for int8: of a whole tensor by torch, of each row by a straight-through estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        scale = float(self.up.weight.detach().abs().max()) / 127
        x = F.relu(F.linear(x, torch.fake_quantize_per_tensor_affine(self.up.weight, scale, 0, -128, 127)))
        weight = self.down.weight
        rows = weight.detach().abs().amax(1, keepdim=True) / 127
        return F.linear(x, weight + ((weight / rows).round().clamp(-128, 127) * rows - weight).detach())


def quantized(lay_out: LayOut) -> Iterator[Any]:
    model, (x, y) = Quantized(), classified(8)
    lay_out(model, x)
    yield from trained(model, lambda: F.cross_entropy(model(x), y))


def per_sample_gradients(lay_out: LayOut) -> Iterator[Any]:
    """The norm of each row's gradient, as for differential privacy."""
    model, (x, y) = Perceptron(), classified(8)
    lay_out(model, x)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    rows: Any = (x, y)
    if isinstance(model.head.weight, dshard.DTensor):
        rows = dshard.distribute_batch(model, rows)

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    for gradient in vmap(grad(loss), (None, 0, 0))(weights, *rows).values():
        yield gradient.flatten(1).norm(dim=1).tolist()


def optimized_in_backward(lay_out: LayOut) -> Iterator[Any]:
    """Each parameter is stepped by an optimiser of its own as soon as its gradient is there."""
    model, (x, y) = Perceptron(), classified(8)
    lay_out(model, x)
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        yield loss


def sharpness_aware(lay_out: LayOut) -> Iterator[Any]:
    """Each step goes by the gradient at the worst point near the parameters, which are then put back."""
    model, (x, y) = Perceptron(), classified(8)
    lay_out(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        before = [p.data.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad / norm, alpha=0.05)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p, value in zip(model.parameters(), before, strict=True):
            p.data = value
        optimizer.step()
        optimizer.zero_grad()
        yield loss, norm


def pruned(lay_out: LayOut) -> Iterator[Any]:
    model, (x, y) = Perceptron(), classified(8)
    lay_out(model, x)
    prune.l1_unstructured(model.stem, "weight", amount=0.3)
    prune.ln_structured(model.head, "weight", amount=0.25, n=2, dim=0)
    yield from trained(model, lambda: F.cross_entropy(model(x), y))
    prune.remove(model.stem, "weight")
    yield (model.stem.weight == 0).sum(), model(x).sum()


def kept_products(ctx: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Perceptron):
    """Its blocks are recomputed in the ways that torch has."""

    how = "sequential"

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.how.startswith("sequential"):
            x = checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant="reentrant" in self.how)
        else:
            contexts = partial(create_selective_checkpoint_contexts, kept_products)
            options: dict[str, Any] = {"context_fn": contexts} if self.how == "selective" else {}
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=self.how == "reentrant", **options)
        return self.head(self.norm(x))


def checkpointed(lay_out: LayOut) -> Iterator[Any]:
    model, (x, y) = Checkpointed(), classified(8)
    lay_out(model, x)
    for model.how in ("sequential", "sequential reentrant", "reentrant", "each", "selective"):
        yield from trained(model, lambda: F.cross_entropy(model(x), y), steps=1)


def taught_by_average(lay_out: LayOut) -> Iterator[Any]:
    """A teacher that is a copy of the parallelized model and follows it, buffers as well."""
    model, (x, y) = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)), classified(8)
    lay_out(model, x)
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        said = teacher(x).softmax(1)
        loss = F.kl_div(model(x + 0.1).log_softmax(1), said, reduction="batchmean") + F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
            for mine, other in zip(teacher.buffers(), model.buffers(), strict=True):
                mine.copy_(other)
        yield loss


def measured(lay_out: LayOut) -> Iterator[Any]:
    """What is told of a classifier: confusions, the best of k, an area under a curve, calibration."""
    model, (x, y) = Perceptron(), classified(12)
    lay_out(model, x)
    with torch.no_grad():
        out = model(x)
    found = out.argmax(1)
    yield torch.bincount(y * 5 + found, minlength=25).tolist()
    hits = out.topk(3)[1].t().eq(y.view(1, -1).expand(3, -1))
    yield [hits[:k].reshape(-1).double().sum() / 12 for k in (1, 3)]
    order = torch.argsort(out.softmax(1)[:, 1], descending=True)
    right, wrong = ((y == 1)[order].cumsum(0), (y != 1)[order].cumsum(0))
    yield torch.trapezoid(right / right[-1].clamp(min=1), wrong / wrong[-1].clamp(min=1))
    sure, _ = out.softmax(1).max(1)
    bins = torch.bucketize(sure, torch.linspace(0, 1, 6))
    yield [float(sure[bins == i].mean()) if (bins == i).any() else 0.0 for i in range(6)]
    yield torch.quantile(out, 0.9), torch.histc(out, bins=5, min=-1, max=1).tolist(), out.std()


METHODS: tuple[Callable[[LayOut], Iterator[Any]], ...] = (
    quantized,
    per_sample_gradients,
    optimized_in_backward,
    sharpness_aware,
    pruned,
    checkpointed,
    taught_by_average,
    measured,
)
