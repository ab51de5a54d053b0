"""Operators: rules in one notation, a table for each family, and the choice of a strategy."""

from dshard.ops.random import manual_seed
from dshard.ops.registry import register_rule
from dshard.ops.settings import cache_info, use_topology

__all__ = ["cache_info", "manual_seed", "register_rule", "use_topology"]
