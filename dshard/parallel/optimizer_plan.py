"""Steps of optimisers whose calls are laid out together, such as those that multiply whole matrices.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from dshard.core.trees import nested_tensors
from dshard.parallel.function_plan import Argument, FunctionPlan, argument_like, plan_function

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class _Owned(NamedTuple):
    """A parameter, its gradient, and what an optimiser keeps for it."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]


def plan_steps(optimizer: OptimizerT) -> OptimizerT:
    """Choose the layouts of all calls of an optimiser's step together, once it has states; return the optimiser.

    Muon, and others that multiply the matrices that they step on, then gather each of them once, or split the work,
    whichever takes less time; by itself each product of a step is split as is cheapest for it. Parameters and states
    stay where they are. The step is traced without data when they or gradients have new shapes or layouts. One with a
    closure is not planned.

        optimizer = dshard.parallel.plan_steps(torch.optim.Muon(model.parameters()))

    Raises:
        LayoutError: in a step that reads values of distributed tensors.
    """
    run = optimizer.step
    plans, seen = dict[tuple[Argument, ...], FunctionPlan](), set[tuple[Argument, ...]]()

    @wraps(run)
    def step(self: OptimizerT, closure: Any = None) -> Any:
        owned = _owned(self)
        key = tuple(map(argument_like, nested_tensors(owned)))
        if closure is not None or all(argument.layout is None for argument in key):
            return run(closure)
        if key not in seen and not all(
            each.state for each in owned
        ):  # states have the layouts in which steps make them
            seen.add(key)
            return run()
        if key not in plans:
            plans[key] = plan_function(_step_of(self), owned)
        if not plans[key].has_products:  # each call is cheapest where its operands lie
            return run()
        with plans[key].followed():
            return run()

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def _step_of(optimizer: Optimizer) -> Callable[[Sequence[_Owned]], None]:
    """A step of an optimiser as a function of parameters, gradients and states."""

    def step(owned: Sequence[_Owned]) -> None:
        _like(optimizer, owned).step()

    step.__qualname__ = f"{type(optimizer).__name__}.step"
    return step


def _owned(optimizer: Optimizer) -> list[_Owned]:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [_Owned(p.detach(), p.grad, {**optimizer.state.get(p, {})}) for p in parameters]


def _like(optimizer: Optimizer, owned: Sequence[_Owned]) -> Optimizer:
    """An optimiser as this one, without its hooks, of other parameters."""
    rest = iter(owned)
    own = object.__new__(type(optimizer))
    vars(own).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    vars(own).update({name: OrderedDict() for name in _HOOKS})
    own.state, own.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        taken = [next(rest) for p in group["params"] if p.grad is not None]
        for each in taken:
            each.parameter.grad = each.gradient
            own.state[each.parameter] = each.state
        own.param_groups.append({**group, "params": [each.parameter for each in taken]})
    return own
