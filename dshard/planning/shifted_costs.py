"""A lower bound on the least sum of tables over shared variables, by shifts of costs; no table is made.

What a table takes for a value of one of its variables may be taken by the variable itself, and the other way round: no
sum changes. The least of each variable and of each table, added, is at most the least sum. Variables are gone through
in order and back; each takes what its tables take at least, and shares what it has among the tables to the variables
behind it (TRW-S, Kolmogorov 2006). That makes the bound larger, up to that of the linear program at best, and exact
where tables form a tree.

Shifts are rounded, and equal ones are one array. What a variable does follows from the names of its tables and from
their shifts, so it is worked out once for all that have both alike: within a row of equal blocks shifts soon repeat.
Arrays are numpy's: most have a hundred numbers, for which torch's operators take several times as long.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dshard.planning.deadline import ENDLESS, Deadline
from dshard.planning.eliminate import NamedTable

GRAIN = 2.0**-40
"""Shifts are multiples of this part of the bound."""


class Spread(NamedTuple):
    """A table in which some values are alike: its entries, and for each variable the row of each of its values.

    A compact one has no other rows; `kept` has for each variable the numbers of these in the table that was given.
    """

    entries: Tensor
    rows: tuple[Tensor, ...]
    kept: tuple[Tensor, ...] = ()

    def compact(self) -> Spread:
        """That without the rows that no value has."""
        pairs, entries = [of.unique(return_inverse=True) for of in self.rows], self.entries
        for dim, (kept, _) in enumerate(pairs):
            entries = entries.index_select(dim, kept)
        return Spread(entries, tuple([own for _, own in pairs]), tuple([kept for kept, _ in pairs]))

    def whole(self) -> Tensor:
        """The table with a row for each value."""
        table = self.entries
        for dim, rows in enumerate(self.rows):
            table = table.index_select(dim, rows)
        return table


Array: TypeAlias = NDArray[np.float64]


class _Table(NamedTuple):
    """A compact spread as arrays: its entries, and for each variable the row of each of its values."""

    entries: Array
    rows: tuple[NDArray[np.int64], ...]

    def whole(self) -> Array:
        """The table of one variable, with a row for each value."""
        return self.entries.take(self.rows[0])


class _End(NamedTuple):
    """One of the variables of a table of two: where shifts to it and to the other are, the table, and its dim."""

    own: int
    other: int
    table: Hashable
    dim: int


class _Kind(NamedTuple):
    """The tables of a variable: those that have only it, and those of two with its dim."""

    own: tuple[Hashable, ...]
    ends: tuple[tuple[Hashable, int], ...]


class ShiftedCosts:
    """Tables, each of one variable or of two, from which costs are shifted to variables.

    `shifts` has for each use of a table of two variables what is shifted from it to
    the first of them, by its rows, and then what is to the second. `kind_of` is the number of each variable's kind.
    """

    def __init__(self, variables: int, uses: Sequence[NamedTable], tables: Mapping[Hashable, Spread]) -> None:
        self.known = dict[Hashable, tuple[Array, ...]]()
        self._take(tables)
        own, ends = defaultdict[int, list[Hashable]](list), defaultdict[int, list[_End]](list)
        self.between = [use for use in uses if len(use.variables) == 2]
        first = list(map(float, range(variables)))
        for use in uses:
            if len(use.variables) == 1:
                own[use.variables[0]].append(use.table)
        for number, (table, (source, reader)) in enumerate(self.between):
            at = 2 * number
            ends[source].append(_End(at, at + 1, table, 0))
            ends[reader].append(_End(at + 1, at, table, 1))
            first[source] = min(first[source], reader - 0.5)
        self.order = sorted(range(variables), key=first.__getitem__)
        self.ends = [ends[variable] for variable in range(variables)]
        kinds = [_Kind(tuple(own[v]), tuple([end[2:] for end in self.ends[v]])) for v in range(variables)]
        self.kinds = [*dict.fromkeys(kinds)]
        numbers = {kind: number for number, kind in enumerate(self.kinds)}
        self.kind_of = [numbers[kind] for kind in kinds]
        self.near = [_getter([i for end in own for i in (end.own, end.other)]) for own in self.ends]
        self.arrays, self.grain = dict[bytes, Array](), 0.0
        sizes = [self.tables[name].entries.shape for name, _ in self.between]
        self.shifts = [self._one(np.zeros(n)) for both in sizes for n in both]
        self.grain = GRAIN * abs(self.bound)

    def _take(self, tables: Mapping[Hashable, Spread]) -> None:
        self.spreads = tables
        self.tables = {
            name: _Table(x.entries.numpy(), tuple([rows.numpy() for rows in x.rows])) for name, x in tables.items()
        }
        self.known.clear()

    def _one(self, shift: Array) -> Array:
        """A shift, rounded; of equal ones always the same array."""
        if self.grain:
            shift = np.rint(shift / self.grain) * self.grain
        return self.arrays.setdefault(shift.tobytes(), shift)

    def replace(self, tables: Mapping[Hashable, Spread]) -> None:
        """Have other costs for the same variables, perhaps of fewer values; what was shifted stays."""
        old, at, known = self.spreads, dict[Hashable, list[NDArray[np.int64]]](), dict[Hashable, Array]()
        for name, _ in self.between:
            if name not in at:
                ends = zip(old[name].kept, tables[name].kept, strict=True)
                at[name] = [torch.searchsorted(before, kept).numpy() for before, kept in ends]
        for i, shift in enumerate(self.shifts):
            (name, _), dim = self.between[i // 2], i % 2
            key = name, dim, id(shift)
            if key not in known:
                known[key] = self._one(shift[at[name][dim]])
            self.shifts[i] = known[key]
        self._take(tables)

    def _key(self, variable: int) -> tuple[Hashable, ...]:
        """What follows for a variable from its tables and their shifts follows for all of equal keys."""
        return self.kind_of[variable], *map(id, self.near[variable](self.shifts))

    def _own(self, variable: int) -> Array:
        """What each value of a variable costs by itself, with what was shifted to it."""
        first, *others = self.kinds[self.kind_of[variable]].own
        own = self.tables[first].whole()
        for name in others:
            own += self.tables[name].whole()
        for end in self.ends[variable]:
            own += self.shifts[end.own].take(self.tables[end.table].rows[end.dim])
        return own

    def _rest(self, end: _End) -> Array:
        """What is left of a table at least, for each row of a dim."""
        dim, mine, other = end.dim, self.shifts[end.own], self.shifts[end.other]
        key = "rest", end.table, dim, id(mine), id(other)
        if key not in self.known:
            left = self.tables[end.table].entries - (other if dim == 0 else other[:, None])
            self.known[key] = (left.min(1 - dim) - mine,)
        return self.known[key][0]

    @property
    def bound(self) -> float:
        """The least of all variables and all tables, added."""
        own, ids = [self._key(variable) for variable in self.order], [*map(id, self.shifts)]
        rests = [*zip([name for name, _ in self.between], ids[::2], ids[1::2], strict=True)]
        one = dict(zip(own, self.order, strict=True))
        ends = {key: _End(2 * number, 2 * number + 1, key[0], 0) for number, key in enumerate(rests)}
        least = sum([times * float(self._own(one[key]).min()) for key, times in Counter(own).items()])
        return least + sum([times * float(self._rest(ends[key]).min()) for key, times in Counter(rests).items()])

    def improve(self, deadline: Deadline = ENDLESS) -> None:
        """Go through the variables in order and back, which shifts costs to where the bound is larger.

        Raises:
            TimeIsOver: the deadline came first.
        """
        for order, dim in ((self.order, 0), (self.order[::-1], 1)):
            for variable in order:
                deadline.check()
                self._share(variable, dim)

    def _share(self, variable: int, dim: int) -> None:
        """Have a variable take what its tables take at least, and share it among those in which it has this dim."""
        key, ends = ("shared", dim, self._key(variable)), self.ends[variable]
        if key not in self.known:
            own, taken = self._own(variable), list[Array]()
            for end in ends:
                rest = self._rest(end)
                taken.append(rest - rest.min())
                own += taken[-1].take(self.tables[end.table].rows[end.dim])
            ahead = sum([end.dim == dim for end in ends])
            part, shifts = own / max(ahead, len(ends) - ahead, 1), list[Array]()
            for end, more in zip(ends, taken, strict=True):
                shift = self.shifts[end.own] + more
                if end.dim == dim:
                    least = _least_of_rows(part, self.tables[end.table].rows[dim], len(shift))
                    shift -= least - least.min()
                shifts.append(self._one(shift))
            self.known[key] = tuple(shifts)
        for end, shift in zip(ends, self.known[key], strict=True):
            self.shifts[end.own] = shift

    @property
    def uses(self) -> list[NamedTable]:
        """The tables of `shared` with their variables."""
        return [*[NamedTable(self.kinds[kind], (v,)) for v, kind in enumerate(self.kind_of)], *self.between]

    def shared(self) -> dict[Hashable, Tensor]:
        """Tables of equal sums, from all uses of one the same is shifted: what is from the one in the middle."""
        of = defaultdict[Hashable, list[int]](list)
        for number, (name, _) in enumerate(self.between):
            of[name].append(2 * number)
        middle = {
            name: [torch.from_numpy(self.shifts[at[len(at) // 2] + dim]) for dim in (0, 1)] for name, at in of.items()
        }
        whole = dict[Hashable, Tensor]()
        for name, (first, second) in middle.items():
            spread = self.spreads[name]
            whole[name] = spread._replace(entries=spread.entries - first[:, None] - second).whole()
        for kind in self.kinds:
            own = sum([self.spreads[name].whole() for name in kind.own], torch.zeros(()))
            whole[kind] = sum([middle[name][dim][self.spreads[name].rows[dim]] for name, dim in kind.ends], own)
        return whole

    def excess(self, deadline: Deadline = ENDLESS) -> dict[int, Tensor]:
        """By how much any choice in which a variable has a value exceeds the bound, at least; of alike ones for one.

        Raises:
            TimeIsOver: the deadline came first.
        """
        excess = dict[int, Tensor]()
        for variable in {self._key(variable): variable for variable in self.order}.values():
            deadline.check()
            own = self._own(variable)
            own -= own.min()
            for end in self.ends[variable]:
                rest = self._rest(end)
                own += (rest - rest.min())[self.tables[end.table].rows[end.dim]]
            excess[variable] = torch.from_numpy(own)
        return excess

    @property
    def choice(self) -> tuple[int, ...]:
        """A value for each variable, one after the other: that of the least costs, given those before."""
        choice, known = [-1] * len(self.order), dict[Hashable, int]()
        for variable in self.order:
            others = [choice[self.between[end.own // 2].variables[1 - end.dim]] for end in self.ends[variable]]
            key = self._key(variable), *others
            if key not in known:
                costs = self._own(variable)
                for end, other in zip(self.ends[variable], others, strict=True):
                    (entries, rows), dim = self.tables[end.table], end.dim
                    left = self._rest(end)
                    if other >= 0:
                        left = entries.take(rows[1 - dim][other], 1 - dim) - self.shifts[end.own]
                    costs += left[rows[dim]]
                known[key] = int(costs.argmin())
            choice[variable] = known[key]
        return tuple(choice)


def _getter(at: Sequence[int]) -> Callable[[Sequence[Array]], tuple[Array, ...]]:
    """The quickest way to take what is at these positions, none or several."""
    return itemgetter(*at) if at else lambda _: ()


def _least_of_rows(costs: Array, rows: NDArray[np.int64], count: int) -> Array:
    """The least cost of the values of each row; no row is without a value."""
    least = np.full(count, inf)
    if len(rows) == count:
        least[rows] = costs
    else:
        np.minimum.at(least, rows, costs)
    return least
