"""What a plan of a step may not do: layouts that are pinned, and dims that a mesh axis may not shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from dshard.errors import StrategyError
from dshard.layout import Layout
from dshard.placements import Replicate, Shard
from dshard.planning.call_candidates import AxisGroups, CallCandidate
from dshard.planning.step_graph import GraphCall, StepGraph, Value

WORDS = ("batch", "sequence", "features", "experts", "parameters")
"""What an axis may be forbidden to shard: dims that count these, in operators, and parameters where they are stored."""
NOTHING: Mapping[int, Layout] = MappingProxyType({})
DimWords: TypeAlias = tuple[str | None, ...]


class StoredLimit(NamedTuple):
    """Where a parameter may be stored: in one layout `only`, or not as in `never`, and whole along some mesh axes."""

    only: Layout | None = None
    never: Layout | None = None
    whole: tuple[int, ...] = ()

    def of(self, layouts: Iterable[Layout]) -> tuple[Layout, ...]:
        """Those of the layouts in which it may be stored."""
        if self.only is not None:
            return (self.only,)
        are_whole = [each for each in layouts if all(each.placements[axis] == Replicate() for axis in self.whole)]
        return tuple([layout for layout in are_whole if layout != self.never])


class CallLimit(NamedTuple):
    """What the candidates of a call may not do: the layouts in which operands are read, and dims that stay whole.

    `read` has None for an operand that may be read in any. `whole` are an operand or result, a dim and a mesh axis.
    """

    read: tuple[Layout | None, ...] = ()
    whole: tuple[tuple[int, int, int], ...] = ()

    def allowed(
        self, call: GraphCall, candidates: tuple[CallCandidate, ...], graph: StepGraph
    ) -> tuple[CallCandidate, ...]:
        """The candidates that do none of it.

        Raises:
            StrategyError: there are none.
        """
        if not (self.read or self.whole):
            return candidates
        own = tuple([each for each in candidates if self._allows(each)])
        if not own:
            number = next(i for i, layout in enumerate(self.read) if layout is not None)
            ways = dict.fromkeys([f"[{each.inputs[number]}]" for each in candidates])
            raise StrategyError(
                f"pins: {call.name} in {call.module or 'the model'} cannot read {_named(call.operands[number], graph)} "
                f"in the layout [{self.read[number]}]: it reads that in {', '.join([*ways][:4])}; pin one of these"
            )
        return own

    def _allows(self, candidate: CallCandidate) -> bool:
        if any(wanted not in (None, own) for wanted, own in zip(self.read, candidate.inputs, strict=False)):
            return False
        layouts = (*candidate.inputs, *candidate.outputs)
        return not any(_splits(layouts[i], dim, axis) for i, dim, axis in self.whole)


def _named(value: Value, graph: StepGraph) -> str:
    made = "" if value.producer is None else graph.calls[value.producer.call].module
    return f"what {made} returns" if made else repr(value.name)


def _splits(layout: Layout, dim: int, axis: int) -> bool:
    placement = layout.placements[axis]
    return isinstance(placement, Shard) and placement.dim == dim


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a plan of a step may not do.

    `parameters` says by name where some may be stored, `read` in which layout all that read a value do, by its number,
    and `forbid` what each mesh axis may not shard, where `words` has what the dims of each value count. Mesh axes of a
    group are used `alike` by each call, and for each parameter where `parameters` says nothing.
    """

    parameters: Mapping[str, StoredLimit] = field(default_factory=dict)
    read: Mapping[int, Layout] = field(default_factory=dict)
    forbid: Mapping[int, frozenset[str]] = field(default_factory=dict)
    words: Mapping[int, DimWords] = field(default_factory=dict)
    alike: AxisGroups = ()

    def stored(self, name: str) -> StoredLimit:
        """Where the parameter of this name may be stored."""
        whole = tuple([axis for axis, words in self.forbid.items() if "parameters" in words])
        return self.parameters.get(name, StoredLimit())._replace(whole=whole)

    def of_call(self, call: GraphCall) -> CallLimit:
        """What the candidates of a call may not do."""
        read = [self.read.get(value.number) for value in call.operands]
        whole = [
            (i, dim, axis)
            for i, value in enumerate((*call.operands, *call.results) if self.forbid else ())
            for dim, word in enumerate(self.words[value.number])
            for axis, forbidden in self.forbid.items()
            if word in forbidden
        ]
        return CallLimit(tuple(read) if any(x is not None for x in read) else (), tuple(whole))

    def also(self, parameters: Mapping[str, StoredLimit], read: Mapping[int, Layout] = NOTHING) -> StepLimits:
        """These, and what is said of some parameters, and of values that are read."""
        return replace(self, parameters={**self.parameters, **parameters}, read={**self.read, **read})


FREE = StepLimits()
"""Limits that leave everything."""
