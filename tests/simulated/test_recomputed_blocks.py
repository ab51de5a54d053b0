"""Blocks that are recomputed in the backward pass run as in the forward pass of the parallelized model."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from dshard import (
    Mesh,
    Replicate,
    Shard,
    clear_caches,
    distribute_tensor,
    experts,
    mlp_experts,
    parallel,
    parallelize,
    trace,
)
from dshard.parallel import Precision, plan_model
from dshard.testing import simulated, whole


class Attending(nn.Module):
    """Attention with a residual, and a plain tensor that is made within."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2)) * torch.tensor(0.5, dtype=x.dtype)  # type: ignore[no-any-return]


class Recomputing(nn.Module):
    """Blocks that are recomputed in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.use_reentrant = nn.Linear(8, 8), use_reentrant
        self.blocks = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_blocks_have_the_attention_of_their_plan(use_reentrant: bool) -> None:
    x, alone = torch.randn(2, 8, 8, dtype=torch.float64), Recomputing(use_reentrant).double()
    alone(x).sin().sum().backward()
    mesh = Mesh((4,), ("cp",))
    with simulated(mesh):
        model = parallelize(Recomputing(use_reentrant).double(), mesh, "ulysses", x)
        model(x).sin().sum().backward()

        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad)


class Ending(nn.Module):
    """Blocks that save what an activation gives after the last product, which dshard's checkpoint may leave out."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputed = recomputed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()) for _ in "ab"
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = parallel.checkpoint(block, x) if self.recomputed else block(x)
        return x


@pytest.mark.parametrize("strategy", ["data", "fsdp", "megatron"])
def test_what_follows_the_last_product_of_a_recomputed_block_is_saved_again(strategy: str) -> None:
    x, alone, mesh = torch.randn(4, 8, dtype=torch.float64), Ending(False).double(), Mesh((4,), ("x",))
    alone(x).square().sum().backward()
    with simulated(mesh):
        model = parallelize(Ending(True).double(), mesh, strategy, x)
        model(x).square().sum().backward()

        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad)


class Inside(Attending):
    """A block that recomputes its own forward pass, so that hooks around the block do not run again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.norm, self.use_reentrant = nn.LayerNorm(8), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: super(Inside, self).forward(self.norm(x)), x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class RecomputingInside(Recomputing):
    """Blocks that recompute their own forward passes."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(use_reentrant)
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Inside(use_reentrant) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("strategy", "use_reentrant"), one_way_each(["data", "fsdp", "megatron"], [False, True], every=2)
)
def test_blocks_that_recompute_themselves_use_weights_in_their_dtype(strategy: str, use_reentrant: bool) -> None:
    x, alone = torch.randn(4, 8, 8, dtype=torch.float64), RecomputingInside(use_reentrant).double()
    alone(x).sin().sum().backward()
    mesh = Mesh((4,), ("x",))
    with simulated(mesh):
        precision = Precision(torch.float64)
        model = parallelize(RecomputingInside(use_reentrant), mesh, strategy, x.float(), precision=precision)
        model(x).sin().sum().backward()

        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            assert mine.grad.dtype == torch.float32
            torch.testing.assert_close(whole(mine.grad).double(), theirs.grad, rtol=1e-5, atol=1e-6)


def test_blocks_that_recompute_themselves_gather_their_weights_at_once() -> None:
    x, mesh, gathers = torch.randn(4, 8, 8), Mesh((4,), ("x",)), []
    for make in (Recomputing, RecomputingInside):
        with simulated(mesh):
            model = parallelize(make(False), mesh, "fsdp", x)
            model.blocks = model.blocks[:2]
            for _ in range(2):
                with trace() as sent:
                    model(x).sin().sum().backward()
        gathers.append(sum(event.collective == "all_gather" for event in sent.events))
    assert gathers[1] <= gathers[0]


class Adapted(nn.Module):
    """A layer and a norm, before which an adapter may stand, recomputed together with a plain tensor."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.use_reentrant = use_reentrant
        self.adapter: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.recomputed, self.first(x), use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

    def recomputed(self, x: Tensor) -> Tensor:
        y = x * torch.full((8,), 0.5, dtype=x.dtype)
        return self.layer(y if self.adapter is None else y + self.adapter(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("strategy", "use_reentrant"), one_way_each(["data", "auto"], [False, True]))
def test_what_is_recomputed_beside_modules_counts_plain_tensors(strategy: str, use_reentrant: bool) -> None:
    """Weights of an adapter that is added later are plain; statistics are updated again, as on one device."""
    x, alone, mesh = torch.randn(8, 8, dtype=torch.float64), Adapted(use_reentrant).double(), Mesh((4,), ("x",))
    model, adapters = Adapted(use_reentrant).double(), [nn.Linear(8, 8, bias=False).double() for _ in range(2)]
    adapters[1].load_state_dict(adapters[0].state_dict())
    alone.adapter = adapters[0]
    alone(x).sin().sum().backward()
    with simulated(mesh):
        parallelize(model, mesh, strategy, x)  # whose plan is priced on tensors without data
        model.adapter = adapters[1]
        model(x).sin().sum().backward()

        torch.testing.assert_close(adapters[1].weight.grad, adapters[0].weight.grad)
        for mine, theirs in zip(model.first.parameters(), alone.first.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad)
        for mine, theirs in zip(model.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(whole(mine), theirs)


def _keeps_matmuls(context: Any, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_kept = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_selective_checkpoint_keeps_no_tensor_by_which_shapes_are_inferred() -> None:
    """In the forward pass matmuls run on tensors without data, too, when a call is new; in the recomputation not."""
    contexts, mesh = partial(create_selective_checkpoint_contexts, _keeps_matmuls), Mesh((2,), ("x",))
    own = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(4, 6), (8, 6)]]
    F.linear(*own).sin().sum().backward()
    clear_caches()
    with simulated(mesh):
        x, w = (distribute_tensor(each.detach(), mesh, [Shard(0)]).requires_grad_() for each in own)
        out = checkpoint(lambda *args: F.linear(*args).sin(), x, w, use_reentrant=False, context_fn=contexts)
        out.sum().backward()

        torch.testing.assert_close([whole(x.grad), whole(w.grad)], [each.grad for each in own])


class Recomputed(nn.Module):
    """A block, and a layer that no module within the model calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))  # type: ignore[no-any-return]


