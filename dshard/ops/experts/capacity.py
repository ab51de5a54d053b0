"""A capacity of experts: each takes so many tokens, the first in order, on every mesh the same.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dshard.errors import ArgumentError, ShapeError
from dshard.validate import as_int, check_one_of

Beyond: TypeAlias = Literal["drop", "raise"]
"""What happens to tokens beyond the capacity of an expert: it does not get them, or that is an error."""


def check_capacity(capacity: object, beyond: object) -> None:
    """Check a capacity, and what happens beyond it."""
    if capacity is not None:
        as_int(capacity, "capacity of an expert, in tokens", least=1)
    check_one_of(beyond, ["drop", "raise"], "beyond", ArgumentError)


def within_capacity(index: Tensor, total: int, capacity: int, beyond: Beyond) -> Tensor:
    """The indices [t, k], with `total`, no expert, in place of those of experts that have `capacity` tokens before.

    Raises:
        ShapeError: on all ranks, if some expert gets more, and these are not dropped.
    """
    hits = torch.zeros_like(index[:, :1]).expand(-1, total).contiguous().scatter_add(1, index, torch.ones_like(index))
    before = hits.cumsum(0) - hits
    kept = torch.where(before.gather(1, index) < capacity, index, total)
    if beyond == "raise":
        counts = hits.sum(0)
        most, expert = (int(x.item()) for x in counts.max(0))
        if most > capacity:
            raise ShapeError(
                f"experts: expert {expert} gets {most} tokens, {most - capacity} more than its capacity of {capacity}: "
                'give a higher one, or beyond="drop"'
            )
    return kept
