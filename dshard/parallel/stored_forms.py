"""Parameters that the files of a pretrained model store in another form, which transformers converts.

Each rank reads shards by the placements of the parameter, and converts those. This is right for stacking the experts of
a layer. The gate and up projections of experts are stored separately and joined along the dim of features: if that is
sharded, a rank gets a shard of each, and the result is redistributed afterwards. Other conversions, such as splitting a
fused projection, need the global tensor on each rank until it is converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

from torch import nn

from dshard.layout import Shape
from dshard.mesh import Mesh
from dshard.placements import Placement, Replicate, Shard

Placements = tuple[Placement, ...]
_STACKED, _JOINED = ("MergeModulelist",), ("MergeModulelist", "Concatenate")  # the names of operations


@dataclass(frozen=True, slots=True)
class StoredForm:
    """The operations that convert stored tensors to the parameters of some names; `parts` tensors join along `dim`."""

    names: tuple[str, ...]
    operations: tuple[str, ...]
    parts: int
    dim: int | None

    def while_loading(self, shape: Shape, placements: Placements, mesh: Mesh) -> Placements:
        """The placements in which a rank reads the stored tensors of a parameter of this shape."""
        if self.operations == _STACKED:
            return placements
        if self.dim is None:
            return (Replicate(),) * len(placements)
        splits = [placement == Shard(self.dim) for placement in placements]
        ranks = prod(size for size, split in zip(mesh.shape, splits, strict=True) if split)
        if shape[self.dim] % (self.parts * ranks) == 0:
            return placements
        return tuple(Replicate() if split else each for each, split in zip(placements, splits, strict=True))


def known_forms(model: nn.Module) -> list[StoredForm]:
    """The forms that transformers can convert for this model, whether its files have them or not."""
    mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    return [_form_of(converter) for converter in mapping if hasattr(converter, "operations")]


def converted_forms(model: nn.Module) -> list[StoredForm]:
    """The forms that transformers has converted for this loaded model."""
    converters: Any = getattr(model, "_weight_conversions", None) or ()
    return [_form_of(converter) for converter in converters if hasattr(converter, "operations")]


def _form_of(converter: Any) -> StoredForm:
    operations = [op for op in converter.operations if type(op).__name__ != "Force16BytesAlignment"]
    names = tuple(type(op).__name__ for op in operations)
    joins = names == _JOINED and len(converter.target_patterns) == 1
    dim = operations[-1].dim if joins else None
    return StoredForm(tuple(converter.target_patterns), names, len(converter.source_patterns), dim)


def form_of(name: str, forms: Sequence[StoredForm]) -> StoredForm | None:
    """The form of the parameter of this name; among several, the form with the most operations."""
    matching = [form for form in forms if any(target in name for target in form.names)]
    return max(matching, key=lambda form: len(form.operations), default=None)


def as_planned(p: Any, form: StoredForm | None, placements: Placements) -> Any:
    """A loaded parameter without its graph, moved to the placements of the plan; `form` was converted for it."""
    loaded = p.detach()
    if form is not None and form.dim is not None and Shard(form.dim) in loaded.placements:
        dim, parts, sizes = form.dim, form.parts, loaded.shape
        pieces = loaded.to_local().unflatten(dim, (parts, loaded.to_local().shape[dim] // parts))
        by_part = [Shard(at.dim + (at.dim >= dim)) if isinstance(at, Shard) else at for at in loaded.placements]
        shape = (*sizes[:dim], parts, sizes[dim] // parts, *sizes[dim + 1 :])
        loaded = type(loaded).from_local(pieces, loaded.device_mesh, by_part, shape=shape).flatten(dim, dim + 1)
    return loaded.redistribute(placements=placements)
