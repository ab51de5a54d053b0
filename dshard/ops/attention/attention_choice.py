"""The candidates of attention, priced: loops b, h and q by the rule; loop k, and heads of queries alone, beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, prod
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dshard.comm import sum_dtype
from dshard.core.context import planning_context
from dshard.core.observe import Decision, planned
from dshard.core.operands import operand_of, plan_to, plans_to
from dshard.core.spec import Spec, contiguous_spec, for_shapes, meta_tensors, spec_of
from dshard.errors import CompileError, StrategyError
from dshard.layout import Shape, placed
from dshard.mesh import Mesh
from dshard.ops.attention.key_windows import KeyWindows
from dshard.ops.attention.local_attention import Options, whole
from dshard.ops.attention.ring_price import RingCall, ring_strategy, window_strategy
from dshard.placements import Partial, ReduceOp, Replicate, Shard
from dshard.redistribute import Plan, plan
from dshard.rules.attention_blocks import Reach
from dshard.rules.attention_loops import (
    Keys,
    RequestedLoops,
    attention_rule,
    axes_of_row,
    is_grouped,
    ways_of,
    with_queries,
    with_row,
)
from dshard.rules.attention_ring import Ring
from dshard.rules.expand import Allowed, expansions
from dshard.rules.strategy import Constraints, Question, Strategy, StrategyChoice, completed_layout
from dshard.rules.strategy_choice import cheapest, choose, strategies_within
from dshard.rules.strategy_price import returned_layout
from dshard.topology import Topology

Kind: TypeAlias = Literal["split keys", "own key heads", "rings"]
"""The kinds of candidates beside those in which a rank computes with the whole keys of its heads, or of every head."""


HEADS_OF_QUERIES, SPLIT_KEYS = "heads of queries", "split keys"
"""The names of candidates by the rules of attention with the keys of every head, or a range of them."""
ABOUT = 1 / 16
"""Seconds are predicted no better than this: of two as near, the candidate of at most half the bytes is taken."""
STATISTICS: tuple[ReduceOp, ...] = ("max", "sum")
"""The reductions of a number for each row of the scores that merge the results of split keys."""
MERGING, PASSES = 13, 4
"""Distributed operators that merge the results of split keys, and how often a result is read or written there."""


class How(NamedTuple):
    """How a candidate runs: what a rank has of the keys, round which axes they are sent, how often they are repeated.

    `local` is the strategy of what ranks compute, where that is of repeated key heads; `windows` are those of the keys
    that a rank has, where it has not all.
    """

    keys: Keys
    ring: Ring = Ring(())
    repeats: int = 1
    local: Strategy | None = None
    windows: KeyWindows | None = None


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The cheapest way to run a call of attention: its decision and strategy, how it runs, and the result's spec.

    `specs` are those of the operands, `reach` says which keys queries may see, where that is known. `within` is the
    decision of what ranks compute, once they have the keys that are brought to them.
    """

    specs: Sequence[Spec]
    options: Options
    reach: Reach | None
    decision: Decision
    strategy: Strategy
    how: How
    result: Spec
    within: Decision


