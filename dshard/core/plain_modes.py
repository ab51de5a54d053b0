"""What plain tensors among distributed ones are, by what models on their mesh were told of inputs."""

from __future__ import annotations

import gc
from typing import Literal, TypeAlias
from weakref import WeakSet

from dshard.core.comparisons import comparisons_on
from dshard.mesh import Mesh

PlainMode: TypeAlias = Literal["global", "per-data-rank", "both"]
_MODELS: dict[tuple[Mesh, bool], WeakSet[object]] = {}
"""What stands for the models on a mesh, by whether plain tensors are parts of data ranks; each ends with its model."""


def declare_model(model: object, mesh: Mesh, per_data_rank: bool) -> None:
    """Declare that a model on `mesh` is given whole batches, alike on all ranks, or the rows of each data rank."""
    _MODELS.setdefault((mesh, per_data_rank), WeakSet()).add(model)
    comparisons_on(mesh).restart()


def plain_mode(mesh: Mesh) -> PlainMode | None:
    """What plain tensors are in programs on this mesh: whole, rows, "both" if models differ; None without a model."""
    whole, rows = _MODELS.get((mesh, False)), _MODELS.get((mesh, True))
    if whole and rows:
        gc.collect()  # a model that is no longer used, which other ranks may have freed, says nothing
    return "both" if whole and rows else "global" if whole else "per-data-rank" if rows else None
