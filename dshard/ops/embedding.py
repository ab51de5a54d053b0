"""Embedding: a table sharded over its rows is looked up where they are, and gets its gradient there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.core.call import Call, LocalOp, Operator, OperatorForm, RankCall
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_function import bind_arguments, call_torch
from dshard.core.wrapper import Wrapper
from dshard.errors import LayoutError
from dshard.mesh import Coordinate
from dshard.ops.composite import Local, run_composite
from dshard.ops.custom import accept_call
from dshard.ops.lookup import look_up, rows_held
from dshard.rules.rule import Rule, linear
from dshard.rules.rule_notation import parse_rule
from dshard.rules.strategy import Strategy

EMBEDDING = "v h, ... -> ... h"
"""The rule of embedding: table, indices -> rows."""


def looked_up(call: Call) -> Rule:
    """Indices and features may be sharded; a table sharded over its rows leaves a partial sum."""
    return call.rule(EMBEDDING, passes=linear(0))


def kernel(call: RankCall) -> LocalOp:
    """A kernel of embedding in which rows that another rank holds count as zero.

    Of a whole table it is torch's own operator, whose local gradient is then a term of the table's: not where rows are
    divided by how often all ranks look them up, or where torch's has no second derivative.
    """
    size = call.shapes[0][0]
    rows = call.held(0)
    if len(rows) < size:
        return rows_held(rows, size, look_up)
    has_entries = all(prod(call.local_shape(i)) for i in (0, 1))
    return call.func if has_entries and not call.argument("scale_grad_by_freq") else look_up


def looked_up_backward(call: Call) -> Rule:
    """Features may be sharded; sharded indices leave the gradient of the table partial.

    Where rows are divided by how often they are looked up, each rank must count all indices.
    """
    lookups = "[...]" if call.argument("scale_grad_by_freq") else "..."
    return call.rule(f"{lookups} h, {lookups} -> [v] h", passes=linear(0))


NAMES = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def embedding(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.nn.functional.embedding` of a table that is sharded over its rows and needs a gradient.

    Any other call runs as a torch operator, which would replicate the gradient of a table on every rank.
    """
    indices, table, padding, max_norm, _, by_frequency, sparse = bind_arguments(NAMES, args, kwargs)
    recorded = isinstance(table, Wrapper) and table.requires_grad and torch.is_grad_enabled()
    if recorded and sparse:
        raise LayoutError(
            "embedding(sparse=True) of a distributed table: its gradient is strided, and each rank computes "
            "that of the rows it holds; leave out sparse=True, and give the table to Adam in place of SparseAdam"
        )
    if not recorded or not isinstance(indices, Wrapper) or table.dim() != 2 or not table._spec.layout.axes_of(0):
        return call_torch(func, args, kwargs)
    size = table.shape[0]
    if max_norm is not None or by_frequency or not (padding is None or -size <= padding < size):
        return call_torch(func, args, kwargs)

    def rule() -> Rule:
        return parse_rule(EMBEDDING, [tuple(table.shape), tuple(indices.shape)], passes=linear(0))

    kernel = partial(_kernel_at, size, padding)
    return run_composite(rule, _look_up(size, padding), (table, indices), ("embedding", padding), kernel)


def embedding_form(args: Args, kwargs: Kwargs) -> OperatorForm | None:
    """`torch.nn.functional.embedding` as one operator, whose gradient is strided."""
    indices, table, padding, max_norm, _, by_frequency, _ = bind_arguments(NAMES, args, kwargs)
    if max_norm is not None or by_frequency:
        return None
    shapes = [tuple(x.shape) for x in (table, indices)]

    def kernel(strategy: Strategy, at: Coordinate) -> LocalOp:
        if strategy.inputs[0].axes_of(0):
            return _kernel_at(shapes[0][0], padding, strategy, at)
        return lambda table, indices: F.embedding(indices, table, padding)

    return OperatorForm((table, indices), parse_rule(EMBEDDING, shapes, passes=linear(0)), (), kernel)


def _look_up(size: int, padding: int | None) -> Local:
    return lambda table, indices: look_up(table, indices, -1 if padding is None else padding % size)


def _kernel_at(size: int, padding: int | None, strategy: Strategy, at: Coordinate) -> Local:
    """The kernel of a table of so many rows at a coordinate: rows that another rank holds count as zero."""
    rows = strategy.inputs[0].dim_range(0, size, at)
    if len(rows) == size:
        return _look_up(size, padding)
    held_padding = -1 if padding is None or padding % size not in rows else padding % size - rows.start
    return rows_held(rows, size, lambda table, indices: look_up(table, indices, held_padding))


