"""The candidates of a fused cross entropy, priced: each mesh axis shards rows, classes or features, or none of them.

Sharded rows send one message, of the loss. Sharded classes join two numbers of each row, chunk by chunk, and leave the
gradient of x partial. Sharded features sum the logits of each chunk, which pays for few classes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from math import prod

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import Program, run_without_data, sum_dtype
from dshard.core.context import planning_context
from dshard.core.local_work import seconds_of_local_work
from dshard.core.observe import Decision, planned
from dshard.core.operands import operand_of, plans_to
from dshard.core.spec import Spec, contiguous_spec
from dshard.cost import PlannedCollective
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.ops.fused_loss.chunked_loss import ChunkedLoss, Joining, LossOptions, of_rows
from dshard.placements import ReduceOp, Replicate, Shard
from dshard.rules.expand import Expansion, expansions
from dshard.rules.rule import Rule
from dshard.rules.rule_notation import parse_rule
from dshard.rules.strategy import Constraints, Question, Strategy, StrategyChoice, completed_layout
from dshard.rules.strategy_price import Price
from dshard.topology import Topology

CLASSES, FEATURES = "v", "d"
FEWEST_PASSES = 2
"""How often logits are read or written, at least, for the loss, and as often for their gradient."""


def fused_loss_rule(shapes: Sequence[Shape], has_bias: bool, has_weight: bool, reduced: bool) -> Rule:
    """The rule of rows (..., d), a weight (v, d), targets (...), and perhaps bias and class weights, both (v,).

    >>> print(fused_loss_rule([(2, 3, 4), (5, 4), (2, 3)], False, False, False))
    _0 _1 d, v d, _0 _1 -> _0 _1
    """
    terms = ["... d", "v d", "...", *["v"] * has_bias, *["[c]"] * has_weight]
    return parse_rule(f"{', '.join(terms)} -> {'' if reduced else '...'}", shapes, loops=True)


@dataclass(frozen=True, slots=True)
class FusedChoice:
    """The cheapest way to run a fused cross entropy: decision, strategy, what ranks compute, the result's spec."""

    specs: tuple[Spec, ...]
    decision: Decision
    strategy: Strategy
    loss: ChunkedLoss
    result: Spec


