"""Attention of one block by single operators, in single precision at least: they hold its scores, and may modify them.

The log-sum-exp of a row is that of all its modified scores. Dropout leaves some of the weights, times a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from dshard.comm import sum_dtype


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
