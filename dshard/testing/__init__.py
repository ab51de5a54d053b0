"""Tools for tests of your layouts and operators: generators, simulated and real ranks, brute-force checks of rules.

Needs the extra `testing`: pip install "dshard[testing]". See docs/testing.md.

Design: docs/design/0021-what-the-tests-say.md
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dshard.errors import RuleError
from dshard.testing.check import check_call, check_rule
from dshard.testing.counter import CountedCollective as Collective
from dshard.testing.counter import Traffic, count_traffic
from dshard.testing.cuda_kernels import cuda_contract
from dshard.testing.host_sync import HostSyncError, no_host_sync
from dshard.testing.pool import RankPool, rank_pool
from dshard.testing.simulated_ranks import distribute, parts, simulated, whole

if TYPE_CHECKING:
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

__all__ = [
    "Collective",
    "HostSyncError",
    "RankPool",
    "Redistribution",
    "RuleError",
    "Traffic",
    "check_call",
    "check_rule",
    "count_traffic",
    "cuda_contract",
    "distribute",
    "dtensors",
    "layouts",
    "meshes",
    "no_host_sync",
    "parts",
    "placements",
    "rank_pool",
    "redistributions",
    "shapes",
    "simulated",
    "whole",
    "whole_numbers",
]


def __getattr__(name: str) -> object:
    """Import the generators on demand, as only they need hypothesis."""
    if name not in __all__:  # what is imported above is found without this
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("dshard.testing.generators"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
