"""The least sum of tables over shared variables, by elimination; parts of a problem that are alike are done once.

Variables have values 0, 1, ...; a factor is a table of costs over some of them. A variable is eliminated by adding all
factors that mention it, and taking the least over its values: a new factor over its neighbours. A factor that would
have more than `limit` entries is made in several, each of some of the terms (mini-buckets, Dechter and Rish 2003):
the sum of least values bounds the least sum from below, and is equal to it where nothing was cut. Before, what each of
them takes at least for a value of the variable is shared out evenly among them, which makes the bound larger (moment
matching, Flerova, Ihler, Dechter and Otten 2011). A variable with one value is no dim of what is made: a step has
thousands, most of which have one left after a few passes, and a tensor at most 64 dims.

Tables are named. Eliminations of factors of the same names in the same pattern are one *node*, worked out once however
often the problem has it: the blocks of a model that repeats one are as quick as one block, and variables between them
are eliminated in pairs, then in fours, and so on.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dshard.planning.deadline import ENDLESS, Deadline

LIMIT = 8_000_000
"""The most entries of a table that is made by an elimination."""


class NamedTable(NamedTuple):
    """A table by its name, over these variables: one dim each."""

    table: Hashable
    variables: tuple[int, ...]


class Term(NamedTuple):
    """A table that a node adds: the number of a node or, of given tables, -1 - their number; and a dim for each own."""

    node: int
    dims: tuple[int, ...]


class Node(NamedTuple):
    """An elimination: the terms, and how many dims their sum has, of which the last is that of the variable."""

    terms: tuple[Term, ...]
    ndim: int


class _Elimination(NamedTuple):
    """One variable of the problem that is eliminated: the nodes, each with the variables that are left there."""

    variable: int
    nodes: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """An order of elimination: its nodes, and the variables that each serves.

    It serves smaller sizes than those that it was made for, too. `tables` are the names of given tables, each with its
    dims of variables with several values, and `constants` the names of those that have none, with the times that the
    problem has each; `fixed` are the variables with one value. `cuts` are the numbers of nodes in order, those of one
    factor that was cut together; `roots` the number of times that a node ends a part of the problem; `is_exact` says
    that no factor was cut.
    """

    tables: tuple[tuple[Hashable, tuple[int, ...]], ...]
    constants: Mapping[Hashable, int]
    fixed: tuple[int, ...]
    nodes: tuple[Node, ...]
    cuts: tuple[tuple[int, ...], ...]
    eliminations: tuple[_Elimination, ...]
    roots: Mapping[int, int]
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Solution:
    """The outcome of an elimination.

    `bound` is at most the least sum; `choice` a value for each variable, which gives the least sum if the order is
    exact. `tables` has what each node takes at least.
    """

    bound: float
    choice: tuple[int, ...]
    tables: _NodeTables

    def excess(self, deadline: Deadline = ENDLESS) -> dict[int, Tensor]:
        """By how much the values of variables exceed the bound: min-marginals.

        `excess[v][i]` bounds from below by how much any choice in which a variable that is alike v has the value i
        does. Nodes are gone through from the last to the first, each with the excess of what is outside it; of a node
        that serves several variables, the least.

        Raises:
            TimeIsOver: the deadline came first.
        """
        order, least = self.tables.order, self.tables.least
        outside: list[Tensor | None] = [None] * len(least)
        for root in order.roots:
            outside[root] = -least[root]
        own: list[Tensor] = [torch.empty(0)] * len(least)
        for number in range(len(least) - 1, -1, -1):
            deadline.check()
            beyond = outside[number]
            assert beyond is not None
            total = self.tables.total(number).add_(beyond.unsqueeze(-1))
            own[number] = _marginal(total)
            for child, dims in order.nodes[number].terms:
                if child < 0:
                    continue
                others = tuple([dim for dim in range(total.dim()) if dim not in dims])
                seen = total.amin(others) if others else total
                kept = sorted(dims)
                seen = seen.permute([kept.index(dim) for dim in dims]) - least[child]
                seen = torch.where(seen.isnan(), inf, seen)
                before = outside[child]
                outside[child] = seen if before is None else torch.minimum(before, seen)
        excess = {variable: torch.zeros(1, dtype=torch.float64) for variable in order.fixed}
        for variable, made in order.eliminations:
            for node, _ in made:  # of several, each bounds from below
                known = excess.get(variable)
                excess[variable] = own[node] if known is None else torch.maximum(known, own[node])
        return excess


def elimination_order(sizes: Sequence[int], factors: Sequence[NamedTable], limit: int = LIMIT) -> EliminationOrder:
    """The order of elimination that makes the smallest table next, of equal ones that of the fewest eliminations."""
    return _Orderer(sizes, factors, limit).run()


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A factor: the table of a node over these variables, after so many eliminations. Itself is quick to hash."""

    node: int
    variables: tuple[int, ...]
    depth: int


