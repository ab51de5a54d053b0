"""Writes docs/reference.md: the public names by what they are for, each with its line, and below with its docstring.

PYTHONPATH=. python docs/make_reference.py
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import get_args, get_origin

import dshard

PAGE = Path(__file__).parent / "reference.md"

WHOLE = ("parallel", "pipeline", "checkpoint", "testing", "debug", "experimental")
"""Modules all of whose names are public."""

GROUPS: dict[str, dict[str, str]] = {
    "Layouts": {
        "dshard": "Mesh init_device_mesh Layout Placement Shard Replicate Partial",
        "dshard.tools.report.visualize": "visualize",
    },
    "Tensors": {
        "dshard": "DTensor distribute_tensor from_torch implicit_replication zeros ones empty full rand randn "
        "randint randperm linspace logspace manual_seed get_rng_state set_rng_state",
        "dshard.autograd": "redistribute",
    },
    "Whole models": {
        "dshard": "parallelize plan_model plan_function batches distribute_batch data_ranks accumulate rehearsing "
        "rehearsal_of replay distribute_module",
        "dshard.rehearsal": "Rehearsal",
        "dshard.replay": "Replay",
        "dshard.parallel": "Auto ModelPlan FunctionPlan Cost Memory Moves plan_steps plan_table PlanTable RankedPlan "
        "Precision checkpoint from_pretrained loss_parallel "
        "register_experts",
    },
    "Styles of torch": {
        "dshard.parallel": "parallelize_module ParallelStyle ColwiseParallel RowwiseParallel SequenceParallel "
        "PrepareModuleInput PrepareModuleOutput PrepareModuleInputOutput",
    },
    "Products and operators": {
        "dshard": "matmul linear linear_cross_entropy flex_attention experts mlp_experts ExpertBody "
        "use_strategy strategies Schedule Stream register_rule rules",
        "dshard.experimental": "local_map register_sharding TensorLike",
    },
    "Plans and explanations": {
        "dshard": "explain trace strict compare cache_info CacheInfo clear_caches",
        "dshard.compare": "Comparison ModuleComparison Deviation",
        "dshard.explain": "Report Candidate Explanation explain_matmul",
        "dshard.redistribute": "plan Plan Step AllGather ReduceScatter AllReduce AllToAll Slice Exchange "
        "ReduceExchange MakePartial Panel",
        "dshard.reshard": "plan_reshard ReshardPlan Task Chain",
        "dshard.debug": "CommDebugMode tell_waits visualize_sharding",
    },
    "Networks": {
        "dshard": "Topology use_topology Routing",
        "dshard.topology": "FLAT_CPU FLAT_CUDA PRESETS Layer Link Device Backend Algorithm nccl_algorithms "
        "default_topology",
        "dshard.calibrate": "measure measure_world fit Fit",
    },
    "Pipelines": {
        "dshard.pipeline": "Pipeline Stage split uniform chain choose Choice Costs Part EdgeCost StageCost simulate "
        "Timeline Span SCHEDULES Program Action Compute Forward Backward BackwardInput BackwardWeight Send Receive "
        "Edge Crossing computes edges_of lead_of play rank_schedules",
    },
    "A step before it runs": {
        "dshard.simulate": "record Recorded Event PlacedEvent",
        "dshard.launch": "rehearse Rehearsed",
    },
    "Checkpoints": {
        "dshard.checkpoint": "save load save_safetensors load_safetensors",
        "dshard.report": "checkpoint_progress",
    },
    "Tests": {
        "dshard.testing": "rank_pool RankPool simulated check_rule check_call RuleError count_traffic Traffic "
        "Collective cuda_contract no_host_sync HostSyncError distribute parts whole whole_numbers dtensors layouts "
        "meshes placements shapes redistributions Redistribution",
        "dshard.selftest": "run SelfTest Result environment",
    },
    "Errors": {
        "dshard": "DShardError ArgumentError CheckpointError CompileError DtypeError LayoutError MeshError "
        "MixedError NotationError PeerError RankError ReplayError ShapeError StrategyError TopologyError",
    },
}
"""What names are for, and where they are imported from."""

OF_TORCH = {
    "Layouts": '| <a id="dshard.DeviceMesh"></a>`DeviceMesh` | `dshard` | torch\'s: what `init_device_mesh` returns. |'
}
"""The rows of names that torch documents."""


def paths() -> list[str]:
    """Where each name of the page is imported from, `dshard.matmul`."""
    return [
        f"{module}.{name}" for group in GROUPS.values() for module, names in group.items() for name in names.split()
    ]


def value_at(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def first_line(path: str) -> str:
    """The first line of a docstring; of a value its type."""
    value = value_at(path)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        own = type(value).__module__.startswith("dshard")
        return f"a `{type(value).__name__}`" if own or isinstance(value, Mapping) else _members(value)
    return (inspect.getdoc(value) or "").partition("\n")[0]


def _members(kind: object) -> str:
    """What a type made of others is: one of a union's types or a literal's values, or a tuple."""
    members = ", ".join(f"`{getattr(each, '__name__', each)}`" for each in get_args(kind))
    return f"{'a tuple of' if get_origin(kind) is tuple else 'one of'} {members}"


def reference() -> str:
    """The page: a table of names for each task, then the docstrings."""
    lines = ["# Reference", "", "Everything that is public, by what it is for. Names of `dshard` need no module.", ""]
    for task, modules in GROUPS.items():
        lines += [f"## {task}", "", "| name | from | for |", "|---|---|---|"]
        every = [(module, name) for module, names in modules.items() for name in names.split()]
        for module, name in every:
            text = first_line(f"{module}.{name}").replace("|", "\\|")
            source = (
                "dshard" if hasattr(dshard, name) and getattr(dshard, name) is value_at(f"{module}.{name}") else module
            )
            # mkdocstrings makes anchors of where names are defined, and links say where they are imported from
            anchor = "" if source == module else f'<a id="{source}.{name}"></a>'
            lines.append(f"| {anchor}[`{name}`](#{module}.{name}) | `{source}` | {text} |")
        lines += [OF_TORCH[task]] if task in OF_TORCH else []
        lines += ["", *(line for module, name in every for line in (f"::: {module}.{name}", ""))]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(reference())
