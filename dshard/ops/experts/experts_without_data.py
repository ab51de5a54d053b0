"""A layer of experts on tensors without data: one operator, with its rule, its work and what autograd saves.

So a model is traced and priced without running the body, which may ask for values.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dshard.core.call import Call, Operator
from dshard.core.signature import Context
from dshard.rules.expert_loops import OPERANDS, expert_rule
from dshard.rules.rule import Rule

_LIBRARY = torch.library.Library("dshard", "FRAGMENT")
_LIBRARY.define("experts(Tensor x, Tensor index, Tensor weight, Tensor[] parameters, str rule, int flops) -> Tensor")
_LIBRARY.define("experts_backward(Tensor grad, Tensor[] operands, int flops) -> Tensor[]")


def _experts(x: Tensor, index: Tensor, weight: Tensor, parameters: Sequence[Tensor], rule: str, flops: int) -> Tensor:
    return torch.empty_like(x)


def _experts_backward(grad: Tensor, operands: Sequence[Tensor], flops: int) -> list[Tensor]:
    return [torch.empty_like(operand) for operand in operands]


_LIBRARY.impl("experts", _experts, "Meta")
_LIBRARY.impl("experts_backward", _experts_backward, "Meta")


@register_flop_formula(torch.ops.dshard.experts)
def _flops(x: Any, index: Any, weight: Any, parameters: Any, rule: str, flops: int, *, out_shape: Any = None) -> int:
    return flops


@register_flop_formula(torch.ops.dshard.experts_backward)
def _backward_flops(grad: Any, operands: Any, flops: int, *, out_shape: Any = None) -> int:
    return flops


def experts_without_data(tensors: Sequence[Tensor], *, held: int, pairs: int, rule: str = "") -> Tensor:
    """The result, without data, of `held` experts for so many `pairs` of a token and one of them.

    `tensors` are tokens, indices, weights and parameters.
    Each pair is multiplied with each of its expert's matrices, and autograd saves what goes in and what comes out.
    `rule` is that of the parameters, for a trace of the operator.
    """
    matrices = [p for p in tensors[OPERANDS:] if p.dim() > 2] if held else []
    flops = 2 * pairs * sum(p.numel() // held for p in matrices)
    width = sum(sum(p.shape) - held for p in matrices)
    out: Tensor = _WithoutData.apply(rule, flops, (pairs, width), *tensors)  # type: ignore[no-untyped-call]
    return out


class _WithoutData(torch.autograd.Function):
    """The autograd node of the operator: each operand gets a gradient."""

    @staticmethod
    def forward(
        ctx: Context,
        rule: str,
        flops: int,
        saved: tuple[int, int],
        x: Tensor,
        index: Tensor,
        weight: Tensor,
        *rest: Any,
    ) -> Tensor:
        ctx.flops = flops
        kept = torch.empty(saved, dtype=x.dtype, device="meta")
        ctx.save_for_backward(kept, x, index, weight, *rest)
        return torch.ops.dshard.experts(x, index, weight, rest, rule, flops)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, *operands = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        wanted = [x for x, is_needed in zip(operands, needed, strict=True) if is_needed]
        gradients = iter(torch.ops.dshard.experts_backward(grad, wanted, 2 * ctx.flops))
        return (None, None, None, *(next(gradients) if is_needed else None for is_needed in needed))


def _rule(call: Call) -> Rule:
    return expert_rule(call.shapes, call.argument("rule"))


RULES: dict[str, Operator] = {"dshard::experts": Operator(_rule)}
"""The operator that stands for a call without data; no program calls it."""
