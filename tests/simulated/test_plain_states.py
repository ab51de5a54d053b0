"""Steps of optimisers with plain states are one device's; a closure, and what follows a step that raised, are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.kept_parameters import X, backward, build
from torch import Tensor, nn
from torch.optim import Optimizer

from dshard import DTensor, Mesh, MixedError, distribute_tensor, manual_seed, parallelize
from dshard.comm.rank_tensors import per_rank
from dshard.placements import Replicate, Shard
from dshard.testing import simulated, whole

PLANS = {"fsdp": Mesh((3,), ("x",)), "megatron": Mesh((2,), ("x",))}


class Stepping(Optimizer):
    """Gradients divided by what `scaled` makes of them and of a state that begins as `begin` makes it."""

    def __init__(
        self, parameters: Any, begin: Callable[[Tensor], list[Tensor]], scaled: Callable[[Tensor, list[Tensor]], Tensor]
    ) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.begin, self.scaled = begin, scaled

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad.data
                if not state:
                    state["step"], state["plain"] = torch.zeros(1), self.begin(grad)
                state["step"] += 1
                p.data.add_(self.scaled(grad, state["plain"]), alpha=-group["lr"] / float(state["step"]))
        return loss


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.double)


def kronecker(grad: Tensor, factors: list[Tensor]) -> Tensor:
    """By the inverses of sums of products, one for each dim, kept as plain matrices."""
    out = grad
    for dim, factor in enumerate(factors):
        rows = grad.movedim(dim, 0).reshape(grad.shape[dim], -1)
        factor.add_(rows @ rows.T)
        out = torch.tensordot(out, torch.linalg.inv(factor), dims=([0], [0]))
    return out


def rotated(grad: Tensor, bases: list[Tensor]) -> Tensor:
    """In the basis of a QR factorisation of the sum so far, replaced in each step."""
    rows = grad.reshape(grad.shape[0], -1)
    bases[0] = torch.linalg.qr(0.9 * bases[0] + rows @ rows.T).Q
    return (bases[0] @ (bases[0].T @ rows).sign()).reshape(grad.shape)


def factored(grad: Tensor, moments: list[Tensor]) -> Tensor:
    """By second moments of rows and columns alone."""
    squares = grad.square().reshape(grad.shape[0], -1)
    moments[0].mul_(0.9).add_(squares.mean(1), alpha=0.1)
    torch._foreach_lerp_(moments[1:], [squares.mean(0)], 0.1)
    scale = torch.outer(moments[0], moments[1]) / moments[0].mean()
    return grad / (scale.reshape(grad.shape).sqrt() + 1e-3)


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "Kronecker factors": (lambda grad: [eye(n) for n in grad.shape], kronecker),
    "QR of a state": (lambda grad: [eye(grad.shape[0])], rotated),
    "factored moments": (
        lambda grad: [torch.zeros(n, dtype=torch.double) for n in (len(grad), grad.numel() // len(grad))],
        factored,
    ),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_plain_states_is_that_of_one_device(name: str, plan: str) -> None:
    def trained(model: nn.Module) -> list[Tensor]:
        optimizer = Stepping(model.parameters(), *OPTIMIZERS[name])
        for _ in range(2):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    alone = trained(build())
    with simulated(PLANS[plan]):
        laid_out = [whole(p) for p in trained(parallelize(build(), PLANS[plan], plan, X)) if isinstance(p, DTensor)]

    torch.testing.assert_close([p.detach() for p in laid_out], [p.detach() for p in alone])


def unlike(mesh: Mesh, *shape: int) -> Tensor:
    """A plain tensor of which each rank has other values."""
    return per_rank(mesh, lambda rank: torch.full(shape, float(rank), dtype=torch.double))


def test_a_plain_target_that_ranks_do_not_share_is_refused_in_a_closure() -> None:
    mesh = PLANS["fsdp"]
    with simulated(mesh):
        model = parallelize(build(), mesh, "fsdp", X)
        optimizer = Stepping(model.parameters(), *OPTIMIZERS["factored moments"])

        with pytest.raises(MixedError):
            optimizer.step(lambda: F.mse_loss(model(X), unlike(mesh, 4, 3)).backward())


def test_a_step_that_raises_leaves_plain_tensors_refused() -> None:
    mesh = PLANS["fsdp"]

    def fail(grad: Tensor, state: list[Tensor]) -> Tensor:
        raise KeyError("state")

    with simulated(mesh):
        model = parallelize(build(), mesh, "fsdp", X)
        backward(model)
        with pytest.raises(KeyError):
            Stepping(model.parameters(), lambda grad: [], fail).step()
        with pytest.raises(MixedError), torch.no_grad():
            model[0].weight * unlike(mesh, 7, 5)  # type: ignore[index]


def test_sparse_values_do_not_depend_on_the_mesh() -> None:
    def drawn(mesh: Mesh, *placements: Any) -> Tensor:
        torch.manual_seed(0)
        manual_seed(0)
        with simulated(mesh):
            x = distribute_tensor(torch.zeros(7, 5), mesh, placements)
            nn.init.sparse_(x, 0.4)
            return whole(x)

    one = drawn(Mesh((1,), ("x",)), Replicate())
    assert (one == 0).sum(0).eq(3).all()
    for mesh, placements in [(Mesh((3,), ("x",)), [Shard(0)]), (Mesh((2, 2), ("x", "y")), [Shard(1), Shard(0)])]:
        torch.testing.assert_close(drawn(mesh, *placements), one)