class Candidates:
    """The candidates of one call of attention, for operands of these specs, of which those `needed` get a gradient.

    Candidates are of these `kinds`, beside those with whole keys. `reach` says which keys queries may see, where that
    is known. `held` says whether the scores are held in memory.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        options: Options,
        requested: RequestedLoops,
        needed: tuple[bool, ...],
        kinds: frozenset[Kind],
        reach: Reach | None = None,
        held: bool = False,
    ) -> None:
        self.specs, self.options, self.kinds, self.reach = specs, options, kinds, reach
        self.held = sum_dtype(specs[0].dtype).itemsize if held else 0
        shapes, layouts = [spec.shape for spec in specs], [spec.layout for spec in specs]
        forms: list[Keys] = ["whole", "split", *(["every head"] if is_grouped(shapes, options.gqa) else [])]  # type: ignore[list-item]
        self.rules = {keys: attention_rule(shapes, options.gqa, keys, options.causal, self.held) for keys in forms}
        ways, self.balanced = ways_of(requested, self.rules["split"], layouts)
        if len(shapes[0]) < 3 or shapes[0][-3] == 1:
            ways = tuple((allowed, ring) for allowed, ring in ways if frozenset({"h"}) not in allowed)
        self.rings = [(allowed, ring) for allowed, ring in ways if ring]
        self.allowed = tuple(allowed for allowed, ring in ways if not ring)
        if ways and not self.allowed and "rings" not in kinds:
            raise CompileError(
                f"attention={requested!r} in a compiled region: a compiled graph keeps no exchange whose result a rank "
                "does not need; use 'context' or 'ulysses' there"
            )
        with torch.no_grad(), for_shapes():
            self.out: Tensor = whole(options)(*meta_tensors(specs))
        self.topology = planning_context().topology_of(layouts[0].mesh)
        operands, outputs = tuple(map(operand_of, specs)), ((tuple(self.out.shape), self.out.itemsize),)
        constraints = Constraints(gradients=needed, kept=(True,) * len(specs), returned=layouts[0].unblocked())
        self.question = Question(self.rules["whole"], operands, outputs, self.topology, constraints)
        self.how = self._all()
        if not self.how:
            raise StrategyError(_impossible(requested, specs))

    def choice(self) -> AttentionChoice:
        """The cheapest candidate."""
        base, *others = self.how
        strategy, how = self._fewest_bytes(cheapest(base, others))
        (shape, itemsize), result = self.question.outputs[0], strategy.outputs[0]
        end = returned_layout(result, self.specs[0].layout)
        decision = Decision(
            "attention",
            self.question.operands,
            self.topology,
            StrategyChoice(
                self._among(self.question, self.allowed),
                strategy,
                tuple(each for each, runs in self.how.items() if runs != How("whole")),
            ),
            plans_to(self.specs, strategy.inputs, self.topology),
            ends=(plan(result, end, shape, itemsize, self.topology),),
            exchanges=strategy.exchanges,
        )
        out, device = self.out, self.specs[0].device
        spec = spec_of(end, shape, out.stride(), out.dtype, device)
        within = self._within(decision, strategy, how)
        return AttentionChoice(self.specs, self.options, self.reach, decision, strategy, how, spec, within)

    def _within(self, decision: Decision, strategy: Strategy, how: How) -> Decision:
        """The decision of what ranks compute: it sends nothing to bring keys."""
        query, *keys = self.specs
        if how.windows is not None:
            shapes, layouts = [how.windows.shape(spec.shape) for spec in keys], strategy.inputs[1:]
            triples = zip(layouts, shapes, keys, strict=True)
            inner = [query, *(contiguous_spec(at, shape, spec.dtype, spec.device) for at, shape, spec in triples)]
        elif how.local is not None:
            inner, strategy = repeated(self.specs, how.repeats), how.local
        else:
            return decision
        inner = [spec if i in (1, 2) else spec.with_layout(strategy.inputs[i]) for i, spec in enumerate(inner)]
        assert decision.choice is not None
        operands, plans = tuple(map(operand_of, inner)), plans_to(inner, strategy.inputs, self.topology)
        choice = replace(decision.choice, strategy=strategy)
        return replace(decision, operands=operands, choice=choice, plans=plans, exchanges=())

    def _all(self) -> dict[Strategy, How]:
        """The candidates, with how each runs; those of the rule itself first."""
        rows: dict[Keys, tuple[Allowed, ...]] = {
            "whole": self.allowed,
            "split": with_row(self.allowed, "k") if "split keys" in self.kinds else (),
            "every head": with_row(self.allowed, "h"),
        }
        candidates: dict[Strategy, How] = {}
        for keys, rule in self.rules.items():
            strategy = self._cheapest(self.question._replace(rule=rule), rows[keys])
            if strategy is not None:
                candidates[_named(strategy, keys, self.specs, tuple(self.out.shape), self.topology)] = How(keys)
        if "own key heads" in self.kinds and "every head" in self.rules:
            candidates |= self._repeated(rows["every head"])
        if "rings" in self.kinds:
            least = min([strategy.seconds for strategy in candidates], default=inf)
            candidates |= self._rings(least * (1 + ABOUT))
        if self.reach is not None:
            candidates |= self._windows()
        return candidates

    def _fewest_bytes(self, best: Strategy) -> tuple[Strategy, How]:
        """The candidate of fewest bytes among those about as fast as `best` that receive half as much; and how it runs.

        It is the best itself where there is none.
        """
        received, near = {best: self._received(best)}, self.how
        if received[best]:
            most = best.seconds * (1 + ABOUT)
            near = {strategy: how for strategy, how in self.how.items() if strategy.seconds <= most}
            if self.allowed:
                own = strategies_within(most, self._among(self.question, self.allowed))
                near = dict.fromkeys(own, How("whole")) | near
            received |= {each: n for each in near if 2 * (n := self._received(each)) <= received[best]}
        fewest = min(received, key=lambda each: (received[each], each.seconds))
        return fewest, near[fewest]

    def _received(self, strategy: Strategy) -> int:
        """Bytes that the busiest rank receives in the forward pass."""
        outputs = self.question.outputs
        plans = [
            (plan_to(spec, layout, self.topology), spec.itemsize)
            for spec, layout in zip(self.specs, strategy.inputs, strict=True)
        ]
        plans += [
            (plan(layout, end, shape, itemsize, self.topology), itemsize)
            for layout, end, (shape, itemsize) in zip(strategy.outputs, strategy.ends, outputs, strict=True)
        ]
        return sum(moved.busiest() * itemsize for moved, itemsize in plans) + sum(
            sent.nbytes for sent in strategy.exchanges
        )

    def _cheapest(self, question: Question, rows: tuple[Allowed, ...]) -> Strategy | None:
        """The cheapest strategy of a rule in which mesh axes have some of these rows; None where none can be."""
        if next(expansions(*question[:3], rows), None) is None:
            return None
        return choose(self._among(question, rows)).strategy

    @staticmethod
    def _among(question: Question, rows: tuple[Allowed, ...]) -> Question:
        return question._replace(constraints=replace(question.constraints, among=rows))

    def _repeated(self, rows: tuple[Allowed, ...]) -> dict[Strategy, How]:
        """The candidates with loop h in which key heads are repeated until there are enough of them."""
        candidates: dict[Strategy, How] = {}
        for times in repeats(self.specs):
            specs = repeated(self.specs, times)
            rule = attention_rule([spec.shape for spec in specs], self.options.gqa, "whole", self.options.causal)
            operands = tuple(map(operand_of, specs))
            local = self._cheapest(self.question._replace(rule=rule, operands=operands), rows)
            if local is None:
                continue
            plans = [plan_to(specs[i], local.inputs[i], self.topology) for i in (1, 2)]
            sent = tuple(each for p in plans for each in planned(p, specs[1].itemsize, self.topology))
            stored = (local.inputs[0], self.specs[1].layout, self.specs[2].layout, *local.inputs[3:])
            strategy = replace(local, inputs=stored, name="own key heads", exchanges=sent)
            candidates[strategy] = How("whole", repeats=times, local=local)
        return candidates

    def _windows(self) -> dict[Strategy, How]:
        """The candidates in which ranks receive only the keys that their queries reach."""
        stored = [spec.layout.placements for spec in self.specs[1:3]]
        shape = self.specs[0].layout.mesh.shape
        axes = tuple(axis for axis, n in enumerate(shape) if n > 1 and all(p[axis] == Shard(2) for p in stored))
        ways = [rows for rows in self.allowed if all(rows[axis] is None or "q" in (rows[axis] or ()) for axis in axes)]
        pairs = [window_strategy(self._call, with_queries(rows, axes), axes) for rows in ways if axes]
        return {each[0]: How("whole", windows=each[1]) for each in pairs if each is not None}

    @property
    def _call(self) -> RingCall:
        return RingCall(self.question, self.specs, self.options, self.reach)

    def _rings(self, most: float) -> dict[Strategy, How]:
        """The candidates in which keys and values go round a ring, but those that take more than `most` seconds."""
        candidates: dict[Strategy, How] = {}
        for rows, axes in self.rings:
            for is_balanced in _forms(self.balanced, self._call):
                ring = Ring(axes, is_balanced)
                strategy = ring_strategy(self._call, rows, ring, most)
                if strategy is not None:
                    candidates[strategy] = How("whole", ring)
        return candidates


def _forms(balanced: bool | None, call: RingCall) -> tuple[bool, ...]:
    """Whether halves are swapped: nothing is gained by it where queries see all keys."""
    if balanced and len(call.specs) > 3:
        raise StrategyError(
            "attention='balanced ring' with attn_mask: halves are swapped where is_causal says what is seen; use 'ring'"
        )
    if balanced is not None:
        return (balanced,)
    return (False, True) if call.options.causal or call.reach is not None else (False,)


def _named(strategy: Strategy, keys: Keys, specs: Sequence[Spec], shape: Shape, topology: Topology) -> Strategy:
    """The strategy as an alternative, where it is none of the rule; with loop k it sends what merges the results.

    In half precision the result is reduced in single precision, and rounded after it.
    """
    if keys == "whole":
        return strategy
    if keys == "every head":
        return replace(strategy, name=HEADS_OF_QUERIES)
    query = specs[0]
    itemsize = max(query.itemsize, torch.float32.itemsize)
    plans = _statistics(strategy, query, itemsize, topology)
    rows = prod(strategy.inputs[0].largest_shape(query.shape)[:-1])
    merging = MERGING * topology.dispatch + PASSES * rows * shape[-1] * itemsize / topology.memory_bandwidth
    gather = strategy.gather + sum(each.seconds for each in plans) + merging
    if itemsize > query.itemsize:
        end = completed_layout(returned_layout(strategy.outputs[0], query.layout))
        plans = (*plans, plan(strategy.outputs[0], end, shape, itemsize, topology))
        strategy = replace(strategy, outputs=(end,), ends=(end,), reduce=plans[-1].seconds)
    sent = tuple(collective for each in plans for collective in planned(each, itemsize, topology))
    return replace(strategy, name=SPLIT_KEYS, exchanges=sent, gather=gather)


def _statistics(strategy: Strategy, query: Spec, itemsize: int, topology: Topology) -> tuple[Plan, ...]:
    """The reductions of a number for each row of the scores: its maximum, and the sum of exponentials."""
    layout, axes = strategy.inputs[0], tuple(axes_of_row(strategy.rows, "k"))
    pairs = [(placed(layout, axes, Partial(op)), placed(layout, axes, Replicate())) for op in STATISTICS]
    return tuple(plan(*pair, query.shape[:-1], itemsize, topology) for pair in pairs)


def _impossible(requested: RequestedLoops, specs: Sequence[Spec]) -> str:
    query, key = specs[0].shape, specs[1].shape
    heads = f"{query[-3]} query and {key[-3]} key heads" if len(query) > 2 and len(key) > 2 else "no heads"
    return (
        f"attention={requested!r} of {heads}, {query[-2]} queries and {key[-2]} keys on the mesh "
        f"({specs[0].layout.mesh}): no mesh axis can be given these loops; 'context' and 'split-keys' need no heads, "
        "or leave the choice to dshard"
    )


# -- loop h over more ranks than there are key heads: a rank receives only the key heads of its queries
# Each key head is first repeated on the rank that stores a part of it, once for each group of ranks that needs it. Then
# loop h can shard the heads, and an all_to_all sends every rank its own; gradients of copies are summed on that rank.


def repeats(specs: Sequence[Spec]) -> Iterator[int]:
    """The numbers of times for which key heads may be repeated, so that some of the mesh axes can shard them.

    Empty if they are stored sharded by heads, as repeated heads may have other shards.
    """
    query, key, value = (spec.shape for spec in specs[:3])
    mesh: Mesh = specs[0].layout.mesh
    if (
        len(query) < 3
        or key[-3] != value[-3]
        or any(Shard(len(spec.shape) - 3) in spec.layout.placements for spec in specs[1:3])
    ):
        return
    axes = range(mesh.ndim)
    sizes = {prod(mesh.shape[axis] for axis in each) for n in axes for each in combinations(axes, n + 1)}
    groups = query[-3] // key[-3] if key[-3] else 1
    times = {next((n for n in range(1, groups + 1) if not groups % n and not key[-3] * n % size), 1) for size in sizes}
    yield from sorted(times - {1})


def repeated(specs: Sequence[Spec], times: int) -> list[Spec]:
    """The specs of attention's operands with repeated key heads."""
    query, key, value, *mask = specs
    pairs = [(spec, (*spec.shape[:-3], spec.shape[-3] * times, *spec.shape[-2:])) for spec in (key, value)]
    return [query, *(contiguous_spec(each.layout, shape, each.dtype, each.device) for each, shape in pairs), *mask]
