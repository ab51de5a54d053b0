"""What plain tensors among distributed ones are, by what models on their mesh were told of inputs."""

from __future__ import annotations

import gc
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

from dshard.core.comparisons import comparisons_on
from dshard.layout import Layout
from dshard.mesh import Mesh

PlainMode: TypeAlias = Literal["global", "per-data-rank", "both"]
_MODELS: dict[tuple[Mesh, bool], WeakKeyDictionary[object, Layout]] = {}
"""The layout of rows for each model on a mesh, by whether plain tensors are parts of data ranks."""


def declare_model(model: object, rows: Layout, per_data_rank: bool) -> None:
    """Declare that a model is given whole batches, alike on all ranks of the mesh, or the rows of each data rank.

    `rows` is the layout in which it computes with tensors of rows.
    """
    _MODELS.setdefault((rows.mesh, per_data_rank), WeakKeyDictionary())[model] = rows
    comparisons_on(rows.mesh).restart()


def plain_mode(mesh: Mesh) -> PlainMode | None:
    """What plain tensors are in programs on this mesh: whole, rows, "both" if models differ; None without a model."""
    whole, rows = _MODELS.get((mesh, False)), _MODELS.get((mesh, True))
    if whole and rows:
        gc.collect()  # a model that is no longer used, which other ranks may have freed, says nothing
    return "both" if whole and rows else "global" if whole else "per-data-rank" if rows else None


def layout_of_rows(mesh: Mesh) -> Layout | None:
    """The layout in which the models on a mesh, given whole batches, compute with rows; None if theirs differ."""
    layouts = {*_MODELS.get((mesh, False), {}).values()}
    return layouts.pop() if len(layouts) == 1 else None