_Key: TypeAlias = tuple[int, ...]
"""A node in numbers alone, which are quick to hash: of each term the node and the dims, -1 for that of the variable.

One of several of a cut has the kind of that, too, as what it takes depends on the others.
"""


class _Cut(NamedTuple):
    """How a variable would be eliminated: the nodes, what is left of each, and the entries of their tables.

    Variables with equal nodes are of one `kind`.
    """

    nodes: tuple[_Key, ...]
    rests: tuple[tuple[int, ...], ...]
    size: int
    depth: int
    kind: int


_Rank: TypeAlias = tuple[bool, float, int, int, int]
"""Kinds in order: those that need not be cut, then of the smallest table for each variable of the kind."""


class _Orderer:
    """Eliminates variables by the sizes of their tables alone; those that are alike share the effort, and are next."""

    def __init__(self, sizes: Sequence[int], factors: Sequence[NamedTable], limit: int) -> None:
        self.sizes, self.limit = tuple(sizes), limit
        self.names: dict[tuple[Hashable, tuple[int, ...]], int] = {}
        self.constants: dict[Hashable, int] = {}
        self.nodes: dict[_Key, Node] = {}
        self.numbers: dict[_Key, int] = {}
        self.kinds: dict[tuple[_Key, ...], int] = {}
        self.of: list[dict[_Made, None]] = [{} for _ in sizes]
        for table, variables in factors:
            dims = tuple([dim for dim, variable in enumerate(variables) if sizes[variable] > 1])
            if dims:
                number = self.names.setdefault((table, dims), len(self.names))
                self._add(_Made(-1 - number, tuple([variables[dim] for dim in dims]), 0))
            else:
                self.constants[table] = self.constants.get(table, 0) + 1
        self.cuts: dict[int, _Cut] = {}
        self.alike = defaultdict[int, dict[int, None]](dict)
        self.waiting: list[_Rank] = []

    def run(self) -> EliminationOrder:
        eliminations, roots, cuts = list[_Elimination](), dict[int, int](), dict[tuple[int, ...], None]()
        self._look(range(len(self.sizes)))
        while self.waiting:
            rank = heapq.heappop(self.waiting)
            if rank != self._rank(rank[-1]):
                continue
            near = dict[int, None]()
            for variable in list(self.alike[rank[-1]]):
                if variable in near:  # a neighbour that is alike was eliminated just now
                    continue
                cut = self.cuts[variable]
                made = tuple([self.numbers.setdefault(node, len(self.numbers)) for node in cut.nodes])
                if made:
                    cuts[made] = None
                for node, rest in zip(made, cut.rests, strict=True):
                    if not rest:
                        roots[node] = roots.get(node, 0) + 1
                eliminations.append(_Elimination(variable, tuple(zip(made, cut.rests, strict=True))))
                near |= self._eliminate(variable, cut, made)
            self._look(near)
        nodes, is_exact = tuple([self.nodes[key] for key in self.numbers]), all(len(cut) == 1 for cut in cuts)
        fixed = tuple([variable for variable, size in enumerate(self.sizes) if size == 1])
        of = tuple(self.names), self.constants, fixed
        return EliminationOrder(*of, nodes, tuple(cuts), tuple(eliminations), roots, is_exact)

    def _add(self, factor: _Made) -> None:
        for variable in factor.variables:
            self.of[variable][factor] = None

    def _eliminate(self, variable: int, cut: _Cut, made: Sequence[int]) -> dict[int, None]:
        """Put the nodes in place of a variable's factors; its neighbours, which are to be looked at."""
        near = dict.fromkeys([other for factor in self.of[variable] for other in factor.variables if other != variable])
        for factor in self.of[variable]:
            for other in factor.variables:
                if other != variable:
                    del self.of[other][factor]
        del self.alike[cut.kind][variable]
        for node, rest in zip(made, cut.rests, strict=True):
            self._add(_Made(node, rest, cut.depth + 1))
        return near

    def _look(self, variables: Iterable[int]) -> None:
        """Work out anew how each of these variables would be eliminated."""
        changed = dict[int, None]()
        for variable in variables:
            before, cut = self.cuts.get(variable), self._cut(variable)
            if before is not None:
                del self.alike[before.kind][variable]
                changed[before.kind] = None
            self.cuts[variable] = cut
            self.alike[cut.kind][variable] = changed[cut.kind] = None
        for kind in changed:
            if self.alike[kind]:
                heapq.heappush(self.waiting, self._rank(kind))

    def _rank(self, kind: int) -> _Rank:
        variables = self.alike[kind]
        if not variables:
            return (True, inf, 0, 0, kind)
        first = next(iter(variables))
        cut = self.cuts[first]
        return (len(cut.nodes) > 1, cut.size / len(variables), cut.depth, first, kind)

    def _cut(self, variable: int) -> _Cut:
        factors = list(self.of[variable])
        if not factors:
            return _Cut((), (), 0, 0, self.kinds.setdefault((), len(self.kinds)))
        made = [self._node(variable, factors)]
        if made[0][-1] > self.limit:
            made = [self._node(variable, own) for own in self._groups(factors)]
        nodes = tuple([node for node, _, _ in made])
        if len(made) > 1:
            kind = self.kinds.setdefault(nodes, len(self.kinds))
            self.nodes |= {(*node, kind): self.nodes[node] for node in nodes}
            nodes = tuple([(*node, kind) for node in nodes])
        size, depth = sum([size for _, _, size in made]), max([factor.depth for factor in factors])
        kind = self.kinds.setdefault(nodes, len(self.kinds))
        return _Cut(nodes, tuple([rest for _, rest, _ in made]), size, depth, kind)

    def _node(self, variable: int, factors: list[_Made]) -> tuple[_Key, tuple[int, ...], int]:
        """The node that adds these factors, the variables that are left there, and the entries of its table."""
        if len(factors) > 1:
            factors.sort(key=lambda factor: (factor.node, factor.variables.index(variable)))
        dims, size, key = dict[int, int](), self.sizes[variable], list[int]()
        for factor in factors:
            key.append(factor.node)
            for other in factor.variables:
                if other == variable:
                    key.append(-1)
                    continue
                if other not in dims:
                    dims[other] = len(dims)
                    size *= self.sizes[other]
                key.append(dims[other])
        node, rest = tuple(key), tuple(dims)
        if node not in self.nodes:
            dims[variable] = len(dims)
            terms = [Term(factor.node, tuple([dims[other] for other in factor.variables])) for factor in factors]
            self.nodes[node] = Node(tuple(terms), len(dims))
        return node, rest, size

    def _groups(self, factors: Sequence[_Made]) -> list[list[_Made]]:
        """The factors of a variable in groups whose tables are within the limit; one that is larger is alone."""
        groups: list[tuple[list[_Made], set[int]]] = []
        for factor in sorted(factors, key=lambda f: -self._entries(f.variables)):
            for group, variables in groups:
                if self._entries(variables.union(factor.variables)) <= self.limit:
                    group.append(factor)
                    variables.update(factor.variables)
                    break
            else:
                groups.append(([factor], set(factor.variables)))
        return [group for group, _ in groups]

    def _entries(self, variables: Iterable[int]) -> int:
        return prod([self.sizes[each] for each in variables])


