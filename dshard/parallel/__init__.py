"""Lay out whole models: the search over meshes, and torch's own styles of laying out modules."""

from dshard.parallel.loss import loss_parallel
from dshard.parallel.search import MeshChoice, Move, Transformer, rank_meshes
from dshard.parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from dshard.parallel.style_apply import parallelize_module
from dshard.parallel.style_io import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput

__all__ = [
    "ColwiseParallel",
    "MeshChoice",
    "Move",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "Transformer",
    "loss_parallel",
    "parallelize_module",
    "rank_meshes",
]
