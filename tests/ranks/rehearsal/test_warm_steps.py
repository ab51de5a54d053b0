"""Warm steps run what first ones do, by fewer functions of Python: equal to one device, whatever comes between."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dshard import Replicate, Shard, distribute_tensor, init_device_mesh, parallelize, trace, use_strategy
from dshard.testing import RankPool

CLASSES = 5
DEBUG = os.environ.get("DSHARD_DEBUG") == "1"


class Block(nn.Module):
    """Attention between linear modules, with a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def batch(rows: int, seed: int, ignored: int) -> tuple[Tensor, Tensor]:
    """Words, and classes of which some are `ignored`."""
    rng = torch.Generator().manual_seed(seed)
    words = torch.randint(CLASSES, (rows, 4), generator=rng)
    classes = torch.randint(CLASSES, (rows, 4), generator=rng)
    return words, classes.masked_fill(torch.rand(rows, 4, generator=rng) < 0.3, ignored)


def compare(model: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def steps() -> None:
    """Steps of other sizes, in training and not, traced on one rank alone, recomputed, without gradients."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = Net().double(), Net().double()
    parallelize(model, mesh, "data", batch(8, 0, -100)[0])
    weights = torch.rand(CLASSES, dtype=torch.float64)
    laid: Any = distribute_tensor(weights, mesh, [Replicate()])
    for i, rows in enumerate((8, 8, 7, 7, 3, 8, 5, 5, 8, 8, 8)):
        words, classes = batch(rows, i % 4, 2 if i == 5 else -100)
        options: dict[str, Any] = {"ignore_index": 2} if i == 5 else {}
        for each, x, y, w in (
            (model, words, distribute_tensor(classes, mesh, [Shard(0)]), laid),
            (reference, words, classes, weights),
        ):
            each.train(i % 3 > 0)
            each.zero_grad()
            if i > 5:
                options["weight"] = w
            forward: Callable[..., Any] = (
                each if i != 8 else lambda *a, each=each: checkpoint(each, *a, use_reentrant=False)
            )
            here = each is model and (DEBUG or dist.get_rank() == 1)  # the debug mode wants all ranks alike
            seen: Any = trace() if i in (3, 9) and here else nullcontext()
            with seen:
                loss: Any = F.cross_entropy(forward(x).flatten(0, 1), y.flatten(), **options)
                if i == 10:
                    loss = loss * loss
                loss.backward()
            if each is model:
                got = loss.full_tensor()
        torch.testing.assert_close(got, loss)
        compare(model, reference)
        with torch.no_grad():
            torch.testing.assert_close(model(words).full_tensor(), reference(words))


def test_warm_steps_equal_one_device(ranks: RankPool):
    ranks.run(steps)


def second_order() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    torch.manual_seed(1)
    logits, classes = torch.randn(11, CLASSES, dtype=torch.float64), torch.randint(CLASSES, (11,))
    for _ in range(3):
        results: list[list[Tensor]] = []
        for placements in ([Shard(0)], None):
            x: Any = logits if placements is None else distribute_tensor(logits, mesh, placements)
            y: Any = classes if placements is None else distribute_tensor(classes, mesh, placements)
            x = x.clone().requires_grad_()
            loss = F.cross_entropy(2 * x, y) ** 2
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (again,) = torch.autograd.grad(grad.square().sum(), x)
            results.append([t.full_tensor() if placements else t for t in (loss.detach(), grad.detach(), again)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_second_derivatives_of_a_warm_mean(ranks: RankPool):
    ranks.run(second_order)


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions of Python are called in a run, without what collecting garbage calls."""
    count = 0

    def profile(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # a collection in a run calls what waits for the end of older objects: finalizers of other tests
    dist.barrier()  # a rank that waits for more than a second looks why, which takes calls
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def other_forms(mesh: Any) -> None:
    """Other calls of the model's functions: some run no operator, one writes, some run as several operators."""
    x: Any = distribute_tensor(torch.rand(4, 2, 4, 4), mesh, [Shard(2)])
    x.reshape(-1).flatten()
    for each in x, x.transpose(0, 1):
        each.contiguous()
    x.flip(2).chunk(2, 2)
    F.dropout(x, training=False)
    F.relu(x, inplace=True)
    with use_strategy(attention="ring"):
        F.scaled_dot_product_attention(x, x, x, is_causal=True)


def counted() -> tuple[int, ...]:
    """The functions of Python that a warm pass, a mean, and a step with and of an optimiser call beyond torch's own."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    other_forms(mesh)
    words, classes = batch(8, 0, -100)
    model, reference = Net(), Net()
    parallelize(model, mesh, "data", words)
    target: Any = distribute_tensor(classes, mesh, [Shard(0)])

    def loss_of(model: nn.Module, target: Tensor) -> tuple[Callable[[], Any], ...]:
        out: Any = model(words)

        def step() -> None:
            F.cross_entropy(model(words).flatten(0, 1), target.flatten()).backward()

        optimiser = torch.optim.AdamW(model.parameters(), fused=True)
        return lambda: model(words), lambda: F.cross_entropy(out.flatten(0, 1), target.flatten()), step, optimiser.step

    pairs = zip(loss_of(model, target), loss_of(reference, classes), strict=True)
    counts = []
    for ours, theirs in pairs:
        for _ in range(3):
            ours()
        # the least of several, as ranks may still wait for long in a run
        counts.append(min(calls_of(ours) for _ in range(3)) - calls_of(theirs))
    return tuple(counts)


@pytest.mark.skipif(DEBUG, reason="counts the functions of warm calls")
def test_a_warm_step_calls_few_functions_of_its_own(ranks: RankPool):
    operators = 33
    forward, mean, step, update = ranks.run(counted)[0]
    assert forward < 40 * operators, (
        "of about 33 operators, with the inputs laid out; blocks look for a backward pass; some keys share a hash"
    )
    assert mean < 240, "two views, the loss of the local rows, one collective"
    assert step < 2750, "with the gradients of 15 leaves, reduced together"
    assert update < 150, "a fused one of 15 parameters, whose writes are counted by one call"
