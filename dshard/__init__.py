"""dshard: declare the layouts of tensors on a mesh of devices, and run ordinary PyTorch code on them."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from dshard.caches import CacheInfo, cache_info, clear_caches
from dshard.comm import DeviceMesh, init_device_mesh
from dshard.core.context import use_topology
from dshard.dispatch.registry import register_rule, rules
from dshard.errors import (
    ArgumentError,
    CheckpointError,
    CompileError,
    DShardError,
    DtypeError,
    LayoutError,
    MeshError,
    MixedError,
    NotationError,
    PeerError,
    RankError,
    ShapeError,
    StrategyError,
    TopologyError,
)
from dshard.explain import explain
from dshard.factories import distribute_module, empty, full, ones, rand, randint, randn, randperm, zeros
from dshard.functional import linear, matmul
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.ops.matmul.options import use_strategy
from dshard.ops.random.state import get_rng_state, manual_seed, set_rng_state
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.rules.matmul_loops import Schedule
from dshard.rules.matmul_strategies import strategies
from dshard.rules.panel_stream import Stream
from dshard.tensor import DTensor, distribute_tensor
from dshard.topology import Topology
from dshard.topology.network import MEASURERS as _MEASURERS
from dshard.trace import strict, trace

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CacheInfo",
    "CheckpointError",
    "CompileError",
    "DShardError",
    "DTensor",
    "DeviceMesh",
    "DtypeError",
    "Layout",
    "LayoutError",
    "Mesh",
    "MeshError",
    "MixedError",
    "NotationError",
    "Partial",
    "PeerError",
    "Placement",
    "RankError",
    "Replicate",
    "Schedule",
    "ShapeError",
    "Shard",
    "StrategyError",
    "Stream",
    "Topology",
    "TopologyError",
    "cache_info",
    "clear_caches",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "get_rng_state",
    "init_device_mesh",
    "linear",
    "manual_seed",
    "matmul",
    "ones",
    "parallelize",
    "plan_model",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_rule",
    "rules",
    "set_rng_state",
    "strategies",
    "strict",
    "trace",
    "use_strategy",
    "use_topology",
    "zeros",
]

if _TYPE_CHECKING:
    from dshard.parallel import parallelize, plan_model

_LATE = {
    "calibrate": "dshard.calibrate",
    "parallel": "dshard.parallel",
    "parallelize": "dshard.parallel",
    "plan_model": "dshard.parallel",
    "visualize": "dshard.report.visualize",
}
"""Names that few programs need, and the modules that have them: imported when they are asked for."""


def __getattr__(name: str) -> _Any:
    """Import a name of `_LATE` when it is asked for."""
    if name not in _LATE:
        raise AttributeError(f"module 'dshard' has no attribute {name!r}")
    module = _import_module(_LATE[name])
    value = globals()[name] = module if module.__name__ == f"dshard.{name}" else getattr(module, name)
    return value


def _measure(mesh: _Any, **options: _Any) -> Topology:
    topology: Topology = _import_module("dshard.calibrate").measure(mesh, **options)
    return topology


_MEASURERS.append(_measure)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
