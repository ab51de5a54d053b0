"""The topology: layers of a network, the device of each rank, and measured figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, prod
from os import PathLike
from pathlib import Path
from typing import get_args

from dshard.caches import cached
from dshard.errors import TopologyError
from dshard.interned import Interned
from dshard.mesh import Mesh
from dshard.notebook import Drawn
from dshard.topology import json_files
from dshard.topology.algorithms import Algorithm
from dshard.topology.links import COLLECTIVES, Collective, Device, Hardware, Layer, Link, Measured, check_name
from dshard.topology.presets import CPU, PRESETS, Backend, parts_of, torus_layers
from dshard.topology.sharing import DIRECT, groups_of, host_size, link_within, measured_link, nodes_of, shared_link
from dshard.validate import as_int, as_tuple, check_type, shown, suggestion


@dataclass(frozen=True, repr=False, eq=False)
class Topology(Interned, Drawn):
    """The network between the ranks and the device of each: all figures of a machine.

    Rank r is the r-th of the innermost units, counted from the first unit of each layer: with layers of 4 nodes and 8
    GPUs, rank 11 is GPU 3 of node 1.

    >>> topology = Topology.preset("dgx-a100", nodes=4)
    >>> mesh = Mesh((4, 8), ("dp", "tp"))
    >>> topology.link(mesh, ["tp"]).bandwidth, topology.link(mesh, ["dp"]).bandwidth
    (300000000000.0, 25000000000.0)

    Attributes:
        name: For people.
        layers: From the outermost to the innermost; the outermost may have any number of units.
        device: The device of each rank.
        backend: The backend whose algorithms run the collectives, see `dshard.cost`.
        measured: Figures that replace the computed ones.
        algorithms: How NCCL runs collectives here; without any, a ring or a tree with the latencies of the layers.
        source: The origin of the figures.

    Raises:
        TopologyError: no layers, or an inner layer without a number of ranks.
    """

    name: str
    layers: tuple[Layer, ...]
    device: Device = CPU
    backend: Backend = "gloo"
    measured: tuple[Measured, ...] = ()
    source: str = ""
    algorithms: tuple[Algorithm, ...] = ()

    def __post_init__(self) -> None:
        _set = object.__setattr__
        for name in ("layers", "measured", "algorithms"):
            _set(self, name, as_tuple(getattr(self, name), name, "give them as a tuple", TopologyError))
        _check(self)

    @property
    def size(self) -> int | None:
        """The number of ranks, or None where any number is possible."""
        first = self.layers[0].ranks
        return None if first is None else first * prod(layer.ranks or 1 for layer in self.layers[1:])

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second to a rank's memory."""
        return self.device.memory_bandwidth

    @property
    def launch(self) -> float:
        """The seconds to launch one local operation."""
        return self.device.launch

    @property
    def dispatch(self) -> float:
        """The host's seconds for one distributed operator beyond its bytes and operations; 0 if unknown."""
        return self.device.dispatch

    @property
    def in_place(self) -> float:
        """The host's seconds for an operator that writes to its operand, beyond bytes and operations; 0 if unknown."""
        return self.device.in_place

    def link(self, mesh: Mesh, axes: Iterable[str], collective: Collective | None = None) -> Link:
        """The link of one rank in a collective along `axes`, with all groups of these axes active at once.

        Figures measured for these groups win, those for this collective before those for any. Else the hierarchical
        communication matrix decides, see `dshard.topology.sharing`; without a `collective`, as for one around a ring.
        An exchange gets no more than on any of its axes alone, as all of its bytes may pass there.

        Raises:
            TopologyError: the mesh has ranks that this topology has not.
            MeshError: the mesh has no such axis.
        """
        try:
            return _link(self, mesh, tuple(axes), collective)
        except (TypeError, AttributeError):  # of what is no mesh, no sequence, or has no hash
            check_type(mesh, Mesh, "the mesh of a link", "give a dshard.Mesh", TopologyError)
            as_tuple(axes, "axes", f"give names of axes of the mesh ({mesh}), such as ['tp']", TopologyError)
            raise

    def link_within(
        self, mesh: Mesh, axes: Iterable[str], pairs: Iterable[tuple[int, int]]
    ) -> tuple[Link, tuple[int, Hardware | None] | None]:
        """The link of one rank in messages between these pairs of ranks of each group along `axes`, all sent at once.

        With it the nodes that a pair spans at most, as by `nodes`. Ranks are counted within their group. Messages may
        all stay within smaller groups, such as those of a host.
        """
        return _link_within(self, mesh, tuple(axes), tuple(pairs))

    def nodes(self, mesh: Mesh, axes: Iterable[str]) -> tuple[int, Hardware | None] | None:
        """The number of nodes that a group along `axes` spans, and the connection within a node; None if unknown."""
        return nodes_of(self.layers, groups_of(mesh, axes))

    def overlap(self, mesh: Mesh, axes: Iterable[str]) -> float:
        """The part of a collective's seconds along `axes` in which work beside it goes on as without it.

        That measured for these groups, or else that of the device.
        """
        return _overlap(self, mesh, tuple(axes))

    def hosts(self, mesh: Mesh, axis: str) -> int:
        """The number of hosts that a group along a mesh axis spans; 1 if unknown, or if each rank is on its own."""
        size = host_size(self.layers, groups_of(mesh, mesh.names))
        return 1 if size == 1 else max(len({rank // size for rank in group}) for group in groups_of(mesh, (axis,)))

    def flops(self, dtype: str = "") -> float:
        """Floating-point operations per second of one rank, for the dtype of this name or by default."""
        dtype = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
        rates = self.device.flops
        known = (rate for name, rate in rates if dtype == name or dtype.startswith(f"{name}_")) if dtype else iter(())
        return next(known, rates[0][1])

    def check(self, world_size: int) -> None:
        """Refuse a world with another number of ranks than this topology.

        Raises:
            TopologyError: the sizes differ.
        """
        world_size = as_int(world_size, "world_size", TopologyError, least=1)
        if self.size not in (None, world_size):
            raise TopologyError(
                f"the topology {self.name!r} is one of {self._ranks_text()}, but the world has {world_size}: "
                f"use the topology of this world, or one whose layers have {world_size} ranks in all"
            )

    @cached("network", 256)
    def bytes_only(self) -> Topology:
        """Return a copy in which only bytes on the network take time: no latency, launches or local copies."""
        return replace(
            self,
            layers=tuple(replace(layer, latency=0.0) for layer in self.layers),
            device=replace(self.device, memory_bandwidth=inf, launch=0.0, dispatch=0.0, in_place=0.0),
            measured=tuple(replace(figures, latency=0.0, points=()) for figures in self.measured),
            algorithms=(),
        )

    def with_measured(self, measured: Iterable[Measured]) -> Topology:
        """Return a copy of the topology with these figures added; for the same links the last ones count."""
        added = as_tuple(measured, "measured", "give a sequence of dshard.topology.Measured", TopologyError)
        return replace(self, measured=(*self.measured, *added))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the topology to a JSON file that `load` reads."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """The topology as JSON; its schema is in docs/design/0003-topology-and-cost.md."""
        return json_files.dumps(asdict(self), self.size)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Topology:
        """Read a topology from a JSON file.

        Raises:
            TopologyError: the file describes no topology; the message names the wrong field.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise TopologyError(f"cannot read the topology {str(path)!r}: {why}") from error
        try:
            return cls.from_json(text)
        except TopologyError as error:
            raise TopologyError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Read a topology from the JSON of `to_json`; it is parsed as data, and no code of it is run.

        Raises:
            TopologyError: the text describes no topology; the message names the wrong field.
        """
        return cls(**json_files.loads(text))

    @classmethod
    def preset(cls, name: str, nodes: int = 1, *, ranks: int | None = None) -> Topology:
        """The preset of a machine by its name, with `nodes` nodes; `ranks` on each node, if not the default number.

        Raises:
            TopologyError: there is no such preset; the message lists all.
        """
        parts = parts_of(name, nodes, ranks)
        return cls(name, parts.layers, parts.device, parts.backend, source=parts.source, algorithms=parts.algorithms)

    @classmethod
    def measure(cls, mesh: object, **options: object) -> Topology:
        """Measure the topology of a mesh with processes, by timing collectives on it: `dshard.calibrate.measure`.

        Every rank of the mesh calls it and gets the same topology. `options` are `base`, what is known of the network;
        `sizes`, in bytes; `seconds` to measure for; `collectives`; and `progress`, a function called with the progress.

        Raises:
            MeshError: the mesh has no processes.
            TopologyError: an option has no valid value.
        """
        return MEASURERS[-1](mesh, **options)

    @classmethod
    def flat(
        cls,
        bandwidth: float,
        latency: float = 0.0,
        *,
        ranks: int | None = None,
        name: str = "flat",
        device: Device = CPU,
        backend: Backend = "gloo",
        source: str = "",
    ) -> Topology:
        """Create a network of ranks that all have the same link and share nothing; any number of ranks unless given."""
        return cls(name, (Layer("rank", ranks, bandwidth, latency),), device, backend, source=source)

    @classmethod
    def torus(
        cls,
        shape: Sequence[int],
        bandwidth: float,
        latency: float = 0.0,
        *,
        device: Device = CPU,
        backend: Backend = "gloo",
    ) -> Topology:
        """A torus of this shape, with one link of `bandwidth` from each rank to the next along each dim."""
        sizes = as_tuple(shape, "shape", "give the ranks along each dim, such as (4, 4)", TopologyError)
        shape = tuple(as_int(size, "shape", TopologyError, least=1) for size in sizes)
        name = f"torus {'x'.join(map(str, shape))}"
        return cls(name, torus_layers(shape, bandwidth, latency), device, backend)

    def __str__(self) -> str:
        levels = ", ".join(
            f"{'n' if layer.ranks is None else layer.ranks} x {layer.name} ({layer.group_bandwidth / 1e9:g} GB/s)"
            for layer in self.layers
        )
        measured = f", {len(self.measured)} measured figures" if self.measured else ""
        return f"{self.name}: {levels}{measured}"

    def __repr__(self) -> str:
        text = str(self)
        return f"Topology({text if len(text) < 180 else text[:177] + '...'!r})"

    def _ranks_text(self) -> str:
        factors = " x ".join(str(layer.ranks) for layer in self.layers)
        return f"{self.size} ranks ({factors})" if len(self.layers) > 1 else f"{self.size} ranks"


MEASURERS: list[Callable[..., Topology]] = []
"""Functions that measure a topology; the last is used.

A topology is a value and imports nothing that runs collectives: `dshard.calibrate` registers its function here.
"""


def check_topology(topology: object) -> None:
    """Refuse a value that is no Topology, including the name of a preset, which lacks the number of nodes."""
    if isinstance(topology, Topology):
        return
    if isinstance(topology, str) and topology in PRESETS:
        raise TopologyError(
            f"{topology!r} is the name of a preset, of any number of nodes, and no Topology: give "
            f"Topology.preset({topology!r}, nodes=1), or of as many nodes as there are"
        )
    raise TopologyError(
        f"{shown(topology)} is no Topology: give one of Topology.preset(name, nodes), Topology.load(path) or "
        f"Topology.flat(bandwidth, latency){suggestion(topology, PRESETS)}"
    )


def _check(topology: Topology) -> None:
    check_name("name", topology.name)
    if not isinstance(topology.source, str):
        raise TopologyError(f"source: {shown(topology.source)} is no text")
    if not topology.layers:
        raise TopologyError("layers: a topology needs at least one")
    fields = (
        ("layers", topology.layers, Layer),
        ("measured", topology.measured, Measured),
        ("algorithms", topology.algorithms, Algorithm),
    )
    for field, values, kind in fields:
        for i, value in enumerate(values):
            check_type(value, kind, f"{field}[{i}]", f"give a dshard.topology.{kind.__name__}", TopologyError)
    check_type(topology.device, Device, "device", "give a dshard.topology.Device", TopologyError)
    for i, layer in enumerate(topology.layers[1:], 1):
        if layer.ranks is None:
            raise TopologyError(f"layers[{i}].ranks: only the outermost layer may have any number of units")
    if topology.backend not in get_args(Backend):
        raise TopologyError(f"backend: {topology.backend!r} is none; use {', '.join(get_args(Backend))}")
    for i, measured in enumerate(topology.measured):
        _check_ranks(topology, measured.mesh, f"measured[{i}].mesh: ")


def _check_ranks(topology: Topology, mesh: Mesh, where: str = "") -> None:
    if topology.size is not None and max(mesh.ranks) >= topology.size:
        raise TopologyError(
            f"{where}the mesh ({mesh}) has rank {max(mesh.ranks)}, but the topology {topology.name!r} is one of "
            f"{topology._ranks_text()}: use the topology of this world"
        )


@cached("network", 8192)
def _link(topology: Topology, mesh: Mesh, axes: tuple[str, ...], collective: Collective | None) -> Link:
    if collective is not None and collective not in COLLECTIVES:
        raise TopologyError(f"collective: {collective!r} is none; use {', '.join(COLLECTIVES)}, or None for any")
    if collective is not None and collective not in DIRECT and not topology.measured:  # as any around a ring
        return _link(topology, mesh, axes, None)
    _check_ranks(topology, mesh)
    groups = groups_of(mesh, axes)
    link = measured_link(topology.measured, groups, collective) or shared_link(topology.layers, groups, collective)
    if collective != "exchange" or len(axes) < 2:
        return link
    for axis in axes:
        link = link.no_faster_than(_link(topology, mesh, (axis,), collective))
    return link


@cached("network", 4096)
def _overlap(topology: Topology, mesh: Mesh, axes: tuple[str, ...]) -> float:
    groups = groups_of(mesh, axes)
    for figures in reversed(topology.measured):
        if figures.overlap is not None and groups_of(figures.mesh, figures.axes) == groups:
            return figures.overlap
    return topology.device.overlap


@cached("network", 4096)
def _link_within(
    topology: Topology, mesh: Mesh, axes: tuple[str, ...], pairs: tuple[tuple[int, int], ...]
) -> tuple[Link, tuple[int, Hardware | None] | None]:
    first = [coordinate for coordinate in mesh.coordinates() if not any(coordinate[mesh.axis(axis)] for axis in axes)]
    groups = [mesh.group(axes, coordinate) for coordinate in first]
    messages = tuple(sorted({(min(group[i], group[j]), max(group[i], group[j])) for group in groups for i, j in pairs}))
    return link_within(topology.measured, topology.layers, messages), nodes_of(topology.layers, messages)
