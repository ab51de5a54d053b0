"""The candidates of a layer of experts, priced: loops t, e and f by the rule, the ragged form of loop e beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from dshard.core.context import planning_context
from dshard.core.observe import Decision
from dshard.core.operands import operand_of, plans_to
from dshard.core.spec import Spec, contiguous_spec
from dshard.cost import PlannedCollective, planned_collective
from dshard.errors import StrategyError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.ops.experts.token_route import TokenExchange
from dshard.redistribute import plan
from dshard.rules.expand import Allowed, Expansion, expansions
from dshard.rules.expert_loops import OPERANDS, RequestedLoops, Way, ways_of
from dshard.rules.rule import Rule
from dshard.rules.strategy import Constraints, Question, Strategy, StrategyChoice
from dshard.rules.strategy_choice import cheapest, choose
from dshard.rules.strategy_price import Price, returned_layout

STEPS = 5
"""The host's time for the exchanges of a level in one pass, waits included, in that of a distributed operator.

It is what they take longer than the redistributions of the other forms, whose time on the host is not counted.
"""
COUNTS = 2
"""The numbers that two ranks tell each other: of rows, and of pairs of a token and an expert."""
CODE, NUMBER = 4, 8
"""The bytes of the code of a pair, and of a number."""


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """The cheapest way to run a layer of experts: its decision and strategy, and the specs of what it computes.

    `computed` is the result in the layout in which it is computed, which is then redistributed; `gradients` are those
    of the operands. `levels` are the exchanges of the ragged form, one after the other; none where tokens are whole, or
    gathered.
    """

    specs: Sequence[Spec]
    decision: Decision
    strategy: Strategy
    levels: tuple[TokenExchange, ...]
    computed: Spec
    result: Spec
    gradients: tuple[Spec, ...]


class ExpertsCandidates:
    """The candidates for operands of these specs, of which those `needed` get a gradient.

    Those of the ragged form are among them only if the call `may_ask` the host for counts.
    """

    def __init__(
        self, rule: Rule, specs: Sequence[Spec], requested: RequestedLoops, needed: tuple[bool, ...], may_ask: bool
    ) -> None:
        self.rule, self.specs, self.needed, self.requested = rule, specs, needed, requested
        tokens = specs[0]
        self.topology = planning_context().topology_of(tokens.layout.mesh)
        ways = ways_of(requested, rule, tokens.layout)
        self.static: tuple[Allowed, ...] = tuple([rows for rows, levels in ways if not levels])
        self.ragged: tuple[Way, ...] = tuple([way for way in ways if way[1]]) if may_ask else ()
        self.expert_dim = rule.inputs[OPERANDS].index(("e",))
        self.total = specs[OPERANDS].shape[self.expert_dim]
        constraints = Constraints(
            gradients=needed, kept=(True,) * len(specs), returned=tokens.layout, among=self.static or None
        )
        operands = tuple(map(operand_of, specs))
        self.question = Question(rule, operands, ((tokens.shape, tokens.itemsize),), self.topology, constraints)

    def choice(self) -> ExpertsChoice:
        """The cheapest candidate.

        Raises:
            StrategyError: there is none.
        """
        candidates = dict(self._ragged())
        base = self._static()
        if base is None and not candidates:
            raise StrategyError(self._impossible())
        ragged = sorted(candidates, key=lambda each: each.seconds)
        strategy = ragged[0] if base is None else cheapest(base, ragged)
        tokens, result = self.specs[0], strategy.outputs[0]
        end = returned_layout(result, tokens.layout)
        decision = Decision(
            "experts",
            self.question.operands,
            self.topology,
            StrategyChoice(self.question, strategy, tuple(ragged)),
            plans_to(self.specs, strategy.inputs, self.topology),
            ends=(plan(result, end, tokens.shape, tokens.itemsize, self.topology),),
            exchanges=strategy.exchanges,
        )
        computed, returned, *gradients = (
            contiguous_spec(layout, spec.shape, spec.dtype, spec.device)
            for layout, spec in zip((result, end, *strategy.gradients), (tokens, tokens, *self.specs), strict=True)
        )
        levels = candidates.get(strategy, ())
        return ExpertsChoice(self.specs, decision, strategy, levels, computed, returned, tuple(gradients))

    def _static(self) -> Strategy | None:
        """The cheapest strategy of the rule that is allowed."""
        if not self.static or next(expansions(*self.question[:3], self.static), None) is None:
            return None
        return choose(self.question).strategy

    def _ragged(self) -> Iterator[tuple[Strategy, tuple[TokenExchange, ...]]]:
        """The candidates of the ragged form."""
        price = Price(self.question)
        for rows, levels in self.ragged:
            for expansion in expansions(*self.question[:3], (rows,)):
                axes = [axis for level in levels for axis in level]
                if len(levels) > 1 and expansion.order["e"] != tuple(axes):
                    continue  # a host has the experts of its ranks, one after the other
                sent = self._with_tokens_split(expansion, axes)
                yield self._priced(price.of(sent), levels)

    def _with_tokens_split(self, expansion: Expansion, axes: Sequence[int]) -> Expansion:
        """The expansion with tokens, their indices, weights and results where tokens are stored, along these axes."""
        stored, order = self.specs[0].layout, list[tuple[int, tuple[int, ...]]]()

        def split(layout: Layout) -> Layout:
            pairs = enumerate(zip(layout.placements, stored.placements, strict=True))
            placements = tuple([there if axis in axes else here for axis, (here, there) in pairs])
            return Layout(layout.mesh, placements, tuple(order))

        tokens = split(expansion.inputs[0])
        if tokens.placements == stored.placements:
            tokens = stored
        dims = range(len(self.specs[0].shape) - 1)
        order += [
            (dim, tokens.axes_of(dim)) for dim in dims if len(tokens.axes_of(dim)) > 1
        ]  # the same for all of them
        inputs = (*map(split, expansion.inputs[:OPERANDS]), *expansion.inputs[OPERANDS:])
        gradients = (*map(split, expansion.gradients[:OPERANDS]), *expansion.gradients[OPERANDS:])
        return replace(expansion, inputs=inputs, outputs=tuple(map(split, expansion.outputs)), gradients=gradients)

    def _priced(
        self, base: Strategy, levels: tuple[tuple[int, ...], ...]
    ) -> tuple[Strategy, tuple[TokenExchange, ...]]:
        """The strategy with its exchanges along the axes of each level, of the tokens that are expected."""
        exchanges = tuple(self._levels(base.inputs[OPERANDS], levels))
        forward, backward = self._sent(base, exchanges)
        asked = STEPS * self.topology.dispatch * len(levels)
        names = dict(enumerate(base.rows))
        for i, level in enumerate(levels):
            names |= dict.fromkeys(level, "ragged" if i == len(levels) - 1 else "hop")
        words = [(name, names[axis]) for axis, name in enumerate(base.inputs[0].mesh.names)]
        strategy = replace(
            base,
            name=" ".join(f"{name}:{row}" for name, row in words if row is not None),
            exchanges=forward,
            gather=base.gather + sum(each.seconds for each in forward) + asked,
            backward=base.backward + (sum(each.seconds for each in backward) + asked) * any(self.needed),
        )
        return strategy, exchanges

    def _levels(self, experts: Layout, levels: Sequence[tuple[int, ...]]) -> Iterator[TokenExchange]:
        """The exchanges of each level, to experts in this layout."""
        assert self.rule.chosen is not None
        order, names = experts.axes_of(self.expert_dim), experts.mesh.names
        along = [tuple([names[axis] for axis in order if axis in level]) for level in levels]
        for i, axes in enumerate(along):
            beyond = tuple([name for each in along[i + 1 :] for name in each])
            yield TokenExchange(experts, axes, self.expert_dim, self.total, self.rule.chosen.routing, beyond, i > 0)

    def _sent(
        self, base: Strategy, levels: Sequence[TokenExchange]
    ) -> tuple[tuple[PlannedCollective, ...], tuple[PlannedCollective, ...]]:
        """The exchanges of a forward and of a backward pass: counts, tokens there, sums back.

        Of each its busiest rank counts: the one whose experts get most, or, on the way back, whose are least its own.
        """
        (x, _, weight, *_), mesh = self.specs, base.inputs[0].mesh
        local, k, width = self._tokens(x, base.inputs[0]), weight.shape[-1], x.shape[-1] * x.itemsize
        there, back = list[PlannedCollective](), list[PlannedCollective]()
        again, last = list[PlannedCollective](), list[PlannedCollective]()
        for level in levels:
            hits, shares = level.hits((0,) * mesh.ndim, k)
            send = partial(self._exchange, mesh, level.axes)
            rows, pairs = local * (len(hits) - 1) * max(hits), local * k * (len(hits) - 1) * max(shares)
            sums, returned = local * (sum(hits) - min(hits)), local * k * (sum(shares) - min(shares))
            there += send(COUNTS * NUMBER * (len(hits) - 1)), send(rows * width + pairs * (CODE + weight.itemsize))
            back.insert(0, send(sums * width))
            again.append(send(rows * width))
            last.insert(0, send(sums * width + returned * weight.itemsize))
            local *= len(hits)
        return (*there, *back), (*again, *last)

    def _exchange(self, mesh: Mesh, axes: tuple[str, ...], nbytes: float) -> PlannedCollective:
        return planned_collective("all_to_all", mesh, axes, round(nbytes), self.topology)

    @staticmethod
    def _tokens(spec: Spec, layout: Layout | None = None) -> int:
        """The number of tokens, or of those of a rank in this layout."""
        shape = spec.shape if layout is None else layout.largest_shape(spec.shape)
        return prod(shape[:-1])

    def _impossible(self) -> str:
        x, parameters = self.specs[0], self.specs[OPERANDS:]
        return (
            f"experts={self.requested!r} of tokens {x.shape} and parameters {[each.shape for each in parameters]} on "
            f"the mesh ({x.layout.mesh}): no mesh axis can be given these loops (the rule is '{self.rule}', and the "
            "ragged form asks the host, which a graph cannot); use 't' or 'e', or leave the choice to dshard"
        )
