"""Values of plans as JSON, written and read as their annotations say.

Layouts are in the notation in which they are printed, and fields that have their defaults are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import torch

from dshard.core.torch_placements import torch_placements
from dshard.layout import Layout, parse_layout
from dshard.mesh import Mesh
from dshard.placements import Placement

Placements: TypeAlias = tuple[Placement, ...]


def encoded(value: Any, mesh: Mesh) -> dict[str, Any]:
    """The fields of a dataclass that are compared and have no default, or another value; its mesh is `mesh`."""
    hints, written = get_type_hints(type(value)), dict[str, Any]()
    for each in fields(value):
        own = getattr(value, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.compare and hints[each.name] is not Mesh and (default is MISSING or own != default):
            written[each.name] = _encoded(hints[each.name], own, mesh)
    return written


def _encoded(kind: Any, value: Any, mesh: Mesh) -> Any:
    if kind == Placements:
        return str(Layout(mesh, value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if is_dataclass(value):
        return encoded(value, mesh)
    if isinstance(value, Mapping):
        return {key: _encoded(get_args(kind)[1], each, mesh) for key, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        if get_origin(kind) is UnionType:
            kind = next(each for each in get_args(kind) if get_origin(each) is tuple)
        return [_encoded(each, own, mesh) for each, own in zip(_entries(kind, len(value)), value, strict=True)]
    return value


def decoded(kind: Any, value: Any, mesh: Mesh) -> Any:
    """The value of such a kind that was written so; a mesh is `mesh`."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind == Placements:
        return torch_placements(parse_layout(value, mesh))
    if kind is Mesh:
        return mesh
    if origin in (Union, UnionType):
        kinds = [each for each in parts if each is not NoneType]
        return value if value is None or get_origin(kinds[0]) is Literal else decoded(kinds[0], value, mesh)
    if kind is torch.dtype:
        return getattr(torch, value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: decoded(hints[name], own, mesh) for name, own in value.items()})  # type: ignore[operator]
    if origin is Mapping:
        return {key: decoded(parts[1], own, mesh) for key, own in value.items()}
    if origin is frozenset:
        return frozenset(value)
    if origin is tuple:
        return tuple([decoded(each, own, mesh) for each, own in zip(_entries(kind, len(value)), value, strict=True)])
    return value


def _entries(kind: Any, n: int) -> tuple[Any, ...]:
    """The kinds of the entries of a tuple of `n`."""
    parts = get_args(kind)
    return parts[:1] * n if parts[1:] == (...,) else parts
