"""The topology on which choices are priced, with the caches of these choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from dshard.caches import Cache, clear_records
from dshard.comm import FORGET, DeviceMesh, Scoped, ScopedState, bind, outside_graphs, ranks_per_host, same_topology
from dshard.mesh import Mesh
from dshard.topology import Topology, default_topology
from dshard.topology.network import check_topology


class PlanningContext:
    """A topology, or None for the default of each mesh, and the caches of choices that were priced on it."""

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology
        self.executors = Cache("executors")
        self.choices = Cache("choices")
        self.moves = Cache("moves")

    def topology_of(self, mesh: Mesh) -> Topology:
        """The topology on which choices for this mesh are priced."""
        if self.topology is not None:
            return self.topology
        return default_topology(mesh.device_type, ranks_per_host(mesh))

    def why_topology(self, mesh: Mesh) -> str:
        """Why `topology_of(mesh)` is that topology, in words."""
        if self.topology is not None:
            return "as use_topology says"
        ranks = ranks_per_host(mesh)
        hosts = "" if ranks is None else f" with {ranks} ranks on each host (LOCAL_WORLD_SIZE)"
        return f"the default for {mesh.device_type} ranks{hosts}"


_DEFAULT = PlanningContext()
MAX_TOPOLOGIES = 16
"""Caches are kept for the last 16 topologies used."""

_ALL: dict[Topology | None, PlanningContext] = {None: _DEFAULT}
_SETTINGS: Scoped[PlanningContext, PlanningContext] = Scoped(
    "settings", lambda entered: entered[-1] if entered else _DEFAULT
)
_here, _ANYWHERE = _SETTINGS.here, _SETTINGS.anywhere


class GuardedContext:
    """The planning context of the last block that was entered or left: a compiled graph cannot read a ContextVar."""

    settings = _DEFAULT


def planning_context() -> PlanningContext:
    """The planning context in force in this thread and asynchronous task."""
    if not _ANYWHERE:
        return _DEFAULT
    state = _here()
    return state.value if state is not None else _SETTINGS.value()


_ALL_SETTINGS: list[Scoped[Any, Any]] = []
_DEFAULTS: list[object] = []


def declare_setting(setting: Scoped[Any, Any]) -> None:
    """Declare a setting on which choices depend; its values are compared by `==`."""
    _ALL_SETTINGS.append(setting)
    _DEFAULTS.append(setting.value())


declare_setting(_SETTINGS)


_STATIC: Scoped[bool, bool] = Scoped("static sizes", bool)
are_sizes_static = _STATIC.in_force
"""Whether this thread is within `static_sizes`."""
declare_setting(_STATIC)


@contextmanager
def static_sizes() -> Iterator[None]:
    """Within the block no operator asks the host for numbers of rows: its steps are recorded once, for all values."""
    with _STATIC.entered(True):
        yield


def settings_in_force() -> list[object]:
    """The settings on which choices depend in this thread and asynchronous task, beside the operands."""
    for setting in _ALL_SETTINGS:  # the guards of compiled graphs call this for each tensor
        if setting.anywhere:
            return [each.value() for each in _ALL_SETTINGS]
    return _DEFAULTS


@contextmanager
def settings_restored(states: Sequence[ScopedState[Any, Any]]) -> Iterator[None]:
    """Within the block, the settings are those of `settings_states()` of before."""
    with ExitStack() as stack:
        for setting, state in zip(_ALL_SETTINGS, states, strict=True):
            stack.enter_context(setting.restored(state))
        yield


def settings_states() -> list[ScopedState[Any, Any]]:
    """The states of the settings in this thread and asynchronous task."""
    return [each.state() for each in _ALL_SETTINGS]


def planning_context_of(topology: Topology | None) -> PlanningContext:
    """The planning context of `topology`: one object, until 16 other topologies have been used since."""
    context = _ALL.pop(topology, None) or PlanningContext(topology)
    _ALL[topology] = context
    for other in [other for other in _ALL if other is not None][:-MAX_TOPOLOGIES]:
        del _ALL[other]
    return context


@contextmanager
def use_topology(topology: Topology, *, mesh: DeviceMesh | Mesh | None = None) -> Iterator[None]:
    """Price every choice within the block on `topology`, which must be the same on all ranks.

    With a `mesh`, which all its ranks then give, they use the topology of its first rank, which is sent on entry.
    Without, nothing is sent. It holds for the thread and the asynchronous task that enters the block, and for the
    backward passes that they call.

    Raises:
        TopologyError: no topology, such as the name of a preset.
    """
    check_topology(topology)
    outside_graphs("use_topology")
    if mesh is not None:
        topology = same_topology(topology, mesh if isinstance(mesh, Mesh) else bind(mesh))
    try:
        with _SETTINGS.entered(planning_context_of(topology)):
            GuardedContext.settings = planning_context()
            yield
    finally:
        GuardedContext.settings = planning_context()


FORGET.append(clear_records)
