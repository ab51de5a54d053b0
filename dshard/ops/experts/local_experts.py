"""Experts on the tokens of one rank: pairs of a token and a local expert, sorted by expert, and their weighted sums.

On tensors without data a layer of experts is one operator, with its rule, its work and what autograd saves. So a model
is traced and priced without running the body, which may ask for values.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dshard.caches import cached
from dshard.comm import has_data, has_only_shape, numbers_of, sum_dtype
from dshard.core.call import Call, Operator
from dshard.core.context import are_sizes_static
from dshard.core.signature import Context
from dshard.core.wrapper import is_recorded
from dshard.errors import ShapeError
from dshard.ops.grouped_matmul import is_aligned
from dshard.ops.matmul.options import current_options
from dshard.rules.expert_loops import OPERANDS, UNIFORM, expert_rule
from dshard.rules.rule import Rule

Body: TypeAlias = Callable[..., Tensor]
"""`body(rows, ends, *parameters)`: what experts make of rows [n, d] sorted by expert, of which expert i has those from
`ends[i - 1]` to `ends[i]`. `ends` is an int32 tensor, parameters are those of these experts; the result is [n, d]."""


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """A body, as it runs on one rank: with the experts numbered `held`, of `total`.

    With a capacity each gets so many rows at most, and the index `total` is of none.
    """

    body: Body
    held: range
    total: int
    capacity: int | None = None

    def run(self, rows: Tensor, ends: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """The body's result.

        Raises:
            ShapeError: it has another shape than the rows.
        """
        out = self.body(rows, ends, *parameters)
        if out.shape != rows.shape:
            raise ShapeError(
                f"experts: the body returned {tuple(out.shape)} for rows of shape {tuple(rows.shape)}; it returns a "
                "row for each that it is given, in their order"
            )
        return out

    def __call__(self, x: Tensor, index: Tensor, weight: Tensor, *given: Tensor) -> Tensor:
        """What these experts add to each token: x [..., d], index and weight [..., k] -> [..., d]."""
        parameters: Sequence[Tensor] = given
        if is_recorded((x, weight, *parameters)):
            x, weight, *parameters = together(x, weight, *parameters)
        return self.summed((x, index, weight, *parameters))

    def summed(self, tensors: Sequence[Tensor], row: Tensor | None = None) -> Tensor:
        """What these experts add to each token: `row` says of which each index is, where there are theirs alone."""
        x, index, weight, *parameters = tensors
        if has_only_shape(x):
            n = round(index.numel() * len(self.held) / max(1, self.total)) if row is None else len(row)
            return experts_without_data(tensors, held=len(self.held), pairs=n)
        tokens = x.reshape(-1, x.shape[-1])
        pairs = pairs_of(index.reshape(-1), self, are_own=row is not None)
        token = pairs.order // max(1, index.shape[-1]) if row is None else row.index_select(0, pairs.order)
        weights = weight.reshape(-1).index_select(0, pairs.order)
        out = self.weighted(tokens.index_select(0, token), pairs.ends, weights, parameters, is_padded=pairs.is_padded)
        total = out.new_zeros(tokens.shape).index_add_(0, token, out)
        return total.to(x.dtype).reshape(x.shape)

    def weighted(
        self, rows: Tensor, ends: Tensor, weight: Tensor, parameters: Sequence[Tensor], *, is_padded: bool = False
    ) -> Tensor:
        """The body's rows times their weights, in the dtype in which those of a token are summed; padded ones are 0."""
        if not len(rows):  # a body need not know that there may be none; parameters get zeros as gradients
            return (rows * weight.unsqueeze(1)).to(sum_dtype(rows.dtype))
        if is_padded:  # torch's grouped product leaves what is behind its groups unwritten, and so its gradient
            behind = (torch.arange(len(rows), device=rows.device) >= ends[-1]).unsqueeze(1)
            out = self.run(rows.masked_fill(behind, 0), ends, parameters).masked_fill(behind, 0)
        else:
            out = self.run(rows, ends, parameters)
        return (out * weight.unsqueeze(1)).to(sum_dtype(out.dtype))


class Pairs(NamedTuple):
    """The pairs of a token and a local expert, by their number among all, sorted by expert; and where each expert ends.

    If they are padded, pairs of other experts follow, so that their number does not depend on values.
    """

    order: Tensor
    ends: Tensor
    is_padded: bool


def pairs_of(index: Tensor, experts: LocalExperts, are_own: bool = False) -> Pairs:
    """The pairs of flat indices; their number is known without the values where this rank has the experts of all.

    Else they are padded where sizes are static.

    Raises:
        IndexError: an index is none of an expert.
    """
    n = len(experts.held)
    local = _local_numbers(index, experts.held, experts.total + (experts.capacity is not None))
    local, order = torch.sort(local, stable=True)
    ends = ends_of(local, n)
    are_all = are_own or (n == experts.total and experts.capacity is None)
    is_padded = not are_all and n > 0 and _is_static(index)
    if not (are_all or is_padded):
        order = order[: numbers_of(ends[-1:])[0] if n else 0]
    elif experts.capacity is not None:
        order = order[: experts.capacity * n]
    return Pairs(order, ends, is_padded)


