"""The tables of a step: what the candidates of its calls cost, and the moves of tensors between them.

A variable is a call, whose values are its candidates, or a parameter that several calls read, whose values are the
layouts in which it may be stored. A table is the work of a call; the moves of a tensor from the call that makes it to
one that reads it, and of its gradient back; or those of a parameter to its use, and of its gradient to where it is
stored. The backward pass moves what the forward pass moved, the other way, so it needs no variables. A parameter with
one use lies where that is cheapest, which needs no variable either. Calls that are alike share their tables.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from itertools import combinations, pairwise, product
from math import prod, sqrt
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dshard.cost import collective_seconds
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.planning.call_candidates import AxisGroups, CallCandidate, are_alike, candidates, on_axes
from dshard.planning.deadline import ENDLESS, Deadline
from dshard.planning.eliminate import NamedTable
from dshard.planning.kept_values import kept_values
from dshard.planning.local_seconds import cast_seconds, gradient_sum_seconds
from dshard.planning.move_prices import MovePrices, completion
from dshard.planning.packed_values import with_packed_values
from dshard.planning.shifted_costs import Spread
from dshard.planning.step_graph import End, GraphCall, StepGraph, Value, is_copy
from dshard.planning.step_limits import FREE, StepLimits, StoredLimit
from dshard.planning.uncollected import uncollected
from dshard.topology import Topology
from dshard.torch_private import no_functions

N = TypeVar("N", float, Tensor)
NEVER = 1e6
"""Seconds of a move that is not made."""
MOMENTS = 2
"""The numbers that an optimiser such as Adam keeps of each of a parameter."""


class Parts(NamedTuple):
    """Seconds of moves for which work waits, of work, and of moves that may run beside it; and bytes that are held.

    `stored` are those of parameters and moments, `saved` those that the forward pass leaves to the backward pass, and
    `gradients` those of parameters' gradients, which take their place.
    """

    exposed: float = 0.0
    work: float = 0.0
    beside: float = 0.0
    stored: float = 0.0
    saved: float = 0.0
    gradients: float = 0.0

    @property
    def memory(self) -> float:
        """The bytes that are held at the end of either pass."""
        return self.stored + max(self.saved, self.gradients)

    def plus(self, other: Parts, times: int = 1) -> Parts:
        """The sum with so many times another."""
        return Parts(*[a + times * b for a, b in zip(self, other, strict=True)])


class Weights(NamedTuple):
    """The multipliers of a weighted sum: of the seconds of moves that may run beside work, and of a byte.

    A byte that is `saved` counts in this part, and one of a gradient in the rest: more than these are never held.
    """

    beside: float = 1.0
    memory: float = 0.0
    saved: float = 1.0

    def of(self, parts: Parts) -> float:
        """The weighted sum, in seconds."""
        return parts.exposed + parts.work + self.beside * parts.beside + self.of_bytes(*parts[3:])

    def of_bytes(self, stored: N, saved: N, gradients: N) -> N:
        """What the weighted sum has for bytes, at most the price of those that are held."""
        return self.memory * (stored + self.saved * saved + (1 - self.saved) * gradients)


class _Pairs(NamedTuple):
    """The different layouts of an operand and of its gradient among candidates, and the pair of each candidate."""

    used: Tensor
    gradients: Tensor
    of: Tensor


class _Edge(NamedTuple):
    """A tensor between two domains: its layouts where it is made, what its gradient becomes there, and its uses.

    `fixed` are the moves that are not made. `saved` are the bytes that a move adds to what is saved.
    """

    prices: MovePrices
    made: Tensor
    wanted: Tensor
    of: Tensor
    pairs: _Pairs
    domains: tuple[int, int]
    needs_grad: bool
    fixed: Tensor
    saved: Tensor


class _Use(NamedTuple):
    """A parameter and an operand that it is: the layouts in which it may be stored, with bytes of a rank, and its uses.

    `prices` are those of moves together with other parameters, `single` those of moves between the same layouts that
    are made `alone`: that says for each layout and use whether the parameter is moved so, and whether its gradient is.
    `held` has for each layout the bytes of the parameter with its moments, and of its gradient, `saved` those of copies
    that stay until the backward pass. `variable` chooses the layout of one that several calls read. `times` says how
    often each move to a use is made. `casts` are the seconds of casts between the dtypes in which it is stored and
    used, and its gradient reduced, by these layouts; gradients are `wider` than it.
    """

    prices: MovePrices
    single: MovePrices
    alone: Tensor
    stored: Tensor
    held: Tensor
    saved: Tensor
    times: Tensor
    pairs: _Pairs
    domain: int
    operand: int
    variable: int | None
    needs_grad: bool
    casts: Tensor
    wider: float

    def seconds(self, back: int, sources: Tensor, destinations: Tensor) -> Tensor:
        """The seconds of moves from each layout to each use, or of gradients `back`."""
        together, alone = (each.seconds[sources, destinations] for each in (self.prices, self.single))
        return torch.where(self.alone[back], alone, together)

    def price(self, at: int, pair: int) -> int:
        """Price exactly what a use moves of a parameter in this layout; how many moves were not before."""
        layout, used, gradient = (
            int(each) for each in (self.stored[at], self.pairs.used[pair], self.pairs.gradients[pair])
        )
        there, back = (self.single if alone[at, pair] else self.prices for alone in self.alone)
        return there.price(layout, used) + (self.needs_grad and back.price(gradient, layout))


class _Work(NamedTuple):
    """For each candidate of a domain the seconds of what it sends within, and of its work, and bytes of a rank."""

    exposed: Tensor
    work: Tensor
    stored: Tensor
    saved: Tensor
    gradients: Tensor

    def parts(self, at: int) -> Parts:
        """Those of a candidate."""
        exposed, work, *held = (float(each[at]) for each in self)
        return Parts(exposed, work, 0.0, *held)

    @classmethod
    def of(cls, exposed: Sequence[float] | Tensor, **others: Sequence[float] | Tensor) -> _Work:
        """Those of so many candidates; what is not given is zero."""
        nothing = [0.0] * len(exposed)
        columns = [exposed, *[others.get(name, nothing) for name in cls._fields[1:]]]
        return cls(*[torch.as_tensor(column, dtype=torch.float64) for column in columns])


class StepTables:
    """The tables of a step's graph on a mesh, with moves that are bounded from below until they are priced.

    `domains` are the values of variables that are alike, `domain_of` the number of each variable's; the first variables
    are the calls. `uses` says which tables there are, and between which variables. `limits` says what no plan does.

    Raises:
        StrategyError: a call that can do nothing but what it may not.
        TimeIsOver: the deadline came before all tables were made.
    """

    @uncollected()
    def __init__(
        self,
        graph: StepGraph,
        mesh: Mesh,
        topology: Topology,
        limits: StepLimits = FREE,
        deadline: Deadline = ENDLESS,
    ) -> None:
        self.graph, self.mesh, self.topology, self.limits = with_packed_values(graph), mesh, topology, limits
        self.kept = kept_values(self.graph)
        self.domains: list[tuple[CallCandidate, ...] | tuple[Layout, ...]] = []
        self.domain_of: list[int] = []
        self.uses: list[NamedTable] = []
        self.prices: dict[Hashable, MovePrices] = {}
        self.names: dict[Hashable, int] = {}
        self.work: dict[Hashable, _Work] = {}
        self.edges: dict[Hashable, _Edge] = {}
        self.parameters: dict[Hashable, _Use] = {}
        self.buckets = _buckets(graph, mesh, topology)
        self._add_domains(deadline)
        with no_functions():  # such as those that make tensors on another device
            for value in graph.values:
                deadline.check()
                for use in value.uses if value.kind == "made" else ():
                    self._add_edge(value, use)
            for value in graph.outputs:
                if value.producer is not None and not value.uses:
                    self._add_end(value, value.producer)
            self.of_calls = len(self.domains), len(self.domain_of), len(self.uses)
            self._add_parameters(deadline)
            self._bound(deadline)

    def growth(self) -> float:
        """How many times the candidates there would be if no mesh axes were used alike, of calls by about as many ways.

        What takes time is proportional to that, about.
        """
        free = self.mesh.ndim - sum([len(group) - 1 for group in self.limits.alike])
        sizes = [len(own) for own in self.domains[: self.of_calls[0]]]
        grown: float = sum([size ** (self.mesh.ndim / free) for size in sizes])
        return grown / max(1, sum(sizes))  # there are none where no operator runs

    def pinned(self, stored: Mapping[str, Layout | StoredLimit]) -> StepTables:
        """The tables of plans that store parameters, by name, in these layouts; prices are known to both."""
        other = copy(self)
        other.limits = self.limits.also(
            {name: StoredLimit(own) if isinstance(own, Layout) else own for name, own in stored.items()}
        )
        domains, variables, uses = self.of_calls
        other.domains, other.domain_of, other.uses = (
            self.domains[:domains],
            self.domain_of[:variables],
            self.uses[:uses],
        )
        other.work, other.parameters = dict(self.work), {}
        with no_functions():
            other._add_parameters(ENDLESS)
            other._bound(ENDLESS)
        return other

    def _bound(self, deadline: Deadline) -> None:
        for prices in self.prices.values():
            deadline.check()
            prices.bound()

    # -- what there is

    def _add_domains(self, deadline: Deadline) -> None:
        """Add the candidates of all calls, those that are alike once."""
        known: dict[Hashable, int] = {}
        for call in self.graph.calls:
            added = tuple([max(0, len(x.uses) - 1) * x.needs_grad for x in call.results])
            limit, kept = self.limits.of_call(call), tuple([x.number in self.kept.made for x in call.results])
            key = (call.signature, tuple([value.kind == "made" for value in call.operands]), added, kept, limit)
            if key not in known:
                deadline.check()
                known[key] = len(self.domains)
                every = candidates(call, self.mesh, self.topology, self.limits.alike, deadline)
                own = limit.allowed(call, every, self.graph)
                self.domains.append(own)
                work = [c.work + self._sums(call, c) for c in own]
                saved = [float(c.saved + self._results(call, c)) for c in own]
                with no_functions():
                    costs = _Work.of([c.exchanges for c in own], work=work, saved=saved)
                self.work[self._name("work", known[key])] = costs
            self.domain_of.append(known[key])
            self.uses.append(NamedTable(self._name("work", known[key]), (call.number,)))

    def _name(self, *key: Hashable) -> int:
        """The name of the table of this key, a number: a step has thousands of uses, and keys take long to hash."""
        return self.names.setdefault(key, len(self.names))

    def _sums(self, call: GraphCall, candidate: CallCandidate) -> float:
        """Seconds to add the gradients of results that several calls read."""
        ends = zip(call.results, candidate.outputs, strict=True)
        return sum([gradient_sum_seconds(value, layout, self.topology) for value, layout in ends])

    def _results(self, call: GraphCall, candidate: CallCandidate) -> int:
        """Bytes of the results that are kept where they are made."""
        ends = zip(call.results, candidate.outputs, strict=True)
        return sum([local_bytes(value, layout) for value, layout in ends if value.number in self.kept.made])

    def _prices(self, value: Value) -> MovePrices:
        return self._known_prices(value.shape, value.itemsize, None)

    def _of_parameter(self, value: Value) -> tuple[MovePrices, MovePrices]:
        """Prices of moves of a parameter that are joined with those of others, and of single ones."""
        nbytes = max(1, prod(value.shape) * value.itemsize)
        joined = max(value.itemsize, round(value.itemsize * self.buckets[value.needs_grad] / nbytes)) / value.itemsize
        key = "parameter", joined
        return (
            self._known_prices(value.shape, value.itemsize, joined, *key),
            self._known_prices(value.shape, value.itemsize, None, *key),
        )

    def _known_prices(self, shape: Shape, itemsize: int, joined: float | None, *own: Hashable) -> MovePrices:
        key = (shape, itemsize, joined, *own)
        if key not in self.prices:
            self.prices[key] = MovePrices(self.mesh, self.topology, shape, itemsize, joined)
        return self.prices[key]

    def _candidates(self, domain: int) -> tuple[CallCandidate, ...]:
        return self.domains[domain]  # type: ignore[return-value]  # that of a call

    def _pairs(self, prices: MovePrices, domain: int, operand: int) -> _Pairs:
        numbers: dict[tuple[Layout, Layout], int] = {}
        own = self._candidates(domain)
        of = [numbers.setdefault((c.inputs[operand], c.gradients[operand]), len(numbers)) for c in own]
        used, gradients = zip(*numbers, strict=True)
        return _Pairs(prices.add(used), prices.add(gradients), torch.tensor(of))

    def _add_edge(self, value: Value, use: End) -> None:
        assert value.producer is not None
        (producer, result), (call, operand) = value.producer, use
        domains = self.domain_of[producer], self.domain_of[call]
        stays = operand == 0 and self.graph.calls[call].writes, operand == 0 and self._is_view_of_view(value, call)
        keeps = use in self.kept.uses, use in self.kept.alone
        ends = domains[0], result, domains[1], operand
        name = self._name("edge", value.shape, value.dtype, value.needs_grad, *ends, stays, keeps)
        if name not in self.edges:
            prices, numbers = self._prices(value), dict[tuple[Layout, Layout], int]()
            own = [(c.outputs[result], c.cotangent(result)) for c in self._candidates(domains[0])]
            of = torch.tensor([numbers.setdefault(each, len(numbers)) for each in own])
            made, wanted = map(prices.add, zip(*numbers, strict=True))
            pairs = self._pairs(prices, domains[1], operand)
            prices.ask(made, pairs.used)
            if value.needs_grad:
                prices.ask(pairs.gradients, wanted)
            saved, moved = self._copies(value, prices, (made, pairs.used), keeps), made[:, None] != pairs.used
            fixed = moved & (stays[0] | (stays[1] & torch.isin(made, pairs.used))[:, None])
            self.edges[name] = _Edge(prices, made, wanted, of, pairs, domains, value.needs_grad, fixed, saved)
        self.uses.append(NamedTable(name, (producer, call)))

    def _is_view_of_view(self, value: Value, call: int) -> bool:
        """Whether a call is a view of what is one, or has other readers: executors move it behind, if they can."""
        assert value.producer is not None
        maker, reader = (self.graph.calls[n] for n in (value.producer.call, call))
        return self.graph.is_view(reader) and (is_copy(maker) or self.graph.is_view(maker))

    def _copies(
        self, value: Value, prices: MovePrices, ends: tuple[Tensor, Tensor], keeps: tuple[bool, bool]
    ) -> Tensor:
        """The bytes that a moved copy adds to what is saved, if its use keeps it, perhaps alone."""
        made, used = ([local_bytes(value, prices.layouts[i]) for i in end.tolist()] for end in ends)
        moved = keeps[0] * torch.tensor(used) - keeps[1] * torch.tensor(made)[:, None]
        return ((ends[0][:, None] != ends[1]) * moved).double()  # a price times integers is single

    def _add_end(self, value: Value, producer: End) -> None:
        """Charge what the model returns, and leaves partial, its completion."""
        domain = self.domain_of[producer.call]
        name = self._name("end", value.shape, value.dtype, domain, producer.position)
        if name not in self.work:
            layouts = [c.outputs[producer.position] for c in self._candidates(domain)]
            ends = {each: completion(each, value.shape, value.itemsize, self.topology)[1] for each in {*layouts}}
            self.work[name] = _Work.of([ends[layout] for layout in layouts])
        self.uses.append(NamedTable(name, (producer.call,)))

    def _add_parameters(self, deadline: Deadline) -> None:
        for value in self.graph.parameters():
            deadline.check()
            self._add_parameter(value, self.limits.stored(value.name))

    def _add_parameter(self, value: Value, limit: StoredLimit) -> None:
        """Add the tables of a parameter, stored in a layout that the limit allows."""
        variable = None
        if len(value.uses) > 1:
            variable, own = len(self.domain_of), limit.of(_layouts(value, self.mesh, (), self.limits.alike))
            self.domain_of.append(len(self.domains))
            self.domains.append(own)
            stored, gradients = self._held(value, own)
            sums = [gradient_sum_seconds(value, layout, self.topology) for layout in own]
            name = self._name("stored", value.number)
            self.work[name] = _Work.of([0.0] * len(own), work=sums, stored=stored, gradients=gradients)
            self.uses.append(NamedTable(name, (variable,)))
        for call, operand in value.uses:
            domain = self.domain_of[call]
            is_kept, is_first = value.name in self.graph.kept, value.uses[0] == (call, operand)
            kind = value.shape, value.dtype, value.needs_grad
            name = self._name("use", *kind, domain, operand, variable, limit, is_kept, is_first)
            if name not in self.parameters:
                prices, single = self._of_parameter(value)
                pairs = self._pairs(prices, domain, operand)
                if variable is None:
                    used = [prices.layouts[i] for i in pairs.used.unique().tolist()]
                    own = limit.of(_layouts(value, self.mesh, used, self.limits.alike))
                stored = prices.add(own)
                single.add(prices.layouts)
                for each in (prices, single):
                    each.ask(stored, pairs.used)
                    if value.needs_grad:
                        each.ask(pairs.gradients, stored)
                held = self._held(value, own) * (variable is None)
                used, gradients = ([prices.layouts[i] for i in each.tolist()] for each in (pairs.used, pairs.gradients))
                saved = self._copies(value, prices, (stored, pairs.used), (True, False))
                times = torch.tensor([[self._times(value, at, to) for to in used] for at in own], dtype=torch.float64)
                ways = [[_is_alone(at, *ends, is_first) for ends in zip(used, gradients, strict=True)] for at in own]
                alone, kept = torch.tensor(ways).movedim(-1, 0), saved * (times == 1)
                moved, of = (prices, single, alone, stored, held, kept, times, pairs), (domain, operand, variable)
                self.parameters[name] = _Use(*moved, *of, value.needs_grad, *self._casts(value, own, gradients))
            self.uses.append(NamedTable(name, (call,) if variable is None else (variable, call)))

    def _casts(self, value: Value, stored: Sequence[Layout], gradients: Sequence[Layout]) -> tuple[Tensor, float]:
        """The seconds of casts of a parameter in each layout and its gradient in each, and how much wider that is."""
        used = value.dtype
        kept, reduced = (each or used for each in self.graph.dtypes)

        def seconds(layout: Layout, *dtypes: torch.dtype) -> float:
            return sum([cast_seconds(value, layout, *ends, self.topology) for ends in pairwise(dtypes)])

        back = value.needs_grad
        down = [seconds(layout, kept, used) + back * seconds(layout, reduced, kept) for layout in stored]
        up = [back * seconds(layout, used, kept, reduced) for layout in gradients]
        both = torch.tensor(down, dtype=torch.float64)[:, None] + torch.tensor(up, dtype=torch.float64)
        return both, reduced.itemsize / used.itemsize

    def _times(self, value: Value, stored: Layout, used: Layout) -> int:
        """How often a step moves a parameter to a use: again for the backward pass, unless it is kept until then.

        Weights that are gathered are kept or not with all others of their block, whether they are trained or not.
        """
        pairs = zip(stored.placements, used.placements, strict=True)
        is_gathered = any(isinstance(at, Shard) and isinstance(to, Replicate) for at, to in pairs)
        return 1 + (value.name not in self.graph.kept and (is_gathered or value.needs_grad))

    def _held(self, value: Value, layouts: Sequence[Layout]) -> Tensor:
        """Two rows: the bytes of a parameter and its moments in each layout, and those of its gradient."""
        itemsize, is_trained = (self.graph.dtypes.stored or value.dtype).itemsize, value.needs_grad
        own = torch.tensor([itemsize * layout.local_numel(value.shape) for layout in layouts], dtype=torch.float64)
        return torch.stack([own * (1 + MOMENTS * is_trained), own * is_trained])

    # -- tables

    def compact(self, weights: Weights, alive: Sequence[Tensor]) -> dict[Hashable, Spread]:
        """All tables by name, of the values of each domain that are alive, with one row for all of alike layouts."""
        return {name: spread.compact() for name, spread in self._spread(weights, alive)}

    def _spread(self, weights: Weights, alive: Sequence[Tensor]) -> Iterator[tuple[Hashable, Spread]]:
        known = set[Hashable]()
        for name, (variable, *_) in self.uses:
            if name in self.work and name not in known:
                known.add(name)
                own = self.work[name]
                total = own.exposed + own.work + weights.of_bytes(*own[2:])
                yield name, Spread(total, (alive[self.domain_of[variable]],))
        for name, edge in self.edges.items():
            rows = tuple([of[alive[d]] for of, d in zip((edge.of, edge.pairs.of), edge.domains, strict=True)])
            yield name, Spread(self._between(edge) + weights.memory * weights.saved * edge.saved, rows)
        for name, use in self.parameters.items():
            total, pairs = self._weighted(use, weights), use.pairs.of[alive[use.domain]]
            if use.variable is None:
                yield name, Spread(total.amin(0), (pairs,))
            else:
                yield name, Spread(total, (alive[self.domain_of[use.variable]], pairs))

    def _weighted(self, use: _Use, weights: Weights) -> Tensor:
        """The weighted sum of a parameter in each layout for each use."""
        held = weights.of_bytes(use.held[0][:, None], use.saved, use.held[1][:, None])
        return weights.beside * self._moved(use) + held + use.casts

    def _between(self, edge: _Edge) -> Tensor:
        """Seconds from each layout in which a tensor is made to each use, and of its gradient back."""
        moved = edge.prices.seconds[edge.made][:, edge.pairs.used]
        moved = moved + NEVER * edge.fixed
        if edge.needs_grad:
            moved = moved + edge.prices.seconds[edge.pairs.gradients][:, edge.wanted].T
        return moved

    def _moved(self, use: _Use) -> Tensor:
        """Seconds from each layout in which a parameter is stored to each use, in both passes."""
        there = use.times * use.seconds(0, use.stored[:, None], use.pairs.used)
        return there + use.wider * use.seconds(1, use.pairs.gradients, use.stored[:, None]) if use.needs_grad else there

    # -- exact prices

    def price(self, choice: Sequence[int], weights: Weights) -> tuple[Parts, int]:
        """Price exactly all that a choice does: its parts, and how many moves had no exact price before."""
        parts, new = Parts(), 0
        chosen = Counter([(name, tuple([choice[variable] for variable in variables])) for name, variables in self.uses])
        for (name, at), times in chosen.items():
            if name in self.work:
                done = self.work[name].parts(at[0])
            elif name in self.edges:
                edge = self.edges[name]
                made, pair = int(edge.of[at[0]]), int(edge.pairs.of[at[1]])
                new += self._price_edge(edge, made, pair)
                done = Parts(exposed=float(self._between(edge)[made, pair]), saved=float(edge.saved[made, pair]))
            else:
                use = self.parameters[name]
                stored, more = self._price_use(use, at, weights)
                new += more
                pair = int(use.pairs.of[at[-1]])
                moved, cast, saved = (float(each[stored, pair]) for each in (self._moved(use), use.casts, use.saved))
                held = map(float, use.held[:, stored])
                done = Parts(0.0, cast, moved, next(held), saved, next(held))
            parts = parts.plus(done, times)
        return parts, new

    def _price_edge(self, edge: _Edge, made: int, pair: int) -> int:
        new: int = edge.prices.price(int(edge.made[made]), int(edge.pairs.used[pair]))
        if edge.needs_grad:
            new += edge.prices.price(int(edge.pairs.gradients[pair]), int(edge.wanted[made]))
        return new

    def _price_use(self, use: _Use, at: Sequence[int], weights: Weights) -> tuple[int, int]:
        """The position of the layout in which a parameter is stored, priced exactly, and how many moves were not."""
        pair, new = int(use.pairs.of[at[-1]]), 0
        while True:  # what is cheapest by a bound may not be by its price
            costs = self._weighted(use, weights)[:, pair]
            best = int(costs.argmin()) if use.variable is None else at[0]
            more = use.price(best, pair)
            new += more
            if not more:
                return best, new

    def stored(self, choice: Sequence[int], weights: Weights) -> dict[int, Layout]:
        """The layout in which each parameter is stored, by its number, if a choice is made."""
        layouts: dict[int, Layout] = {}
        for name, variables in self.uses:
            if name in self.parameters:
                use = self.parameters[name]
                at, _ = self._price_use(use, [choice[variable] for variable in variables], weights)
                value = self.graph.calls[variables[-1]].operands[use.operand]
                layouts[value.number] = use.prices.layouts[int(use.stored[at])]
        return layouts


def local_bytes(value: Value, layout: Layout) -> int:
    """The bytes of a value that the first rank has in a layout."""
    return layout.local_numel(value.shape) * value.itemsize


def _is_alone(stored: Layout, used: Layout, gradient: Layout, is_first: bool) -> tuple[bool, bool]:
    """Whether a parameter moves alone from the layout in which it is stored to a use, and its gradient back.

    What is gathered for the `is_first` use, or reduced, moves together with others.
    """
    ends = [*zip(stored.placements, used.placements, gradient.placements, strict=True)]
    is_gathered = is_first and all(Replicate() in (at, to) for at, to, _ in ends if at != to)
    there = stored != used and not is_gathered
    return there, there or any(at != back and not isinstance(back, Partial) for at, _, back in ends)


def _buckets(graph: StepGraph, mesh: Mesh, topology: Topology) -> tuple[float, float]:
    """The bytes of parameters that are gathered together, and of those that are trained, whose gradients are reduced.

    Frozen weights are gathered with all others of their block, but reductions are of trained ones alone: those of a few
    small adapters share few latencies, whatever is frozen beside them.
    """
    own = [(prod(value.shape) * value.itemsize, value.needs_grad) for value in graph.parameters()]
    totals = sum([size for size, _ in own]), sum([size for size, is_trained in own if is_trained])
    return _bucket_bytes(totals[0], mesh, topology), _bucket_bytes(totals[1], mesh, topology)


def _bucket_bytes(total: int, mesh: Mesh, topology: Topology) -> float:
    """The bytes of a bucket of gradients, of `total` in all, if all ranks reduce them: as many as end a pass first."""
    n = mesh.size
    begin, seconds = (
        collective_seconds("all_reduce", 2 * (n - 1) / n * nbytes, mesh, mesh.names, topology) for nbytes in (0, total)
    )
    return total / max(1, int(sqrt((seconds - begin) / begin))) if begin > 0 else 0.0


def _layouts(value: Value, mesh: Mesh, used: Sequence[Layout], alike: AxisGroups) -> tuple[Layout, ...]:
    """The layouts in which a parameter may be stored: each dim sharded along any axes, and further shards of a use.

    Axes of a group are used alike.
    """
    dims: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(value.shape)))]
    layouts = dict.fromkeys([Layout(mesh, placements) for placements in on_axes(dims, mesh.ndim, alike)])
    for layout in used:
        layouts[layout] = None
        free = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Replicate)]
        for n in range(1, len(free) + 1):
            for axes, into in product(combinations(free, n), product(range(len(value.shape)), repeat=n)):
                finer, dims_of = layout, dict(zip(axes, into, strict=True))
                if not are_alike(dims_of, alike):
                    continue
                for axis, dim in dims_of.items():
                    finer = finer.replace(axis, Shard(dim))
                layouts[finer] = None
    return tuple([layout for layout in layouts if _has_parts(layout, value.shape)])


def _has_parts(layout: Layout, shape: Sequence[int]) -> bool:
    """Whether no dim is sharded over more ranks than it has entries."""
    sizes = layout.mesh.shape
    return all(prod([sizes[axis] for axis in layout.axes_of(dim)]) <= size for dim, size in enumerate(shape))
