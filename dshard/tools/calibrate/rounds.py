"""Time collectives and local work on all ranks of a mesh at once, and fit the times.

The fit is a straight line where that is accurate, else points to interpolate between. A collective that takes
`messages` latencies and passes its bytes `passes` times takes

    messages * latency + passes * seconds(bytes)

seconds, as `dshard.cost` has it. Seconds of bytes are bytes / bandwidth where that fits; where it does not (caches,
buffers, algorithms that change with the size) they are interpolated between the sizes measured.

The local work of one rank is measured while all ranks compute, since they may share cores and memory.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from math import inf
from statistics import mean, median
from typing import TypeAlias

import torch
from torch import Tensor

from dshard.comm import Runtime, device_of, transport
from dshard.comm.runtime import Group
from dshard.cost import collective_seconds, work_seconds
from dshard.errors import TopologyError
from dshard.mesh import Mesh
from dshard.tools.calibrate.block_program import operators_of, program_on
from dshard.topology import Collective, Device, Topology
from dshard.topology.links import Points

COLLECTIVES: tuple[Collective, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "permute",
)
"""Collectives that can be measured; an exchange is an all_to_all whose pieces differ in size."""

SIZES = (1 << 12, 1 << 14, *(1 << power for power in range(16, 22)), *(int(2 ** (22 + i / 2)) for i in range(5)))
"""Bytes that the busiest rank receives, 4 KiB to 16 MiB; denser where they leave the caches and page faults begin."""

ROUNDS = 2
"""A budget allows about so many rounds of all sizes: few, as little disturbs what takes long; the rest has more."""

MOMENT, MOST_TURNS = 0.005, 4
"""Seconds below which a collective has several turns in a round."""

LEAST_SIZES = 2
ITEMSIZE = 4

Progress: TypeAlias = Callable[[float, str], None]
"""Called with how much is done, from 0 to 1, and what is being measured."""


@dataclass(frozen=True, slots=True)
class Case:
    """One collective along some axes of the mesh."""

    axes: tuple[str, ...]
    collective: Collective

    def __str__(self) -> str:
        return f"{self.collective} along {','.join(self.axes)}"


Turns: TypeAlias = list[tuple[Case, int]]
"""Cases and the bytes that their busiest ranks receive, in the order in which they are timed."""


@dataclass(slots=True)
class Clock:
    """Time work on all ranks of a mesh together; decisions use only times that every rank knows."""

    mesh: Mesh
    runtime: Runtime
    begin: float = field(default_factory=time.perf_counter)

    @property
    def everyone(self) -> Group:
        """The group of all ranks of the mesh."""
        return self.runtime.group(self.mesh.names)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return device_of(self.mesh)

    def elapsed(self) -> float:
        """Seconds since the beginning, by this rank's clock."""
        return time.perf_counter() - self.begin

    def seconds(self, call: Callable[[], object], before: Callable[[], object] | None = None) -> float:
        """Time `call` on this rank after synchronising all ranks; on a GPU, time its stream.

        What runs right `before` it, on all ranks, does not count.
        """
        if before is not None:
            self._meet()
            before()
        self._meet()  # of groups that share a link, some end what ran before earlier than others
        if self.device.type == "cuda":
            return self._stream_seconds(call)
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def _meet(self) -> None:
        """Wait for all ranks."""
        if self.mesh.size > 1:
            transport.all_reduce(torch.zeros(1, device=self.device), "sum", self.everyone)

    def _stream_seconds(self, call: Callable[[], object]) -> float:
        """Time `call` between two events on the stream, excluding the host's wait for the end."""
        self.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def synchronize(self) -> None:
        """Wait for all work launched on an accelerator."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return, on all ranks, the largest of each of `values` over the ranks."""
        if self.mesh.size == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        every = transport.all_gather(mine, [len(values)] * self.mesh.size, self.everyone)
        largest: list[float] = every.view(self.mesh.size, -1).amax(0).tolist()
        return largest


Times: TypeAlias = dict[Case, dict[int, list[float]]]
"""The slowest rank's measured seconds, for each case and number of received bytes."""


