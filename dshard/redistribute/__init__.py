"""From one layout to another: steps as values, their price, and the cheapest sequence of them."""

from dshard.redistribute.plan import Plan, plan
from dshard.redistribute.step import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Messages,
    Pend,
    ReduceExchange,
    ReduceScatter,
    Slice,
    Step,
    after,
    axes_of,
    describe,
    messages,
    messages_received,
    numel,
    received,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Exchange",
    "Messages",
    "Pend",
    "Plan",
    "ReduceExchange",
    "ReduceScatter",
    "Slice",
    "Step",
    "after",
    "axes_of",
    "describe",
    "messages",
    "messages_received",
    "numel",
    "plan",
    "received",
]
