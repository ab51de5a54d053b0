"""From one layout to another: steps as values, their price, and the cheapest sequence of them."""

from dshard.redistribute.plan import Plan, plan
from dshard.redistribute.step import (
    AllGather,
    AllReduce,
    AllToAll,
    Messages,
    Pend,
    ReduceScatter,
    Slice,
    Step,
    after,
    axes_of,
    messages,
    received,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Messages",
    "Pend",
    "Plan",
    "ReduceScatter",
    "Slice",
    "Step",
    "after",
    "axes_of",
    "messages",
    "plan",
    "received",
]
