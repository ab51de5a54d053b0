"""Calls of attention of any sizes, in any layouts, by any loops, and how near to one device a result must be."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from dshard import DTensor, Layout, Mesh
from dshard.rules.attention_loops import ATTENTIONS, LOOPS, RINGS
from dshard.testing import distribute
from dshard.testing.rule_rows import layouts_of

MESHES = [Mesh((2,), ("x",)), Mesh((3,), ("x",)), Mesh((2, 2), ("x", "y")), Mesh((2, 1, 2), ("x", "y", "z"))]


def drawn(draw: Random, dtype: torch.dtype, large: bool = False) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key, value and perhaps a mask, of any sizes, and the options of a call.

    `large` ones exceed the tiles of kernels, and have sizes of heads which these pad or refuse.
    """
    generator = torch.Generator().manual_seed(draw.randrange(1000))

    def reals(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    heads, groups = draw.choice([1, 2, 3, 4]), draw.choice([1, 1, 2, 4])
    queries, keys = draw.choice([0, 1, 3, 4, 4, 5]), draw.choice([0, 1, 2, 4, 4, 7])
    batch, size, of_value = draw.choice([1, 2, 3]), 4, [4, 6]
    if large:
        queries, keys = (n if draw.random() < 0.3 else draw.choice([16, 31, 48, 64, 70]) for n in (queries, keys))
        size = draw.choice([4, 8, 8, 12, 16, 20])
        of_value = [size, size, size, 8, 12]
        if draw.random() < 0.02:
            size, of_value = 264, [8, 264]  # too large for kernels
        if draw.random() < 0.6:
            keys = queries
    lead = draw.choice([(), (batch,)]) if groups == 1 else (batch,)
    given = [
        reals(*lead, heads * groups, queries, size),
        reals(*lead, heads, keys, size),
        reals(*lead, heads, keys, draw.choice(of_value)),
    ]
    options: dict[str, Any] = {"scale": draw.choice([None, 0.3]), "enable_gqa": groups > 1}
    kind = draw.choice(["none", "causal", "causal", "bool", "float"] if large else ["none", "causal", "bool", "float"])
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        shape = draw.choice([(queries, keys), (1, queries, keys), (*lead, heads * groups, queries, keys)])
        mask = reals(*shape)
        given.append(mask if kind == "float" else mask > -0.5)
    return given, options


def layouts_drawn(draw: Random, given: list[Tensor], mesh: Mesh) -> list[Layout]:
    return [draw.choice([one for one in layouts_of(x, mesh) if not one.partial_axes()]) for x in given]


def loops_drawn(draw: Random, mesh: Mesh) -> Any:
    """Loops, one for each mesh axis, or the name of some, or None for the choice."""
    kind = draw.random()
    if kind < 0.2:
        return None
    return (
        draw.choice(list(ATTENTIONS.rows)) if kind < 0.4 else tuple(draw.choice((*LOOPS, *RINGS)) for _ in mesh.shape)
    )


def with_gradients(out: Any, given: list[Any], grad: Any) -> list[Any]:
    """The result, and with a gradient `grad` those of the operands that have one."""
    if grad is None:
        return [out]
    leaves = [x for x in given if x.is_floating_point()]
    cotangent = distribute(grad, out.layout.cotangent()) if isinstance(out, DTensor) else grad
    found = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [out, *(torch.zeros_like(x) if each is None else each for x, each in zip(leaves, found, strict=True))]


def leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def as_near(mine: Tensor, right: Tensor, alone: Tensor, largest: float) -> bool:
    """Whether a result is the exact one, or below double precision at most twice as far from it as one device's.

    There differences of almost equal terms, such as the gradient of a query that sees one key, are rounded as the
    terms are, which are as large as the `largest` result or gradient.
    """
    if mine.dtype == torch.float64:
        return torch.allclose(mine, right, atol=1e-11)
    if mine.dtype == torch.float32:
        largest *= 4  # sums of many terms in other orders
    far, may_be = ((x - right).abs().max().item() if right.numel() else 0.0 for x in (mine, alone))
    return far <= 2 * may_be + largest * torch.finfo(mine.dtype).eps