def call_of(case: Case, nbytes: int, group: Group, source: Tensor) -> tuple[Callable[[], object], int]:
    """Return a collective in which the busiest rank receives about `nbytes`, and the exact number of these bytes."""
    n, number = len(group.ranks), max(1, nbytes // ITEMSIZE)
    piece = max(1, number // (2 * (n - 1) if case.collective == "all_reduce" else n - 1))
    pieces, part = source[: piece * n], source[:number]
    equal = [piece] * n
    match case.collective:
        case "all_gather":
            return partial(transport.all_gather, source[:piece], equal, group), (n - 1) * piece * ITEMSIZE
        case "reduce_scatter":
            return partial(transport.reduce_scatter, pieces, equal, "sum", group), (n - 1) * piece * ITEMSIZE
        case "all_reduce":
            return partial(transport.all_reduce, pieces, "sum", group), 2 * (n - 1) * piece * ITEMSIZE
        case "all_to_all":
            return partial(transport.all_to_all, pieces, equal, equal, group), (n - 1) * piece * ITEMSIZE
        case "broadcast":
            return partial(transport.broadcast, part, 0, group), number * ITEMSIZE
        case "permute":
            there, back = (group.index + 1) % n, (group.index - 1) % n
            return partial(transport.permute, part, there, back, number, group), number * ITEMSIZE
        case "exchange":
            raise TopologyError(f"exchange: priced as an all_to_all; measure some of {', '.join(COLLECTIVES)}")


def run_rounds(clock: Clock, cases: Sequence[Case], sizes: Sequence[int], budget: float, progress: Progress) -> Times:
    """Time all cases in turn, round after round, until about `budget` seconds have passed.

    Each collective runs twice, and the second counts: many links let a first one pass faster than they go on, by what
    they may send after a rest. Sizes that the budget does not allow about `ROUNDS` rounds of are left out, apart from
    the two smallest; the last rounds are of those that the rest of the budget allows. So a slow link is measured at
    sizes that show how fast it goes on, and small sizes, which are disturbed most, often.
    """
    times: Times = {}
    if not cases:
        return times
    budget = clock.slowest([budget])[0]  # ranks that differed in it would measure different sizes, and wait for ever
    begin = clock.elapsed()
    source = torch.ones(2 * max(sizes) // ITEMSIZE + 2 * clock.mesh.size, device=clock.device)
    turns = _warm_up(clock, cases, sizes, source, budget / (ROUNDS + 1), progress)
    rounds = 0
    while turns:
        mine: list[tuple[Case, int, float]] = []
        for case, nbytes in turns:
            progress(min(1.0, (clock.elapsed() - begin) / budget), str(case))
            call, received = call_of(case, nbytes, clock.runtime.group(case.axes), source)
            mine.append((case, received, clock.seconds(call, before=call)))
        *agreed, now = clock.slowest([*(seconds for _, _, seconds in mine), clock.elapsed() - begin])
        for (case, received, _), seconds in zip(mine, agreed, strict=True):
            times.setdefault(case, {}).setdefault(received, []).append(seconds)
        rounds += 1
        if rounds >= ROUNDS:
            turns = _that_fit(turns, agreed, budget - now)
    progress(1.0, "done")
    return times


def _that_fit(turns: Turns, took: Sequence[float], left: float) -> Turns:
    """The shortest of the turns, which `took` so long, as many as fit into the seconds that are `left`."""
    fitting: Turns = []
    for seconds, i in sorted((seconds, i) for i, seconds in enumerate(took)):
        left -= 2 * seconds
        if left < 0:
            break
        fitting.append(turns[i])
    return fitting


def _warm_up(
    clock: Clock, cases: Sequence[Case], sizes: Sequence[int], source: Tensor, budget: float, progress: Progress
) -> Turns:
    """Warm up connections, and return the cases and sizes of which one round takes `budget` seconds.

    What takes a moment only takes several turns in a round, as others on the machine disturb it more. All cases take
    their turns at one size before those at the next, so that links are as busy before each of them.
    """
    chosen: Turns = []
    alive, spent, took = list(cases), 0.0, dict.fromkeys(cases, 0.0)
    before = sizes[0]
    for nbytes in sizes:
        for case in list(alive):
            expected = 2 * took[case] * nbytes / before
            if nbytes not in sizes[:LEAST_SIZES] and spent + expected > budget:
                alive.remove(case)
                continue
            progress(0.0, str(case))
            call, _ = call_of(case, nbytes, clock.runtime.group(case.axes), source)
            took[case] = clock.slowest([clock.seconds(call, before=call)])[0]
            turns = max(1, min(MOST_TURNS, int(MOMENT / took[case])))
            spent += 2 * took[case] * turns
            chosen += [(case, nbytes)] * turns
        before = nbytes
    return chosen


LINE_TYPICALLY, LINE_ALWAYS = 0.05, 0.15
"""A line describes times from which it differs by no more: in the median, and at any size."""

LEAST_SHARE = 0.1
"""Where times do not grow with the bytes, these still count for this part of what they take at the best rate."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The latency, bandwidth and points of one collective, as the fields of `dshard.topology.Measured` define them."""

    latency: float
    bandwidth: float
    points: Points = ()


def typical(times: Sequence[float]) -> float:
    """Return the mean of the faster half of `times`, as other load on the machine only ever adds time.

    >>> typical([1.0, 3.0, 2.0, 1000.0, 2000.0])
    2.0
    """
    return mean(sorted(times)[: (len(times) + 1) // 2])


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range of `times`, divided by their typical value.

    >>> spread([1.0, 2.0, 3.0, 4.0, 1000.0])
    1.0
    """
    ordered = sorted(times)
    last = len(ordered) - 1
    return (ordered[round(0.75 * last)] - ordered[round(0.25 * last)]) / typical(times)


def fit(times: Sequence[tuple[int, float]], messages: float, passes: float, cap: float = inf) -> Fit:
    """Fit pairs of bytes and seconds, whose bytes rise.

    The line is the one of least absolute relative deviation among those with a latency of at least zero and a positive
    bandwidth, so that sizes count alike and single wrong times do not move it. Points never fall as the bytes grow.
    No price falls below the bytes over `cap`, the bandwidth that no algorithm can exceed.
    """
    latency, slope = best_line(times)
    errors = [abs(latency + slope * nbytes - seconds) / seconds for nbytes, seconds in times]
    if median(errors) <= LINE_TYPICALLY and max(errors) <= LINE_ALWAYS:
        return Fit(latency / messages, min(passes / slope, cap))
    return _table(times, messages, passes, cap)


def best_line(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the intercept and slope of the line with the least relative error, through two points or the origin."""
    lines = [(0.0, seconds / nbytes) for nbytes, seconds in times]
    for (x0, y0), (x1, y1) in combinations(times, 2):
        slope = (y1 - y0) / (x1 - x0)
        if slope > 0 and y0 - slope * x0 >= 0:
            lines.append((y0 - slope * x0, slope))
    return min(lines, key=lambda line: sum(abs(line[0] + line[1] * x - y) / y for x, y in times))


def _table(times: Sequence[tuple[int, float]], messages: float, passes: float, cap: float) -> Fit:
    sizes = [nbytes for nbytes, _ in times]
    seconds = rising([seconds for _, seconds in times])
    free = LEAST_SHARE * min(y / x for x, y in zip(sizes, seconds, strict=True))
    start = max(0.0, seconds[0] - free * sizes[0])
    points: list[tuple[float, float]] = []
    x0, y0 = 0.0, 0.0
    for x, y in zip(sizes, seconds, strict=True):
        least = max(y0 + free * (x - x0) / passes, x / cap)
        points.append((x, max((y - start) / passes, least)))
        x0, y0 = points[-1]
    return Fit(start / messages, x0 / y0, tuple(points))


def rising(values: Sequence[float]) -> list[float]:
    """Return the nondecreasing values nearest to `values` in squared distance (isotonic regression).

    >>> rising([1.0, 4.0, 2.0, 5.0])
    [1.0, 3.0, 3.0, 5.0]
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
            before, n = blocks.pop()
            total, count = total + before, count + n
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


SIDE = {"cpu": 384, "cuda": 8192}
COPIED = {"cpu": 1 << 22, "cuda": 1 << 28}
WINDOW = 0.04
"""Seconds for which each kind of work is repeated, so that ranks that share a core have had it in turn."""
LEAST_REPEATS, SHARE = 3, 0.015
"""Windows of each kind of work: at least so many, and no more than each takes this share of the seconds to measure."""


def measure_device(clock: Clock, seconds: float = 0.0) -> Device:
    """Measure the slowest rank's matmul rate for each dtype, copy rate, and seconds to launch an operation.

    `seconds` are those to measure for, of which this takes about a tenth. Products are those of a linear layer and of
    its two gradients: with one operand transposed, or the other, they do not all run equally fast.
    """
    device = clock.device
    side, copied = (table.get(device.type, table["cpu"]) for table in (SIDE, COPIED))
    small, large = torch.ones(1, device=device), torch.ones(copied, dtype=torch.uint8, device=device)
    repeats = max(LEAST_REPEATS, int(seconds * SHARE / WINDOW))
    launch = _each(clock, small.clone, repeats)
    copy = _each(clock, large.clone, repeats)
    rates, alone = [], 1.0
    for dtype in _dtypes(device):
        x, w, grad = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(3))
        work = partial(_linear_and_back, x, w, grad)
        took = _each(clock, work, repeats)
        rates.append((str(dtype).removeprefix("torch."), 2 * side**3 / _beyond(took / 3, launch)))
        if len(rates) == 1 and device.type == "cpu" and clock.mesh.size > 1:
            alone = min(1.0, _each(clock, work if clock.everyone.index == 0 else None, repeats) / took)
    memory = 2 * copied / _beyond(copy, launch)
    return Device(name_of(device), tuple(rates), memory, launch, *measure_dispatch(clock, repeats), alone=alone)


def measure_overlap(clock: Clock, axes: tuple[str, ...], topology: Topology, seconds: float = 0.0) -> float:
    """Measure the part of a collective's seconds along `axes` in which work beside it goes on as without it.

    An all_gather and products that take about as long, a window by the figures of `topology`, run one after the other,
    and beside each other. `seconds` are those to measure for.
    """
    group, device = clock.runtime.group(axes), clock.device
    n, side = len(group.ranks), SIDE.get(device.type, SIDE["cpu"])
    x, w, grad = (torch.ones(side, side, device=device) for _ in range(3))
    part = torch.ones(_elements_of_a_window(clock.mesh, axes, n, topology, device), device=device)
    sizes = [part.numel()] * n
    received = (n - 1) * part.numel() * part.element_size()
    gather = collective_seconds("all_gather", received, clock.mesh, axes, topology)
    products = max(1, round(gather / work_seconds(6.0 * side**3, 0.0, topology, "float32")))

    def send() -> None:
        transport.begin_all_gather(part, sizes, group)()

    def work() -> None:
        for _ in range(products):
            _linear_and_back(x, w, grad)

    def both() -> None:
        wait = transport.begin_all_gather(part, sizes, group)
        work()
        wait()

    repeats = max(LEAST_REPEATS, int(seconds * SHARE / WINDOW))
    times = [[clock.seconds(call, before=call) for _ in range(repeats)] for call in (send, work, both)]
    sending, working, together = clock.slowest(list(map(typical, times)))
    return min(1.0, max(0.0, (sending + working - together) / min(sending, working)))


def _elements_of_a_window(mesh: Mesh, axes: tuple[str, ...], n: int, topology: Topology, device: torch.device) -> int:
    """The elements that each of `n` ranks sends in an all_gather that takes about a window, a power of two."""
    number = COPIED.get(device.type, COPIED["cpu"]) // 4
    while number > 1 and collective_seconds("all_gather", 4.0 * (n - 1) * number, mesh, axes, topology) > WINDOW:
        number //= 2
    return number


def measure_dispatch(clock: Clock, repeats: int = LEAST_REPEATS) -> tuple[float, float]:
    """Measure the host's seconds for one distributed operator, and for one that writes to its operand.

    The means over a small program on replicated tensors, so that nothing is sent: over its forward and
    backward pass, and over the rest of its optimiser. 0 on an accelerator, which is given its work ahead of time.
    """
    if clock.device.type != "cpu":
        return 0.0, 0.0
    program = program_on(clock.mesh)
    program.step()
    passes, update = operators_of(program.passes), operators_of(program.update)
    dispatch = _each(clock, program.passes, repeats) / (passes.making + passes.writing)
    return dispatch, max(0.0, _each(clock, program.update, repeats) - update.making * dispatch) / update.writing


def _linear_and_back(x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor) -> None:
    x @ w.T, grad @ w, grad.T @ x


def name_of(device: torch.device) -> str:
    """The name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    wide = (torch.float32, torch.float64)
    return (torch.bfloat16, torch.float16, *wide) if device.type == "cuda" else wide


def _each(clock: Clock, work: Callable[[], object] | None, repeats: int) -> float:
    """Return the slowest rank's typical seconds for one run of `work`; a rank with None only waits for the others."""
    if work is not None:
        work()
    return clock.slowest([typical([_window(clock, work) for _ in range(repeats)])])[0]


def _window(clock: Clock, work: Callable[[], object] | None) -> float:
    if work is None:
        clock.seconds(lambda: None)
        return 0.0
    done = 0

    def repeat() -> None:
        nonlocal done
        end = time.perf_counter() + WINDOW
        while not done or time.perf_counter() < end:
            work()
            done += 1
            if done % 64 == 0 or done & (done - 1) == 0:  # often at first: a GPU is given its work long before it ends
                clock.synchronize()

    return clock.seconds(repeat) / done


def _beyond(seconds: float, launch: float) -> float:
    """Subtract the launch from `seconds`, leaving at least half of them."""
    return max(seconds - launch, seconds / 2)
