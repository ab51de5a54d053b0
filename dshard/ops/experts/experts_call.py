"""The entry of `dshard.experts`: a layer of experts of plain or distributed tensors.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dshard.comm import has_only_shape, is_captured, publish_failure
from dshard.core.call_key import call_key
from dshard.core.context import are_sizes_static, planning_context
from dshard.core.executable import ComposedExecutable, Executable, wrap_as
from dshard.core.observe import OBSERVERS, tell_observers
from dshard.core.operands import common_mesh, spec_like
from dshard.core.torch_function import autocast
from dshard.core.wrapper import Wrapper
from dshard.errors import ShapeError
from dshard.mesh import Coordinate
from dshard.ops.composite import are_traced, run_executable
from dshard.ops.experts.capacity import Beyond, check_capacity, within_capacity
from dshard.ops.experts.experts_choice import ExpertsCandidates, ExpertsChoice
from dshard.ops.experts.experts_without_data import experts_without_data
from dshard.ops.experts.local_experts import Body, LocalExperts
from dshard.ops.experts.ragged_experts import RaggedExperts
from dshard.ops.experts.routed_tokens import routed_tokens
from dshard.ops.matmul.options import current_options
from dshard.rules.expert_loops import OPERANDS, UNIFORM, ExpertLoops, RequestedLoops, check_experts, expert_rule
from dshard.rules.rule import Rule
from dshard.torch_private import no_torch_function
from dshard.validate import shown


class PlainExperts(NamedTuple):
    """A layer of experts that runs on plain tensors: its rule, its operands, and once it has run its result.

    Observers are told before and after; what runs between is the body.
    """

    rule: Rule
    operands: Sequence[Tensor]
    out: Tensor | None = None


def run_experts(
    body: Body,
    tensors: Sequence[Tensor],
    rule: str = "e f d, e d f",
    loops: str | ExpertLoops | None = None,
    capacity: int | None = None,
    beyond: Beyond = "drop",
) -> Any:
    """A layer of experts of tokens, indices, weights and parameters: see `dshard.experts`."""
    options = current_options()
    requested = options.experts if loops is None else check_experts(loops)
    _check_tensors(tensors)
    check_capacity(capacity, beyond)
    shape_rule = expert_rule([tuple(t.shape) for t in tensors], rule, options.routing or UNIFORM)
    distributed = [t for t in tensors if isinstance(t, Wrapper)]
    if not distributed:
        total = _total(shape_rule, tensors)
        if has_only_shape(tensors[0]):
            return experts_without_data(tensors, held=total, pairs=tensors[1].numel(), rule=rule)
        x, index, *rest = tensors
        index = _within(index, total, capacity, beyond)
        local = LocalExperts(body, range(total), total, capacity)
        return _observed(shape_rule, tensors, partial(local, x, index, *rest)) if OBSERVERS else local(x, index, *rest)
    x, index, weight, *parameters = tensors
    try:
        index = _within(index, _total(shape_rule, tensors), capacity, beyond)
        with no_torch_function():
            x, weight, *parameters = autocast((x, weight, *parameters))
            return _run(body, shape_rule, (requested, True, capacity), (x, index, weight, *parameters))
    except Exception as error:
        publish_failure(error, distributed[0]._spec.layout.mesh.ranks)
        raise


def _observed(rule: Rule, operands: Sequence[Tensor], run: Callable[[], Tensor]) -> Tensor:
    tell_observers(partial(PlainExperts, rule, operands))
    out = run()
    tell_observers(partial(PlainExperts, rule, operands, out))
    return out


def _within(index: Tensor, total: int, capacity: int | None, beyond: Beyond) -> Tensor:
    """The indices, of which those beyond the capacity are of no expert."""
    if capacity is None or not index.numel():
        return index
    return within_capacity(index.reshape(-1, index.shape[-1]), total, capacity, beyond).view(index.shape)


def _check_tensors(tensors: Sequence[Any]) -> None:
    others = [t for t in tensors if not isinstance(t, Tensor)]
    if others:
        raise TypeError(f"experts of {shown(others[0])}: x, index, weight and the parameters are tensors")
    if len(tensors) <= OPERANDS:
        raise ShapeError("experts without parameters: give at least one, whose dim e are the experts")
    index = tensors[1]
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"experts: index is of {index.dtype}; give the numbers of experts, as whole numbers")


def _total(rule: Rule, tensors: Sequence[Tensor]) -> int:
    return int(tensors[OPERANDS].shape[rule.inputs[OPERANDS].index(("e",))])


def _run(body: Body, rule: Rule, asked: tuple[RequestedLoops, bool, int | None], tensors: Sequence[Tensor]) -> Any:
    """Run a call; `asked` are the loops requested, whether the host may be asked, and the capacity."""
    requested, may_ask, capacity = asked
    mesh = common_mesh("experts", list(tensors))
    may_ask = may_ask and not (are_sizes_static() or is_captured(mesh) or are_traced(tensors))
    needed = tuple(torch.is_grad_enabled() and t.requires_grad for t in tensors)
    choices, key = planning_context().choices, call_key(("experts", rule, requested, needed, may_ask), tensors)
    choice: ExpertsChoice | None = choices.get(key)
    if choice is None:
        specs = [spec_like(t, mesh) for t in tensors]
        choice = choices.add(key, ExpertsCandidates(rule, specs, requested, needed, may_ask).choice())
    else:
        choices.hits += 1
    executable = _executable(choice, body, rule, capacity, tensors)
    out = run_executable(executable, tensors)
    if OBSERVERS:
        rows = max(executable.arrived, default=0) if isinstance(executable, RaggedExperts) else None
        dim = rule.inputs[OPERANDS].index(("e",))
        tell_observers(partial(routed_tokens, choice, dim, tensors[1], rows))
    return out


def _executable(
    choice: ExpertsChoice, body: Body, rule: Rule, capacity: int | None, tensors: Sequence[Tensor]
) -> Executable | ComposedExecutable:
    """The executable of one call: what is kept of it is the choice alone, for a body may hold tensors."""
    if choice.levels:
        return RaggedExperts(choice, body, capacity, partial(_run, body, rule, (None, False, capacity)))
    positions = [i for i, t in enumerate(tensors) if isinstance(t, Wrapper)]
    kernel = partial(_kernel, choice, body, rule, capacity)
    finish, gradients = wrap_as(choice.result), choice.strategy.gradients
    return Executable(choice.decision, kernel, [choice.result], positions, finish, gradients=gradients)


def _kernel(choice: ExpertsChoice, body: Body, rule: Rule, capacity: int | None, at: Coordinate) -> LocalExperts:
    """The experts of the rank at a coordinate."""
    dim = rule.inputs[OPERANDS].index(("e",))
    total = choice.specs[OPERANDS].shape[dim]
    return LocalExperts(body, choice.strategy.inputs[OPERANDS].dim_range(dim, total, at), total, capacity)
