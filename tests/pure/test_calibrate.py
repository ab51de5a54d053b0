"""Measured topologies: what a fit recovers, what a price on it keeps to, and a real measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from types import SimpleNamespace

import pytest
import torch
from helpers.topologies import LATENCIES, RATES, cases
from hypothesis import given
from hypothesis import strategies as st

from dshard import Topology
from dshard.cost import collective_seconds
from dshard.errors import TopologyError
from dshard.mesh import Mesh
from dshard.tools.calibrate import COLLECTIVES, Fit, fit, rounds, typical
from dshard.tools.calibrate.measure import parts_of
from dshard.tools.calibrate.rounds import _window, best_line
from dshard.topology import FLAT_CPU, Collective, Link, Measured
from dshard.topology.sharing import cut_bandwidth, groups_of, shared_link

SIZES = [1 << power for power in range(12, 25)]
COLLECTIVE = st.sampled_from(COLLECTIVES)
MESSAGES, PASSES = st.integers(1, 30), st.integers(1, 5)


# -- the fit


def priced(found: Fit, nbytes: float, messages: float, passes: float) -> float:
    link = Link(found.latency, found.bandwidth, points=found.points)
    return messages * link.latency + passes * link.seconds(nbytes)


@given(st.floats(0, 1), st.floats(1e6, 1e11), st.sets(st.sampled_from(SIZES), max_size=3))
def test_a_line_is_found_again_though_some_sizes_went_wrong(part: float, bandwidth: float, wrong: set[int]) -> None:
    slope = 1 / bandwidth
    intercept = part * slope * SIZES[4]  # at most of the sizes bytes count for more than messages
    right = {x: intercept + slope * x for x in SIZES}

    start, rate = best_line([(x, y * (3 if x in wrong else 1)) for x, y in right.items()])

    assert rate == pytest.approx(slope, rel=0.05)
    for x, y in right.items():
        assert x < 1 << 20 or start + rate * x == pytest.approx(y, rel=0.05)


@given(LATENCIES, st.floats(1e6, 1e11), MESSAGES, PASSES)
def test_a_straight_network_needs_no_points(latency: float, bandwidth: float, messages: int, passes: int) -> None:
    found = fit([(x, messages * latency + passes * x / bandwidth) for x in SIZES], messages, passes)

    assert found.points == ()
    assert found.bandwidth == pytest.approx(bandwidth)
    assert priced(found, 0, messages, passes) == pytest.approx(messages * latency, abs=1e-9 * SIZES[-1] / bandwidth)


TIMES = st.lists(st.floats(1e-6, 10.0), min_size=len(SIZES), max_size=len(SIZES))


@given(st.floats(1e6, 1e11), MESSAGES, PASSES)
def test_a_line_keeps_to_the_cap(bandwidth: float, messages: int, passes: int) -> None:
    found = fit([(x, passes * x / bandwidth) for x in SIZES], messages, passes, cap=bandwidth / 2)

    assert found == Fit(0.0, bandwidth / 2)


def test_times_that_fall_take_their_mean() -> None:
    times = [1.0] * 4 + [2.0, 8.0, 2.0, 32.0]

    found = fit([(1000 * (i + 1), y) for i, y in enumerate(times)], 1, 1)

    assert [priced(found, 1000 * (i + 1), 1, 1) for i in (4, 5, 6, 7)] == pytest.approx([2.0, 5.0, 5.0, 32.0], rel=0.1)


@given(TIMES, MESSAGES, PASSES, st.integers(0, 1 << 26), st.integers(0, 1 << 26), RATES | st.just(inf))
def test_whatever_was_timed_prices_rise_and_keep_to_the_cap(
    times: list[float], messages: int, passes: int, some: int, more: int, cap: float
) -> None:
    found = fit(list(zip(SIZES, times, strict=True)), messages, passes, cap)
    low, high = sorted((some, more))

    assert found.latency >= 0
    assert 0 < found.bandwidth <= cap * (1 + 1e-9)
    assert priced(found, low, messages, passes) <= priced(found, high, messages, passes) * (1 + 1e-12)
    if high > low:
        assert priced(found, low, 0, passes) < priced(found, high, 0, passes)
    assert priced(found, high, messages, passes) >= passes * high / cap * (1 - 1e-9)


@given(st.lists(st.floats(1e-6, 1e-3), min_size=len(SIZES), max_size=len(SIZES)), MESSAGES, PASSES)
def test_rising_times_are_met_at_every_size(steps: list[float], messages: int, passes: int) -> None:
    times, total = [], 1e-3
    for x, step in zip(SIZES, steps, strict=True):
        total += step + x * 1e-9
        times.append((x, total))

    found = fit(times, messages, passes)

    for x, y in times:
        # A line is taken where it is within 15 %; in a table bytes are never quite free.
        assert priced(found, x, messages, passes) == pytest.approx(y, rel=0.16)


def test_the_outliers_of_half_of_the_rounds_do_not_count() -> None:
    assert typical([1.0, 1.0, 1.0, 50.0, 90.0]) == 1.0


# -- what prices are made of


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_price_is_the_fitted_formula(collective: Collective, backend: str) -> None:
    mesh = Mesh((2, 4), ("a", "b"))
    topology = replace(FLAT_CPU, backend=backend)
    messages, passes = parts_of(collective, mesh, ("b",), topology)
    found = fit([(x, 1e-3 + x * 1e-9 + (x > 1 << 20) * 5e-3) for x in SIZES], messages, passes)
    figures = Measured(mesh, ("b",), found.latency, found.bandwidth, collective, points=found.points)
    known = topology.with_measured([figures])

    assert found.points
    for x in (0, *SIZES, 1 << 27):
        price = collective_seconds(collective, x, mesh, ["b"], known)
        assert price == pytest.approx(priced(found, x, messages, passes))


@given(cases(), COLLECTIVE)
def test_no_layer_lets_more_through_than_its_cuts(
    case: tuple[Topology, Mesh, tuple[str, ...]], collective: Collective
) -> None:
    topology, mesh, axes = case
    groups = groups_of(mesh, axes)
    if len(groups[0]) == 1:
        return

    link = shared_link(topology.layers, groups, collective)
    passes = parts_of(collective, mesh, axes, topology)[1]

    assert link.bandwidth / passes <= cut_bandwidth(topology.layers, groups, collective) * (1 + 1e-9)


def test_the_cut_between_two_hosts() -> None:
    topology = Topology.preset("dgx-a100", nodes=2)
    mesh = Mesh((2, 8), ("node", "gpu"))
    rate = topology.layers[0].group_bandwidth

    everything = groups_of(mesh, mesh.names)
    assert cut_bandwidth(topology.layers, everything, "all_gather") == rate * 15 / 8
    assert cut_bandwidth(topology.layers, everything, "all_to_all") == rate * 15 / 64
    assert cut_bandwidth(topology.layers, groups_of(mesh, ["node"]), "all_reduce") == rate * 2 / 16


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), max_size=4), RATES, RATES, st.integers(0, 3000))
def test_the_slower_of_two_links_is_never_faster_than_either(
    steps: list[tuple[int, float]], one: float, other: float, nbytes: int
) -> None:
    x, y, points = 0, 0.0, []
    for dx, dy in steps:
        x, y = x + dx, y + dy
        points.append((x, y))
    a, b = Link(0.0, one, points=tuple(points)), Link(0.0, other)

    both = a.no_faster_than(b)

    assert a.seconds(nbytes) >= nbytes / a.best_bandwidth * (1 - 1e-9)
    assert both.seconds(nbytes) >= max(a.seconds(nbytes), b.seconds(nbytes)) * (1 - 1e-9)
    assert a.no_faster_than(a).seconds(nbytes) == pytest.approx(a.seconds(nbytes))


# -- files


CURVED = FLAT_CPU.with_measured(
    [
        Measured(
            Mesh((2, 2)), ("d0",), 1e-4, 1e9, "all_gather", "2026-01-02", "cpu", (10, 20), 0.1, ((10, 0.5), (20, 2.5))
        )
    ]
)


def test_points_survive_a_file() -> None:
    again = Topology.from_json(CURVED.to_json())

    assert again == CURVED
    assert again.link(Mesh((2, 2)), ["d0"], "all_gather").seconds(15) == 1.5


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[10, 1.0], [10, 2.0]], r"measured\[0\].points\[1\]: \(10, 2.0\) comes after \(10, 1.0\): more bytes"),
        ([[10, 1.0], [20, 0.5]], r"measured\[0\].points\[1\]: \(20, 0.5\) comes after"),
        ([[10]], r"measured\[0\].points\[0\]: \(10,\) is no pair of bytes and seconds"),
        ([[10, "1"]], r"measured\[0\].points\[0\]: '1' is not a number of at least 0"),
        ([[0, 1.0]], r"measured\[0\].points\[0\]: 0 is not a number above 0"),
        (3, r"measured\[0\].points: 3 is no list"),
    ],
)
def test_points_that_cannot_be_are_refused_by_their_place(points: object, message: str) -> None:
    data = json.loads(CURVED.to_json())
    data["measured"][0]["points"] = points

    with pytest.raises(TopologyError, match=message):
        Topology.from_json(json.dumps(data))


class Events:
    """The events of a GPU whose kernels take 2 ms, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self.log)


