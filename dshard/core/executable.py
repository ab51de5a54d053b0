"""The executable of a call, planned once: redistributions, a local operator, and the specs of its results.

Every operator, matmul and composite operator runs as an executable, warm and cold, on real ranks, on simulated ranks,
and without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.comm import compare_calls, comparing, is_absent, on_all_ranks, run, runner, with_results_apart
from dshard.core.call import AlternativePlan, LocalOp
from dshard.core.context import planning_context
from dshard.core.moves import local_redistribution, operator_on
from dshard.core.observe import NEEDED, Decision
from dshard.core.operands import operand_of, plans_to
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec
from dshard.core.trees import leaves, replace_leaves, replace_tensors
from dshard.core.wrapper import Wrapper, wrap
from dshard.errors import MeshError
from dshard.layout import Layout
from dshard.mesh import Coordinate
from dshard.redistribute import Plan
from dshard.rules.rule import Rule
from dshard.rules.strategy import ANY, Constraints, Question, Strategy, StrategyChoice
from dshard.rules.strategy_choice import choose
from dshard.torch_private import OpOverload
from dshard.torch_private import make_wrapper_subclass as make

Values: TypeAlias = Sequence[Any]
Finish: TypeAlias = Callable[[Any, Values, Values], Any]
"""A function of the local result, the arguments, and the redistributed local ones that makes the call's result."""
_NO_KWARGS: Kwargs = {}


