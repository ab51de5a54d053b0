"""The cost of a training step of a plan: traced on tensors without data, on a mesh without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dshard.comm import Event, listen, plain, planning
from dshard.core.context import planning_context
from dshard.core.local_work import LocalCall, host_seconds
from dshard.core.observe import Allocations, Decision, OperatorMode, observing
from dshard.core.spec import Spec, is_for_shapes
from dshard.core.trees import tensors_in
from dshard.cost import StepClock
from dshard.distribute import distribute_tensor
from dshard.errors import LayoutError
from dshard.mesh import Mesh
from dshard.parallel.apply_plan import applied
from dshard.parallel.factors import stand_in_for, trace_factors, without_data
from dshard.parallel.forward_values import NoAnswers, Replies
from dshard.parallel.nested_tensors import map_tensors, nested_tensors
from dshard.parallel.plan_values import Cost, Memory, Moves, Plan
from dshard.parallel.reachable_state import ReachableState
from dshard.placements import Replicate
from dshard.topology import Topology
from dshard.torch_private import OpOverload, disable_modes
from dshard.trace import Trace, event_seconds, trace

MOMENTS = 2
"""The number of states of each parameter's size in an optimiser such as Adam."""


@plain()
@planning()
@disable_modes()
def price(
    model: nn.Module,
    plan: Plan,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    reached: ReachableState | None = None,
) -> Cost:
    """The cost of a forward and a backward pass of `model` under `plan`; `model` is not changed.

    Modes around the call do not see its operators. `seconds` are on the topology in use. `reached` is the state that
    the model and the batch lead to, for callers that have it.
    """
    reached = reached or ReachableState(model, args, kwargs)
    try:
        try:
            return _priced(model, plan, (args, kwargs), reached, None)
        except NoAnswers:
            answers = trace_factors(model, args, kwargs, reached).answers
            return _priced(model, plan, (args, kwargs), reached, answers)
    except (NoAnswers, NotImplementedError) as error:
        reason = f" ({str(error).partition('. ')[0]})" if str(error) else ""
        raise LayoutError(
            f"a step of {type(model).__name__} does not run without data{reason}, and is not priced: lay it out by "
            "parallelize, with data and the name of a strategy, or give the placements of its parameters by name"
        ) from error


def _priced(
    model: nn.Module, plan: Plan, example: Any, reached: ReachableState, answers: Sequence[object] | None
) -> Cost:
    """The cost of a step in which the forward pass reads `answers` as host values."""
    state = _state(model, plan, plan.mesh)
    stand_ins = {id(x): stand_in_for(x) for x in reached.tensors}
    stand_ins |= {id(x): state[name] for name, x in (*model.named_parameters(), *model.named_buffers())}
    args, kwargs = map_tensors(example, without_data)
    allocations = Allocations([*(own._local_tensor for own in state.values()), *nested_tensors((args, kwargs))])
    work = _Work(allocations, planning_context().topology_of(plan.mesh))

    def forward() -> Any:
        with Replies(answers):
            return model(*args, **kwargs)

    def traced() -> tuple[Trace, int]:
        with trace() as sent:
            out = forward()
            received = len(sent.events)
            _backward(out)
        return sent, received

    def measured() -> int:
        # each operator is decided by itself, whatever ran before
        with OperatorMode(work.run), listen(work.moved), observing(work.count, work.waits) as work.running:
            out = forward()
            activations = allocations.alive()
            _backward(out)
        return activations

    with reached.replaced(stand_ins), applied(model, plan):
        sent, in_forward = traced()
    for own in state.values():
        own.grad = None
    with reached.replaced(stand_ins), applied(model, plan):
        activations = measured()
    parameters = [t for name, t in state.items() if isinstance(t, nn.Parameter)]
    nbytes = sum(_local_bytes(p) for p in {id(p): p for p in parameters}.values())
    memory = Memory(nbytes, nbytes, MOMENTS * nbytes, activations, max(allocations.most, nbytes))
    return Cost(_moves(sent, in_forward), memory, work.seconds, work.hidden)