class FusedCandidates:
    """The candidates for operands of these specs, of which those `needed` get a gradient."""

    def __init__(
        self,
        specs: Sequence[Spec],
        options: LossOptions,
        has: tuple[bool, bool],
        needed: tuple[bool, ...],
        rows: int | None,
    ) -> None:
        self.specs, self.options, self.has, self.needed, self.rows = tuple(specs), options, has, needed, rows
        self.is_reduced = options.reduction != "none"
        self.mesh = specs[0].layout.mesh
        self.topology = planning_context().topology_of(self.mesh)
        rule = fused_loss_rule([spec.shape for spec in specs], *has, self.is_reduced)
        x, _, target, *_ = specs
        self.shape: Shape = () if self.is_reduced else target.shape
        outputs = ((self.shape, x.itemsize),)
        constraints = Constraints(gradients=needed, kept=(True,) * len(specs), among=())
        self.question = Question(rule, tuple(map(operand_of, specs)), outputs, self.topology, constraints)

    def choice(self) -> FusedChoice:
        """The cheapest candidate."""
        price = Price(self.question)
        found = [(expansion, self._loss(expansion)) for expansion in self._expansions()]
        bounds = sorted(((self._bound(price, *each), i) for i, each in enumerate(found)), key=lambda pair: pair[0])
        priced: list[tuple[Strategy, ChunkedLoss]] = []
        for least, i in bounds:
            if priced and least >= min(strategy.seconds for strategy, _ in priced):
                break
            priced.append(self._priced(price, *found[i]))
        priced.sort(key=lambda each: (float(f"{each[0].seconds:.9e}"), each[0].rows.count(None), each[0].moves))
        strategy, loss = priced[0]
        decision = Decision(
            "linear_cross_entropy",
            self.question.operands,
            self.topology,
            StrategyChoice(self.question, strategy, tuple(each for each, _ in priced)),
            plans_to(self.specs, strategy.inputs, self.topology),
            exchanges=strategy.exchanges,
            composed=True,
        )
        x = self.specs[0]
        result = contiguous_spec(strategy.outputs[0], self.shape, self.options.dtype or x.dtype, x.device)
        return FusedChoice(self.specs, decision, strategy, loss, result)

    def _expansions(self) -> Iterator[Expansion]:
        """Yield the candidates: their losses are complete on all ranks that have no rows of their own."""
        for expansion in expansions(*self.question[:3]):
            yield replace(expansion, outputs=tuple(map(completed_layout, expansion.outputs)))

    def _bound(self, price: Price, expansion: Expansion, loss: ChunkedLoss) -> float:
        """Seconds that a candidate takes at least: without the operators that run for each chunk alone."""
        sent = sum(each.seconds for each in self._sent(loss))
        logits = loss.most * loss.most_classes * self.specs[0].itemsize
        passes = FEWEST_PASSES * (1 + any(self.needed)) * logits / self.topology.memory_bandwidth
        return price.bound(expansion).seconds(price) + sent + passes

    def _priced(self, price: Price, expansion: Expansion, loss: ChunkedLoss) -> tuple[Strategy, ChunkedLoss]:
        base, sent = price.of(expansion), self._sent(loss)
        seconds = sum(each.seconds for each in sent)
        work, again = self._local_work(loss, expansion)
        backward = base.backward - price.local_work(expansion)[1] + again
        again_sent = seconds if not self.is_reduced and any(self.needed) else 0.0
        names = zip(self.mesh.names, expansion.rows, strict=True)
        words = [f"{name}:{self._word(row)}" for name, row in names if row is not None]
        strategy = replace(
            base,
            name=" ".join(words) or "replicated",
            exchanges=sent,
            gather=base.gather + seconds,
            compute=work,
            backward=backward + again_sent,
            held=loss.size * loss.most_classes * sum_dtype(self.specs[0].dtype).itemsize,
        )
        return strategy, loss

    @staticmethod
    def _word(row: object) -> str:
        return {CLASSES: "classes", FEATURES: "features"}.get(str(row), "rows")

    def _loss(self, expansion: Expansion) -> ChunkedLoss:
        """What ranks compute in an expansion."""
        (x, weight), rows = expansion.inputs[:2], expansion.rows
        shape, matrix = x.largest_shape(self.specs[0].shape), weight.largest_shape(self.specs[1].shape)
        joining = Joining(
            self.mesh,
            tuple(axis for axis, row in enumerate(rows) if row not in (None, CLASSES, FEATURES)),
            tuple(axis for axis, row in enumerate(rows) if row == CLASSES),
            tuple(axis for axis, row in enumerate(rows) if row == FEATURES),
            self.topology,
        )
        size, held = (prod(shape[:-1]), shape[-1]), (self.specs[0].dtype, self.mesh.device_type)
        loss = of_rows(self.options, self.has, size, matrix[0], held, self.rows)
        return replace(loss, joining=joining, classes=weight)

    def _sent(self, loss: ChunkedLoss) -> tuple[PlannedCollective, ...]:
        """The collectives of the program of a rank, in order."""
        joining, itemsize = loss.joining, sum_dtype(self.specs[0].dtype).itemsize
        assert joining is not None
        chunk: list[tuple[tuple[int, ...], int, ReduceOp]] = [
            (joining.features, loss.size * loss.most_classes, "sum"),
            (joining.classes, loss.size, "max"),
            (joining.classes, loss.size, "sum"),
        ]
        sums = chunk * len(range(0, max(loss.most, 1), loss.size))
        if self.is_reduced:
            sums.append(((*joining.rows, *joining.classes), 1 + (self.options.reduction == "mean"), "sum"))
        else:
            sums.append((joining.classes, max(loss.most, 1), "sum"))
        plans = [joining.plan(axes, elements, op, itemsize) for axes, elements, op in sums if axes]
        return tuple(each for plan in plans for each in planned(plan, itemsize, self.topology))

    def _local_work(self, loss: ChunkedLoss, expansion: Expansion) -> tuple[float, float]:
        """Seconds of a rank's own operators, forward and backward."""
        shapes = [layout.largest_shape(spec.shape) for spec, layout in zip(self.specs, expansion.inputs, strict=True)]
        dtypes = tuple(spec.dtype for spec in self.specs)
        return LocalWork(local_loss(loss, shapes[1][0]), tuple(shapes), dtypes, self.needed, self.topology).seconds()


