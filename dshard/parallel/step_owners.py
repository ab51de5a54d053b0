"""Steps of optimisers whose products of matrices owners run: each rank has some of the matrices, for all ranks.

The calls of such parts, and those that need their results, wait until the step has been called to its end: on tensors
without data, so that Python goes on. Then one all_to_all brings each owner its matrices, it runs the parts, one
all_to_all brings the results back, and the rest runs.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dshard.comm import has_only_shape, warn_user
from dshard.core.context import planning_context
from dshard.core.moves import with_partials_reduced
from dshard.core.owners import OwnedRun, OwnedTensor, copy_seconds_of, planned_exchanges, run_on_owners
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.trees import map_tensors, nested_tensors, replace_leaves, replace_tensors, tensors_in
from dshard.core.wrapper import Wrapper
from dshard.layout import Layout, Shape, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.parallel.function_plan import FunctionTrace, Planned, name_of
from dshard.parallel.step_parts import SeenTensor, StepParts, step_parts
from dshard.planning.local_seconds import ONE, local_seconds
from dshard.planning.step_graph import GraphCall, StepGraph
from dshard.rules.expand import Expansion
from dshard.rules.strategy import completed_layout
from dshard.topology import Topology
from dshard.torch_private import OpOverload


class PlannedFunction(NamedTuple):
    """A function by its name, and tensors without data for those that it is called with and returns."""

    name: str
    operands: tuple[Tensor, ...]
    result: Any


@dataclass(frozen=True, slots=True, eq=False)
class OwnersPlan:
    """Which functions of a step owners run, by number, whose they are, and which run after them; and its seconds.

    `functions` are those that the step calls on its tensors, in order.
    """

    mesh: Mesh
    step: str
    functions: tuple[PlannedFunction, ...]
    part_of: Mapping[int, int]
    owners: tuple[Coordinate, ...]
    late: frozenset[int]
    seconds: float


def owners_plan(planned: Planned) -> OwnersPlan | None:
    """The plan by which owners run the products of a step; None if its parts need each other, or draw numbers."""
    graph, functions = planned.trace.graph, planned.trace.functions
    multiply = {call.within for call in graph.calls if call.rule.loops}
    products = [n for n, each in enumerate(functions) if each.within in multiply]
    if -1 in multiply or any(argument.layout is None and argument.shape for argument in planned.plan.arguments):
        return None
    found = step_parts(functions, planned.trace.given, products)
    if found is None or any(_draws(call) for call in graph.calls):
        return None
    return _priced(planned, found)


def _draws(call: GraphCall) -> bool:
    return isinstance(call.function, OpOverload) and torch.Tag.nondeterministic_seeded in call.function.tags


def _priced(planned: Planned, found: StepParts) -> OwnersPlan:
    mesh, functions = planned.plan.mesh, planned.trace.functions
    topology = planning_context().topology_of(mesh)
    work = _work(planned.trace.graph, topology)
    loads = [sum([work.get(functions[n].within, 0.0) for n in part.functions]) for part in found.parts]
    owners, load = _owners(loads, mesh)
    reads, makes = [part.reads for part in found.parts], [part.makes for part in found.parts]
    ins, outs = _tensors(planned, reads, owners), _tensors(planned, makes, owners)
    exchanges = sum([each.seconds for each in planned_exchanges(mesh, ins, outs, topology)])
    exchanges += copy_seconds_of(mesh, ins, outs, topology)
    owned = {functions[n].within for part in found.parts for n in part.functions}
    lines = zip(planned.graph.calls, planned.chosen.calls, strict=True)
    rest = sum([own.work + own.exchanges for call, own in lines if call.within not in owned])
    part_of = dict[int, int]()
    for i, part in enumerate(found.parts):
        part_of |= dict.fromkeys(part.functions, i)
    seconds = rest + exchanges + load
    return OwnersPlan(
        mesh, planned.plan.function.__qualname__, _functions(planned.trace), part_of, owners, found.late, seconds
    )


def _functions(trace: FunctionTrace) -> tuple[PlannedFunction, ...]:
    tensors = trace.tensors
    operands = [tuple([tensors[x.number] for x in each.operands]) for each in trace.functions]
    ways = zip(trace.functions, operands, trace.results, strict=True)
    return tuple([PlannedFunction(each.name, own, result) for each, own, result in ways])


def _work(graph: StepGraph, topology: Topology) -> dict[int | None, float]:
    """The seconds of each function of a graph on whole tensors."""
    work: dict[int | None, float] = {}
    for call in graph.calls:
        whole = Expansion(
            (ONE,) * len(call.operands), (ONE,) * len(call.results), (ONE,) * len(call.operands), (None,), {}
        )
        work[call.within] = work.get(call.within, 0.0) + local_seconds(call, whole, topology).forward
    return work


def _owners(loads: Sequence[float], mesh: Mesh) -> tuple[tuple[Coordinate, ...], float]:
    """An owner for each part, the longest first to the rank with the least work; and the seconds of the busiest."""
    ranks, owners = dict.fromkeys(mesh.coordinates(), 0.0), dict[int, Coordinate]()
    for i in sorted(range(len(loads)), key=lambda i: -loads[i]):
        owners[i] = min(ranks, key=ranks.__getitem__)
        ranks[owners[i]] += loads[i]
    return tuple([owners[i] for i in range(len(loads))]), max(ranks.values())


def _tensors(
    planned: Planned, of_parts: Iterable[tuple[SeenTensor, ...]], owners: Sequence[Coordinate]
) -> tuple[OwnedTensor, ...]:
    return tuple(
        [
            OwnedTensor(_layout(planned, x.shape), x.shape, x.itemsize, owner)
            for own, owner in zip(of_parts, owners, strict=True)
            for x in own
        ]
    )


def _layout(planned: Planned, shape: Shape) -> Layout:
    """The layout of the first argument of this shape, or whole."""
    layouts = [x.layout for x in planned.plan.arguments if x.shape == shape and x.layout is not None]
    return completed_layout(layouts[0]) if layouts else replicated(planned.plan.mesh)


class _Waiting(NamedTuple):
    """A call that waits: of a part, of none after all of them, or of all (-1), such as one that makes a constant."""

    part: int | None
    func: Function
    args: Args
    kwargs: Kwargs
    out: Any

    @property
    def operands(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return tensors_in((self.args, self.kwargs))


_EVERY = -1


class OwnersStep(TorchFunctionMode):
    """Within the block the functions of a step run, or wait, as a plan says; `finish` runs those that wait.

    Tensors that waiting calls read and return have twins without data, those of the plan. `differs` says whether the
    step called other functions than was planned: all that waited then ran on all ranks.
    """

    def __init__(self, plan: OwnersPlan, device: torch.device) -> None:
        super().__init__()
        self.plan, self.device, self.at = plan, device, 0
        self.waiting: list[_Waiting] = []
        self.given: dict[int, Tensor] = {}  # the tensor, by the id of its twin
        self.twins: dict[int, Tensor] = {}  # the twin, by the id of its tensor
        self.for_all = set[int]()  # the ids of tensors without data that all ranks will make, such as constants
        self.differs = False

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tensors_in((args, kwargs)) if isinstance(x, Wrapper) or has_only_shape(x)]
        if tensors and not self.differs:
            n, name, planned = self.at, name_of(func), self.plan.functions
            self.at += 1
            if n >= len(planned) or planned[n].name != name or len(planned[n].operands) != len(tensors):
                self._run_by_cost(f"calls {name}")
            elif not self._are_planned(n, tensors):
                self._run_by_cost(f"calls {name} on other tensors")
            elif n in self.plan.part_of or n in self.plan.late:
                return self._wait(n, func, args, kwargs)
        if self.differs:
            return _again(self.given, self.device, func, args, kwargs)
        out = func(*args, **kwargs)
        made = [x for x in nested_tensors(out) if has_only_shape(x) and not isinstance(x, Wrapper)]
        if made:
            self.waiting.append(_Waiting(_EVERY, func, args, kwargs, out))
            self.for_all.update(map(id, made))
        return out

    def _are_planned(self, n: int, tensors: Sequence[Tensor]) -> bool:
        """Whether the operands of a call are those of the plan: one tensor for each twin, and one twin for each."""
        waits = n in self.plan.part_of or n in self.plan.late
        for twin, x in zip(self.plan.functions[n].operands, tensors, strict=True):
            if not isinstance(x, Wrapper):
                is_planned = x is twin or id(x) in self.for_all
            else:
                pair = self.given.get(id(twin), x), self.twins.get(id(x), twin)
                is_planned = not waits or (pair[0] is x and pair[1] is twin)
            if not is_planned:
                return False
        return True

    def _wait(self, n: int, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """The result of a call, without data; or the tensor to which it will write."""
        planned = self.plan.functions[n]
        twins = iter(planned.operands)

        def twin(x: Tensor) -> Tensor:
            if not isinstance(x, Wrapper) and not has_only_shape(x):
                return x if x.dim() else x.clone()  # a number that may be written to
            own = next(twins)
            if own is x or not isinstance(x, Wrapper):  # what a part, or a call that waits for all, has made
                return x
            self.given[id(own)], self.twins[id(x)] = x, own
            return own

        own = replace_tensors((args, kwargs), twin)
        self.waiting.append(_Waiting(self.plan.part_of.get(n), func, own[0], own[1], planned.result))
        return map_tensors(planned.result, lambda x: self.given.get(id(x), x))

    # -- when the step has been called

    def finish(self) -> None:
        """Run what waits: parts on their owners, and then the rest."""
        if not self.differs and self.at < len(self.plan.functions):
            self._run_by_cost("calls no more")
        if not self.differs:
            with torch.no_grad():
                calls = defaultdict[int | None, list[_Waiting]](list)
                for each in self.waiting:
                    calls[each.part].append(each)
                self.given |= self._results_of_owners(calls)
                self._run((*calls[_EVERY], *calls[None]), self.given)

    def _run_by_cost(self, what: str) -> None:
        """Run what waits on all ranks: the step calls other functions than was planned."""
        self.differs = True
        planned = self.plan.functions[min(self.at, len(self.plan.functions)) - 1].name
        warn_user(
            f"{self.plan.step} was planned to call {planned}, and {what}: from here on its calls are laid out by cost, "
            "and the next step is planned anew",
            self.plan.mesh,
        )
        with torch.no_grad():
            self._run(self.waiting, self.given)

    def _run(self, calls: Iterable[_Waiting], values: dict[int, Tensor]) -> None:
        """Make calls on these tensors, by the ids of their twins, and add their results."""
        for each in calls:
            result = _again(values, self.device, each.func, each.args, each.kwargs)
            values |= zip(map(id, nested_tensors(each.out)), nested_tensors(result), strict=True)

    def _results_of_owners(self, calls: Mapping[int | None, Sequence[_Waiting]]) -> dict[int, Tensor]:
        """What late calls need of the parts, by the ids of twins."""
        late = defaultdict[int, list[Tensor]](list)  # all operands of the calls that read a tensor
        for operands in (each.operands for each in calls.get(None, ())):
            for x in operands:
                late[id(x)] += operands
        runs, tensors, made = list[OwnedRun](), list[Wrapper](), list[int]()
        for part, owner in enumerate(self.plan.owners):
            read = {id(x): self.given.get(id(x)) for each in calls[part] for x in each.operands}
            given = {i: x for i, x in read.items() if isinstance(x, Wrapper)}
            own = [with_partials_reduced(x, self.plan.step) for x in given.values()]
            results = {id(x): x for each in calls[part] for x in nested_tensors(each.out) if id(x) in late}
            specs = tuple([self._spec(x, late[i]) for i, x in results.items()])
            run = partial(self._run_part, (*calls.get(_EVERY, ()), *calls[part]), [*given], [*results])
            runs.append(OwnedRun(owner, tuple([x._spec for x in own]), specs, run))
            tensors += own
            made += results
        return dict(zip(made, run_on_owners(self.plan.mesh, runs, tensors, self.plan.step), strict=True))

    def _run_part(
        self, calls: Iterable[_Waiting], operands: Sequence[int], results: Sequence[int], given: list[Tensor]
    ) -> list[Tensor]:
        """What an owner makes of the tensors that it is given; operands and results are ids of twins."""
        values = dict(zip(operands, given, strict=True))
        self._run(calls, values)
        return [values[each] for each in results]

    def _spec(self, x: Tensor, beside: Iterable[Tensor]) -> Spec:
        """The spec of a result: the layout of a tensor beside which it is read, if that has its shape, or whole."""
        others = [self.given.get(id(y)) for y in beside if y.shape == x.shape]
        found = [completed_layout(own._spec.layout) for own in others if isinstance(own, Wrapper)]
        layout = found[0] if found else replicated(self.plan.mesh)
        return contiguous_spec(layout, tuple(x.shape), x.dtype, self.device)


def _again(values: Mapping[int, Tensor], device: torch.device, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The result of a call on tensors, and a device, in place of those without data."""

    def value(x: Any) -> Any:
        if isinstance(x, Tensor):
            return values.get(id(x), x)
        return device if isinstance(x, torch.device) and x.type == "meta" else x

    own = replace_leaves((args, kwargs), value)
    return func(*own[0], **own[1])
