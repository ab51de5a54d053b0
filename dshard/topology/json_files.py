"""Topologies as JSON, with errors that name the path of the wrong field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any, TypeAlias, TypeVar

from dshard.errors import DShardError, TopologyError
from dshard.mesh import Mesh
from dshard.topology.algorithms import Algorithm
from dshard.topology.links import Device, Layer, Measured
from dshard.validate import as_int, check_type, shown

SCHEMA = 1
"""The version of the format that this code writes, and the only one it reads."""

MAX_RANKS = 1 << 20
"""The most ranks that a mesh in a file may have."""

_ALGORITHM = tuple(field.name for field in dataclasses.fields(Algorithm))
Fields: TypeAlias = dict[str, Any]
T = TypeVar("T")
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
    layers = _list("layers", fields["layers"], _layer)
    if "ranks" in fields:
        _check_total(fields["ranks"], layers)
    return {
        "name": _text("name", fields["name"]),
        "layers": layers,
        "device": _device("device", fields["device"]),
        "backend": _text("backend", fields.get("backend", "gloo")),
        "measured": _list("measured", fields.get("measured", []), _measured),
        "source": _text("source", fields.get("source", "")),
        "algorithms": _list("algorithms", fields.get("algorithms", []), _algorithm),
    }


def _layer(path: str, value: object) -> Layer:
    required, optional = (
        ("name", "ranks", "group_bandwidth", "latency"),
        ("pair_bandwidth", "rank_bandwidth", "hardware"),
    )
    return _build(path, Layer, _fields(path, value, required, optional), pair_bandwidth=_pairs)


_DEVICE_OPTIONS = ("dispatch", "in_place", "memory", "alone", "overlap")


def _device(path: str, value: object) -> Device:
    fields = _fields(path, value, ("name", "flops", "memory_bandwidth", "launch"), _DEVICE_OPTIONS)
    return _build(path, Device, fields, flops=_rates, memory_bandwidth=lambda _, value: inf if value is None else value)


def _measured(path: str, value: object) -> Measured:
    required = ("collective", "mesh", "axes", "latency", "bandwidth")
    fields = _fields(path, value, required, ("points", "date", "device", "sizes", "spread"))
    read: dict[str, Read] = {"mesh": _mesh, "axes": _texts, "sizes": _values, "points": _rows}
    return _build(path, Measured, fields, **read, date=_text, device=_text)


def _algorithm(path: str, value: object) -> Algorithm:
    return _build(path, Algorithm, _fields(path, value, _ALGORITHM, ()), share=_values, most=_values)


def _mesh(path: str, value: object) -> Mesh:
    """Read a mesh, whose ranks are 0, 1, 2, ... unless listed."""
    fields = _fields(path, value, ("shape", "names"), ("ranks", "device_type"))
    return _build(path, Mesh, fields, shape=_sizes, names=_texts, ranks=_integers, device_type=_text)


def _build(path: str, make: Callable[..., T], fields: Fields, **read: Read) -> T:
    """Call `make` with these fields, reading some of them first; its errors are prefixed with the path in the file."""
    for name in read.keys() & fields.keys():
        fields[name] = read[name](f"{path}.{name}", fields[name])
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


def _values(path: str, value: object) -> tuple[Any, ...]:
    """Read a list of any values, which the class that receives them checks."""
    return _list(path, value, lambda _, item: item)


def _rows(path: str, value: object) -> tuple[tuple[Any, ...], ...]:
    return _list(path, value, _values)


def _pairs(path: str, value: object) -> Any:
    """Read one bandwidth for all pairs, or a matrix."""
    return _rows(path, value) if isinstance(value, list) else value


def _rates(path: str, value: object) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, dict):
        raise TopologyError(f"{path}: {value!r} is no object of dtypes and rates")
    return tuple(value.items())


def _text(path: str, value: object) -> str:
    if not isinstance(value, str):
        raise TopologyError(f"{path}: {shown(value)} is no text")
    return value


def _texts(path: str, value: object) -> tuple[str, ...]:
    return _list(path, value, _text)


def _integer(path: str, value: object) -> int:
    return as_int(value, path, TopologyError, least=0)


def _integers(path: str, value: object) -> tuple[int, ...]:
    return _list(path, value, _integer)


def _sizes(path: str, value: object) -> tuple[int, ...]:
    sizes = _integers(path, value)
    if prod(sizes) > MAX_RANKS:
        raise TopologyError(f"{path}: {sizes} has more than {MAX_RANKS} ranks")
    return sizes


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