class Event:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")

    def elapsed_time(self, end: Event) -> float:
        assert end is not self
        return 2.0


def test_on_a_gpu_the_stream_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr(rounds, "device_of", lambda mesh: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "Event", events)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.log.append("wait for all"))
    clock = rounds.Clock(Mesh((1,)), None)  # type: ignore[arg-type]  # nothing is sent

    assert clock.seconds(lambda: events.log.append("run")) == 0.002
    assert events.log == ["wait for all", "record", "run", "record", "wait"]


def test_work_that_a_gpu_takes_long_for_is_not_given_to_it_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 0.1 s, which the host launches in 10 us: a window of 0.04 s ends after the first."""
    now, launched = 0.0, 0

    def launch() -> None:
        nonlocal now, launched
        now += 1e-5
        launched += 1

    def wait(clock: rounds.Clock) -> None:
        nonlocal now
        now = max(now, 0.1 * launched)

    monkeypatch.setattr(rounds.time, "perf_counter", lambda: now)
    monkeypatch.setattr(rounds, "device_of", lambda mesh: torch.device("cpu"))
    monkeypatch.setattr(rounds.Clock, "_meet", lambda clock: None)
    monkeypatch.setattr(rounds.Clock, "synchronize", wait)

    _window(rounds.Clock(Mesh((1,)), None), launch)  # type: ignore[arg-type]  # nothing is sent

    assert launched == 1


def test_what_runs_before_is_not_timed_and_all_ranks_meet_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = 0.0, list[str]()

    def taking(seconds: float, what: str) -> None:
        nonlocal now
        now += seconds
        log.append(what)

    monkeypatch.setattr(rounds.time, "perf_counter", lambda: now)
    monkeypatch.setattr(rounds, "device_of", lambda mesh: torch.device("cpu"))
    monkeypatch.setattr(rounds.Clock, "_meet", lambda clock: taking(1.0, "meet"))
    clock = rounds.Clock(Mesh((1,)), None)  # type: ignore[arg-type]  # nothing is sent

    assert clock.seconds(lambda: taking(2.0, "call"), before=lambda: taking(5.0, "before")) == 2.0
    assert log == ["meet", "before", "meet", "call"]


RATE, BURST, LATENCY = 6e6, 1 << 17, 3e-3


class ShapedLink(rounds.Clock):
    """A clock on which calls, numbers of bytes, cross a slow link that passes a burst at once after a rest."""

    now, device = 0.0, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__(Mesh((4,)), SimpleNamespace(group=lambda axes: None))  # type: ignore[arg-type]
        self.timed: list[int] = []

    def elapsed(self) -> float:
        return self.now

    def seconds(self, call: object, before: object = None) -> float:
        took, burst = 0.0, BURST
        for nbytes in (before, call):
            assert isinstance(nbytes, int)
            took, burst = LATENCY + max(0, nbytes - burst) / RATE, max(0, burst - nbytes)
            self.now += took
        self.timed.append(nbytes)
        return took

    def slowest(self, values: Sequence[float]) -> list[float]:
        return list(values)


def test_a_slow_link_is_measured_beyond_the_bursts_that_it_passes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "call_of", lambda case, nbytes, group, source: (nbytes, nbytes))
    clock = ShapedLink()
    work = [rounds.Case((axis,), each) for axis in "xyz" for each in COLLECTIVES]

    times = rounds.run_rounds(clock, work, rounds.SIZES, 4.0, lambda done, what: None)

    for samples in times.values():
        found = fit(sorted((nbytes, typical(seconds)) for nbytes, seconds in samples.items()), 1, 1)
        assert priced(found, 1 << 20, 1, 1) == pytest.approx(LATENCY + (1 << 20) / RATE, rel=0.05)
        assert len(samples[min(samples)]) > len(samples[max(samples)])
    assert clock.now == pytest.approx(4.0, rel=0.2)
    assert sum(before > after for before, after in pairwise(clock.timed)) < len(work)  # all cases by size, not each