def solve(order: EliminationOrder, tables: Mapping[Hashable, Tensor], deadline: Deadline = ENDLESS) -> Solution:
    """Eliminate all variables; `tables` has those of the order by name.

    An infinite entry forbids a combination.

    Raises:
        TimeIsOver: the deadline came first.
    """
    given = [tables[name].reshape([tables[name].shape[dim] for dim in dims]) for name, dims in order.tables]
    of_nodes = _NodeTables(order, given)
    for cut in order.cuts:
        deadline.check()
        of_nodes.add(cut)
    bound = sum([float(of_nodes.least[root]) * times for root, times in order.roots.items()])
    bound += sum([float(tables[name].sum()) * times for name, times in order.constants.items()])
    return Solution(bound, _choice(order, of_nodes.table), of_nodes)


class _NodeTables:
    """What the nodes of an order take at least, without their variable: with it tables are larger, and made anew.

    `shifts` have what each node of a cut gives to the others, for each value of the variable.
    """

    def __init__(self, order: EliminationOrder, given: Sequence[Tensor]) -> None:
        self.order, self.given = order, given
        self.least, self.shifts = list[Tensor](), dict[int, Tensor]()

    def add(self, cut: Sequence[int]) -> None:
        """Add the nodes that are next: of several each takes as much at least for each value of their variable."""
        if len(cut) > 1:
            own = [_marginal(self.total(number)) for number in cut]
            mean = torch.stack(own).mean(0)
            self.shifts |= {n: torch.where(mean.isinf(), inf, mean - x) for n, x in zip(cut, own, strict=True)}
        self.least += [self.total(number).amin(-1) for number in dict.fromkeys(cut)]  # alike parts are one node

    def table(self, number: int) -> Tensor:
        """The table of a term."""
        return self.given[-1 - number] if number < 0 else self.least[number]

    def total(self, number: int) -> Tensor:
        """The sum of a node's terms, in memory of its own."""
        node = self.order.nodes[number]
        terms = [_aligned(self.table(term.node), term.dims, node.ndim) for term in node.terms]
        if number in self.shifts:
            terms.append(self.shifts[number])
        shape = torch.broadcast_shapes(*[term.shape for term in terms])
        total = terms[0].expand(shape).clone(memory_format=torch.contiguous_format)
        for term in terms[1:]:
            total += term
        return total


