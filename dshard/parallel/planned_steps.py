"""Planned steps of optimisers that multiply whole matrices: their layouts, or owners that run their products.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from dshard.core.trees import nested_tensors
from dshard.parallel.function_plan import Argument, FunctionPlan, argument_like, planned
from dshard.parallel.step_owners import OwnersPlan, OwnersStep, owners_plan
from dshard.torch_private import no_functions

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


class _Owned(NamedTuple):
    """A parameter, its gradient, and what an optimiser keeps for it."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]


def plan_steps(optimizer: OptimizerT) -> OptimizerT:
    """Choose the layouts of all calls of an optimiser's step together, once it has states; return the optimiser.

    Muon, and others that multiply the matrices that they step on, then gather each of them once, or split the work, or
    each rank owns some matrices and multiplies these for all, whichever takes less time; by itself each product of a
    step is split as is cheapest for it. Parameters and states stay where they are. The step is traced without data when
    they or gradients have new shapes or layouts. One with a closure is not planned, nor one of parameters on several
    meshes: give those of each mesh an optimiser of their own.

        optimizer = dshard.parallel.plan_steps(torch.optim.Muon(model.parameters()))

    Raises:
        LayoutError: in a step that reads values of distributed tensors.
    """
    run = optimizer.step
    plans, seen = dict[tuple[Argument, ...], _Plans](), set[tuple[Argument, ...]]()

    @wraps(run)
    def step(self: OptimizerT, closure: Any = None) -> Any:
        owned = _owned(self)
        key = tuple(map(argument_like, nested_tensors(owned)))
        if closure is not None or len({own.layout.mesh for own in key if own.layout is not None}) != 1:
            return run(closure)
        if key not in seen and not all(each.state for each in owned):
            seen.add(key)  # states have the layouts in which steps make them
            return run()
        if key not in plans:
            plans[key] = _plans_of(self, owned)
        layouts, owners = plans[key]
        if owners is not None:
            waiting = OwnersStep(owners, owned[0].parameter.device)
            out = _run_within(self, run, waiting, waiting.finish)
            if waiting.differs:
                del plans[key]
            return out
        if not layouts.has_products:  # each call is cheapest where its operands lie
            return run()
        return _run_within(self, run, layouts.followed())

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


class _Plans(NamedTuple):
    """The plan of a step's layouts, and that of its owners where they take less time."""

    layouts: FunctionPlan
    owners: OwnersPlan | None


def _plans_of(optimizer: Optimizer, owned: Sequence[_Owned]) -> _Plans:
    step = _Step(optimizer)
    found = planned(step, (owned,), {})
    records = any(group.get("differentiable") for group in optimizer.param_groups)
    owners = None if step.keeps_results or records else owners_plan(found)
    return _Plans(found.plan, None if owners is None or owners.seconds >= found.plan.seconds else owners)


class _Step:
    """A step of an optimiser as a function of parameters, gradients and states.

    `keeps_results` says whether it leaves tensors in its states that were not there before.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.keeps_results = optimizer, False
        self.__qualname__ = f"{type(optimizer).__name__}.step"

    def __call__(self, owned: Sequence[_Owned]) -> None:
        with no_functions():
            own, before = _like(self.optimizer, owned), {*map(id, nested_tensors(owned))}
        _step_without_hooks(own)
        self.keeps_results = any(id(x) not in before for x in _kept(own))


def _step_without_hooks(optimizer: Optimizer) -> None:
    """Step, but run no hooks of the optimiser, nor of all optimisers."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def _kept(optimizer: Optimizer) -> list[Tensor]:
    return nested_tensors([[*optimizer.state.values()], optimizer.param_groups])


def _run_within(
    optimizer: Optimizer,
    run: Callable[[], Any],
    block: AbstractContextManager[Any],
    finish: Callable[[], object] = lambda: None,
) -> Any:
    """Run a step within a block, and then `finish`, after the hooks before steps and before those after them."""
    entered = ExitStack()

    def leave(*_: object) -> None:
        entered.close()
        finish()

    before = optimizer.register_step_pre_hook(lambda *_: _enter(entered, block))
    after = optimizer.register_step_post_hook(leave)
    hooks: Any = after.hooks_dict_ref()  # torch's, in which this one is to be the first
    hooks.move_to_end(after.id, last=False)
    try:
        with entered:
            return run()
    finally:
        before.remove()
        after.remove()


def _enter(stack: ExitStack, block: AbstractContextManager[Any]) -> None:
    stack.enter_context(block)


def _owned(optimizer: Optimizer) -> list[_Owned]:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [_Owned(p.detach(), p.grad, {**optimizer.state.get(p, {})}) for p in parameters]


def _like(optimizer: Optimizer, owned: Sequence[_Owned]) -> Optimizer:
    """An optimiser as this one, of other parameters."""
    rest = iter(owned)
    own = object.__new__(type(optimizer))
    vars(own).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    own.state, own.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        taken = [next(rest) for p in group["params"] if p.grad is not None]
        for each in taken:
            each.parameter.grad = each.gradient
            own.state[each.parameter] = each.state
        own.param_groups.append({**group, "params": [each.parameter for each in taken]})
    return own
