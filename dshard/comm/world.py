"""Worlds: where the local tensors of a mesh live, and so how redistributions and programs of its ranks run.

They live on processes, a rank in each; in one process, which simulates all ranks; in a graph, while torch traces; or
nowhere, where only their shapes are known: on a rank outside the mesh, without processes, or on the meta device.

Design: docs/design/0014-one-communication-engine.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dshard.comm import collectives, rank_checks
from dshard.comm.backends import SIMULATED, Backend
from dshard.comm.collective import Collective, reduce
from dshard.comm.collectives import Begin, Wait
from dshard.comm.drive import Make, Program, Request, Results, redistributed
from dshard.comm.events import LISTENERS, MOVES, emit, tell_copies
from dshard.comm.program_steps import Steps, Transfer
from dshard.comm.rank_tensors import are_simulated, is_any_meta, plain, stack, unstack
from dshard.comm.recorded_calls import RECORDERS, recorded_begin
from dshard.comm.runtime import Group, Runtime, is_outside, own_coordinate, own_runtime, planned_backend
from dshard.comm.scatter_shards import device_of
from dshard.comm.traced_collectives import is_any_traced, moved_once
from dshard.comm.transport import primitive, report
from dshard.comm.workspace import WORKSPACE, GraphSession, Session, Workspace
from dshard.layout import Shape
from dshard.mesh import Coordinate, Mesh
from dshard.redistribute import Plan
from dshard.redistribute.layout_state import StepLoad


def run_in_step(mesh: Mesh, make: Make, tensors: Sequence[Tensor]) -> Results:
    """Run the programs of all ranks on the local tensors of each, in step: they begin the same collectives in order."""
    results: dict[int, Results] = {}
    received: Mapping[int, Tensor] = {}
    with plain():
        locals_of, space = [unstack(x) for x in tensors], Session()
        programs = {r: make(mesh.coordinate(r), space, [parts[r] for parts in locals_of]) for r in mesh.ranks}
        while len(results) < len(programs):
            requests: dict[int, Request] = {}
            for rank, program in programs.items():
                wait = partial(received.__getitem__, rank)
                try:
                    requests[rank] = program.send(wait) if received else next(program)
                except StopIteration as stop:
                    results[rank] = stop.value
            assert not (results and requests), "programs of all ranks have the same collectives"
            received = _run_requests(requests) if requests else {}
        return tuple(
            stack(dict(zip(mesh.ranks, of_ranks, strict=True)))
            for of_ranks in zip(*map(results.__getitem__, mesh.ranks), strict=True)
        )


def _run_requests(requests: Mapping[int, Request]) -> dict[int, Tensor]:
    busiest = max((request.transfer for request in requests.values()), key=lambda transfer: transfer.elements)
    report = busiest.collective.report
    if report is not None:
        itemsize = next(iter(requests.values())).buffer.itemsize
        load, axes = report.load_of(itemsize), busiest.collective.axes
        emit(report.collective, report.mesh, axes, report.elements * itemsize, load=load)
    return {rank: _received(request.transfer.collective, requests) for rank, request in requests.items()}


def _received(c: Collective, requests: Mapping[int, Request]) -> Tensor:
    """The buffer that the rank of this collective receives from all ranks of its group."""
    parts = [requests[peer].buffer for peer in c.ranks]
    if c.kind in ("all_to_all", "reduce_scatter"):
        send = [requests[peer].transfer.collective.send for peer in c.ranks]
        parts = [part.split(list(sizes))[c.index] for part, sizes in zip(parts, send, strict=True)]
    is_sum = c.op is not None and c.kind in ("all_reduce", "reduce_scatter")
    return reduce(torch.stack(parts), c.op) if is_sum else torch.cat(parts)  # type: ignore[arg-type]


T = TypeVar("T")
Prepared = tuple[Runtime, Group, Begin]
COPY = "copy"


class SentStep(NamedTuple):
    """A collective: its kind, its mesh axes, and the bytes that the busiest rank receives; of a `COPY` those it copies.

    Of a step of one redistribution `load` is what it is priced by.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    load: StepLoad | None = None


