"""Redistribution from one layout to another: steps as values, their price, and the cheapest sequence of them.

step.py            the steps as values, and the regions that each rank sends and receives
layout_state.py    layouts as numbers, and the load of each step on its busiest rank
price.py           seconds of a step
axis_roles.py      mesh axes that are interchangeable
lower_bound.py     the least seconds of any plan between two layouts
space.py           the layouts of a tensor as a graph, whose edges are steps
plan.py            plans: searched, priced, printed
panel.py           steps panel by panel
blocks.py          dims that are sharded in blocks: those of the unflattened tensor
"""

from dshard.redistribute.blocks import unflattened_shape
from dshard.redistribute.panel import Panel, Ranges, cuts, owned, slices, summa_panels
from dshard.redistribute.plan import Plan, plan, plan_price
from dshard.redistribute.step import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    Messages,
    ReduceExchange,
    ReduceScatter,
    Slice,
    Step,
    after,
    all_reduce_sizes,
    describe,
    inside,
    messages,
    numel,
    sizes_received,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Exchange",
    "MakePartial",
    "Messages",
    "Panel",
    "Plan",
    "Ranges",
    "ReduceExchange",
    "ReduceScatter",
    "Slice",
    "Step",
    "after",
    "all_reduce_sizes",
    "cuts",
    "describe",
    "inside",
    "messages",
    "numel",
    "owned",
    "plan",
    "plan_price",
    "sizes_received",
    "slices",
    "summa_panels",
    "unflattened_shape",
]
