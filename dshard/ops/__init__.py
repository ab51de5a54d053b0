"""Operators: rules in one notation, a table for each family, and the choice of a strategy."""

from dshard.ops.random import manual_seed
from dshard.ops.registry import register_rule

__all__ = ["manual_seed", "register_rule"]
