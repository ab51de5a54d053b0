"""Redistribution from one layout to another: steps as values, their price, and the cheapest sequence of them.

step.py            the steps as values, and the regions that each rank sends and receives
layout_state.py    layouts as numbers, and the load of each step on its busiest rank, with its seconds
axis_roles.py      mesh axes that are interchangeable
lower_bound.py     the least seconds of any plan between two layouts
space.py           the layouts of a tensor as a graph, whose edges are steps
plan.py            plans: searched, priced, printed
panel.py           steps panel by panel
blocks.py          dims that are sharded in blocks: those of the unflattened tensor
"""

from dshard.redistribute.panel import Panel
from dshard.redistribute.plan import Plan, plan
from dshard.redistribute.step import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    ReduceExchange,
    ReduceScatter,
    Slice,
    Step,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Exchange",
    "MakePartial",
    "Panel",
    "Plan",
    "ReduceExchange",
    "ReduceScatter",
    "Slice",
    "Step",
    "plan",
]
