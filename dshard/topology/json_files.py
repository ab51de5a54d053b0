"""Topologies as JSON, with errors that name the path of the wrong field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from types import UnionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from dshard.errors import DShardError, TopologyError
from dshard.mesh import Mesh
from dshard.topology.algorithms import Algorithm
from dshard.topology.links import Device, Layer, Measured
from dshard.validate import as_int, check_type, shown

SCHEMA = 1
"""The version of the format that this code writes, and the only one it reads."""

MAX_RANKS = 1 << 20
"""The most ranks that a mesh in a file may have."""

Fields: TypeAlias = dict[str, Any]
Read: TypeAlias = Callable[[str, object], Any]
"""Reads the value at a path in the file."""


def dumps(fields: Fields, size: int | None) -> str:
    """A topology of `size` ranks as JSON, from its `fields` as `dataclasses.asdict` gives them.

    Infinity, which JSON has not, is written as null; ranks of a mesh in order are left out.
    """
    device, first = fields["device"], {name: fields.pop(name) for name in ("name", "source", "backend")}
    device["flops"] = dict(device["flops"])
    if device["memory_bandwidth"] == inf:
        device["memory_bandwidth"] = None
    if device["memory"] is None:
        del device["memory"]
    for layer in fields["layers"]:
        if layer["hardware"] is None:
            del layer["hardware"]
    if not fields["algorithms"]:
        del fields["algorithms"]
    for measured in fields["measured"]:
        if measured["mesh"]["ranks"] == tuple(range(prod(measured["mesh"]["shape"]))):
            measured["mesh"]["ranks"] = ()
        if measured["overlap"] is None:
            del measured["overlap"]
    return json.dumps({"schema": SCHEMA, **first, "ranks": size, **fields}, indent=2, allow_nan=False) + "\n"


def loads(text: str) -> Fields:
    """The fields of the topology that the JSON `text` describes."""
    check_type(text, str, "a topology", "give its JSON as text; Topology.load reads a file", TopologyError)
    try:
        value = json.loads(text, object_pairs_hook=_unique_fields)
    except TopologyError:
        raise
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"no topology: this is not JSON: {error}") from error
    known = ("schema", "name", "layers", "device", "backend", "ranks", "measured", "source", "algorithms")
    fields = _fields("", value, required=known[:4], optional=known[4:])
    if fields["schema"] != SCHEMA or isinstance(fields["schema"], bool):
        raise TopologyError(f"schema: {fields['schema']!r} is not {SCHEMA}, the only version that is read here")
    layers = _list("layers", fields["layers"], partial(_read, Layer))
    if "ranks" in fields:
        _check_total(fields["ranks"], layers)
    return {name: _read(kind, name, fields[name]) for name, kind in _KINDS.items() if name in fields}


_KINDS = {
    "name": str,
    "layers": tuple[Layer, ...],
    "device": Device,
    "backend": str,
    "measured": tuple[Measured, ...],
    "source": str,
    "algorithms": tuple[Algorithm, ...],
}
"""The fields of a topology in a file, and the kinds of their values."""


def _read(kind: Any, path: str, value: Any) -> Any:
    """The value at a path in the file, as an annotation says; numbers are checked by the class that receives them."""
    if dataclasses.is_dataclass(kind):
        return _build(kind, path, value)
    if kind is str:
        return _text(path, value)
    if kind is int:
        return as_int(value, path, TopologyError, least=0)
    if get_origin(kind) is UnionType and isinstance(value, list):  # one number, or a matrix
        kind = next((each for each in get_args(kind) if get_origin(each) is tuple), kind)
    if get_origin(kind) is tuple:
        item, *more = get_args(kind)
        return _list(path, value, partial(_read, item if more == [...] else None))
    return value


def _build(make: Any, path: str, value: object) -> Any:
    """Call a class with the fields of an object; its errors are prefixed with the path in the file."""
    hints, known = get_type_hints(make), [each for each in dataclasses.fields(make) if each.init]
    required = [each.name for each in known if each.default is dataclasses.MISSING]
    fields = _fields(path, value, required, [each.name for each in known if each.name not in required])
    for name, own in fields.items():
        read: Read = _READERS.get((make, name)) or partial(_read, hints[name])
        fields[name] = read(f"{path}.{name}", own)
    try:
        return make(**fields)
    except DShardError as error:
        raise TopologyError(f"{path}.{error}" if isinstance(error, TopologyError) else f"{path}: {error}") from error


def _fields(path: str, value: object, required: Sequence[str], optional: Sequence[str]) -> Fields:
    where = f"{path}." if path else ""
    if not isinstance(value, dict):
        raise TopologyError(f"{path or 'no topology'}: {shown(value)} is no object with fields")
    for name in required:
        if name not in value:
            raise TopologyError(f"{where}{name}: missing; the fields are {', '.join((*required, *optional))}")
    for name in value:
        if name not in required and name not in optional:
            raise TopologyError(f"{where}{name}: no such field; the fields are {', '.join((*required, *optional))}")
    return dict(value)


def _list(path: str, value: object, read: Read) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TopologyError(f"{path}: {shown(value)} is no list")
    return tuple(read(f"{path}[{i}]", item) for i, item in enumerate(value))


def _rates(path: str, value: object) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, dict):
        raise TopologyError(f"{path}: {value!r} is no object of dtypes and rates")
    return tuple(value.items())


def _text(path: str, value: object) -> str:
    if not isinstance(value, str):
        raise TopologyError(f"{path}: {shown(value)} is no text")
    return value


def _sizes(path: str, value: object) -> tuple[int, ...]:
    sizes: tuple[int, ...] = _read(tuple[int, ...], path, value)
    if prod(sizes) > MAX_RANKS:
        raise TopologyError(f"{path}: {sizes} has more than {MAX_RANKS} ranks")
    return sizes


_READERS: dict[tuple[type, str], Read] = {
    (Device, "flops"): _rates,
    (Device, "memory_bandwidth"): lambda _, value: inf if value is None else value,
    (Mesh, "shape"): _sizes,
}
"""The readers of fields that are written otherwise than they are annotated, or have a limit."""


def _total(layers: Sequence[Layer]) -> int | None:
    """Return the number of ranks of all layers together, or None if it is not fixed."""
    sizes = [layer.ranks for layer in layers]
    return None if None in sizes else prod(size for size in sizes if size is not None)


def _check_total(stated: object, layers: Sequence[Layer]) -> None:
    if stated != _total(layers) or isinstance(stated, bool):
        factors = " x ".join("any" if layer.ranks is None else str(layer.ranks) for layer in layers)
        raise TopologyError(f"ranks: {shown(stated)} is not the number of ranks of the layers, {factors}")


def _unique_fields(pairs: list[tuple[str, object]]) -> Fields:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TopologyError(f"{twice}: given twice in one object")
    return fields