class Executable:
    """A call as planned once for its cache key: redistribute the operands, run the local operator, wrap the result.

    `decision` has the plans: one for each operand, at most one for the local result. `local_op` gives the local
    operator of the rank at a coordinate, `finish` makes the result of the call of the local one, `specs` are those of
    the outputs. `tensors` are the positions of the distributed arguments, None where some are nested or named.
    `prepare` changes the redistributed first operand. `gradients` are the layouts in which the gradient of the local
    operator gives the operands' gradients; they are those of the call only if it is `differentiable`.
    """

    __slots__ = (
        "compared",
        "decision",
        "end",
        "finish",
        "gradients",
        "local_op",
        "mesh",
        "moves",
        "operators",
        "plans",
        "prepare",
        "specs",
        "tensors",
    )

    def __init__(
        self,
        decision: Decision,
        local_op: Callable[[Coordinate], LocalOp],
        specs: Sequence[Spec],
        tensors: Sequence[int] | None,
        finish: Finish,
        *,
        gradients: Sequence[Layout] = (),
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.decision, self.local_op, self.specs, self.tensors, self.finish = decision, local_op, specs, tensors, finish
        self.gradients, self.prepare = gradients, prepare
        self.mesh = decision.operands[0].layout.mesh
        self.plans = decision.plans
        self.compared = comparing()
        self.operators: dict[type[Tensor], LocalOp] = {}
        self.moves: list[tuple[int, LocalOp]] = []
        self.end: LocalOp | None = None

    def __call__(self, args: Values, kwargs: Kwargs = _NO_KWARGS) -> Any:
        """Run the call on distributed arguments; not recorded by autograd."""
        if self.compared:
            self.compare(args, kwargs)
        tensors = self.tensors
        if tensors is None:
            local, out = self._run_nested(args, kwargs)
            return self.finish(out, args, local)
        local = list(args)
        for i in tensors:
            local[i] = args[i]._local_tensor
        return self.finish(self.run(local, kwargs), args, local)

    def run(self, local: list[Any], kwargs: Kwargs = _NO_KWARGS) -> Any:
        """Run the local operator; local tensors in the list `local` are first replaced by their redistributed ones."""
        assert self.tensors is not None
        operator = self.operators.get(type(local[self.tensors[0]])) or self.compile(local)
        for i, move in self.moves:
            local[i] = move(local[i])
        out = operator(*local, **kwargs)
        return out if self.end is None else self.end(out)

    def compile(self, local: Values) -> LocalOp:
        """Compile the redistributions and the local operator, once for each type of local tensors."""
        operands = [i for i, arg in enumerate(local) if isinstance(arg, Tensor)]
        assert self.tensors is not None
        absent = is_absent(local[self.tensors[0]], self.mesh)
        self.moves = [
            (i, runner(plan) if i in self.tensors else partial(_move_plain, plan, absent))
            for i, plan in zip(operands, self.plans, strict=True)
            if plan.steps
        ]
        if self.prepare is not None:
            self.moves.insert(1 if self.plans[0].steps else 0, (operands[0], self.prepare))
        for end in self.decision.ends:
            self.end = runner(end) if end.steps else None
        first = local[operands[0]]
        operator = operator_on(self.mesh, self.local_op, [first])
        if absent and not hasattr(operator, "keeps_device"):
            operator = _without_data(operator, self.decision.op)
        operator = self.operators[type(first)] = with_results_apart(operator, first)
        return operator

    def _run_nested(self, args: Values, kwargs: Kwargs) -> tuple[Values, Any]:
        """The redistributed positional arguments and the local result, on simulated ranks or of nested arguments."""
        plans, distributed = iter(self.plans), [x for x in leaves((args, kwargs)) if isinstance(x, Wrapper)]
        absent = is_absent(distributed[0]._local_tensor, self.mesh)

        def redistributed(leaf: object) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            plan = next(plans)
            return run(plan, leaf._local_tensor) if isinstance(leaf, Wrapper) else _move_plain(plan, absent, leaf)

        local, local_kwargs = replace_leaves((args, kwargs), redistributed)
        if self.prepare is not None:
            local = [self.prepare(local[0]), *local[1:]]
        operator = operator_on(self.mesh, self.local_op, leaves((local, local_kwargs)))
        if absent and not hasattr(operator, "keeps_device"):
            operator = _without_data(operator, self.decision.op)
        out = operator(*local, **local_kwargs)
        for end in self.decision.ends:
            out = run(end, out)
        return local, out

    def compare(self, args: Values, kwargs: Kwargs = _NO_KWARGS) -> None:
        """In debug mode, go on only if all ranks make the same call."""
        if self.compared:
            compare_calls(f"{self.decision.op} of {_call_text(args, kwargs)}", self.mesh)


def _move_plain(plan: Plan, absent: bool, x: Tensor) -> Tensor:
    return run(plan, x.to("meta") if absent else on_all_ranks(x, plan.src.mesh))


def _without_data(operator: LocalOp, name: str) -> LocalOp:
    """The local operator of a rank outside the mesh: its results have no data, whatever `device` the call names."""

    def on_meta(x: object) -> object:
        return x.to("meta") if isinstance(x, Tensor) else _META if isinstance(x, torch.device) else x

    def run(*args: object, **kwargs: object) -> object:
        try:
            return replace_leaves(operator(*replace_leaves(args, on_meta), **replace_leaves(kwargs, on_meta)), on_meta)
        except NotImplementedError as error:
            raise MeshError(
                f"{name} needs the numbers of its operands, which a rank outside their mesh does not have: call it on "
                "the ranks of the mesh alone"
            ) from error

    return run


_META = torch.device("meta")


class ComposedExecutable:
    """A call, planned once, that runs as several local operators or other calls: `run` of its arguments.

    `decision` is None if only the decisions within it are observed.
    """

    def __init__(self, decision: Decision | None, run: Function) -> None:
        self.decision, self.run = decision, run

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the call on distributed arguments; not recorded by autograd."""
        return self.run(args, kwargs)


class AlternativeExecutable(ComposedExecutable):
    """A call, planned once, that runs by an alternative to the operator's rule, on operands with `specs`."""

    def __init__(self, decision: Decision, specs: Sequence[Spec], strategy: Strategy, plan: AlternativePlan) -> None:
        layouts = list(zip(specs, plan.inputs, strict=True))
        plans = plans_to(specs, plan.inputs, decision.topology)
        decision = replace(decision, plans=plans, exchanges=strategy.exchanges)
        super().__init__(decision, partial(_run_alternative, plan.run, layouts))


def _run_alternative(run: LocalOp, layouts: Sequence[tuple[Spec, Layout]], args: Args, kwargs: Kwargs) -> Any:
    rest = iter(layouts)
    args, kwargs = replace_tensors((args, kwargs), lambda leaf: _in_layout(leaf, *next(rest)))
    return run(*args, **kwargs)


def _in_layout(x: Tensor, spec: Spec, layout: Layout) -> Wrapper:
    """The operand of this spec as a distributed tensor in `layout`."""
    if isinstance(x, Wrapper) and spec.layout == layout:
        return x
    local = x._local_tensor if isinstance(x, Wrapper) else on_all_ranks(x, layout.mesh)
    return wrap(local_redistribution(spec, layout)(local), spec.with_layout(layout))


def decision_of(func: OpOverload, args: Args, kwargs: Kwargs, why: str = NEEDED) -> Decision:
    """The decision of an operator without a strategy, whose run makes other decisions."""
    operands = tuple(operand_of(t._spec) for t in leaves((args, kwargs)) if isinstance(t, Wrapper))
    topology = planning_context().topology_of(operands[0].layout.mesh)  # those of a list may be on several meshes
    return Decision(str(func), operands, topology, why=why)


def positions_of(args: Args, kwargs: Kwargs) -> list[int] | None:
    """The positions of the distributed arguments, None if there are nested or named tensors."""
    nested = [leaf for arg in args if isinstance(arg, list | tuple) for leaf in leaves(arg)] + leaves(kwargs)
    positions = [i for i, arg in enumerate(args) if isinstance(arg, Wrapper)]
    return None if any(isinstance(leaf, Tensor) for leaf in nested) or not positions else positions


def decide(
    op: str, rule: Rule, specs: Sequence[Spec], outs: Sequence[Tensor], constraints: Constraints = ANY
) -> tuple[Decision, StrategyChoice]:
    """The decision for the cheapest strategy of `rule`, for operands of these specs and outputs like `outs`."""
    operands, outputs = tuple(map(operand_of, specs)), tuple((tuple(out.shape), out.itemsize) for out in outs)
    topology = planning_context().topology_of(operands[0].layout.mesh)
    choice = choose(Question(rule, operands, outputs, topology, constraints))
    return Decision(op, operands, topology, choice, plans_to(specs, choice.strategy.inputs, topology)), choice


def wrap_as(spec: Spec) -> Finish:
    """A `Finish` that wraps the one local result, no view, as a tensor of spec `spec`."""
    shape, stride, dtype, device = spec.shape, spec.stride, spec.dtype, spec.device

    def wrap_result(out: Tensor, args: Values, local: Values) -> Wrapper:
        wrapped: Wrapper = make(Wrapper.public, shape, stride, None, None, dtype, torch.strided, device)
        wrapped._local_tensor = out
        wrapped._spec = spec
        return wrapped

    return wrap_result


def _call_text(args: Values, kwargs: Kwargs) -> str:
    """The arguments of a call as text: tensors by shape, dtype and layout, others by their repr."""
    texts = [
        *map(_argument_text, leaves(list(args))),
        *(f"{name}={_argument_text(value)}" for name, value in kwargs.items()),
    ]
    return ", ".join(texts)


def _argument_text(x: object) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    spec = x._spec if isinstance(x, Wrapper) else None
    layout = "plain" if spec is None else f"[{spec.layout}]"
    return f"{tuple(x.shape)} {x.dtype} {layout}"
