"""Products: their rules, the strategies that have a name, all schedules with their closed forms, local kernels."""

from dshard.ops.matmul.asked import use_strategy
from dshard.ops.matmul.named import strategies
from dshard.ops.matmul.schedule import Schedule, schedules

__all__ = ["Schedule", "schedules", "strategies", "use_strategy"]
