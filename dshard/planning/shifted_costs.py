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
from collections.abc import Hashable, Mapping, Sequence
from math import inf
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
    """One of the variables of a table of two: the number of the use of the table, its name, and the variable's dim."""

    use: int
    table: Hashable
    dim: int


_Kind: TypeAlias = tuple[tuple[Hashable, ...], tuple[tuple[Hashable, int], ...]]
"""The tables of a variable: those that have only it, and those of two with its dim."""


class ShiftedCosts:
    """Tables, each of one variable or of two, from which costs are shifted to variables.

    `shifts` has for each use of a table of two variables what is shifted from it to
    each of them, by its rows.
    """

    def __init__(self, variables: int, uses: Sequence[NamedTable], tables: Mapping[Hashable, Spread]) -> None:
        self.known, self.leasts = dict[Hashable, tuple[Array, ...]](), dict[Hashable, float]()
        self._take(tables)
        own, ends = defaultdict[int, list[Hashable]](list), defaultdict[int, list[_End]](list)
        self.between = [use for use in uses if len(use.variables) == 2]
        first = list(map(float, range(variables)))
        for use in uses:
            if len(use.variables) == 1:
                own[use.variables[0]].append(use.table)
        for number, (table, (source, reader)) in enumerate(self.between):
            ends[source].append(_End(number, table, 0))
            ends[reader].append(_End(number, table, 1))
            first[source] = min(first[source], reader - 0.5)
        self.order = sorted(range(variables), key=first.__getitem__)
        self.ends = [ends[variable] for variable in range(variables)]
        self.kinds = [(tuple(own[v]), tuple([end[1:] for end in self.ends[v]])) for v in range(variables)]
        self.arrays, self.grain = dict[bytes, Array](), 0.0
        none = [self.tables[name].entries.shape for name, _ in self.between]
        self.shifts = [[self._one(np.zeros(n)) for n in sizes] for sizes in none]
        self.grain = GRAIN * abs(self.bound)
        self.leasts.clear()

    def _take(self, tables: Mapping[Hashable, Spread]) -> None:
        self.spreads = tables
        self.tables = {
            name: _Table(x.entries.numpy(), tuple([rows.numpy() for rows in x.rows])) for name, x in tables.items()
        }
        self.known.clear()
        self.leasts.clear()

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
        for (name, _), shifts in zip(self.between, self.shifts, strict=True):
            for dim, shift in enumerate(shifts):
                key = name, dim, id(shift)
                if key not in known:
                    known[key] = self._one(shift[at[name][dim]])
                shifts[dim] = known[key]
        self._take(tables)

    def _key(self, variable: int) -> tuple[Hashable, ...]:
        """What follows for a variable from its tables and their shifts follows for all of equal keys."""
        return self.kinds[variable], *[id(x) for end in self.ends[variable] for x in self.shifts[end.use]]

    def _own(self, variable: int) -> Array:
        """What each value of a variable costs by itself, with what was shifted to it."""
        (first, *others), ends = self.kinds[variable][0], self.ends[variable]
        own = self.tables[first].whole()
        for name in others:
            own += self.tables[name].whole()
        for use, name, dim in ends:
            own += self.shifts[use][dim].take(self.tables[name].rows[dim])
        return own

    def _rest(self, end: _End) -> Array:
        """What is left of a table at least, for each row of a dim."""
        use, name, dim = end
        key = "rest", name, dim, id(self.shifts[use][0]), id(self.shifts[use][1])
        if key not in self.known:
            mine, other = self.shifts[use][dim], self.shifts[use][1 - dim]
            left = self.tables[name].entries - (other if dim == 0 else other[:, None])
            self.known[key] = (left.min(1 - dim) - mine,)
        return self.known[key][0]

    @property
    def bound(self) -> float:
        """The least of all variables and all tables, added."""
        own, rests = list[tuple[Hashable, ...]](), list[tuple[Hashable, ...]]()
        for variable in self.order:
            own.append(key := self._key(variable))
            if key not in self.leasts:
                self.leasts[key] = float(self._own(variable).min())
        for i, ((name, _), shifts) in enumerate(zip(self.between, self.shifts, strict=True)):
            rests.append(key := (name, *map(id, shifts)))
            if key not in self.leasts:
                self.leasts[key] = float(self._rest(_End(i, name, 0)).min())
        least = sum([times * self.leasts[key] for key, times in Counter(own).items()])
        return least + sum([times * self.leasts[key] for key, times in Counter(rests).items()])

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
                shift = self.shifts[end.use][end.dim] + more
                if end.dim == dim:
                    least = _least_of_rows(part, self.tables[end.table].rows[dim], len(shift))
                    shift -= least - least.min()
                shifts.append(self._one(shift))
            self.known[key] = tuple(shifts)
        for end, shift in zip(ends, self.known[key], strict=True):
            self.shifts[end.use][end.dim] = shift

    @property
    def uses(self) -> list[NamedTable]:
        """The tables of `shared` with their variables."""
        return [*[NamedTable(kind, (v,)) for v, kind in enumerate(self.kinds)], *self.between]

    def shared(self) -> dict[Hashable, Tensor]:
        """Tables of equal sums, from all uses of one the same is shifted: what is from the one in the middle."""
        of = defaultdict[Hashable, list[list[Array]]](list)
        for (name, _), shifts in zip(self.between, self.shifts, strict=True):
            of[name].append(shifts)
        middle = {name: [*map(torch.from_numpy, shifts[len(shifts) // 2])] for name, shifts in of.items()}
        whole = dict[Hashable, Tensor]()
        for name, (first, second) in middle.items():
            spread = self.spreads[name]
            whole[name] = spread._replace(entries=spread.entries - first[:, None] - second).whole()
        for kind in dict.fromkeys(self.kinds):
            own = sum([self.spreads[name].whole() for name in kind[0]], torch.zeros(()))
            whole[kind] = sum([middle[name][dim][self.spreads[name].rows[dim]] for name, dim in kind[1]], own)
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
            others = [choice[self.between[end.use].variables[1 - end.dim]] for end in self.ends[variable]]
            key = self._key(variable), *others
            if key not in known:
                costs = self._own(variable)
                for end, other in zip(self.ends[variable], others, strict=True):
                    (entries, rows), dim = self.tables[end.table], end.dim
                    left = self._rest(end)
                    if other >= 0:
                        left = entries.take(rows[1 - dim][other], 1 - dim) - self.shifts[end.use][dim]
                    costs += left[rows[dim]]
                known[key] = int(costs.argmin())
            choice[variable] = known[key]
        return tuple(choice)


def _least_of_rows(costs: Array, rows: NDArray[np.int64], count: int) -> Array:
    """The least cost of the values of each row; no row is without a value."""
    least = np.full(count, inf)
    if len(rows) == count:
        least[rows] = costs
    else:
        np.minimum.at(least, rows, costs)
    return least
