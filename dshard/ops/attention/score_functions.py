"""Functions of scores by their global indices, for the scores that a rank has: those of `flex_attention`, and dropout.

A rank's queries and keys may be several ranges of positions, in order, as in a balanced ring.
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

from dshard.comm import has_only_shape
from dshard.layout import Shape
from dshard.ops.attention.held_scores import Held
from dshard.ops.random import Draw, kept_factor
from dshard.ops.random.distributions import bernoulli
from dshard.ops.random.draw import fill

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
