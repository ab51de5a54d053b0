"""Tiny language models with experts, of Hugging Face, and a few of their training steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dshard
from dshard import DTensor
from dshard.comm import plain
from dshard.mesh import Mesh
from dshard.testing import whole
from helpers.hugging_face import CONFIGS, SIZES, causal_model

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: CONFIGS[family] for family in ("mixtral", "qwen3-moe", "gpt-oss", "deepseek")},
    "olmoe": ("Olmoe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm4-moe": (
        "Glm4Moe",
        {
            **SIZES,
            **_EXPERTS,
            "num_experts": None,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **SIZES,
            **_EXPERTS,
            "layer_types": ["full_attention"],
            "shared_expert_intermediate_size": 16,
            "partial_rotary_factor": 1.0,
        },
    ),
}
"""The families that have experts: those of `CONFIGS`, and newer ones."""
WITH_LOSS = ("mixtral", "qwen3-moe", "gpt-oss", "olmoe", "qwen3-next")
"""The families that have an auxiliary loss of their routers."""


class Steps(NamedTuple):
    """The losses of some steps, and of the first the gradients by name, and the norm by which they were clipped.

    Later gradients say less: AdamW steps by the sign of what rounding leaves of a gradient that is zero.
    """

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    norms: list[Tensor]

    def differs(self, other: Steps) -> float:
        """The largest relative difference of losses, norms and gradients, those near zero relative to the largest."""
        numbers = zip((*self.losses, *self.norms), (*other.losses, *other.norms), strict=True)
        scale = max(float(g.norm()) for g in other.gradients.values() if g is not None)
        assert [n for n, g in self.gradients.items() if g is None] == [
            n for n, g in other.gradients.items() if g is None
        ]
        of_gradients = [
            float((g - other.gradients[name]).norm()) / max(float(g.norm()), 1e-3 * scale)
            for name, g in self.gradients.items()
            if g is not None
        ]
        return max(*(float((a - b).abs() / b.abs()) for a, b in numbers), *of_gradients)


@plain()
def expert_model(family: str, implementation: str | None = None, **changes: Any) -> Any:
    """A model of a family, with experts computed as this implementation of transformers does, in training."""
    if family in WITH_LOSS:
        changes = {"output_router_logits": True, "router_aux_loss_coef": 0.1, **changes}
    model = causal_model(*FAMILIES[family], **changes).train()
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model


@plain()
def batch(rows: int = 4, length: int = 6) -> dict[str, Tensor]:
    """Tokens, which are their own labels."""
    tokens = torch.randint(3, 32, (rows, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens, "labels": tokens}


def trained(model: nn.Module, steps: int = 2) -> Steps:
    """Train a model, parallelized or not, by AdamW with clipped gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    result = Steps([], {}, [])
    for step in range(steps):
        loss = model(**batch()).loss
        loss.backward()
        if not step:
            result.gradients.update({name: _whole(p.grad) for name, p in model.named_parameters()})
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if not step:
            result.norms.append(_whole(norm))
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(_whole(loss))
    return result


def parallelized(model: Any, mesh: Any, strategy: Any) -> Any:
    """Parallelize a model by a strategy."""
    return dshard.parallelize(model, mesh, strategy, **batch())


def mesh_of(strategy: str, ranks: int = 4) -> Mesh:
    """A mesh of so many ranks with the axes of a strategy."""
    return Mesh((ranks,), ("x",)) if " x " not in strategy else Mesh((2, ranks // 2), ("a", "b"))


def _whole(x: Any) -> Any:
    """A tensor as one plain tensor, if it is one."""
    return whole(x.detach()) if isinstance(x, DTensor) else None if x is None else x.detach().clone()


class OwnExperts(nn.Module):
    """Experts as torchtitan has them: three weights, without biases."""

    def __init__(self, experts: int = 4, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, inner, width) / 3)
        self.w2 = nn.Parameter(torch.randn(experts, width, inner) / 3)
        self.w3 = nn.Parameter(torch.randn(experts, inner, width) / 3)
        self.count = experts

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.count):
            token, slot = torch.where(index == e)
            hidden = F.silu(x[token] @ self.w1[e].T) * (x[token] @ self.w3[e].T)
            out = out.index_add(0, token, hidden @ self.w2[e].T * weight[token, slot, None])
        return out


class OwnModel(nn.Module):
    """A residual stream of two layers, of which one has experts, the last of them without a token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router, self.experts, self.last = (
            nn.Linear(8, 8),
            nn.Linear(8, 4),
            OwnExperts(),
            nn.Linear(8, 8),
        )
        with torch.no_grad():
            self.router.bias[3] -= 100

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        weight, index = self.router(x).softmax(-1).topk(2)
        x = x + self.experts(x, index, weight)
        return (x + self.last(x)).square().mean()