def _backward(out: object) -> None:
    ends = [t for t in tensors_in(list(out.values()) if isinstance(out, Mapping) else out) if t.requires_grad]
    torch.autograd.backward(ends, [torch.empty_like(t) for t in ends])


def _state(model: nn.Module, plan: Plan, mesh: Mesh) -> dict[str, Any]:
    replicated = (Replicate(),) * mesh.ndim
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        stand_in = stand_in_for(parameter)
        state[name] = distribute_tensor(stand_in, mesh, plan.parameters.get(name, replicated))
        vars(state[name]).update(vars(stand_in))
    if plan.precision is not None:
        plan.precision.reduce(state.values())
    for name, buffer in model.named_buffers():
        state[name] = distribute_tensor(without_data(buffer), mesh, replicated)
    return state


def _local_bytes(x: Any) -> int:
    spec: Spec = x._spec
    return prod(spec.layout.local_shape(spec.shape, (0,) * spec.layout.mesh.ndim)) * spec.itemsize


class _Work:
    """Seconds of a step: of local work, of collectives, and of both overlapped; and the memory of all operators.

    A joined collective overlaps with the following work until its first wait; all others are waited for at once.
    """

    def __init__(self, allocations: Allocations, topology: Topology) -> None:
        self.allocations, self.topology, self.seconds, self.sent = allocations, topology, 0.0, 0.0
        self.clock, self.ends = StepClock(), dict[int, tuple[float, Decision]]()
        self.running: list[Decision] = []

    @property
    def hidden(self) -> float:
        """Seconds of collectives that overlap with local work."""
        total = self.seconds + self.sent
        hidden = total - self.clock.seconds
        return hidden if hidden > 1e-9 * total else 0.0  # sums of other order differ by rounding

    def count(self, decision: Decision) -> None:
        """Add the host's seconds for one operator."""
        self.works(host_seconds(decision.op, self.topology))

    def moved(self, event: Event) -> None:
        """Add the seconds of a collective."""
        seconds, decision = event_seconds(event), self.running[-1] if self.running else None
        joined = decision is not None and bool(decision.members)
        self.sent += seconds
        self.clock.send(seconds, waits=not joined)
        if decision is not None and joined:  # kept, so that no other has its id
            self.ends[id(decision)] = self.clock.network, decision

    def waits(self, decision: Decision) -> None:
        """Let the following work wait for a joined collective."""
        end, _ = self.ends.get(id(decision), (0.0, decision))
        self.clock.wait(end)

    def run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operator on local tensors, and add its work and memory."""
        out = func(*args, **kwargs)
        if is_for_shapes():  # nothing is kept of what is asked for shapes alone
            return out
        operands, outputs = tensors_in((args, list(kwargs.values()))), tensors_in(out)
        before = {StorageWeakRef(x.untyped_storage()) for x in operands}
        fresh = [x for x in outputs if StorageWeakRef(x.untyped_storage()) not in before]
        call = LocalCall(func, args, kwargs, out, operands, fresh)
        if call.works:
            self.works(call.seconds(call.flops(), self.topology))
        if self.allocations.add(outputs):
            self.allocations.most = max(self.allocations.most, self.allocations.alive())
        return out

    def works(self, seconds: float) -> None:
        """Add local work."""
        self.seconds += seconds
        self.clock.work(seconds)


def _moves(sent: Trace, forward: int) -> tuple[Moves, ...]:
    groups: dict[tuple[str, str, str, str], list[tuple[int, int, float]]] = {}
    for i, event in enumerate(sent.events):
        direction = "forward" if i < forward else "backward"
        shares = event.members or ((event.module, event.nbytes),)
        for module, nbytes in shares:
            key = (module.partition(".")[2], direction, event.collective, event.axis)
            seconds = event.seconds * (nbytes / event.nbytes if event.nbytes else 1 / len(shares))
            is_last = module == shares[-1][0]  # with which it is complete
            groups.setdefault(key, []).append((int(is_last), nbytes, seconds))
    return tuple(Moves(*key, *map(sum, zip(*parts, strict=True))) for key, parts in groups.items())
