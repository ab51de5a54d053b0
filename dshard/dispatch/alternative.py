"""Alternatives to an operator's rule: priced beside the rule's strategies, and run where one is the cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dshard.core.call import AlternativePlan, Call, Operator, writes_first
from dshard.core.context import planning_context
from dshard.core.moves import local_redistribution, on_all_ranks, replace_leaves
from dshard.core.observe import Decision, planned
from dshard.core.operands import operand_of, plan_to
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import Layout
from dshard.rules.rule import Rule
from dshard.rules.strategy import Strategy, alternative_strategy


def alternatives_of(op: Operator, rule: Rule, call: Call) -> dict[Strategy, AlternativePlan]:
    """The alternatives to the rule that apply to a call, each priced, and how it runs; in place there are none."""
    if not op.alternatives or writes_first(call.func):
        return {}
    plans = [(alternative.name, alternative.plan(call, rule)) for alternative in op.alternatives]
    return {_priced(name, rule, call, plan): plan for name, plan in plans if plan is not None}


def _priced(name: str, rule: Rule, call: Call, plan: AlternativePlan) -> Strategy:
    topology = planning_context().topology_of(call.specs[0].layout.mesh)
    sent = [collective for each, itemsize in plan.plans for collective in planned(each, itemsize, topology)]
    seconds = sum(each.seconds for each, _ in plan.plans) + sum(each.seconds for each in plan.exchanges)
    return alternative_strategy(
        name,
        rule,
        tuple(map(operand_of, call.specs)),
        call.out_sizes,
        topology,
        (plan.inputs, plan.outputs),
        (*sent, *plan.exchanges),
        seconds,
    )


class AlternativeExecutable:
    """Redistributes the operands and runs an alternative to the rule, as planned once for its cache key.

    `decision` is that of the rule, of operands with `specs`.
    """

    def __init__(self, decision: Decision, specs: Sequence[Spec], strategy: Strategy, plan: AlternativePlan) -> None:
        self.run, self.layouts = plan.run, list(zip(specs, plan.inputs, strict=True))
        plans = tuple(plan_to(spec, layout) for spec, layout in self.layouts)
        self.decision = replace(decision, strategy=strategy, plans=plans, exchanges=strategy.exchanges)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        layouts = iter(self.layouts)
        args, kwargs = replace_leaves(
            (args, kwargs), lambda leaf: _in_layout(leaf, *next(layouts)) if isinstance(leaf, Tensor) else leaf
        )
        return self.run(*args, **kwargs)


def _in_layout(x: Any, spec: Spec, layout: Layout) -> Any:
    """The operand of this spec as a distributed tensor in `layout`."""
    if isinstance(x, Wrapper) and spec.layout == layout:
        return x
    local = x._local if isinstance(x, Wrapper) else on_all_ranks(x, layout.mesh)
    return wrap(local_redistribution(spec, layout)(local), spec.with_layout(layout))
