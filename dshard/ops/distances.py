"""Distances between the rows of two matrices: rows of either may be sharded, or features, by one small reduction."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from dshard.comm import HALF
from dshard.core.call import Call, LocalOp, Operator, RankCall
from dshard.ops.batched import or_nothing
from dshard.ops.small_reductions import Statistic, reduced_statistic
from dshard.rules.rule import Rule, linear

aten: Any = torch.ops.aten


def distances(call: Call) -> Rule:
    """Rows of both matrices may be sharded; the features, over which a distance is taken, may not."""
    return call.rule("... p [m], ... r [m] -> ... p r")


def distances_backward(call: Call) -> Rule:
    """Any dim may be sharded, but for p=inf not the features; the other matrix's rows leave the gradient partial."""
    features = "[m]" if call.argument("p") == inf else "m"
    return call.rule(f"... p r, ... p {features}, ... r {features}, ... p r -> ... p {features}", passes=linear(0))


def _refused_alike(call: RankCall) -> LocalOp:
    """The operator; in half precision also called on a rank without rows, so that all refuse the dtype."""
    local = or_nothing()(call)
    if call.specs[0].dtype not in HALF:
        return local

    def refusing(x1: Tensor, x2: Tensor, *rest: object, **options: object) -> Any:
        if not x1.numel() or not x2.numel():
            call.func(x1.new_ones(1, 1), x2.new_ones(1, 1), *rest, **options)
        return local(x1, x2, *rest, **options)

    return refusing


def _where_largest(call: RankCall) -> LocalOp:
    """The backward form; for p=inf it finds the largest difference by equality, so the distances are recomputed.

    A partial operand may have been completed in another order for the forward form, and rounded differently.
    """
    if call.argument("p") != inf:
        return call.func

    def local(grad: Tensor, x1: Tensor, x2: Tensor, p: float, _: Tensor) -> Any:
        return call.func(grad, x1, x2, p, aten._cdist_forward.default(x1, x2, p, None))

    return local


def _of_features(call: Call) -> Statistic:
    """The statistic of distances over a shard of the features, to the power `p`; the result is the root of its sum."""
    p: float = call.argument("p")

    def powers(*args: object, **kwargs: object) -> Tensor:
        term: Tensor = call.func(*args, **kwargs)
        return term if p in (0, 1, inf) else term.pow(p)

    def root(total: Tensor) -> Tensor:
        return total if p in (0, 1, inf) else total.pow(1 / p)

    return Statistic(powers, "max" if p == inf else "sum", root)


RULES: dict[str, Operator] = {
    "aten::_cdist_forward": Operator(distances, _refused_alike, (reduced_statistic(_of_features),)),
    "aten::_cdist_backward": Operator(distances_backward, or_nothing(_where_largest)),
}
