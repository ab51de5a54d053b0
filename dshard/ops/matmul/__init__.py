"""Products: their rules, the strategies that have a name, all schedules with their closed forms, local kernels."""

from dshard.ops.matmul.asked import use_strategy
from dshard.ops.matmul.named import strategies
from dshard.ops.matmul.schedule import Schedule, schedules
from dshard.ops.matmul.stream import Stream

__all__ = ["Schedule", "Stream", "schedules", "strategies", "use_strategy"]
