"""One tensor given as several operands, and later calls with others: each call computes with its own operands."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dshard import Replicate, Shard, init_device_mesh
from dshard.caches import clear_caches
from dshard.comm import bind
from dshard.layout import Layout
from dshard.testing import RankPool, distribute

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
MATRICES: dict[str, Call] = {
    "mm": lambda x, y, z: x.mm(y),
    "matmul": lambda x, y, z: x @ y,
    "linear": lambda x, y, z: F.linear(x, y),
    "linear with bias": lambda x, y, z: F.linear(x, y, z[0]),
    "addmm": lambda x, y, z: torch.addmm(x, y, z, beta=0.5),
    "einsum": lambda x, y, z: torch.einsum("ij,kj->ik", x, y),
    "add": lambda x, y, z: torch.add(x, y, alpha=0.5),
    "sub": lambda x, y, z: x - y,
    "rsub": lambda x, y, z: torch.rsub(x, y),
    "div": lambda x, y, z: x / (y * y + 1),
    "mul": lambda x, y, z: x * y,
    "pow": lambda x, y, z: (x * x + 1).pow(y),
    "atan2": lambda x, y, z: x.atan2(y),
    "where": lambda x, y, z: torch.where(x > 0, y, z),
    "lerp": lambda x, y, z: torch.lerp(x, y, z),
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z.square() + 1),
    "cat": lambda x, y, z: torch.cat([x, y, z]),
    "stack": lambda x, y, z: torch.stack((x, y), 1),
    "cosine_similarity": lambda x, y, z: F.cosine_similarity(x, y),
    "mse_loss": lambda x, y, z: F.mse_loss(x, 2 * y),
    "huber_loss": lambda x, y, z: F.huber_loss(x, y * y, delta=0.3),
    "kl_div": lambda x, y, z: F.kl_div(x, y.square(), reduction="sum"),
    "triplet_margin_loss": lambda x, y, z: F.triplet_margin_loss(x, y, z),
    "layer_norm": lambda x, y, z: F.layer_norm(x, (4,), y[0], z[0]),
    "named operands": lambda x, y, z: F.layer_norm(x, (4, 4), weight=y, bias=z),
    "cdist": lambda x, y, z: torch.cdist(x, y + 1),
    "outer": lambda x, y, z: torch.outer(x[0], y[1]),
    "kron": lambda x, y, z: torch.kron(x, y),
    "bilinear": lambda x, y, z: F.bilinear(x, y, torch.stack((x, z)).reshape(2, 4, 4)),
}
HEADS: dict[str, Call] = {
    "bmm": lambda x, y, z: torch.bmm(x[0], y[0]),
    "baddbmm": lambda x, y, z: torch.baddbmm(x[0], y[0], z[0]),
    "batched matmul": lambda x, y, z: x @ y,
    "attention": lambda x, y, z: F.scaled_dot_product_attention(x, y, z),
    "causal attention": lambda x, y, z: F.scaled_dot_product_attention(x, y, z, is_causal=True),
    "named attention": lambda x, y, z: F.scaled_dot_product_attention(query=x, key=y, value=z),
    "masked attention": lambda x, y, z: F.scaled_dot_product_attention(x, y, z, attn_mask=z),
}
PATTERNS = ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 1, 2), (1, 1, 1))
SQUARE = (Shard(1), Shard(0))
BY_HEADS = (Shard(0), Shard(1))
WHOLE = (Replicate(), Replicate())


def results(call: Call, tensors: list[Tensor], pattern: tuple[int, ...]) -> list[Any]:
    """What a call returns on tensors in this pattern and, where they are recorded, their gradients."""
    out = call(*(tensors[i] for i in pattern))
    recorded = [x for x in tensors if x.requires_grad]
    grads = torch.autograd.grad((out * out).sum(), recorded, allow_unused=True) if recorded else ()
    return [out, *grads]


def distance(have: Any, want: Tensor | None) -> float:
    """How far a result is from that of one device; none is as far as can be from one."""
    if have is None or want is None:
        return 0.0 if have is want else float("inf")
    return (have.full_tensor() - want).abs().max().item()


def different(every: int) -> list[str]:
    """The calls that differ from one device."""
    mesh, found = bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))), []
    torch.manual_seed(0)
    for calls, shape, sharded in ((MATRICES, (4, 4), SQUARE), (HEADS, (2, 4, 4, 4), BY_HEADS)):
        values = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
        for placements, recorded in ((sharded, True), (WHOLE, False)):
            clear_caches()
            plain = [x.clone().requires_grad_(recorded) for x in values]
            laid = [distribute(x, Layout(mesh, placements)).requires_grad_(recorded) for x in values]
            for (name, call), pattern in product([*calls.items()][::every], PATTERNS):
                pairs = zip(results(call, laid, pattern), results(call, plain, pattern), strict=True)
                far = [distance(have, want) for have, want in pairs]
                if not max(far) < 1e-9:
                    found.append(f"{name} {pattern} {placements}: {far}")
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.thorough)])
def test_calls_of_one_tensor_several_times_say_nothing_of_others(ranks: RankPool, every: int) -> None:
    assert ranks.run(different, every) == [[]] * 4
