"""The candidates of a layer of experts, priced: loops t, e and f by the rule, the ragged form of loop e beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dshard.core.context import planning_context
from dshard.core.observe import Decision
from dshard.core.operands import operand_of, plans_to
from dshard.core.spec import Spec, contiguous_spec
from dshard.cost import PlannedCollective, planned_collective
from dshard.errors import StrategyError
from dshard.layout import Layout
from dshard.ops.experts.token_route import TokenExchange
from dshard.redistribute import plan
from dshard.rules.expand import Allowed, Expansion, expansions
from dshard.rules.expert_loops import OPERANDS, RequestedLoops, Way, expected_rows, ways_of
from dshard.rules.rule import Rule
from dshard.rules.strategy import Constraints, Question, Strategy, StrategyChoice
from dshard.rules.strategy_choice import cheapest, choose
from dshard.rules.strategy_price import Price, returned_layout

STEPS = 12
"""The host's time to make a route and wait for its counts, in that of a distributed operator."""
COUNTS = 2
"""The numbers that two ranks tell each other: of rows, and of pairs of a token and an expert."""
CODE, NUMBER = 4, 8
"""The bytes of the code of a pair, and of a number."""


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """The cheapest way to run a layer of experts: its decision and strategy, and the result's spec.

    `exchange` is that of the ragged form; None where tokens are whole, or gathered, on each axis that splits experts.
    """

    specs: Sequence[Spec]
    decision: Decision
    strategy: Strategy
    exchange: TokenExchange | None
    result: Spec


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
        self.static: tuple[Allowed, ...] = tuple([rows for rows, axes in ways if not axes])
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
        spec = contiguous_spec(end, tokens.shape, tokens.dtype, tokens.device)
        return ExpertsChoice(self.specs, decision, strategy, candidates.get(strategy), spec)

    def _static(self) -> Strategy | None:
        """The cheapest strategy of the rule that is allowed."""
        if not self.static or next(expansions(*self.question[:3], self.static), None) is None:
            return None
        return choose(self.question).strategy

    def _ragged(self) -> Iterator[tuple[Strategy, TokenExchange]]:
        """The candidates of the ragged form."""
        price = Price(self.question)
        for rows, axes in self.ragged:
            for expansion in expansions(*self.question[:3], (rows,)):
                sent = self._with_tokens_split(expansion, axes)
                yield self._priced(price.of(sent), axes)

    def _with_tokens_split(self, expansion: Expansion, axes: Sequence[int]) -> Expansion:
        """The expansion with tokens, their indices, weights and results where tokens are stored, along these axes."""
        stored = self.specs[0].layout

        def split(layout: Layout) -> Layout:
            for axis in axes:
                layout = layout.replace(axis, stored.placements[axis])
            return stored if layout.placements == stored.placements else layout

        inputs = (*map(split, expansion.inputs[:OPERANDS]), *expansion.inputs[OPERANDS:])
        gradients = (*map(split, expansion.gradients[:OPERANDS]), *expansion.gradients[OPERANDS:])
        return replace(expansion, inputs=inputs, outputs=tuple(map(split, expansion.outputs)), gradients=gradients)

    def _priced(self, base: Strategy, axes: tuple[int, ...]) -> tuple[Strategy, TokenExchange]:
        """The strategy with its exchanges along these axes, of the tokens that are expected."""
        tokens, experts, mesh = self.specs[0], base.inputs[OPERANDS], base.inputs[0].mesh
        names = tuple([mesh.names[axis] for axis in experts.axes_of(self.expert_dim) if axis in axes])
        exchange = TokenExchange(experts, names, self.expert_dim, self.total, self._tokens(tokens))
        forward, backward = self._exchanges(base, exchange)
        seconds, back = (sum(each.seconds for each in sent) for sent in (forward, backward))
        asked = STEPS * self.topology.dispatch
        words = [
            (name, "ragged" if axis in axes else row)
            for axis, (name, row) in enumerate(zip(mesh.names, base.rows, strict=True))
        ]
        strategy = replace(
            base,
            name=" ".join(f"{name}:{row}" for name, row in words if row is not None),
            exchanges=forward,
            gather=base.gather + seconds + asked,
            backward=base.backward + (back if any(self.needed) else 0.0),
        )
        return strategy, exchange

    def _exchanges(
        self, base: Strategy, exchange: TokenExchange
    ) -> tuple[tuple[PlannedCollective, ...], tuple[PlannedCollective, ...]]:
        """The exchanges of a forward and of a backward pass: counts, tokens there, sums back."""
        (x, _, weight, *_), mesh = self.specs, base.inputs[0].mesh
        local, k = self._tokens(x, base.inputs[0]), weight.shape[-1]
        held = exchange.held((0,) * mesh.ndim)
        rows = sum([expected_rows(local, k, len(each), self.total) for each in held[1:]])
        pairs = local * k * sum(map(len, held[1:])) / max(1, self.total)
        width = x.shape[-1] * x.itemsize

        def sent(nbytes: float) -> PlannedCollective:
            return planned_collective("all_to_all", mesh, exchange.axes, round(nbytes), self.topology)

        counts = sent(COUNTS * NUMBER * (len(held) - 1))
        there, back = sent(rows * width + pairs * (CODE + weight.itemsize)), sent(rows * width)
        return (counts, there, back), (back, sent(rows * width + pairs * weight.itemsize))

    @staticmethod
    def _tokens(spec: Spec, layout: Layout | None = None) -> int:
        """The number of tokens, or of those of a rank in this layout."""
        shape = spec.shape if layout is None else layout.largest_shape(spec.shape)
        n = 1
        for size in shape[:-1]:
            n *= size
        return n

    def _impossible(self) -> str:
        x, parameters = self.specs[0], self.specs[OPERANDS:]
        return (
            f"experts={self.requested!r} of tokens {x.shape} and parameters {[each.shape for each in parameters]} on "
            f"the mesh ({x.layout.mesh}): no mesh axis can be given these loops (the rule is '{self.rule}', and the "
            "ragged form asks the host, which a graph cannot); use 't' or 'e', or leave the choice to dshard"
        )
