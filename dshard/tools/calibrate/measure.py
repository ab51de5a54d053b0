"""Measure collectives on the running ranks and fit a topology that is equal on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from itertools import combinations
from math import inf
from statistics import median

from dshard.comm import DeviceMesh, bind, init_device_mesh, runtime_of, same_topology, simulated_ranks
from dshard.cost import collective_seconds
from dshard.errors import MeshError, TopologyError
from dshard.mesh import Mesh
from dshard.tools.calibrate.rounds import (
    COLLECTIVES,
    SIZES,
    Case,
    Clock,
    Progress,
    fit,
    measure_device,
    measure_overlap,
    run_rounds,
    spread,
    typical,
)
from dshard.topology import Collective, Measured, Topology, default_topology
from dshard.topology.sharing import cut_bandwidth, groups_of

SECONDS = 20.0
ALL_SUBSETS = 3
"""Meshes of at most so many axes are measured along every set of axes; others along each axis and along all."""


def measure(
    mesh: DeviceMesh | Mesh,
    *,
    base: Topology | None = None,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    collectives: Sequence[Collective] = COLLECTIVES,
    progress: Progress | None = None,
) -> Topology:
    """Measure the topology of a mesh with running processes by timing dshard's own collectives on it.

    Every rank of the mesh calls it, and gets the same topology. Along each set of axes (of more than three axes: along
    each, and along all) every collective runs at each of the `sizes`, all groups at once; a time is that of the slowest
    rank; rounds through all of them are repeated until about so many `seconds` have passed. Where the network is slow,
    the largest sizes are left out. Outliers do not count. The rates of local work are measured with all ranks at work.

    What a `base` has figures for, of the same groups and collective, is not measured again: so the figures of several
    meshes come together. Layers of a base without figures, such as a preset, are limits that no figure exceeds. Without
    a base, ranks that were not measured together are taken to see the slowest link that was measured.

    Args:
        mesh: A mesh over processes; other meshes of the same groups of ranks use its figures too.
        base: What is known of the network.
        sizes: Bytes that the busiest rank receives.
        seconds: About how long to measure.
        collectives: What to measure; prices of what is left out follow from the layers.
        progress: Called with how much is done, from 0 to 1, and what is being measured.
    """
    clock = _clock(mesh)
    levels = _checked(sizes, seconds, collectives)
    progress = progress or (lambda done, what: None)
    progress(0.0, "local work")
    begin = clock.elapsed()
    device = measure_device(clock, seconds)
    known = base or default_topology(clock.mesh.device_type)
    backend = clock.everyone.backend.algorithms if clock.mesh.size > 1 else None
    known = replace(known, device=device, backend=backend or known.backend)
    cases = [
        Case(axes, collective)
        for axes in axes_to_measure(clock.mesh)
        for collective in collectives
        if not _has(known, clock.mesh, axes, collective)
    ]
    left = max(seconds - (clock.elapsed() - begin), seconds / 2)
    times = run_rounds(clock, cases, levels, left, progress)
    limits = base if base is not None and not base.measured else None
    figures = [_figures(clock.mesh, case, samples, known, limits) for case, samples in times.items()]
    overlaps = {
        axes: measure_overlap(clock, axes, known.with_measured(figures), seconds)
        for axes in dict.fromkeys([figure.axes for figure in figures])
    }
    today = date.today().isoformat()
    figures = [replace(each, date=today, device=device.name, overlap=overlaps[each.axes]) for each in figures]
    topology = known if base is not None else _unmeasured_as_slowest(known, figures)
    source = f"measured {today}" if base is None else f"{base.source or base.name}; measured {today}"
    return same_topology(_with_least_overlap(replace(topology.with_measured(figures), source=source)), clock.mesh)


def measure_world(mesh: Mesh, seconds: float, report: Callable[[tuple[float, str]], None]) -> Topology:
    """Call `measure` on a mesh of all ranks of the process group, passing its progress to `report`."""
    device_mesh = init_device_mesh(mesh.device_type, mesh.shape, mesh_dim_names=mesh.names)
    return measure(device_mesh, seconds=seconds, progress=lambda done, what: report((done, what)))


def axes_to_measure(mesh: Mesh) -> list[tuple[str, ...]]:
    """Return the sets of mesh axes whose groups have several ranks, each set of groups once.

    >>> axes_to_measure(Mesh((2, 1, 4), ("pp", "dp", "tp")))
    [('pp',), ('tp',), ('pp', 'tp')]
    """
    names = [name for name, size in zip(mesh.names, mesh.shape, strict=True) if size > 1]
    lengths = range(1, len(names) + 1) if len(names) <= ALL_SUBSETS else (1, len(names))
    return [axes for length in lengths for axes in combinations(names, length)]


def parts_of(collective: Collective, mesh: Mesh, axes: tuple[str, ...], topology: Topology) -> tuple[float, float]:
    """Return how often a collective's predicted seconds count the link's latency, and each received byte."""
    probe = replace(topology, measured=(Measured(mesh, axes, 1.0, 1.0, collective),))
    messages = collective_seconds(collective, 0, mesh, axes, probe)
    return messages, collective_seconds(collective, 1, mesh, axes, probe) - messages


def _figures(
    mesh: Mesh, case: Case, samples: dict[int, list[float]], topology: Topology, limits: Topology | None
) -> Measured:
    messages, passes = parts_of(case.collective, mesh, case.axes, topology)
    groups = groups_of(mesh, case.axes)
    cap = inf if limits is None else cut_bandwidth(limits.layers, groups, case.collective) * passes
    times = sorted((nbytes, typical(seconds)) for nbytes, seconds in samples.items())
    fitted = fit(times, messages, passes, cap)
    return Measured(
        mesh,
        case.axes,
        fitted.latency,
        fitted.bandwidth,
        case.collective,
        sizes=tuple(nbytes for nbytes, _ in times),
        spread=median(map(spread, samples.values())),
        points=fitted.points,
    )


def _unmeasured_as_slowest(topology: Topology, figures: Sequence[Measured]) -> Topology:
    """Return a topology in which groups without a measurement have the slowest measured link."""
    if not figures:
        return replace(topology, name="measured")
    bandwidth, latency = min(figure.bandwidth for figure in figures), max(figure.latency for figure in figures)
    source = topology.source
    flat = Topology.flat(bandwidth, latency, name="measured", device=topology.device, backend=topology.backend)
    return replace(flat, source=source)


def _with_least_overlap(topology: Topology) -> Topology:
    """Return a topology in which groups without a measurement hide no more of a collective than any measured ones."""
    least = min([each.overlap for each in topology.measured if each.overlap is not None], default=1.0)
    return replace(topology, device=replace(topology.device, overlap=least))


def _clock(mesh: DeviceMesh | Mesh) -> Clock:
    if simulated_ranks() is not None:
        raise MeshError("measure: the ranks are simulated in one process, which has no network: start real ones")
    pure = mesh if isinstance(mesh, Mesh) else bind(mesh)
    runtime = runtime_of(pure)
    if runtime is None or runtime.coordinate is None:
        why = "has no processes" if runtime is None else f"does not contain this rank, {runtime.rank}"
        raise MeshError(
            f"measure: the mesh ({pure}) {why}: call it on every rank of a mesh of init_device_mesh, under torchrun; "
            "or use a Topology.preset"
        )
    return Clock(pure, runtime)


def _checked(sizes: Sequence[int], seconds: float, collectives: Sequence[Collective]) -> list[int]:
    levels = sorted(set(sizes))
    if not levels or levels[0] < 1:
        raise TopologyError(f"sizes: {tuple(sizes)}: give the bytes to measure at, each above 0")
    if not seconds > 0:
        raise TopologyError(f"seconds: {seconds!r}: give the time to measure for, above 0")
    for collective in collectives:
        if collective not in COLLECTIVES:
            raise TopologyError(f"collectives: {collective!r} cannot be measured; use {', '.join(COLLECTIVES)}")
    return levels


def _has(topology: Topology, mesh: Mesh, axes: tuple[str, ...], collective: Collective) -> bool:
    groups = groups_of(mesh, axes)
    return any(
        figure.collective == collective and groups_of(figure.mesh, figure.axes) == groups
        for figure in topology.measured
    )
