"""Topologies as JSON: writing, reading, and errors that name the path of the wrong field."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any, TypeAlias, TypeVar

from dshard.errors import DShardError, TopologyError
from dshard.mesh import Mesh
from dshard.topology.links import Device, Layer, Measured
from dshard.validate import check_type

SCHEMA = 1
"""The version of the format that this code writes, and the only one it reads."""

MAX_RANKS = 1 << 20
"""The most ranks that a mesh in a file may have."""

Fields: TypeAlias = dict[str, Any]
T = TypeVar("T")


def dumps(
    *, name: str, layers: Sequence[Layer], device: Device, backend: str, measured: Sequence[Measured], source: str
) -> str:
    """A topology of these fields as JSON. Infinity, which JSON has not, is written as null."""
    value = {
        "schema": SCHEMA,
        "name": name,
        "source": source,
        "backend": backend,
        "ranks": _total(layers),
        "layers": [_layer_data(layer) for layer in layers],
        "device": {
            "name": device.name,
            "flops": dict(device.flops),
            "memory_bandwidth": None if device.memory_bandwidth == inf else device.memory_bandwidth,
            "launch": device.launch,
            "dispatch": device.dispatch,
            "in_place": device.in_place,
        },
        "measured": [_measured_data(figures) for figures in measured],
    }
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _layer_data(layer: Layer) -> Fields:
    return {
        "name": layer.name,
        "ranks": layer.ranks,
        "group_bandwidth": layer.group_bandwidth,
        "pair_bandwidth": layer.pair_bandwidth,
        "rank_bandwidth": layer.rank_bandwidth,
        "latency": layer.latency,
    }


def _measured_data(measured: Measured) -> Fields:
    mesh = measured.mesh
    return {
        "collective": measured.collective,
        "mesh": {
            "shape": mesh.shape,
            "names": mesh.names,
            "ranks": [] if mesh.ranks == tuple(range(mesh.size)) else mesh.ranks,
            "device_type": mesh.device_type,
        },
        "axes": measured.axes,
        "latency": measured.latency,
        "bandwidth": measured.bandwidth,
        "points": measured.points,
        "date": measured.date,
        "device": measured.device,
        "sizes": measured.sizes,
        "spread": measured.spread,
    }


def loads(text: str) -> Fields:
    """The fields of the topology that the JSON `text` describes.

    Raises:
        TopologyError: the text describes no topology; the message has the path of the wrong field.
    """
    check_type(text, str, "a topology", "give its JSON as text; Topology.load reads a file", TopologyError)
    try:
        value = json.loads(text, object_pairs_hook=_unique_fields)
    except TopologyError:
        raise
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"no topology: this is not JSON: {error}") from error
    known = ("schema", "name", "layers", "device", "backend", "ranks", "measured", "source")
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
    }


def _layer(path: str, value: object) -> Layer:
    required, optional = ("name", "ranks", "group_bandwidth", "latency"), ("pair_bandwidth", "rank_bandwidth")
    fields = _fields(path, value, required, optional)
    pair = fields.get("pair_bandwidth")
    if isinstance(pair, list):
        fields["pair_bandwidth"] = _rows(f"{path}.pair_bandwidth", pair)
    return _build(path, Layer, fields)


def _device(path: str, value: object) -> Device:
    fields = _fields(path, value, ("name", "flops", "memory_bandwidth", "launch"), ("dispatch", "in_place"))
    rates = fields["flops"]
    if not isinstance(rates, dict):
        raise TopologyError(f"{path}.flops: {rates!r} is no object of dtypes and rates")
    if fields["memory_bandwidth"] is None:
        fields["memory_bandwidth"] = inf
    return _build(path, Device, {**fields, "flops": tuple(rates.items())})


def _measured(path: str, value: object) -> Measured:
    required = ("collective", "mesh", "axes", "latency", "bandwidth")
    fields = _fields(path, value, required, ("points", "date", "device", "sizes", "spread"))
    fields["axes"] = _list(f"{path}.axes", fields["axes"], _text)
    fields["sizes"] = _list(f"{path}.sizes", fields.get("sizes", []), lambda _, size: size)
    fields["points"] = _rows(f"{path}.points", fields.get("points", []))
    for name in ("date", "device"):
        _text(f"{path}.{name}", fields.get(name, ""))
    return _build(path, Measured, {**fields, "mesh": _mesh(f"{path}.mesh", fields["mesh"])})


def _mesh(path: str, value: object) -> Mesh:
    """A mesh; its ranks are 0, 1, 2, ... unless listed."""
    fields = _fields(path, value, ("shape", "names"), ("ranks", "device_type"))
    shape = _list(f"{path}.shape", fields["shape"], _integer)
    if prod(shape) > MAX_RANKS:
        raise TopologyError(f"{path}.shape: {shape} has more than {MAX_RANKS} ranks")
    return _build(
        path,
        Mesh,
        {
            "shape": shape,
            "names": _list(f"{path}.names", fields["names"], _text),
            "ranks": _list(f"{path}.ranks", fields.get("ranks", []), _integer),
            "device_type": _text(f"{path}.device_type", fields.get("device_type", "cpu")),
        },
    )


def _build(path: str, make: Callable[..., T], fields: Fields) -> T:
    """Call `make` with these fields; an error of it gets the path in the file."""
    try:
        return make(**fields)
    except DShardError as error:
        raise TopologyError(f"{path}.{error}" if isinstance(error, TopologyError) else f"{path}: {error}") from error


def _fields(path: str, value: object, required: Sequence[str], optional: Sequence[str]) -> Fields:
    where = f"{path}." if path else ""
    if not isinstance(value, dict):
        raise TopologyError(f"{path or 'no topology'}: {_excerpt(value)} is no object with fields")
    for name in required:
        if name not in value:
            raise TopologyError(f"{where}{name}: missing; the fields are {', '.join((*required, *optional))}")
    for name in value:
        if name not in required and name not in optional:
            raise TopologyError(f"{where}{name}: no such field; the fields are {', '.join((*required, *optional))}")
    return dict(value)


def _list(path: str, value: object, read: Callable[[str, object], Any]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TopologyError(f"{path}: {_excerpt(value)} is no list")
    return tuple(read(f"{path}[{i}]", item) for i, item in enumerate(value))


def _rows(path: str, value: object) -> tuple[tuple[Any, ...], ...]:
    """Lists of lists of any values; the class that they are given to checks the numbers."""
    return _list(path, value, lambda row, numbers: _list(row, numbers, lambda _, number: number))


def _text(path: str, value: object) -> str:
    if not isinstance(value, str):
        raise TopologyError(f"{path}: {_excerpt(value)} is no text")
    return value


def _integer(path: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TopologyError(f"{path}: {_excerpt(value)} is not a whole number of at least 0")
    return value


def _total(layers: Sequence[Layer]) -> int | None:
    """The number of ranks of the layers together, or None where it is not fixed."""
    sizes = [layer.ranks for layer in layers]
    return None if None in sizes else prod(size for size in sizes if size is not None)


def _check_total(stated: object, layers: Sequence[Layer]) -> None:
    if stated != _total(layers) or isinstance(stated, bool):
        factors = " x ".join("any" if layer.ranks is None else str(layer.ranks) for layer in layers)
        raise TopologyError(f"ranks: {_excerpt(stated)} is not the number of ranks of the layers, {factors}")


def _unique_fields(pairs: list[tuple[str, Any]]) -> Fields:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TopologyError(f"{twice}: given twice in one object")
    return fields


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
