"""The choice of a strategy: the candidates of a rule, and the cheapest of them by branch and bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from dshard.cost import PlannedCollective
from dshard.layout import Layout
from dshard.placements import Partial, Shard
from dshard.rules.expand import Expansion, expansions, order_of
from dshard.rules.rule import PassThrough
from dshard.rules.strategy import Question, Strategy, StrategyChoice
from dshard.rules.strategy_price import Bound, Price


def choose(question: Question) -> StrategyChoice:
    """The cheapest strategy of a rule for given operands.

    Branch and bound: the candidate with the least bound is priced redistribution by redistribution, and left as soon as
    another has a lower bound, until one is priced in full. `constraints.keep` is kept if any strategy can.
    """
    candidates, keep, operands = candidate_expansions(question), question.constraints.keep, question.operands
    if keep is not None:
        candidates = [e for e in candidates if e.inputs[0] == keep == e.outputs[0]] or candidates
    if question.constraints.once:
        late = _summed_later(question)
        later = [e for e in candidates if all(isinstance(e.rows[axis], PassThrough) for axis in late)]
        candidates = later or candidates
    price = Price(question)
    if len(candidates) == 1:
        return StrategyChoice(question, price.of(candidates[0]))
    first = operands[0].layout
    bounds = [price.bound(e) for e in candidates]
    queue = [(bound.seconds(price), i) for i, bound in enumerate(bounds)]
    heapify(queue)
    best: Strategy | None = None
    likely = queue[0][1]
    upper = price.of(candidates[likely])  # whose price bounds how far others are looked into
    best_key: tuple[float, ...] = (upper.seconds,)
    while queue:
        least, i = heappop(queue)
        if _digits(least) > _digits(best_key[0]):
            break
        at_least = bounds[i].seconds(price)
        if at_least > least or bounds[i].refine(price, best_key[0] * (1 + 1e-8) - at_least):
            heappush(queue, (bounds[i].seconds(price), i))
            continue
        strategy = upper if i == likely else price.of(candidates[i])
        partial_count = sum([len(layout.partial_axes()) for layout in strategy.outputs])
        alike = strategy.outputs[:1] != (first,)
        moves_number = not operands[0].shape and strategy.moves  # one that waits is reduced with others
        key = (
            _digits(strategy.seconds),
            moves_number,
            partial_count,
            strategy.moves,
            strategy.rows.count(None),
            alike,
            i,
        )
        if best is None or key < best_key:
            best, best_key = strategy, key
    assert best is not None, "replicated operands are always an expansion"
    return StrategyChoice(question, best)


def _summed_later(question: Question) -> list[int]:
    """The mesh axes on which operands are partial and others replicated.

    Autograd adds the gradients of all uses of a tensor two by two: their sum is reduced once, and not each of them.
    """
    columns = zip(*[operand.layout.placements for operand in question.operands], strict=True)
    return [
        axis
        for axis, column in enumerate(columns)
        if any(isinstance(p, Partial) for p in column) and not any(isinstance(p, Shard) for p in column)
    ]


def _digits(seconds: float) -> float:
    """Seconds rounded to nine digits, so that the order of summation does not decide between strategies."""
    return float(f"{seconds:.9e}")


def strategies(question: Question) -> Iterator[Strategy]:
    """Yield the candidate strategies of a rule, priced."""
    return map(Price(question).of, candidate_expansions(question))


def strategies_within(most: float, question: Question) -> list[Strategy]:
    """The candidate strategies of a rule that take at most so many seconds."""
    price = Price(question)
    near = [e for e in candidate_expansions(question) if _may_take(most, price.bound(e), price)]
    return [strategy for strategy in map(price.of, near) if strategy.seconds <= most]


def _may_take(most: float, bound: Bound, price: Price) -> bool:
    """Whether an expansion may take at most so many seconds: its redistributions are priced until it takes more."""
    while (least := bound.seconds(price)) <= most:
        if not bound.refine(price, most * (1 + 1e-8) - least):
            return True
    return False


def alternative_strategy(
    name: str,
    question: Question,
    layouts: tuple[tuple[Layout, ...], tuple[Layout, ...]],
    exchanges: tuple[PlannedCollective, ...],
    seconds: float,
) -> Strategy:
    """An alternative to a rule, priced like its strategies: `layouts` are the layouts of operands and outputs.

    It sends `exchanges` while it runs, in `seconds`.
    """
    inputs, results = layouts
    order = order_of(question.rule.inputs, inputs)
    passed = tuple(
        [
            PassThrough(frozenset({0}), (placement.reduce_op,)) if isinstance(placement, Partial) else None
            for placement in inputs[0].placements
        ]
    )
    priced = Price(question).of(Expansion(inputs, results, inputs, passed, order))
    return replace(priced, gather=priced.gather + seconds, name=name, exchanges=exchanges)


def cheapest(strategy: Strategy, alternatives: Sequence[Strategy]) -> Strategy:
    """The cheapest among a rule's strategy and the alternatives to the rule; the first of equals."""
    return min((strategy, *alternatives), key=lambda candidate: _digits(candidate.seconds))


def candidate_expansions(question: Question) -> list[Expansion]:
    """The candidate expansions of a rule.

    A matmul with gradients is sharded along each mesh axis that shards an operand along a dim of the result, if it can
    be. Repeating it there may save a message, but also repeats the operators that follow, with replicated gradients.
    """
    rule, operands, outputs, _, constraints = question
    candidates = list(expansions(rule, operands, outputs, constraints.among, constraints.result))
    if not candidates and rule.passes:  # hooks that a plan does not know have completed its partial sums
        candidates = list(expansions(rule, operands, outputs, None, constraints.result))
    if not rule.loops or not any(constraints.gradients) or (constraints.among, constraints.result) != (None, None):
        return candidates
    result_factors = {name for dim in rule.outputs[0] for name in dim}
    split = {
        axis
        for operand, term in zip(operands, rule.inputs, strict=True)
        for axis, placement in enumerate(operand.layout.placements)
        if isinstance(placement, Shard) and not result_factors.isdisjoint(term[placement.dim])
    }
    return [e for e in candidates if None not in map(e.rows.__getitem__, split)] or candidates
