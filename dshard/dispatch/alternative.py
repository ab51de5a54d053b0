"""Alternatives to an operator's rule, priced beside the rule's strategies."""

from __future__ import annotations

from dshard.core.call import AlternativePlan, Call, Operator, writes_first
from dshard.core.context import planning_context
from dshard.core.observe import planned
from dshard.core.operands import operand_of
from dshard.rules.rule import Rule
from dshard.rules.strategy import Strategy
from dshard.rules.strategy_choice import alternative_strategy


def alternatives_of(op: Operator, rule: Rule, call: Call) -> dict[Strategy, AlternativePlan]:
    """The alternatives to the rule that apply to a call, priced, each with its plan; none for in-place operators."""
    if not op.alternatives or writes_first(call.func):
        return {}
    candidates = {}
    for alternative in op.alternatives:
        plans = alternative.plan(call, rule) or ()
        for plan in (plans,) if isinstance(plans, AlternativePlan) else plans:
            candidates[_priced(alternative.name, rule, call, plan)] = plan
    return candidates


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
