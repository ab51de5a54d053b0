"""Resharding from a layout on one mesh to a layout on another: unit tasks, chains of ranks for them, their order.

Design: docs/design/0009-reshard.md
"""

from dshard.reshard.chains import Chain, Task, reduced_axes, region_of, tasks
from dshard.reshard.reshard_plan import ReshardPlan, plan_reshard

__all__ = [
    "Chain",
    "ReshardPlan",
    "Task",
    "plan_reshard",
    "reduced_axes",
    "region_of",
    "tasks",
]
