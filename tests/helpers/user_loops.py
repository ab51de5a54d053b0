"""Training loops as people write them: what stands around a model that `lay_out` may have parallelized.

Each is one program on one device and on a mesh. It yields the numbers that its writer would log.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

LayOut = Callable[..., Any]
"""Parallelize a model, given it and an example of what it takes; or give it back, on one device."""


class Perceptron(nn.Module):
    def __init__(self, features: int = 6, classes: int = 5, width: int = 16) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(features, width), nn.Linear(width, classes)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in "ab")
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def classified(rows: int, features: int = 6, classes: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, features), torch.randint(classes, (rows,))


def accumulated_and_clipped(lay_out: LayOut) -> Iterator[Any]:
    """Microbatches, clipping by norm and by value, a warm-up schedule, weight decay on matrices alone."""
    model = Perceptron()
    x, y = classified(8)
    lay_out(model, x[:4])
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [2])
    for _ in range(4):
        total = 0.0
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            loss = F.cross_entropy(model(xs), ys) / 2
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield total, norm, schedule.get_last_lr()[0]


def averaged_by_hand(lay_out: LayOut) -> Iterator[Any]:
    """An exponential moving average in a copy of the model, updated by hand, and evaluated."""
    model = Perceptron()
    x, y = classified(7)
    lay_out(model, x)
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        ema.eval()
        with torch.inference_mode():
            top = ema(x).topk(2, -1).indices
        yield loss, (top == y[:, None]).any(1).double().mean()


def averaged_stochastically(lay_out: LayOut) -> Iterator[Any]:
    """Stochastic weight averaging, with the statistics of a batch norm computed anew."""
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))
    x, y = classified(8)
    lay_out(model, x)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slow = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for _ in range(4):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        slow.step()
        yield loss
    update_bn([(x,), (x[:4],)], average)
    average.eval()
    yield F.cross_entropy(average(x), y)


def scaled_autocast(lay_out: LayOut) -> Iterator[Any]:
    """Mixed precision with a scaler, whose scale grows."""
    model = Perceptron().float()
    x, y = classified(8)
    x = x.float()
    lay_out(model, x)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss.item(), scaler.get_scale()


class Recomputed(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=bool(i))
        return self.head(self.norm(x))


def recomputed(lay_out: LayOut) -> Iterator[Any]:
    """Activations computed again, by both ways of torch's `checkpoint`."""
    model = Recomputed()
    x, y = classified(8)
    lay_out(model, x)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = F.nll_loss(F.log_softmax(model(x), -1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def frozen_then_not(lay_out: LayOut) -> Iterator[Any]:
    """A head is trained on frozen features, which are then trained at a lower rate."""
    model = Perceptron()
    x, y = classified(8)
    lay_out(model, x)
    for name, p in model.named_parameters():
        p.requires_grad = name.startswith("head")
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(4):
        if step == 2:
            model.requires_grad_(True)
            rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
            optimizer.add_param_group({"params": rest, "lr": 0.01})
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item(), sum(p.numel() for p in model.parameters() if p.grad is not None)


def hooked(lay_out: LayOut) -> Iterator[Any]:
    """Hooks on modules, tensors and parameters read, replace and log activations and gradients."""
    model = Perceptron()
    x, y = classified(6)
    lay_out(model, x)
    seen: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, out: seen.update({name: out.detach().norm()})

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(keep(name))
    model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.norm.register_full_backward_hook(lambda module, grads, outs: seen.update(back=outs[0].norm()))
    model.stem.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    model.head.bias.register_post_accumulate_grad_hook(lambda p: seen.update(bias=p.grad.abs().max()))
    for _ in range(3):
        logits = model(x)
        logits.register_hook(lambda grad: seen.update(logits=grad.abs().sum()))
        loss = F.cross_entropy(logits, y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        yield loss, model.stem.weight.grad.norm(), *(float(value) for _, value in sorted(seen.items()))


def stopped_early(lay_out: LayOut) -> Iterator[Any]:
    """Validation, a plateau schedule, the best parameters kept and loaded, losses that are checked for NaN."""
    model = Perceptron()
    (x, y), (valid_x, valid_y) = classified(8), classified(5)
    lay_out(model, x)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.05)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
    best, kept, stale = float("inf"), model.state_dict(), 0
    for _ in range(4):
        model.train()
        loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            raise RuntimeError("diverged")
        optimizer.zero_grad()
        loss.backward()
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(valid_x)
            valid, accuracy = F.cross_entropy(logits, valid_y), (logits.argmax(1) == valid_y).sum() / len(valid_y)
        plateau.step(valid)
        if valid < best:
            best, stale, kept = valid.item(), 0, {name: p.clone() for name, p in model.state_dict().items()}
        else:
            stale += 1
        yield loss, valid, accuracy, stale, optimizer.param_groups[0]["lr"]
    model.load_state_dict(kept)
    with torch.no_grad():
        yield F.cross_entropy(model(valid_x), valid_y)


def saved_and_resumed(lay_out: LayOut) -> Iterator[Any]:
    """State dicts of a model and an optimizer go through `torch.save`, into new ones that are laid out anew."""
    x, y = classified(8)
    state: Any = None
    for resumed in range(2):
        model = Perceptron()
        lay_out(model, x)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
        if resumed:
            state.seek(0)
            loaded = torch.load(state)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss
        state = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state)


def called_with_parameters(lay_out: LayOut) -> Iterator[Any]:
    """`functional_call`, gradients by `torch.autograd.grad`, and a step within the step (MAML)."""
    model = Perceptron()
    (x, y), (query, wanted) = classified(8), classified(8)
    lay_out(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        params = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        moved = {name: p - 0.1 * grad for (name, p), grad in zip(params.items(), grads, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(model, moved, (query,)), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield inner, loss


def closures(lay_out: LayOut) -> Iterator[Any]:
    """An optimizer that evaluates the loss several times, and one step of sharpness-aware minimisation."""
    model = Perceptron()
    x, y = classified(8)
    lay_out(model, x)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        yield optimizer.step(closure)
    closure()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        steps = [p.grad * (0.05 / norm) for p in model.parameters()]
        for p, step in zip(model.parameters(), steps, strict=True):
            p.add_(step)
    yield norm, closure()


LOOPS: tuple[Callable[[LayOut], Iterator[Any]], ...] = (
    accumulated_and_clipped,
    averaged_by_hand,
    averaged_stochastically,
    scaled_autocast,
    recomputed,
    frozen_then_not,
    hooked,
    stopped_early,
    saved_and_resumed,
    called_with_parameters,
    closures,
)
