"""Operators: rules in one notation, a table for each family, and the choice of a strategy."""

from dshard.ops.random import get_rng_state, manual_seed, set_rng_state
from dshard.ops.registry import register_rule, rules
from dshard.ops.settings import use_topology

__all__ = ["get_rng_state", "manual_seed", "register_rule", "rules", "set_rng_state", "use_topology"]
