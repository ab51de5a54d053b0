"""What plain tensors among distributed ones are, by what models on their mesh were told of inputs."""

from __future__ import annotations

import gc
from typing import Literal, TypeAlias
from weakref import WeakSet

from dshard.core.comparisons import comparisons_on
from dshard.layout import Layout
from dshard.mesh import Mesh

PlainMode: TypeAlias = Literal["global", "per-data-rank", "both"]
_MODELS: dict[tuple[Mesh, bool], WeakSet[object]] = {}
"""What stands for the models that were laid out on a mesh, by whether plain tensors are parts of data ranks."""
_ROWS: dict[Mesh, Layout] = {}
"""The layout in which the last model on a mesh that is given whole batches computes with rows."""


def declare_model(model: object, rows: Layout, per_data_rank: bool) -> None:
    """Declare that a model is given whole batches, alike on all ranks of the mesh, or the rows of each data rank.

    `rows` is the layout in which it computes with tensors of rows.
    """
    _MODELS.setdefault((rows.mesh, per_data_rank), WeakSet()).add(model)
    if not per_data_rank:
        _ROWS[rows.mesh] = rows
    comparisons_on(rows.mesh).restart()


def plain_mode(mesh: Mesh) -> PlainMode | None:
    """What plain tensors are in programs on this mesh: whole, rows, "both" if models differ; None without a model."""
    kinds = [kind for kind in (False, True) if (mesh, kind) in _MODELS]
    if len(kinds) == 2:
        gc.collect()  # so that all ranks have freed the models that are no longer used
        for kind in kinds:
            if not _MODELS[mesh, kind]:
                del _MODELS[mesh, kind]
        kinds = [kind for kind in kinds if (mesh, kind) in _MODELS]
    return ("both" if len(kinds) == 2 else "per-data-rank" if kinds[0] else "global") if kinds else None


def layout_of_rows(mesh: Mesh) -> Layout:
    """The layout in which models on a mesh that are given whole batches compute with rows."""
    return _ROWS[mesh]
