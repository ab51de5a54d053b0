"""torch's debugging helpers by their names, and what tells of long waits."""

from dshard.tools.torch_debug import CommDebugMode, tell_waits, visualize_sharding

__all__ = ["CommDebugMode", "tell_waits", "visualize_sharding"]
