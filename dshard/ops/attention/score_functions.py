"""Functions of scores by their global indices, and attention of one block by operators that hold its scores.

They are those of `flex_attention`, and dropout, for the scores that a rank has: its queries and keys may be several
ranges of positions, in order, as in a balanced ring. Single operators compute in single precision at least. The
log-sum-exp of a row is that of all its modified scores. Dropout leaves some of the weights, times a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dshard.comm import has_only_shape, sum_dtype
from dshard.layout import Shape
from dshard.ops.random import Draw, kept_factor
from dshard.ops.random.distributions import bernoulli
from dshard.ops.random.draw import fill


class Held(NamedTuple):
    """Functions of the scores of a block and of the weights that they give, for which these are held in memory.

    `modify` changes the scores of the block with these ranges of queries and keys, `drop` gives the factors of weights
    with which dropout leaves them. The scores or weights have the dims batch, heads, queries, keys.
    """

    modify: Callable[[Tensor, range, range], Tensor] | None
    drop: Callable[[Tensor, range, range], Tensor] | None


class Operands(NamedTuple):
    """The operands of a kernel for one block: equally many query and key heads, and an additive mask.

    `modify` and `drop` are functions of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    diagonal: bool
    modify: Callable[[Tensor], Tensor] | None = None
    drop: Callable[[Tensor], Tensor] | None = None


def _scores(o: Operands) -> Tensor:
    dtype = sum_dtype(o.q.dtype)
    scores = (o.q.to(dtype) * o.scale) @ o.k.to(dtype).transpose(-2, -1)
    if o.mask is not None:
        scores = scores + o.mask
    if o.diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -inf)
    return scores


def attend_held(o: Operands) -> tuple[Tensor, Tensor]:
    """Attention to a block, and the log-sum-exp of its rows, before weights are dropped."""
    scores = _scores(o)
    if o.modify is not None:
        scores = o.modify(scores)
    most = scores.amax(-1, keepdim=True)
    weights = (scores - most.masked_fill(most == -inf, 0.0)).exp_()
    del scores
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (total.log() + most.masked_fill(empty, 0.0)).masked_fill(empty, -inf)
    if o.drop is not None:
        weights *= o.drop(weights)
    return weights @ o.v.to(weights.dtype) / total, lse.squeeze(-1)


def held_gradients(grad: Tensor, o: Operands, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, and of the scores."""
    dtype = lse.dtype
    q, k, v, grad = (x.to(dtype) for x in (*o[:3], grad))
    scores, modified = _modified(_scores(o), o.modify)
    weights = (modified.detach() - lse.unsqueeze(-1)).exp_()
    factors = None if o.drop is None else o.drop(weights)
    of_v = (weights if factors is None else weights * factors).transpose(-2, -1) @ grad
    of_weights = grad @ v.transpose(-2, -1)
    if factors is not None:
        of_weights *= factors
    of_scores = of_weights.sub_(delta.unsqueeze(-1)).mul_(weights)
    if o.modify is not None:
        of_scores = _pulled_back(scores, modified, of_scores)
    return of_scores @ k * o.scale, of_scores.transpose(-2, -1) @ q * o.scale, of_v, of_scores


def _modified(scores: Tensor, modify: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor]:
    """The scores, and as they are modified, which autograd records."""
    if modify is None:
        return scores, scores
    with torch.enable_grad():
        scores = scores.detach().requires_grad_()
        return scores, modify(scores)


def _pulled_back(scores: Tensor, modified: Tensor, grad: Tensor) -> Tensor:
    """The gradient of scores by that of modified ones."""
    if not modified.requires_grad:  # they do not depend on the scores
        return torch.zeros_like(scores)
    (of_scores,) = torch.autograd.grad(modified, scores, grad, allow_unused=True)
    return torch.zeros_like(scores) if of_scores is None else of_scores


Modify: TypeAlias = Callable[..., Tensor]
"""A `score_mod` or `mask_mod`: a function of the score, for the former, and the indices of batch, head, query, key."""


@dataclass(frozen=True, slots=True)
class Indices:
    """The global indices of a rank's scores: of the batch dims and heads, and the positions of queries and keys."""

    lead: tuple[range, ...]
    queries: tuple[range, ...]
    keys: tuple[range, ...]


class ScoreFunctions(NamedTuple):
    """The functions of scores in one call of attention, and the call by other loops.

    `held` gives it for the scores at some indices; None where nothing is done to them, so that they need not be held.
    Gradients that are differentiated themselves are those of `recorded`, of the operands.
    """

    held: Callable[[Indices], Held] | None
    recorded: Callable[[Sequence[Any]], Any]


def pieces(positions: Sequence[range], part: range) -> Iterator[tuple[range, range]]:
    """Yield the ranges of positions of a `part` of some local rows: the rows within the part, and their positions.

    >>> list(pieces([range(0, 4), range(10, 14)], range(3, 6)))
    [(range(0, 1), range(3, 4)), (range(1, 3), range(10, 12))]
    """
    start = 0
    for each in positions:
        first, stop = max(part.start, start), min(part.stop, start + len(each))
        if first < stop:
            yield range(first - part.start, stop - part.start), each[first - start : stop - start]
        start += len(each)


# -- flex_attention


def modified_at(score_mod: Modify | None, mask: BlockMask | None, indices: Indices) -> Held:
    """The functions of `flex_attention` for the scores at these indices."""

    def modify(scores: Tensor, queries: range, keys: range) -> Tensor:
        if has_only_shape(scores):
            return scores
        rows, columns = (
            [each for _, each in pieces(*pair)] for pair in ((indices.queries, queries), (indices.keys, keys))
        )
        return modified(scores, score_mod, mask, [*([each] for each in indices.lead), rows, columns])

    return Held(modify, None)


def modified(
    scores: Tensor, score_mod: Modify | None, mask: BlockMask | None, indices: Sequence[Sequence[range]]
) -> Tensor:
    """The scores with these indices of batch, heads, queries and keys as `flex_attention` modifies them."""
    places = [
        torch.cat([torch.arange(each.start, each.stop, device=scores.device) for each in ranges]).view(
            [-1 if i == dim else 1 for i in range(4)]
        )
        for dim, ranges in enumerate(indices)
    ]
    if score_mod is not None:
        scores = score_mod(scores, *places).expand(scores.shape).to(scores.dtype)
    if mask is not None:
        scores = scores.masked_fill(mask.mask_mod(*places).logical_not(), -inf)
    return scores


# -- dropout


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of the weights of attention with probability `p`, by a draw for all of their global `shape`."""

    p: float
    draw: Draw
    shape: Shape

    def held(self, indices: Indices) -> Held:
        """Dropout of the weights at these indices."""
        return Held(None, partial(self._factors, indices))

    def _factors(self, indices: Indices, weights: Tensor, queries: range, keys: range) -> Tensor:
        lead = [len(each) for each in indices.lead]
        kept = torch.empty(*lead, len(queries), len(keys), dtype=torch.bool, device=weights.device)
        for rows, q in pieces(indices.queries, queries):
            for columns, k in pieces(indices.keys, keys):
                part = kept[..., rows.start : rows.stop, columns.start : columns.stop]
                fill(part, self.shape, (*indices.lead, q, k), self.draw, bernoulli(1.0 - self.p))
        return kept.reshape(weights.shape).to(weights.dtype).mul_(kept_factor(self.p))