def test_a_model_that_is_recomputed_goes_on_with_its_plan_behind_a_block() -> None:
    """The layer behind the block is laid out by cost, and not as the one in the block."""
    x, alone, mesh = torch.randn(8, 8, dtype=torch.float64), Recomputed().double(), Mesh((2,), ("x",))
    alone(x).sin().sum().backward()
    plan = plan_model(alone, mesh, "auto", x)
    plan = replace(plan, calls=(replace(plan.calls[0].by_cost(), rows=("n",)), plan.calls[1].by_cost()))
    with simulated(mesh), set_checkpoint_early_stop(False):
        model, laid = parallelize(Recomputed().double(), mesh, plan), list[Any]()
        model.head.register_forward_hook(lambda module, args, out: laid.append(out.placements))
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=False).sin().sum().backward()

        assert len(laid) == 2
        assert laid[0] == laid[1] != (Shard(1),)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad)


class Reversible(torch.autograd.Function):
    """A residual whose backward pass runs its module again, and differentiates by the weights that it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *weights: Tensor) -> Tensor:
        ctx.module, ctx.weights = module, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.module(x)
            gradient, *of_weights = torch.autograd.grad(out, [x, *ctx.weights], grads[0])
        return grads[0] + gradient, None, *of_weights


class ReversibleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return Reversible.apply(x, self.inner, *self.inner.parameters())  # type: ignore[no-any-return, no-untyped-call]


def test_a_backward_pass_differentiates_by_the_gathered_weights_that_its_forward_pass_was_given() -> None:
    def net() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), ReversibleBlock(), ReversibleBlock(), nn.Linear(8, 4))

    x, alone = torch.randn(4, 8), net()
    alone(x).square().sum().backward()
    with simulated(Mesh((2,), ("dp",))):
        model = parallelize(net(), Mesh((2,), ("dp",)), "fsdp", x)
        model(x)
        for each in (model, model, deepcopy(model)):
            each.zero_grad()
            each(x).square().sum().backward()
            for found, expected in zip(each.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(whole(found.grad), expected.grad)


def test_sums_without_gradients_that_are_recomputed_are_no_sums_of_gradients() -> None:
    seen = list[object]()

    def part(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        out = F.linear(x, w)
        with torch.no_grad():
            seen.append((out + y).placements)  # type: ignore[attr-defined]
        return out.relu()

    mesh = Mesh((2, 1), ("x", "y"))  # of one rank a sum costs nothing, so what it is for decides
    with simulated(mesh):
        x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0), Shard(1)]).requires_grad_()
        w = distribute_tensor(torch.randn(4, 8), mesh, [Replicate(), Shard(1)]).requires_grad_()
        y = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0), Replicate()])
        checkpoint(part, x, w, y, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_experts_are_recomputed_once() -> None:
    kept = [torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default]
    policy = partial(create_selective_checkpoint_contexts, kept)
    mesh, runs, gradients = Mesh((2,), ("x",)), list[int](), list[list[Tensor]]()
    torch.manual_seed(0)
    x, index, weight = torch.randn(6, 4), torch.randint(3, (6, 2)), torch.rand(6, 2)
    given = [x, weight, torch.randn(3, 8, 4), torch.randn(3, 4, 8)]

    def layer(x: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
        runs.append(0)
        return experts(mlp_experts(), x, laid_index, weight, up, down, loops="ragged").sin()

    with simulated(mesh):
        laid_index = distribute_tensor(index, mesh, [Shard(0)])
        for contexts in (None, {}, {"context_fn": policy}):
            leaves = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in given]
            runs.clear()
            out = layer(*leaves) if contexts is None else checkpoint(layer, *leaves, use_reentrant=False, **contexts)
            out.square().sum().backward()
            assert len(runs) == 1 + (contexts is not None)
            gradients.append([whole(leaf.grad) for leaf in leaves])
    for each in gradients[1:]:
        torch.testing.assert_close(each, gradients[0])
