"""The loss of a chunk of rows, and its gradient by their logits: plain local arithmetic.

The loss of a row is share * log(sum exp logits) - own * logits[target] - sum(spread * logits): without class weights
and label smoothing, share and own are 1 and spread is 0. It does not change if a number is added to all logits of a
row, so it is computed of logits minus the largest, or of log probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Reduction: TypeAlias = Literal["none", "mean", "sum"]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What a cross entropy of class indices is, beside its operands: those of `torch.nn.functional.cross_entropy`.

    The loss has the `dtype` if there is one, or that of the rows.
    """

    classes: int
    ignored: int = -100
    reduction: Reduction = "mean"
    smoothing: float = 0.0
    dtype: torch.dtype | None = None


@dataclass(slots=True)
class ChunkTargets:
    """The targets of a chunk of rows, as far as the loss and its gradient need them, with a number for each row.

    `kept` are the rows that count, of which those `here` have a target among the rank's classes, at `index`. `own` and
    `share` are the factors of the target's logit and of log(sum exp), None for 1; `spread` that of each logit.
    """

    kept: Tensor
    here: Tensor
    index: Tensor
    each: Tensor | None
    own: Tensor | float
    share: Tensor | None
    spread: Tensor | float

    def weights(self, dtype: torch.dtype) -> Tensor:
        """What each row counts in the mean."""
        kept = self.kept.to(dtype)
        return kept if self.each is None else kept.mul_(self.each)


def chunk_targets(
    target: Tensor, held: range, weight: Tensor | None, options: LossOptions, dtype: torch.dtype
) -> ChunkTargets:
    """The targets of rows whose logits are of the classes `held`, with the weights of all classes, if there are any."""
    kept = target != options.ignored
    index = target - held.start if held.start else target
    here = kept if len(held) == options.classes else kept & (index >= 0) & (index < len(held))
    index = index.where(here, 0)
    smoothed = options.smoothing / options.classes if options.smoothing else 0.0
    if weight is None:
        return ChunkTargets(kept, here, index, None, 1 - options.smoothing, None, smoothed)
    wide = weight.to(dtype)
    each = wide[target.where(kept, 0)]
    own = each * (1 - options.smoothing)
    share = own + wide.sum() * smoothed if smoothed else own
    spread = wide[held.start : held.stop] * smoothed if smoothed else 0.0
    return ChunkTargets(kept, here, index, each, own, share, spread)


def linear_terms(shifted: Tensor, targets: ChunkTargets) -> Tensor:
    """What the rank's classes add to the loss of each row: a multiple of their logits, or log probabilities."""
    if shifted.shape[1] == 0:
        return shifted.new_zeros(len(shifted))
    picked = shifted.gather(1, targets.index.unsqueeze(1)).squeeze(1).where(targets.here, 0)
    terms = picked.mul_(targets.own).neg_()
    if isinstance(targets.spread, Tensor):
        terms -= shifted.mv(targets.spread)
    elif targets.spread:
        terms -= shifted.sum(1).mul_(targets.spread)
    return terms


@dataclass(frozen=True, slots=True)
class Probabilities:
    """Those of the rank's classes: the exponentials of `values`, or `values` times a number of each row."""

    values: Tensor
    times: Tensor | None = None

    def of(self, values: Tensor) -> Tensor:
        """The probabilities in place of these values, a number of each row."""
        return values.exp() if self.times is None else values * self.times

    def written(self, out: Tensor) -> Tensor:
        """The probabilities in `out`, which may be the values."""
        if self.times is None:
            return torch.exp(self.values, out=out)
        return torch.mul(self.values, self.times.unsqueeze(1), out=out)


def gradient_of_logits(probabilities: Probabilities, targets: ChunkTargets, dtype: torch.dtype) -> Tensor:
    """The gradient of each row's loss, by its logits of the rank's classes; `probabilities` may be written over.

    That of a target is a small difference, and so computed before it is rounded.
    """
    values, index = probabilities.values, targets.index.unsqueeze(1)
    is_plain = targets.share is None and not isinstance(targets.spread, Tensor) and not targets.spread
    if values.shape[1] == 0:
        return values.to(dtype)
    if values.dtype != dtype and is_plain:
        here = probabilities.of(values.gather(1, index).squeeze(1))
        gradient = probabilities.written(torch.empty_like(values, dtype=dtype))
        own = torch.where(targets.here, here - targets.own, here).to(dtype)
        return gradient.scatter_(1, index, own.unsqueeze(1))
    gradient = probabilities.written(values)
    if targets.share is not None:
        gradient.mul_(targets.share.unsqueeze(1))
    if not is_plain:
        gradient.sub_(targets.spread)
    own = targets.here.to(gradient.dtype).mul_(targets.own).neg_()
    return gradient.scatter_add_(1, index, own.unsqueeze(1)).to(dtype)
