"""`dshard.experts`: a layer of experts of plain or distributed tensors.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dshard.comm import traced
from dshard.core.call_key import call_key
from dshard.core.context import planning_context
from dshard.core.executable import ComposedExecutable, Executable, wrap_as
from dshard.core.operands import common_mesh, spec_like
from dshard.core.torch_function import autocast
from dshard.core.wrapper import Wrapper
from dshard.errors import ShapeError
from dshard.mesh import Coordinate
from dshard.ops.composite import run_executable
from dshard.ops.experts.experts_choice import Candidates, ExpertsChoice
from dshard.ops.experts.local_experts import Body, Experts
from dshard.ops.experts.ragged_experts import RaggedExperts
from dshard.rules.expert_loops import OPERANDS, ExpertLoops, RequestedLoops, check_experts, expert_rule
from dshard.rules.rule import Rule
from dshard.torch_private import no_torch_function


def experts(
    body: Body,
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    *parameters: Tensor,
    rule: str = "e f d, e d f",
    loops: str | ExpertLoops | None = None,
) -> Any:
    """Sum over a token's experts of what each makes of it: y[t] = sum over j of weight[t, j] f[index[t, j]](x[t]).

    `x` are tokens (..., d), `index` the experts of each (..., k) as whole numbers, `weight` their weights (..., k);
    the first tensor in `rule` says which dim of each of the `parameters` are the experts. The result is (..., d).

    `body(rows, ends, *parameters)` computes with plain local tensors: rows (n, d), sorted by expert, and this rank's
    parts of the parameters; `ends` (int32) are where the rows of each of its experts end. It returns (n, d). It is any
    differentiable function; `dshard.mlp_experts()` is one, by torch's grouped product. Rows may follow behind the last
    end, whose results do not count, and no call without rows is made.

    `rule` has a term for each parameter: e are experts, d features of tokens, f inner features, of which mesh axes may
    split e and f, and `[name]` any dim that they may not. `loops` are those of `dshard.rules.expert_loops`: a name, a
    loop for each mesh axis, or None for the cheapest: t moves experts, e moves tokens, f splits each expert, "ragged"
    sends each token only to the ranks that have its experts. In a compiled graph there is no "ragged", which asks the
    host for numbers of tokens.

    Each parameter gets a gradient, zeros for experts without tokens.

    Raises:
        ShapeError: shapes of index, weight and parameters that do not fit, or a body that returns others than rows.
        NotationError: a rule that has no term for a parameter, or one without e.
        StrategyError: requested loops that are impossible.
        IndexError: an index of no expert.

    >>> y = dshard.experts(dshard.mlp_experts(), x, index, weight, up, down)  # doctest: +SKIP
    """
    requested, tensors = check_experts(loops), (x, index, weight, *parameters)
    _check_parameters(parameters, tensors)
    shape_rule = expert_rule([tuple(t.shape) for t in tensors], rule)
    if not any(isinstance(t, Wrapper) for t in tensors):
        total = _total(shape_rule, parameters)
        return Experts(body, range(total), total)(*tensors)
    with no_torch_function():
        floats = autocast((x, weight, *parameters))
        return _run(body, shape_rule, requested, True, (floats[0], index, *floats[1:]))


def _check_parameters(parameters: Sequence[Tensor], tensors: Sequence[Any]) -> None:
    if not parameters:
        raise ShapeError("experts without parameters: give at least one, whose dim e are the experts")
    others = [t for t in tensors if not isinstance(t, Tensor)]
    if others:
        raise TypeError(f"experts of {type(others[0]).__name__}: x, index, weight and the parameters are tensors")
    if tensors[1].is_floating_point():
        raise TypeError(f"experts: index is {tensors[1].dtype}; give the numbers of experts, as whole numbers")


def _total(rule: Rule, parameters: Sequence[Tensor]) -> int:
    return int(parameters[0].shape[rule.inputs[OPERANDS].index(("e",))])


def _run(body: Body, rule: Rule, requested: RequestedLoops, may_ask: bool, tensors: Sequence[Tensor]) -> Any:
    may_ask = may_ask and not any(isinstance(t, Wrapper) and traced(t._local_tensor) for t in tensors)
    needed = tuple(torch.is_grad_enabled() and t.requires_grad for t in tensors)
    mesh = common_mesh("experts", list(tensors))
    choices, key = planning_context().choices, call_key(("experts", rule, requested, needed, may_ask), tensors)
    choice: ExpertsChoice | None = choices.get(key)
    if choice is None:
        specs = [spec_like(t, mesh) for t in tensors]
        choice = choices.add(key, Candidates(rule, specs, requested, needed, may_ask).choice())
    else:
        choices.hits += 1
    return run_executable(_executable(choice, body, rule, tensors), tensors)


def _executable(
    choice: ExpertsChoice, body: Body, rule: Rule, tensors: Sequence[Tensor]
) -> Executable | ComposedExecutable:
    """The executable of one call: what is kept of it is the choice alone, for a body may hold tensors."""
    if choice.exchange is not None:
        return RaggedExperts(choice, body, partial(_run, body, rule, None, False))
    positions = [i for i, t in enumerate(tensors) if isinstance(t, Wrapper)]
    kernel = partial(_kernel, choice, body, rule)
    finish, gradients = wrap_as(choice.result), choice.strategy.gradients
    return Executable(choice.decision, kernel, [choice.result], positions, finish, gradients=gradients)


def _kernel(choice: ExpertsChoice, body: Body, rule: Rule, at: Coordinate) -> Experts:
    """The experts of the rank at a coordinate."""
    dim = rule.inputs[OPERANDS].index(("e",))
    total = choice.specs[OPERANDS].shape[dim]
    return Experts(body, choice.strategy.inputs[OPERANDS].dim_range(dim, total, at), total)