class Bags(NamedTuple):
    """What a call of `torch.nn.functional.embedding_bag` does with the rows of a bag, as it names it."""

    mode: str
    include_last_offset: bool
    padding_idx: int | None

    def of_whole(self, table: Tensor, indices: Tensor, *rest: Tensor) -> Tensor:
        """The bags of a whole table; `rest` are offsets, of indices of one dim, and weights."""
        offsets, weights = self.offsets_and_weights(indices, rest)
        return F.embedding_bag(
            *(indices, table, offsets),
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )

    @staticmethod
    def offsets_and_weights(indices: Tensor, rest: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """The offsets and the weights, where there are any, of those operands that follow the indices."""
        offsets, weights = (*rest, None)[:2] if indices.dim() == 1 else (None, *rest, None)[:2]
        return offsets, weights

    def rule(self, shapes: Sequence[tuple[int, ...]]) -> Rule:
        """Features may be sharded, and bags that are rows of indices; of sharded rows of a table sums are partial."""
        rows, passes = ("[v]", ()) if self.mode == "max" else ("v", linear(0))
        if len(shapes[1]) == 2:
            terms, bags = ("b [l]",) * (len(shapes) - 1), "b"
        else:
            terms, bags = ("[i]", "[o]", "[i]")[: len(shapes) - 1], "[b]"
        n = shapes[2][0] - self.include_last_offset if bags == "[b]" else shapes[1][0]
        text = f"{', '.join((f'{rows} h', *terms))} -> {bags} h"
        return parse_rule(text, shapes, [(n, shapes[0][1])], passes=passes)

    def kernel(self, size: int, strategy: Strategy, at: Coordinate) -> Local:
        """The kernel of a table of so many rows at a coordinate."""
        rows = strategy.inputs[0].dim_range(0, size, at)
        return self.of_whole if len(rows) == size else partial(self._of_rows, rows, size)

    def _of_rows(self, rows: range, size: int, table: Tensor, indices: Tensor, *rest: Tensor) -> Tensor:
        """The part of sums and means that is of these rows of a table."""
        offsets, weights = self.offsets_and_weights(indices, rest)
        ones = torch.ones_like(indices, dtype=table.dtype)
        if self.padding_idx is not None:
            ones = ones.masked_fill(indices == self.padding_idx % size, 0)
        looked_up = rows_held(rows, size, look_up)(table, indices)
        looked_up = looked_up * (ones if weights is None else ones * weights).unsqueeze(-1)
        if offsets is None:
            total, counts = looked_up.sum(1), ones.sum(1)
        else:
            n = len(offsets) - self.include_last_offset
            bag = torch.searchsorted(offsets[:n], torch.arange(len(indices), device=indices.device), right=True) - 1
            total = looked_up.new_zeros(n, table.shape[1]).index_add(0, bag, looked_up)
            counts = ones.new_zeros(n).index_add(0, bag, ones)
        return total / counts.clamp_min(1).unsqueeze(-1) if self.mode == "mean" else total  # type: ignore[no-any-return]


def embedding_bag(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.nn.functional.embedding_bag`, unless it writes to its table, or its gradient counts rows or is sparse."""
    call = _bags(func, args, kwargs)
    if call is None or not all(isinstance(t, Wrapper) for t in call[1]):
        return NotImplemented
    accept_call(func, args, kwargs)
    bags, tensors = call
    shapes = [tuple(t.shape) for t in tensors]
    return run_composite(
        lambda: bags.rule(shapes), bags.of_whole, tensors, ("embedding_bag", bags), partial(bags.kernel, shapes[0][0])
    )


def embedding_bag_form(args: Args, kwargs: Kwargs) -> OperatorForm | None:
    """`torch.nn.functional.embedding_bag` as one operator."""
    call = _bags(F.embedding_bag, args, kwargs)
    if call is None:
        return None
    bags, tensors = call
    return OperatorForm(
        tensors, bags.rule([tuple(t.shape) for t in tensors]), (), partial(bags.kernel, tensors[0].shape[0])
    )


def _bags(func: Function, args: Args, kwargs: Kwargs) -> tuple[Bags, tuple[Tensor, ...]] | None:
    """What a call does with bags, and its operands in the order of the rule; None for one that is no such operator."""
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    indices, table = given["input"], given["weight"]
    if given["max_norm"] is not None or given["scale_grad_by_freq"] or given["sparse"] or table.dim() != 2:
        return None
    rest = tuple(t for t in (given["offsets"], given["per_sample_weights"]) if t is not None)
    bags = Bags(given["mode"], given["include_last_offset"], given["padding_idx"])
    return bags, (table, indices, *rest)


RULES: dict[str, Operator] = {
    "aten::embedding": Operator(looked_up, kernel, refuses_empty=True),
    "aten::embedding_dense_backward": Operator(looked_up_backward),
}
