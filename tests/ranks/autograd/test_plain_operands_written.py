"""A plain tensor that is used among distributed ones and overwritten before the backward pass, which notices it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import THOROUGH, one_in
from torch import Tensor

import dshard
from dshard import DTensor, Layout, Mesh, Partial, Replicate, Shard, distribute_tensor, implicit_replication
from dshard.testing import RankPool, distribute, simulated, whole

REFUSED = "modified by an inplace operation"


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) + 0.5


X, ROW, TABLE = drawn(6, 5).log(), drawn(5), drawn(6, 5)
CLASSES, PLACES, MASK = torch.tensor([0, 4, 1, 2, 0, 3]), torch.tensor([5, 0, 3]), TABLE > 1
Use = Callable[[Tensor, Tensor], Tensor]
USES: dict[str, tuple[Use, Tensor]] = {
    "times a row": (lambda x, t: x * t, ROW),
    "divided by a row": (lambda x, t: x / t, ROW),
    "times a table": (lambda x, t: x * t, TABLE),
    "times a slice": (lambda x, t: x * t[:, 1:], drawn(6, 6)),
    "times what is turned": (lambda x, t: x * t.t(), drawn(5, 6)),
    "times an expanded row": (lambda x, t: x * t.expand(6, 5), ROW),
    "plus": (lambda x, t: x + t, ROW),
    "on the left": (lambda x, t: t * x.sin(), TABLE),
    "twice": (lambda x, t: (x * t).exp() * t, ROW),
    "a number": (lambda x, t: x * t, torch.tensor(1.5)),
    "one element": (lambda x, t: x * t, torch.tensor([1.5])),
    "matmul": (lambda x, t: x @ t, drawn(5, 3)),
    "matmul, on the left": (lambda x, t: t @ x, drawn(3, 6)),
    "linear": (lambda x, t: F.linear(x, t), drawn(3, 5)),
    "addcmul": (lambda x, t: torch.addcmul(x, x, t), TABLE),
    "lerp": (lambda x, t: x.lerp(x.sin(), t), TABLE),
    "where": (lambda x, t: torch.where(t, x, x * 2), MASK),
    "masked fill": (lambda x, t: x.masked_fill(t, 0.5), MASK),
    "masked rows": (lambda x, t: x[t].sum() * x, torch.tensor([True, False, True, True, False, True])),
    "index": (lambda x, t: x[t], PLACES),
    "index select": (lambda x, t: x.index_select(0, t), PLACES),
    "gather": (lambda x, t: x.gather(1, t.unsqueeze(1)), CLASSES),
    "embedding": (lambda x, t: F.embedding(t, x), PLACES),
    "scatter add": (lambda x, t: (x * 0).scatter_add(1, t.unsqueeze(1), x.sin()), CLASSES),
    "mse": (lambda x, t: F.mse_loss(x, t), TABLE),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t), CLASSES),
    "cross entropy of weights": (lambda x, t: F.cross_entropy(x, CLASSES.clone(), weight=t), ROW),
    "soft cross entropy": (lambda x, t: F.cross_entropy(x, t), TABLE),
    "logits": (lambda x, t: F.binary_cross_entropy_with_logits(x, t), TABLE / 2),
    "layer norm": (lambda x, t: F.layer_norm(x, (5,), t), ROW),
    "rms norm": (lambda x, t: F.rms_norm(x, (5,), t), ROW),
    "attention mask": (lambda x, t: attended(x, t), drawn(6, 6)),
    "prelu": (lambda x, t: F.prelu(x, t), ROW),
}


def attended(x: Tensor, mask: Tensor) -> Tensor:
    q = x.unsqueeze(0).unsqueeze(0)
    return F.scaled_dot_product_attention(q, q.sin(), q, attn_mask=mask)


def overwrite(t: Tensor) -> None:
    t.logical_not_() if t.dtype is torch.bool else t.fill_(2) if t.dtype is torch.int64 else t.mul_(3)


def gradient(use: Use, x: Tensor, t: Tensor, writes: bool, trains: bool) -> Tensor | str:
    """The gradient of a program whose plain operand is overwritten after the forward pass, or what refuses it."""
    t = t.clone().requires_grad_(trains and t.is_floating_point())
    out = use(x, t).square().sum()
    if writes:
        with torch.no_grad():
            overwrite(t)
    try:
        out.backward()
    except RuntimeError as error:
        return REFUSED if REFUSED in str(error) else str(error)
    assert x.grad is not None
    return x.grad


def check(use: Use, t: Tensor, layouts: Sequence[Layout], put: Callable[[Layout], DTensor], trains: bool) -> None:
    right = gradient(use, X.clone().requires_grad_(), t, writes=False, trains=trains)
    alone = gradient(use, X.clone().requires_grad_(), t, writes=True, trains=trains)
    for layout in layouts:
        for _ in range(3):  # cold, specialised, warm
            found = gradient(use, put(layout).requires_grad_(), t, writes=True, trains=trains)
            if isinstance(found, Tensor):  # it had a copy
                torch.testing.assert_close(whole(found), right, msg=f"{layout}")
            else:
                assert found == REFUSED == alone, layout


@pytest.mark.parametrize("name", one_in(3, USES))
def test_a_backward_pass_notices_a_plain_operand_that_was_overwritten(name: str) -> None:
    mesh = Mesh((3,), ("x",))
    layouts = [Layout(mesh, [placement]) for placement in (Shard(0), Shard(1), Replicate(), Partial())]
    with simulated(mesh), implicit_replication():
        check(*USES[name], layouts, lambda layout: distribute(X, layout), trains=False)


def on_ranks(every: int) -> None:
    mesh = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    layouts = [Layout(Mesh((4,), ("x",)), [placement]) for placement in (Shard(0), Partial())]
    with implicit_replication():
        for name, (use, t) in [*USES.items()][::every]:
            if t.is_floating_point() and name != "cross entropy of weights":  # which have no gradient
                check(use, t, layouts, lambda layout: distribute_tensor(X, mesh, layout.placements), trains=True)


@pytest.mark.ranks
def test_a_backward_pass_notices_a_plain_parameter_that_was_overwritten(ranks: RankPool) -> None:
    ranks.run(on_ranks, 1 if THOROUGH else 3)