def _is_static(x: Tensor) -> bool:
    """Whether sizes may not depend on values: in a graph, a recording, or where the host would wait for a device."""
    return not has_data(x) or x.device.type != "cpu" or are_sizes_static()


def ends_of(expert: Tensor, n: int) -> Tensor:
    """Where the rows of each of `n` experts end, of the sorted experts of rows."""
    return torch.searchsorted(
        expert, torch.arange(n, device=expert.device, dtype=expert.dtype), right=True, out_int32=True
    )


def _local_numbers(index: Tensor, held: range, total: int) -> Tensor:
    """For each index of an expert its number among those held; behind all for another."""
    if index.itemsize < 4:
        index = index.long()  # torch selects by int32 and int64 alone
    if has_data(index):
        try:
            return _numbers(held, total, index.device).index_select(0, index)
        except IndexError as error:
            wrong = index[(index < 0) | (index >= total)]
            raise index_error(numbers_of(wrong[:1])[0], total) from error
    if len(held) == total:
        return index
    local = index - held.start
    return torch.where((local >= 0) & (local < len(held)), local, len(held))


@cached("exchanges", 1024)
def _numbers(held: range, total: int, device: torch.device) -> Tensor:
    """For each of `total` experts its number among those held; behind all for another."""
    numbers = torch.full((total,), len(held))
    numbers[held.start : held.stop] = torch.arange(len(held))
    return numbers.to(device)


def index_error(index: int, total: int) -> IndexError:
    """The error for the index of no expert."""
    return IndexError(f"experts: index has an expert {index}, but there are {total}, from 0 to {total - 1}")


class Together(torch.autograd.Function):
    """Tensors of which each gets a gradient, perhaps zeros, where any does: parameters of experts without tokens."""

    @staticmethod
    def forward(ctx: Context, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([x.view_as(x) for x in tensors])

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, of which each gets a gradient where any does."""
    return Together.apply(*tensors)  # type: ignore[no-untyped-call, no-any-return]


# -- bodies


_GROUPED = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of torch's grouped product; while it traces only the first is one."""


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [n, d] times the weight [e, d, f] of the expert of each: [n, f]."""
    dtypes = _GROUPED if has_data(rows) else _GROUPED[:1]
    has_kernel = rows.dtype == weight.dtype and rows.dtype in dtypes and min(rows.numel(), weight.numel()) > 0
    is_wide = gcd(*weight.shape[1:]) * rows.itemsize % 16 == 0  # for the products of gradients, too
    if has_kernel and is_wide and is_aligned(rows) and is_aligned(weight):
        return F.grouped_mm(rows, weight, offs=ends)
    if _is_static(rows):
        expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device, dtype=ends.dtype), right=True)
        parts = [torch.where((expert == i).unsqueeze(1), rows @ each, 0) for i, each in enumerate(weight.unbind(0))]
        return torch.stack(parts).sum(0) if parts else rows.new_zeros(len(rows), weight.shape[2])
    stops = numbers_of(ends)
    each_part = [rows[a:b] @ each for a, b, each in zip([0, *stops], stops, weight.unbind(0), strict=False)]
    return torch.cat(each_part) if each_part else rows.new_zeros(len(rows), weight.shape[2])


def mlp(activation: Callable[[Tensor], Tensor], rows: Tensor, ends: Tensor, *parameters: Tensor) -> Tensor:
    """Multilayer perceptrons of parameters up and down, or gate, up and down: see `dshard.mlp_experts`."""
    *ups, down = parameters
    hidden = activation(grouped_product(rows, ups[0].transpose(1, 2), ends))
    for up in ups[1:]:
        hidden = hidden * grouped_product(rows, up.transpose(1, 2), ends)
    return grouped_product(hidden, down.transpose(1, 2), ends)


_LIBRARY = torch.library.Library("dshard", "FRAGMENT")
_LIBRARY.define("experts(Tensor x, Tensor index, Tensor weight, Tensor[] parameters, str rule, int flops) -> Tensor")
_LIBRARY.define("experts_backward(Tensor grad, Tensor[] operands, int flops) -> Tensor[]")
_LIBRARY.impl("experts", lambda x, *rest: torch.empty_like(x), "Meta")
_LIBRARY.impl("experts_backward", lambda grad, operands, flops: [*map(torch.empty_like, operands)], "Meta")


@register_flop_formula([torch.ops.dshard.experts, torch.ops.dshard.experts_backward])
def _flops(*arguments: Any, out_shape: Any = None) -> Any:
    return arguments[-1]


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
    return expert_rule(call.shapes, call.argument("rule"), current_options().routing or UNIFORM)


RULES: dict[str, Operator] = {"dshard::experts": Operator(_rule)}
"""The operator that stands for a call without data; no program calls it."""
