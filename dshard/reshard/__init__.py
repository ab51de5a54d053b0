"""Resharding from a layout on one mesh to a layout on another: unit tasks, chains of ranks for them, their order.

Design: docs/design/0009-reshard.md
"""

from dshard.reshard.chains import Chain, Form
from dshard.reshard.reshard_plan import ReshardPlan, plan_of_form, plan_reshard
from dshard.reshard.tasks import Task, reduced_axes, region_of, tasks

__all__ = [
    "Chain",
    "Form",
    "ReshardPlan",
    "Task",
    "plan_of_form",
    "plan_reshard",
    "reduced_axes",
    "region_of",
    "tasks",
]