_MESH = Mesh((2, 2, 2), ("rows", "classes", "features"))
"""A mesh that stands for any: the operators of a rank depend on what is joined, not on how many ranks join it."""


def local_loss(loss: ChunkedLoss, classes: int) -> ChunkedLoss:
    """What a rank with so many classes computes, the same for all meshes on which it joins the same."""
    joining = loss.joining
    assert joining is not None
    joined = enumerate((joining.rows, joining.classes, joining.features))
    of_rows, of_classes, of_features = ((axis,) if axes else () for axis, axes in joined)
    stands_for = Joining(_MESH, of_rows, of_classes, of_features, joining.topology)
    options = replace(loss.options, classes=classes * (2 if of_classes else 1))
    held = Layout(_MESH, (Replicate(), Shard(0) if of_classes else Replicate(), Replicate()))
    return replace(loss, options=options, joining=stands_for, classes=held)


@dataclass(frozen=True, slots=True)
class LocalWork:
    """The operators of the rank with the most rows and classes, for local operands of these shapes and dtypes.

    The first operands are x, weight and target; those `needed` get a gradient.
    """

    loss: ChunkedLoss
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    needed: tuple[bool, ...]
    topology: Topology

    @cached("local work", 4096)
    def seconds(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass.

        All chunks but the last have equally many rows, so that a few are run.
        """
        rows, size = prod(self.shapes[0][:-1]), self.loss.size
        chunks, rest = divmod(rows, size)
        if chunks < 2:
            return self.forward(rows), self.backward(rows)
        first = self.forward(size)
        forward = first + (chunks - 1) * (self.forward(2 * size) - first)
        if rest:
            forward += self.forward(size + rest) - first
        if self.loss.options.reduction != "none":
            return forward, self.backward(rows)
        first = self.backward(size)
        backward = first + (chunks - 1) * (self.backward(2 * size) - first)
        return forward, backward + (self.backward(size + rest) - first if rest else 0.0)

    def forward(self, rows: int) -> float:
        """Seconds of the forward pass of so many rows."""
        loss = replace(self.loss, most=rows)
        return self._of(partial(loss.program, self.of_operands), self.operands(rows))

    def backward(self, rows: int) -> float:
        """Seconds of the backward pass of so many rows."""
        if not any(self.needed):
            return 0.0
        loss, wide = replace(self.loss, most=rows), torch.empty(rows, device="meta")
        if loss.options.reduction == "none":
            return self._of(partial(loss.gradients, self.of_operands), [wide, *self.operands(rows)])
        x, weight, _, *rest = self.operands(rows)
        kept = [t for t, is_needed in zip((x, weight, *rest[:1]), self.of_operands, strict=False) if is_needed]
        number = wide.new_empty((), dtype=torch.float32 if x.dtype.itemsize < 4 else x.dtype)
        sums = (x.dtype, loss.sums, number.dtype)
        gradients = [t.to(dtype) for t, dtype in zip(kept, compress(sums, self.of_operands), strict=True)]
        dtypes = [t.dtype for t in kept]
        return seconds_of_local_work(lambda: loss.scaled(number, number, *gradients, dtypes=dtypes), self.topology)

    @property
    def of_operands(self) -> tuple[bool, bool, bool]:
        """Whether x, weight and bias get a gradient."""
        return self.needed[0], self.needed[1], self.loss.has_bias and self.needed[3]

    def operands(self, rows: int) -> list[Tensor]:
        """Local operands without data, of so many rows."""
        (x, *_), (weight, _, *rest) = self.shapes, self.shapes[1:]
        shapes = ((rows, x[-1]), weight, (rows,), *rest)
        return [
            torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, self.dtypes, strict=True)
        ]

    def _of(self, make: Callable[..., Program[tuple[Tensor, ...]]], tensors: list[Tensor]) -> float:
        assert self.loss.joining is not None
        at = (0,) * self.loss.joining.mesh.ndim
        return seconds_of_local_work(lambda: run_without_data(make, tensors, at), self.topology)
