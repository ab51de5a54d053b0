"""The parts of an optimiser's step that one rank can do for the others: those between its products of matrices.

A step is seen as the functions of torch that it calls, in order, with the memory that each reads, writes and makes. A
part begins with the fewest bytes from which its products follow, and ends with the fewest that follow from them; it
writes to nothing that was there before. What the step does with its results, and all that must wait for that, is late.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from dshard.layout import Shape


class SeenTensor(NamedTuple):
    """A tensor object of a traced step, and its memory, by number; `value` is that of the graph, if it has one."""

    number: int
    memory: int
    shape: Shape
    itemsize: int
    nbytes: int
    value: int | None


class SeenFunction(NamedTuple):
    """A function of torch that a step calls: what it reads and returns, and the memory that it makes and writes to.

    It is number `within` of the functions of the graph, None of one that computes nothing.
    """

    name: str
    operands: tuple[SeenTensor, ...]
    results: tuple[SeenTensor, ...]
    made: frozenset[int]
    writes: frozenset[int]
    within: int | None

    @property
    def computes(self) -> bool:
        """Whether it does more than ask for a shape."""
        return bool(self.results or self.writes)

    @property
    def touched(self) -> set[int]:
        """The memory that it reads or writes."""
        return {x.memory for x in self.operands}

    @property
    def new(self) -> set[int]:
        """The numbers of its results that are no operands."""
        return {x.number for x in self.results} - {x.number for x in self.operands}

    @property
    def changed(self) -> frozenset[int]:
        """The memory whose contents follow from what it reads."""
        return self.made | self.writes


class StepPart(NamedTuple):
    """Functions that one rank can run for all, the tensors that they need, and those that others need of them."""

    functions: tuple[int, ...]
    reads: tuple[SeenTensor, ...]
    makes: tuple[SeenTensor, ...]


class StepParts(NamedTuple):
    """The parts of a step that do not need each other, and the functions that run once all of them have."""

    parts: tuple[StepPart, ...]
    late: frozenset[int]


def step_parts(
    functions: Sequence[SeenFunction], given: Collection[int], products: Collection[int]
) -> StepParts | None:
    """The parts around the functions that are `products`; None if they need each other, or what they write to.

    `given` is the memory of parameters, gradients and states.
    """
    cores = _cores(functions, products)
    growing = _Growing(functions, frozenset(given), frozenset([n for core in cores for n in core]))
    parts = tuple(map(growing.part, cores))
    owned = {n for part in parts for n in part.functions}
    late = _late(functions, owned) if parts and all(map(growing.is_whole, parts)) else None
    return None if late is None else StepParts(parts, late)


def _cores(functions: Sequence[SeenFunction], products: Collection[int]) -> list[list[int]]:
    """The products with all that lies between some of them, those together that share memory which they make."""
    after, before = _following(functions, products), _needed(functions, products)
    core_of = dict[int, list[int]]()  # by memory that it makes
    for n in sorted({*products, *(after & before)}):
        own = functions[n]
        memory = own.made | {each for each in own.touched if each in core_of}
        alike = {id(core_of[each]): core_of[each] for each in memory if each in core_of}
        core = [*[i for each in alike.values() for i in each], n]
        core_of |= dict.fromkeys(memory, core)
        for other in (each for i in core for each in functions[i].made):
            core_of[other] = core
    return [sorted(core) for core in {id(core): core for core in core_of.values()}.values()]


def _following(functions: Sequence[SeenFunction], products: Collection[int]) -> set[int]:
    found, memory = set[int](), set[int]()
    for n, each in enumerate(functions):
        if n in products or each.touched & memory:
            found.add(n)
            memory |= each.changed
    return found


def _needed(functions: Sequence[SeenFunction], products: Collection[int]) -> set[int]:
    found, memory, tensors = set[int](), set[int](), set[int]()
    for n, each in reversed([*enumerate(functions)]):
        if n in products or each.changed & memory or each.new & tensors:
            found.add(n)
            memory |= each.touched
            tensors |= {x.number for x in each.operands}
    return found


class _Growing:
    """Parts that grow from their cores to what may run with them; `taken` are the functions of all cores."""

    def __init__(self, functions: Sequence[SeenFunction], given: frozenset[int], taken: frozenset[int]) -> None:
        self.functions, self.given, self.taken = functions, given, taken
        self.users = defaultdict[int, list[int]](list)  # of memory
        self.readers = defaultdict[int, list[int]](list)  # of a tensor
        self.sources = defaultdict[int, list[int]](list)  # of the contents of memory, and of views
        self.shared = given.union(*[each.made for each in functions])  # rather than constants, which all ranks make
        for n, each in enumerate(functions):
            if each.computes:
                for memory in each.touched:
                    self.users[memory].append(n)
                for x in each.operands:
                    self.readers[x.number].append(n)
                for memory in each.changed | {x.memory for x in each.results}:
                    self.sources[memory].append(n)

    def part(self, core: Sequence[int]) -> StepPart:
        """The part that reads and makes the fewest bytes."""
        early = self._early(core)
        members = min([[*early[i:], *core] for i in range(len(early) + 1)], key=self._bytes_read)
        late = self._after(members)
        members = min([[*members, *late[:i]] for i in range(len(late), -1, -1)], key=self._bytes_made)
        return StepPart(tuple(sorted(members)), self._reads(members), self._makes(members))

    def _early(self, core: Sequence[int]) -> list[int]:
        """The functions before, in order, all of whose results only the part reads."""
        members, known = {*core}, set[int]()
        waiting = [-n for n in core]
        while waiting:
            n = -heappop(waiting)
            if n not in members and not self._is_only_for(n, members):
                continue
            members.add(n)
            found = {i for memory in self.functions[n].touched for i in self.sources[memory] if i < n} - known
            known |= found
            for i in found - self.taken:
                heappush(waiting, -i)
        return sorted(members - {*core})

    def _is_only_for(self, n: int, members: set[int]) -> bool:
        """Whether all results of a function are read by these alone, and it writes to nothing given."""
        own = self.functions[n]
        used = [use for memory in own.changed for use in self.users[memory] if use > n]
        used += [use for number in own.new for use in self.readers[number]]
        return bool(used) and members.issuperset(used) and not own.writes & self.given

    def _after(self, members: Sequence[int]) -> list[int]:
        """The functions after that read, and write to, nothing but what the part makes."""
        made = {memory for n in members for memory in self.functions[n].made}
        found = list[int]()
        waiting = sorted({n for memory in made for n in self.users[memory]} - self.taken - {*members})
        while waiting:
            n = heappop(waiting)
            own = self.functions[n]
            if n > members[-1] and n not in found and own.touched <= made:
                found.append(n)
                for use in {use for memory in own.made for use in self.users[memory]}:
                    heappush(waiting, use)
                made |= own.made
        return found

    def _own(self, members: Iterable[int]) -> set[int]:
        """The tensors that some functions make."""
        return {number for n in members for number in self.functions[n].new}

    def _reads(self, members: Sequence[int]) -> tuple[SeenTensor, ...]:
        own = self._own(members)
        operands = [x for n in members for x in self.functions[n].operands]
        found = {x.number: x for x in operands if x.number not in own and x.memory in self.shared}
        return tuple(found.values())

    def _makes(self, members: Sequence[int]) -> tuple[SeenTensor, ...]:
        inside = {*members}
        made = {x.number: x for n in members for x in self.functions[n].results if x.number in self._own([n])}
        return tuple([x for number, x in made.items() if not inside.issuperset(self.readers[number])])

    def _bytes_read(self, members: Sequence[int]) -> int:
        return sum([x.nbytes for x in self._reads(members)])

    def _bytes_made(self, members: Sequence[int]) -> int:
        return sum([x.nbytes for x in self._makes(members)])

    def is_whole(self, part: StepPart) -> bool:
        """Whether what the part writes to is its own: a copy of what it reads, of which nobody else has a view."""
        inside, made = {*part.functions}, {memory for n in part.functions for memory in self.functions[n].made}
        written = {memory for n in part.functions for memory in self.functions[n].writes} - made
        reads = [x.memory for x in part.reads]
        used = [use for memory in written for use in self.users[memory] if use > part.functions[0]]
        return not written & self.given and inside.issuperset(used) and all(reads.count(x) == 1 for x in written)


def _late(functions: Sequence[SeenFunction], owned: Collection[int]) -> frozenset[int] | None:
    """The functions that read what the parts make, or must not run before these; None if a part needs one of them."""
    late, waiting, read, after = set[int](), set[int](), set[int](), set[int]()
    for n, each in enumerate(functions):
        if not each.computes:
            continue
        if n in owned:
            if each.touched & after:
                return None
            waiting |= each.changed
            read |= each.touched
        elif each.touched & waiting or each.writes & read:
            late.add(n)
            after |= each.changed
            waiting |= each.changed
            read |= each.touched
    return frozenset(late)
