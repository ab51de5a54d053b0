"""For tests of your own layouts and operators: generators, simulated and real ranks, brute-force checks of rules.

Needs the extra `testing`: pip install "dshard[testing]". See docs/testing.md.
"""

from dshard.errors import RuleError
from dshard.testing.check import check_call, check_rule
from dshard.testing.counter import Collective, Traffic, count_traffic
from dshard.testing.generators import (
    Redistribution,
    dtensors,
    layouts,
    meshes,
    placements,
    redistributions,
    shapes,
    whole_numbers,
)
from dshard.testing.pool import RankPool, rank_pool
from dshard.testing.simulated_ranks import distribute, parts, simulated, whole

__all__ = [
    "Collective",
    "RankPool",
    "Redistribution",
    "RuleError",
    "Traffic",
    "check_call",
    "check_rule",
    "count_traffic",
    "distribute",
    "dtensors",
    "layouts",
    "meshes",
    "parts",
    "placements",
    "rank_pool",
    "redistributions",
    "shapes",
    "simulated",
    "whole",
    "whole_numbers",
]
