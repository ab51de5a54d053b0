"""Layouts of whole models: by named strategies, the cheapest plan, or parameter names; torch's styles; mesh search."""

from dshard.parallel.atp_search import MeshChoice, Move, Transformer, rank_meshes
from dshard.parallel.auto import Auto
from dshard.parallel.batches import batches
from dshard.parallel.boundary import data_ranks, distribute_batch
from dshard.parallel.checkpoint import checkpoint
from dshard.parallel.load_pretrained import from_pretrained
from dshard.parallel.loss import loss_parallel
from dshard.parallel.model_plan import parallelize, plan_model
from dshard.parallel.plan_values import Cost, Memory, Moves, Plan
from dshard.parallel.precision import Precision
from dshard.parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from dshard.parallel.style_apply import parallelize_module
from dshard.parallel.style_io import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput

__all__ = [
    "Auto",
    "ColwiseParallel",
    "Cost",
    "Memory",
    "MeshChoice",
    "Move",
    "Moves",
    "ParallelStyle",
    "Plan",
    "Precision",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "Transformer",
    "batches",
    "checkpoint",
    "data_ranks",
    "distribute_batch",
    "from_pretrained",
    "loss_parallel",
    "parallelize",
    "parallelize_module",
    "plan_model",
    "rank_meshes",
]