def _marginal(total: Tensor) -> Tensor:
    """The least of a table for each value of its last variable."""
    return total.amin(tuple(range(total.dim() - 1))) if total.dim() > 1 else total


def _aligned(table: Tensor, dims: Sequence[int], ndim: int) -> Tensor:
    """A view of a table with the given dim for each of its own, and dims of size one for others."""
    order = sorted(range(len(dims)), key=dims.__getitem__)
    sizes = [1] * ndim
    for dim, size in zip(dims, table.shape, strict=True):
        sizes[dim] = size
    return table.permute(order).reshape(sizes)


def _choice(plan: EliminationOrder, table: Callable[[int], Tensor]) -> tuple[int, ...]:
    """A value for each variable, the last eliminated first: the least of all its factors, given the others' values."""
    choice = [0] * len(plan.eliminations)
    known: dict[tuple[object, ...], int] = {}
    for variable, made in reversed(plan.eliminations):
        at = tuple([(node, tuple([choice[other] for other in rest])) for node, rest in made])
        if at not in known:
            costs = torch.zeros((), dtype=torch.float64)
            for node, values in at:
                picked: list[Any] = [*values, slice(None)]
                for number, dims in plan.nodes[node].terms:
                    costs = costs + table(number)[tuple([picked[dim] for dim in dims])]
            known[at] = int(costs.argmin())
        choice[variable] = known[at]
    return tuple(choice)