class Moving:
    """A redistribution of a local tensor, or of several as one, ready to run wherever they live.

    `steps` are those of the rank at a coordinate, for a dtype and a backend, kept for this rank; `planned` says of
    elements of so many bytes what runs, `shape` what the one tensor of the rank at a coordinate has afterwards, and
    `text` what the ranks compare in debug mode.

    Several tensors are a list, which is emptied once they are packed, so that they are freed while the collective runs.
    They are sent in one `dtype`, which is None for a tensor alone.
    """

    __slots__ = ("dtype", "known", "mesh", "planned", "processes", "sends", "shape", "steps", "text")

    def __init__(
        self,
        mesh: Mesh,
        steps: Callable[[Coordinate, torch.dtype, Backend], Steps],
        planned: Callable[[int], Sequence[SentStep]],
        shape: Callable[[Coordinate], Shape] = tuple,
        text: Callable[[], str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.mesh, self.steps, self.planned, self.shape, self.dtype = mesh, steps, planned, shape, dtype
        self.text = text if rank_checks.enabled() else None
        self.known: dict[torch.dtype, Steps] = {}
        self.processes: OnProcesses | None = None
        self.sends = False

    def __call__(self, x: Any) -> Any:
        """The local tensor, or tensors, of `x` once moved: they share no memory with `x`."""
        first: Tensor = x if self.dtype is None else x[0]
        if first.requires_grad and torch.is_grad_enabled():
            with torch.no_grad():
                return self(x)
        if LISTENERS:
            self.tell_copies(self.dtype or first.dtype)
            return within_move(self._world(first).redistribute, self, x, self.dtype or first.dtype)
        if type(first) is Tensor and not first.is_meta and self.text is None:  # in few calls, for it is most frequent
            world, steps = self.processes, self.known.get(self.dtype or first.dtype)
            if world is not None and steps is not None:
                return advance_alone(redistributed(steps, x, world.at_once), world.launch, [])
        return self._world(first).redistribute(self, x, self.dtype or first.dtype)

    def begin(self, x: Any, owns: bool = False) -> Once | None:
        """Begin to move `x`, which must not be written until the end; with `owns` the collective may overwrite it.

        Later collectives begin when the function that is returned waits. None where nothing can be in flight: on
        simulated ranks, while torch traces, without data, and if nothing is sent. Listeners change nothing of this:
        ranks that listen run the collectives of the others, in their order.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.begin(x, owns)
        first: Tensor = x if self.dtype is None else x[0]
        if type(first) is Tensor and not first.is_meta and self.text is None:
            world, steps = self.processes, self.known.get(self.dtype or first.dtype)
            if world is not None and steps is not None:
                return world.begun(self, steps, x, owns)
        return self._world(first).begin(self, x, self.dtype or first.dtype, owns)

    def begin_or_run(self, x: Any, owns: bool = False) -> Once:
        """Begin to move `x`, or do it where nothing can be in flight; the function returned gives the result."""
        in_flight = self.begin(x, owns)
        if in_flight is not None:
            return in_flight
        done = self(x)
        return Once(lambda: done)

    def is_heard(self) -> bool:
        """Whether there are listeners, and this rank is in the mesh."""
        return bool(LISTENERS) and not is_outside(self.mesh)

    def tell_copies(self, dtype: torch.dtype) -> None:
        """Tell listeners what each step copies in memory, in place of the operators that do it."""
        if self.is_heard():
            tell_copies(lambda: [each.nbytes for each in self.planned(dtype.itemsize) if each.kind == COPY])

    def _world(self, first: Tensor) -> World:
        if type(first) is not Tensor or first.is_meta:
            return world_of(self.mesh, (first,))
        if self.processes is None:
            self.processes = OnProcesses(self.mesh)
        return self.processes


class OnProcesses:
    """A rank in each process: collectives run on process groups, beside the computation."""

    at_once, in_flight, owned = Session(), Session(in_flight=True), Session(in_flight=True, owns=True)
    in_place = Session(in_flight=True, owns=True, packs_in_place=True)

    def __init__(self, mesh: Mesh) -> None:
        self.runtime, self.coordinate = own_runtime(mesh)

    def redistribute(self, moving: Moving, x: Any, dtype: torch.dtype) -> Any:
        return advance_alone(redistributed(self.steps(moving, dtype), x, self.at_once), self.launch, [])

    def begin(self, moving: Moving, x: Any, dtype: torch.dtype, owns: bool) -> Once | None:
        return self.begun(moving, self.steps(moving, dtype), x, owns)

    def begun(self, moving: Moving, steps: Steps, x: Any, owns: bool) -> Once | None:
        """The result in flight once these steps have begun; None if they send nothing."""
        if not moving.sends:
            return None
        space = self.owned if owns or moving.dtype is not None else self.in_flight  # several are packed into a buffer
        if owns and moving.dtype is not None and not RECORDERS:  # a recording would not know whose memory that is
            space = self.in_place
        program, launch = redistributed(steps, x, space), self.launch
        if LISTENERS:
            moving.tell_copies(moving.dtype or (x[0] if isinstance(x, list) else x).dtype)
            return Once(partial(within_move, advance_alone, program, launch, [within_move(_begun, program, launch)]))
        return Once(partial(advance_alone, program, launch, [launch(next(program))]))

    def run(self, mesh: Mesh, make: Make, tensors: Sequence[Tensor], plans: Sequence[Plan]) -> Results:
        if plans and rank_checks.enabled():
            for plan in plans:
                rank_checks.compare(plan, self.runtime)
        pool = Workspace() if RECORDERS else WORKSPACE  # a replay makes its own buffers
        with pool.session(self.runtime) as space:
            return advance(make(self.coordinate, space, tensors), self.launch)

    def steps(self, moving: Moving, dtype: torch.dtype) -> Steps:
        """The steps of this rank; in debug mode all ranks first compare what they are about to run."""
        if moving.text is not None:
            group = self.runtime.group(self.runtime.mesh.names)
            rank_checks.compare_on(moving.text(), group, device_of(self.runtime.mesh))
        steps = moving.known.get(dtype)
        if steps is None:
            steps = moving.known[dtype] = moving.steps(self.coordinate, dtype, self.runtime.backend)
            moving.sends = any(isinstance(step, Transfer) for step in steps)
        return steps

    def launch(self, request: Request) -> Wait:
        """Begin a collective on its process group, and return the function that waits for its end."""
        step, buffer = request.transfer, request.buffer
        known = step.begins.get(buffer.dtype)
        if known is None or known[0] is not self.runtime or self.at_once.traces or request.factor is not None:
            known = self.prepared(request)
        _, group, begin = known
        if RECORDERS and request.factor is None:
            begin = recorded_begin(step.collective, begin)
        what = step.collective.report
        if LISTENERS and what is not None:
            return report(what, group, begin, buffer, request.out)
        return begin(buffer, request.out)

    def prepared(self, request: Request) -> Prepared:
        """The group of a collective, and the primitive that begins it, which are kept with its step."""
        step, dtype = request.transfer, request.buffer.dtype
        group = self.runtime.group(step.collective.axes)
        if request.factor is not None:
            return self.runtime, group, partial(collectives.multiply, request.factor, group)
        prepared = self.runtime, group, primitive(step.collective, dtype, group, is_traced=self.at_once.traces)
        if not self.at_once.traces:
            step.begins[dtype] = prepared
        return prepared


class InGraph(OnProcesses):
    """A rank whose operators torch traces: collectives are functional, and tensors have no memory."""

    at_once = GraphSession()

    def redistribute(self, moving: Moving, x: Any, dtype: torch.dtype) -> Any:
        return moved_once(x, moving, partial(super().redistribute, moving, x, dtype))

    def begin(self, moving: Moving, x: Any, dtype: torch.dtype, owns: bool) -> Once | None:
        return None

    def run(self, mesh: Mesh, make: Make, tensors: Sequence[Tensor], plans: Sequence[Plan]) -> Results:
        return advance(make(self.coordinate, GraphSession(self.runtime), tensors), self.launch)

    def steps(self, moving: Moving, dtype: torch.dtype) -> Steps:
        return moving.steps(self.coordinate, dtype, self.runtime.backend)


class OfSimulatedRanks:
    """All ranks in this process, which run in step."""

    def redistribute(self, moving: Moving, x: Any, dtype: torch.dtype) -> Any:
        several = moving.dtype is not None

        def make(at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Program[Results]:
            steps = moving.steps(at, dtype, SIMULATED)
            moved = yield from redistributed(steps, list(tensors) if several else tensors[0], space)
            return moved if several else (moved,)

        results = run_in_step(moving.mesh, make, x if several else (x,))
        return results if several else results[0]

    def begin(self, *_: object) -> None:
        """Nothing is in flight between simulated ranks."""

    def run(self, mesh: Mesh, make: Make, tensors: Sequence[Tensor], plans: Sequence[Plan]) -> Results:
        return run_in_step(mesh, make, tensors)


class OfShapes:
    """No data anywhere: listeners are told what would run, and buffers are counted."""

    def redistribute(self, moving: Moving, x: Any, dtype: torch.dtype) -> Any:
        self._tell(moving, dtype)
        return x.new_empty(moving.shape(own_coordinate(moving.mesh)))

    def begin(self, moving: Moving, x: Any, dtype: torch.dtype, owns: bool) -> Once | None:
        if moving.dtype is None:
            return None
        if LISTENERS:
            moving.tell_copies(dtype)
        self._tell(moving, dtype)
        steps = moving.steps(own_coordinate(moving.mesh), dtype, planned_backend(moving.mesh))
        program, launch = redistributed(steps, x, OnProcesses.owned), received_at_once  # with buffers until the end
        return Once(partial(within_move, advance_alone, program, launch, [within_move(_begun, program, launch)]))

    def run(self, mesh: Mesh, make: Make, tensors: Sequence[Tensor], plans: Sequence[Plan]) -> Results:
        def tell_and_receive(request: Request) -> Wait:
            collective = request.transfer.collective
            if LISTENERS and collective.report is not None and not is_outside(collective.report.mesh):
                elements = collective.report.busiest or collective.report.elements
                nbytes, load = elements * request.buffer.itemsize, collective.report.load_of(request.buffer.itemsize)
                emit(collective.report.collective, collective.report.mesh, collective.axes, nbytes, load=load)
            return received_at_once(request)

        with Workspace().session() as space:
            return advance(make((0,) * mesh.ndim, space, tensors), tell_and_receive)

    def _tell(self, moving: Moving, dtype: torch.dtype) -> None:
        if moving.is_heard():
            for kind, axes, nbytes, load in moving.planned(dtype.itemsize):
                if kind != COPY:
                    emit(kind, moving.mesh, axes, nbytes, load=load)


World = OnProcesses | OfSimulatedRanks | OfShapes
"""Where local tensors live: it redistributes and begins what is `Moving` there, and runs the program of each rank."""
SIMULATED_RANKS, SHAPES = OfSimulatedRanks(), OfShapes()


def world_of(mesh: Mesh, tensors: Sequence[Tensor]) -> World:
    """Where these local tensors of a mesh live."""
    if are_simulated(tensors):
        return SIMULATED_RANKS
    if is_any_meta(tensors):
        return SHAPES
    return InGraph(mesh) if is_any_traced(tensors) else OnProcesses(mesh)


def within_move(run: Callable[..., T], *args: Any) -> T:
    """`run(*args)`, whose operators are those of a redistribution."""
    with MOVES.entered(None):
        return run(*args)


def _begun(program: Program[Any], launch: Callable[[Request], Wait]) -> Wait:
    """The wait for the first collective of a program, which begins."""
    return launch(next(program))


def advance(program: Program[T], launch: Callable[[Request], Wait]) -> T:
    """Run a program to its end, and return its value; `launch` begins each collective."""
    try:
        request = next(program)
        while True:
            request = program.send(launch(request))
    except StopIteration as stop:
        value: T = stop.value
        return value


def advance_alone(program: Program[Any], launch: Callable[[Request], Wait], waits: list[Wait]) -> Any:
    """Run a program of which one collective after the other is in flight, the first perhaps already, by `waits`.

    Neither what was sent nor its wait, which holds it, stay in memory while the next is packed.
    """
    received: list[Tensor] = []
    try:
        if not waits:
            waits.append(launch(next(program)))
        while True:
            received.append(waits.pop()())
            waits.append(launch(program.send(received.pop)))
    except StopIteration as stop:
        return stop.value


class Once:
    """A value in flight: the first call runs `function`, which waits, and each returns its result, or raises its error.

    Of several results a call returns number `i`.
    """

    __slots__ = ("_error", "_function", "_result")

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self._error: BaseException | None = None

    def __call__(self, i: int | None = None) -> Any:
        function, self._function = self._function, None
        if function is not None:
            try:
                self._result = function()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result if i is None else self._result[i]


def run_without_data(make: Make, tensors: Sequence[Tensor], coordinate: Coordinate) -> tuple[Results, int]:
    """Run a program on tensors without data; return its results, and the peak bytes of its buffers."""
    workspace = Workspace()
    with torch.no_grad(), workspace.session() as space:
        return advance(make(coordinate, space, tensors), received_at_once), workspace.peak


def received_at_once(request: Request) -> Wait:
    """Begin a collective without data, which ends at once."""
    out = request.buffer.new_empty(sum(request.transfer.collective.recv)) if request.out is None else request.out
    return lambda: out
