"""Batch dims and heads of attention that torch broadcasts: the kernels of blocks need equal ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def lead_differs(tensors: Sequence[Tensor], gqa: bool) -> bool:
    """Whether query, key and value differ in batch dims or, but for grouped queries, heads."""
    first = -3 if gqa else -2
    query, key, value = (x.shape[:first] for x in tensors)
    return not query == key == value


def broadcast_lead(tensors: Sequence[Tensor], gqa: bool) -> Sequence[Tensor]:
    """Query, key and value with equal batch dims and, but for grouped queries, heads: those of size 1 are expanded.

    Sizes that do not match are left to torch, which refuses them.
    """
    if not lead_differs(tensors, gqa):
        return tensors
    first = -3 if gqa else -2
    leads = {tuple(x.shape[:first]) for x in tensors}
    ndim = max(map(len, leads))
    sizes = [{lead[i - ndim] for lead in leads if len(lead) >= ndim - i} - {1} for i in range(ndim)]
    if any(len(of_dim) > 1 for of_dim in sizes):
        return tensors
    lead = [max(of_dim, default=1) for of_dim in sizes]
    return [x.expand(*lead, *x.shape[first:]) for x in tensors]
