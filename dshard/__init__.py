"""dshard: declare the layouts of tensors on a mesh of devices, and run ordinary PyTorch code on them."""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# While `python -m dshard` imports this package argv[0] is "-m", and orig_argv ends with the module and its arguments
if (_sys.orig_argv[-len(_sys.argv)] if _sys.argv[:1] == ["-m"] else _sys.argv[0].rpartition("/")[2]) == "dshard":
    import signal as _signal

    # Ctrl-C ends the command without a traceback while torch is imported; `dshard.tools.cli.script` takes it back
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from torch.serialization import add_safe_globals as _add_safe_globals

from dshard.caches import CacheInfo, cache_info, clear_caches
from dshard.comm import DeviceMesh, init_device_mesh
from dshard.core.context import use_topology
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
    ReplayError,
    ShapeError,
    StrategyError,
    TopologyError,
)
from dshard.foreign_names import line_for as _line_for
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.notebook import RENDERERS as _RENDERERS
from dshard.placements import Placement
from dshard.placements import types as _placements
from dshard.routing import Routing
from dshard.rules.matmul_loops import Schedule, strategies
from dshard.rules.panel_stream import Stream
from dshard.topology import Topology
from dshard.topology.network import MEASURERS as _MEASURERS
from dshard.version import __version__ as __version__

__all__ = [
    "ArgumentError",
    "CacheInfo",
    "CheckpointError",
    "CompileError",
    "DShardError",
    "DTensor",
    "DeviceMesh",
    "DtypeError",
    "ExpertBody",
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
    "ReplayError",
    "Replicate",
    "Routing",
    "Schedule",
    "ShapeError",
    "Shard",
    "StrategyError",
    "Stream",
    "Topology",
    "TopologyError",
    "accumulate",
    "batches",
    "cache_info",
    "clear_caches",
    "compare",
    "data_ranks",
    "distribute_batch",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "experts",
    "explain",
    "flex_attention",
    "from_torch",
    "full",
    "get_rng_state",
    "implicit_replication",
    "init_device_mesh",
    "linear",
    "linear_cross_entropy",
    "linspace",
    "logspace",
    "manual_seed",
    "matmul",
    "mlp_experts",
    "ones",
    "parallelize",
    "plan_function",
    "plan_model",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_rule",
    "rehearsal_of",
    "rehearsing",
    "replay",
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
    from dshard.autograd.leaf_gradients import accumulate
    from dshard.compare import compare
    from dshard.core.plain_tensors import implicit_replication
    from dshard.core.torch_placements import Partial, Replicate, Shard
    from dshard.core.torch_tensors import from_torch
    from dshard.dispatch.registry import register_rule, rules
    from dshard.distribute import distribute_module, distribute_tensor
    from dshard.explain import explain
    from dshard.factories import (
        empty,
        full,
        linspace,
        logspace,
        ones,
        rand,
        randint,
        randn,
        randperm,
        zeros,
    )
    from dshard.functional import (
        ExpertBody,
        experts,
        flex_attention,
        linear,
        linear_cross_entropy,
        matmul,
        mlp_experts,
    )
    from dshard.ops.matmul.options import use_strategy
    from dshard.ops.random.state import get_rng_state, manual_seed, set_rng_state
    from dshard.parallel import batches, data_ranks, distribute_batch, parallelize, plan_function, plan_model
    from dshard.rehearsal import rehearsal_of, rehearsing
    from dshard.replay import replay
    from dshard.tensor import DTensor
    from dshard.trace import strict, trace

_LATE = {
    "dshard.autograd.leaf_gradients": ("accumulate",),
    "dshard.calibrate": ("calibrate",),
    "dshard.compare": ("compare",),
    "dshard.core.plain_tensors": ("implicit_replication",),
    "dshard.core.torch_placements": ("Partial", "Replicate", "Shard"),
    "dshard.core.torch_tensors": ("from_torch",),
    "dshard.dispatch.registry": ("register_rule", "rules"),
    "dshard.distribute": ("distribute_module", "distribute_tensor"),
    "dshard.explain": ("explain",),
    "dshard.factories": (
        *("empty", "full", "linspace", "logspace", "ones"),
        *("rand", "randint", "randn", "randperm", "zeros"),
    ),
    "dshard.functional": (
        *("ExpertBody", "experts", "flex_attention", "linear", "linear_cross_entropy", "matmul", "mlp_experts"),
    ),
    "dshard.ops.matmul.options": ("use_strategy",),
    "dshard.ops.random.state": ("get_rng_state", "manual_seed", "set_rng_state"),
    "dshard.parallel": (
        "batches",
        "data_ranks",
        "distribute_batch",
        "parallel",
        "parallelize",
        "plan_function",
        "plan_model",
    ),
    "dshard.rehearsal": ("rehearsal_of", "rehearsing"),
    "dshard.replay": ("replay",),
    "dshard.tools.report.visualize": ("visualize",),
    "dshard.tensor": ("DTensor",),
    "dshard.trace": ("strict", "trace"),
}
"""Modules, and their names that are imported when they are asked for.

Distributed tensors and placements are torch's, too, and torch takes longer to import its own than dshard takes to be
imported.
"""
_MODULES = {name: module for module, names in _LATE.items() for name in names}


def __getattr__(name: str) -> _Any:
    """Import a name of `_LATE` when it is asked for."""
    if name not in _MODULES:
        line = _line_for(name)
        message = f"module 'dshard' has no attribute {name!r}{f': write {line}' if line else ''}"
        # Of an AttributeError in `from dshard import ...` Python drops the message
        is_from_import = bool(line) and _sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise ImportError(message) if is_from_import else AttributeError(message)
    path = _MODULES[name]
    module = _import_module(path)
    value = globals()[name] = module if name in ("calibrate", "parallel") else getattr(module, name)
    return value


class _Package(_ModuleType):
    """This package, whose functions of the names of modules stay what they are when those modules are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)


for _name in _MODULES:
    globals().pop(_name, None)  # a module that the imports above have set
_sys.modules[__name__].__class__ = _Package


def _late_function(path: str) -> _Any:
    """A function that `torch.load` calls, of which it need not have been told more than `import dshard`."""
    module, _, name = path.rpartition(".")
    return lambda *parts: getattr(_import_module(module), name)(*parts)


_PICKLED_BY = (
    "dshard.tensor._unpickle",
    "dshard.core.torch_placements.strided",
    "dshard.core.replaced_parameters.successor",
)
_PLACEMENTS = (_placements.Partial, _placements.Replicate, _placements.Shard)
_add_safe_globals([*((_late_function(path), path) for path in _PICKLED_BY), Layout, Mesh, *_PLACEMENTS])


def _measure(mesh: object, **options: object) -> Topology:
    topology: Topology = _import_module("dshard.calibrate").measure(mesh, **options)
    return topology


_MEASURERS.append(_measure)
_RENDERERS.append(_late_function("dshard.tools.report.visualize.html"))


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
