"""BlockLists that repeat, so that a step of a deep model is run with a few of each and counted as often as they run.

Entries of a list of modules are alike if they are made alike and a trace of the whole model calls the same operators on
the same shapes in them. A model with fewer of these is what it seems only if its own trace is the whole one's without
the entries left out; where it is not, as where later layers take what all earlier ones made, nothing is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from torch import nn

from dshard.dispatch.planned_calls import PlannedCall
from dshard.parallel.gather_groups import lists_of_blocks
from dshard.parallel.plan_values import Plan
from dshard.planning.step_recorder import SignedCall

V = TypeVar("V")
Entry: TypeAlias = tuple[str, int]
"""The path of a list of modules, and a position in it."""
SPREAD = 8
"""Units more where what one adds differs from one to the next, as where gradients of several are reduced together."""
KEPT = 3
"""Units that stay of each repeat: weights are gathered a block ahead, so that the first and the last two are apart."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Units of `period` consecutive entries of the list of modules at `path`, from `first`: `times` that are alike."""

    path: str
    first: int
    period: int
    times: int

    def unit(self, position: int) -> int | None:
        """The unit to which the entry at this position belongs; None if to none."""
        unit = (position - self.first) // self.period
        return unit if 0 <= unit < self.times else None


def repeats_in(path: str, keys: Sequence[Hashable]) -> Iterator[Repeat]:
    """The repeats of a list of entries with these keys, of which more entries can be left out than otherwise.

    >>> [(each.first, each.period, each.times) for each in repeats_in("layers", "abbbbbbcdcdcdcdcd")]
    [(1, 1, 6), (7, 2, 5)]
    """
    first = 0
    while first < len(keys):
        best = Repeat(path, first, 1, 1)
        for period in range(1, (len(keys) - first) // (KEPT + 2) + 1):
            end = first + period
            while end < len(keys) and keys[end] == keys[end - period]:
                end += 1
            times = (end - first) // period
            if times > KEPT + 1 and (times - KEPT) * period > (best.times - KEPT) * best.period:
                best = Repeat(path, first, period, times)
        if best.times > 1:
            yield best
        first += best.period * best.times


class BlockLists:
    """The entries of a model's lists of blocks, each with a key; those of one key do the same in a step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {path: [*model.get_submodule(path)._modules] for path in lists_of_blocks(model)}
        self.positions = {
            f"{path}.{name}".lstrip("."): (path, i)
            for path, names in self.names.items()
            for i, name in enumerate(names)
        }
        self.made = self._made()

    def may_repeat(self) -> bool:
        """Whether entries are made alike, so that a trace is worth its time."""
        return any(any(self._repeats(path, self.made)) for path in self.names)

    def repeats(self, calls: Sequence[SignedCall], plan: Plan) -> tuple[Repeat, ...]:
        """The units that repeat in a trace, and are laid out alike by a plan."""
        called = _by_entry(((self.entry(module), call) for module, call in calls))
        laid = _by_entry(self._laid_out(plan))
        keys = {e: (key, called.get(e), frozenset(laid.get(e, ()))) for e, key in self.made.items()}
        return tuple(each for path in self.names for each in self._repeats(path, keys))

    def entry(self, name: str) -> tuple[Entry | None, str]:
        """The entry in which a module, or a parameter, of this name is, and its name within that."""
        for path in self.names:
            inside = name[len(path) + 1 :] if path and name.startswith(f"{path}.") else name if not path else ""
            own, _, rest = inside.partition(".")
            position = self.positions.get(f"{path}.{own}".lstrip(".")) if own else None
            if position is not None:
                return position, rest
        return None, name

    def _repeats(self, path: str, keys: Mapping[Entry, Hashable]) -> Iterator[Repeat]:
        return repeats_in(path, [keys[path, i] for i in range(len(self.names[path]))])

    def _made(self) -> dict[Entry, Hashable]:
        """How each entry is made: the classes and modes of its modules, and its tensors, of which it shares none."""
        state = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        homes: dict[int, set[Entry | None]] = {}
        for name, x in state:
            homes.setdefault(id(x), set()).add(self.entry(name)[0])
        modules = ((self.entry(name), (type(m), m.training)) for name, m in self.model.named_modules())
        tensors = (
            (self.entry(name), (tuple(x.shape), x.dtype, x.requires_grad, len(homes[id(x)]) == 1 or name))
            for name, x in state
        )
        made = _by_entry((*modules, *tensors))
        return {entry: made.get(entry, ()) for entry in self.positions.values()}

    def _laid_out(self, plan: Plan) -> Iterator[tuple[tuple[Entry | None, str], Hashable]]:
        for kind in _NAMED:
            for name, value in _items(getattr(plan, kind)):
                yield self.entry(name), (kind, value)
        for call in plan.calls:
            yield self.entry(call.module), call.layouts()


_NAMED = ("parameters", "outputs", "products", "gathers", "shared", "groups")
"""The fields of a plan with names of modules or parameters."""


def _items(named: Any) -> Iterator[tuple[str, Any]]:
    yield from named.items() if isinstance(named, Mapping) else ((name, True) for name in named or ())


def _by_entry(facts: Any) -> dict[Entry, tuple[Hashable, ...]]:
    """What is known of each entry, by the names within it, in order."""
    by_entry: dict[Entry, list[Hashable]] = {}
    for (entry, rest), fact in facts:
        if entry is not None:
            by_entry.setdefault(entry, []).append((rest, fact))
    return {entry: tuple(known) for entry, known in by_entry.items()}


class ShortModel:
    """A model with so many `units` of each repeat, as its forward pass finds it within `applied`."""

    def __init__(self, blocks: BlockLists, repeats: Sequence[Repeat], units: Sequence[int]) -> None:
        self.blocks, self.repeats = blocks, repeats
        left = Counter[str]()
        self.own: dict[Entry, str] = {}
        """The name here of each entry that is kept."""
        for path, names in blocks.names.items():
            numbered = all(name.isdigit() for name in names)
            for position, name in enumerate(names):
                at = self.unit((path, position))
                if at is None or at[1] < units[at[0]]:
                    self.own[path, position] = str(left[path]) if numbered else name
                    left[path] += 1
        self._lists = [
            (blocks.model.get_submodule(path), {self.own[p, i]: child for (p, i), child in self._children(path)})
            for path in blocks.names
        ]
        self._back = {f"{path}.{name}".lstrip("."): (path, i) for (path, i), name in self.own.items()}

    def unit(self, entry: Entry) -> tuple[int, int] | None:
        """The number of the repeat, and the unit of it, to which an entry of the whole model belongs."""
        units = ((r, each.unit(entry[1])) for r, each in enumerate(self.repeats) if each.path == entry[0])
        return next(((r, unit) for r, unit in units if unit is not None), None)

    def _children(self, path: str) -> Iterator[tuple[Entry, nn.Module | None]]:
        children = self.blocks.model.get_submodule(path)._modules.values()
        return (((path, i), child) for i, child in enumerate(children) if (path, i) in self.own)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the lists of the model have the entries that are kept."""
        whole = [(module, module._modules) for module, _ in self._lists]
        try:
            for module, children in self._lists:
                module.__dict__["_modules"] = children
            yield
        finally:
            for module, children in whole:
                module.__dict__["_modules"] = children

    def name(self, whole: str) -> str | None:
        """The name here of a module or parameter of the whole model; None if it is left out."""
        entry, rest = self.blocks.entry(whole)
        if entry is None:
            return whole
        return ".".join(filter(None, (entry[0], self.own[entry], rest))) if entry in self.own else None

    def whole(self, name: str) -> tuple[Entry | None, str]:
        """The entry in the whole model of what has this name here, and its name within that."""
        for short, entry in self._back.items():
            if name == short or name.startswith(f"{short}."):
                return entry, name[len(short) + 1 :]
        return None, name

    def are_apart(self, modules: Iterable[str]) -> bool:
        """Whether these modules of this model are in more than one entry."""
        return len({self.whole(module)[0] for module in modules}) > 1

    def gradients(self) -> float:
        """By how many times the whole model has more parameters."""
        with self.applied():
            own = sum(p.numel() for p in self.blocks.model.parameters())
        return sum(p.numel() for p in self.blocks.model.parameters()) / max(1, own)

    def plan(self, plan: Plan) -> Plan:
        """A plan of the whole model, for this one."""
        changes: dict[str, Any] = {}
        for kind in _NAMED:
            named = getattr(plan, kind)
            short = {own: value for name, value in _items(named) if (own := self.name(name)) is not None}
            changes[kind] = short if isinstance(named, Mapping) else named if named is None else type(named)(short)
        changes["calls"] = tuple([self.call(call) for call in plan.calls if self.name(call.module) is not None])
        return replace(plan, **changes)

    def call(self, call: PlannedCall) -> PlannedCall:
        """A planned call, with the names of its modules here."""
        begun = [name for module in call.begun if (name := self.name(module)) is not None]
        return replace(call, module=self.name(call.module) or "", begun=tuple(begun))

    def is_part(self, calls: Sequence[SignedCall], whole: Sequence[SignedCall]) -> bool:
        """Whether these calls are those of the whole model, but for the entries left out."""
        rest = [(name, call) for module, call in whole if (name := self.name(module)) is not None]
        return rest == [*calls]
