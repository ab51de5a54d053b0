"""Tables and progress bars: what programs use of `dshard.tools.report`."""

from dshard.tools.report import checkpoint_progress, export
from dshard.tools.report.visualize import visualize

__all__ = ["checkpoint_progress", "export", "visualize"]
