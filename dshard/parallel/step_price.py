"""The cost of a training step of a plan: traced on tensors without data, on a mesh without processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dshard.comm import plain, planning
from dshard.core.context import planning_context
from dshard.core.spec import Spec
from dshard.core.trees import map_tensors, nested_tensors, tensors_in
from dshard.distribute import distribute_tensor
from dshard.errors import LayoutError
from dshard.mesh import Mesh
from dshard.parallel.apply_plan import applied
from dshard.parallel.expert_modules import experts_as_operators
from dshard.parallel.factors import stand_in_for, trace_factors, without_data
from dshard.parallel.forward_values import HostReadMissing, HostReads
from dshard.parallel.plan_values import Cost, Memory, Moves, Plan
from dshard.parallel.reachable_state import ReachableState
from dshard.placements import Replicate
from dshard.step_timeline import StepTimeline, makespan
from dshard.torch_private import disable_modes
from dshard.trace import Trace, trace

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
        except HostReadMissing:
            answers = trace_factors(model, args, kwargs, reached).answers
            return _priced(model, plan, (args, kwargs), reached, answers)
    except Exception as error:
        if not (isinstance(error, HostReadMissing | NotImplementedError) or _runs_on_data_alone(model, args, kwargs)):
            raise
        reason = f" ({str(error).partition('. ')[0]})" if str(error) else ""
        raise LayoutError(
            f"a step of {type(model).__name__} does not run without data{reason}, and is not priced: lay it out by "
            "parallelize, with data and the name of a strategy, or give the placements of its parameters by name"
        ) from error


def _runs_on_data_alone(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether the forward pass of `model` fails without data, and does not with it."""
    try:
        return trace_factors(model, args, kwargs).answers is None
    except Exception:
        return False


def _priced(
    model: nn.Module, plan: Plan, example: Any, reached: ReachableState, answers: Sequence[object] | None
) -> Cost:
    """The cost of a step in which the forward pass reads `answers` as host values."""
    state = _state(model, plan, plan.mesh)
    stand_ins = {id(x): stand_in_for(x) for x in reached.tensors}
    stand_ins |= {id(x): state[name] for name, x in (*model.named_parameters(), *model.named_buffers())}
    args, kwargs = map_tensors(example, without_data)
    known = [*(own._local_tensor for own in state.values()), *nested_tensors((args, kwargs))]
    timeline = StepTimeline(planning_context().topology_of(plan.mesh), known, for_shapes=True)

    def step() -> Iterator[None]:
        """A step, that stops between its passes."""
        with HostReads(answers):
            out = model(*args, **kwargs)
        yield
        _backward(out)

    runs = partial(_as_planned, model, plan, reached, stand_ins)
    with runs(), trace() as sent:
        for _ in step():
            in_forward = len(sent.events)
    for own in state.values():
        own.grad = None
    with runs(), timeline.recorded():
        for _ in step():  # gradients are joined in the order in which the pass before gave them
            activations = timeline.memory.alive()
    parameters = [t for name, t in state.items() if isinstance(t, nn.Parameter)]
    nbytes = sum(_local_bytes(p) for p in {id(p): p for p in parameters}.values())
    memory = Memory(nbytes, nbytes, MOMENTS * nbytes, activations, max(timeline.memory.most, nbytes))
    work, network = timeline.seconds("compute"), timeline.seconds("network")
    hidden = work + network - makespan(timeline.slots)
    return Cost(_moves(sent, in_forward), memory, work, hidden if hidden > 1e-9 * (work + network) else 0.0)


@contextmanager
def _as_planned(
    model: nn.Module, plan: Plan, reached: ReachableState, stand_ins: Mapping[int, Tensor]
) -> Iterator[None]:
    """Within the block `model` runs by the plan, on these stand-ins for its tensors."""
    with reached.replaced(stand_ins), experts_as_operators(model), applied(model, plan):
        yield


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
