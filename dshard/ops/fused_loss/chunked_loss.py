"""The program of a rank: the loss of its rows, and the gradients, one chunk of rows after the other.

Of a chunk the logits are there, in a dtype in which sums are exact enough, and nothing else of their size. The
gradients are those of a sum of the rows' losses, and accumulate with the loss: in the backward pass they are multiplied
by the gradient of the result alone (Liger Kernel, Hsu et al. 2024). Ranks with some of the classes join two numbers of
each row (Megatron-LM, vocab-parallel cross entropy), ranks with some of the features the logits of the chunk.

The loss of a row is share * log(sum exp logits) - own * logits[target] - sum(spread * logits): without class weights
and label smoothing, share and own are 1 and spread is 0. It does not change if a number is added to all logits of a
row, so it is computed of logits minus the largest, or of log probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dshard.comm import Program, Session, planned_backend, redistributed, steps_of, sum_dtype
from dshard.layout import Layout, placed, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.placements import Partial, ReduceOp
from dshard.redistribute import Plan, plan
from dshard.topology import Topology

Reduction: TypeAlias = Literal["none", "mean", "sum"]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What a cross entropy of class indices is, beside its operands: those of `torch.nn.functional.cross_entropy`.

    The loss has the `dtype` if there is one, or that of the rows.
    """

    classes: int
    ignored: int = -100
    reduction: Reduction = "mean"
    smoothing: float = 0.0
    dtype: torch.dtype | None = None


@dataclass(slots=True)
class ChunkTargets:
    """The targets of a chunk of rows, as far as the loss and its gradient need them, with a number for each row.

    `kept` are the rows that count, of which those `here` have a target among the rank's classes, at `index`. `own` and
    `share` are the factors of the target's logit and of log(sum exp), None for 1; `spread` that of each logit.
    """

    kept: Tensor
    here: Tensor
    index: Tensor
    each: Tensor | None
    own: Tensor | float
    share: Tensor | None
    spread: Tensor | float

    def weights(self, dtype: torch.dtype) -> Tensor:
        """What each row counts in the mean."""
        kept = self.kept.to(dtype)
        return kept if self.each is None else kept.mul_(self.each)


def chunk_targets(
    target: Tensor, held: range, weight: Tensor | None, options: LossOptions, dtype: torch.dtype
) -> ChunkTargets:
    """The targets of rows whose logits are of the classes `held`, with the weights of all classes, if there are any."""
    kept = target != options.ignored
    index = target - held.start if held.start else target
    here = kept if len(held) == options.classes else kept & (index >= 0) & (index < len(held))
    index = index.where(here, 0)
    smoothed = options.smoothing / options.classes if options.smoothing else 0.0
    if weight is None:
        return ChunkTargets(kept, here, index, None, 1 - options.smoothing, None, smoothed)
    wide = weight.to(dtype)
    each = wide[target.where(kept, 0)]
    own = each * (1 - options.smoothing)
    share = own + wide.sum() * smoothed if smoothed else own
    spread = wide[held.start : held.stop] * smoothed if smoothed else 0.0
    return ChunkTargets(kept, here, index, each, own, share, spread)


def linear_terms(shifted: Tensor, targets: ChunkTargets) -> Tensor:
    """What the rank's classes add to the loss of each row: a multiple of their logits, or log probabilities."""
    if shifted.shape[1] == 0:
        return shifted.new_zeros(len(shifted))
    picked = shifted.gather(1, targets.index.unsqueeze(1)).squeeze(1).where(targets.here, 0)
    terms = picked.mul_(targets.own).neg_()
    if isinstance(targets.spread, Tensor):
        terms -= shifted.mv(targets.spread)
    elif targets.spread:
        terms -= shifted.sum(1).mul_(targets.spread)
    return terms


@dataclass(frozen=True, slots=True)
class Probabilities:
    """Those of the rank's classes: the exponentials of `values`, or `values` times a number of each row."""

    values: Tensor
    times: Tensor | None = None

    def of(self, values: Tensor) -> Tensor:
        """The probabilities in place of these values, a number of each row."""
        return values.exp() if self.times is None else values * self.times

    def written(self, out: Tensor) -> Tensor:
        """The probabilities in `out`, which may be the values."""
        if self.times is None:
            return torch.exp(self.values, out=out)
        return torch.mul(self.values, self.times.unsqueeze(1), out=out)


def gradient_of_logits(probabilities: Probabilities, targets: ChunkTargets, dtype: torch.dtype) -> Tensor:
    """The gradient of each row's loss, by its logits of the rank's classes; `probabilities` may be written over.

    That of a target is a small difference, and so computed before it is rounded.
    """
    values, index = probabilities.values, targets.index.unsqueeze(1)
    is_plain = targets.share is None and not isinstance(targets.spread, Tensor) and not targets.spread
    if values.shape[1] == 0:
        return values.to(dtype)
    if values.dtype != dtype and is_plain:
        here = probabilities.of(values.gather(1, index).squeeze(1))
        gradient = probabilities.written(torch.empty_like(values, dtype=dtype))
        own = torch.where(targets.here, here - targets.own, here).to(dtype)
        return gradient.scatter_(1, index, own.unsqueeze(1))
    gradient = probabilities.written(values)
    if targets.share is not None:
        gradient.mul_(targets.share.unsqueeze(1))
    if not is_plain:
        gradient.sub_(targets.spread)
    own = targets.here.to(gradient.dtype).mul_(targets.own).neg_()
    return gradient.scatter_add_(1, index, own.unsqueeze(1)).to(dtype)


FEWEST_CHUNKS, FEWEST_ROWS, ROWS = 8, 128, 1024
"""Rows of a chunk: an eighth of them, or fewer, but of few rows at least 128, and of many 1024: each chunk reads and
writes the sum of the weight's gradient, which takes as long as a product with few rows."""


ON_HOST = 2**22
"""Logits of a chunk on a CPU: larger tensors get new pages from the system each time, and leave its caches."""


def rows_of_chunk(rows: int, classes: int, features: int, device: str = "cuda") -> int:
    """The rows of a chunk: so many that their logits take about as much memory as all rows, or an eighth.

    On a CPU chunks are smaller.

    >>> rows_of_chunk(65536, 32768, 1024), rows_of_chunk(8192, 32768, 1024), rows_of_chunk(200, 32768, 1024)
    (2048, 1024, 128)
    >>> rows_of_chunk(8192, 8192, 1024, "cpu")
    512
    """
    eighth, alike = -(-rows // FEWEST_CHUNKS), -(-rows * features // max(1, classes))
    size = min(eighth, max(alike, ROWS))
    if device == "cpu":
        size = min(size, ON_HOST // max(1, classes))
    return max(1, min(rows, max(size, FEWEST_ROWS)))


@dataclass(frozen=True, slots=True)
class Joining:
    """The mesh axes over which ranks join what each has of a row's loss: those that shard rows, classes, features."""

    mesh: Mesh
    rows: tuple[int, ...]
    classes: tuple[int, ...]
    features: tuple[int, ...]
    topology: Topology

    def plan(self, axes: Sequence[int], elements: int, op: ReduceOp, itemsize: int) -> Plan:
        """The reduction of so many numbers over some mesh axes, completed on all ranks."""
        whole = replicated(self.mesh)
        return plan(placed(whole, axes, Partial(op)), whole, (elements,), itemsize, self.topology)


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """A cross entropy of rows times a weight; without `joining`, a rank has all rows, classes and features.

    `operands` are x (rows..., d), weight (classes, d) and target (rows...), and perhaps bias and class weights, both
    (classes,). `classes` is the layout of the weight. `most` are the rows of the rank with the most, `size` those of a
    chunk.
    """

    options: LossOptions
    has_bias: bool
    has_weight: bool
    most: int
    size: int
    joining: Joining | None = None
    classes: Layout | None = None

    def held(self, at: Coordinate) -> range:
        """The classes of the rank at a coordinate."""
        if self.classes is None:
            return range(self.options.classes)
        return self.classes.dim_range(0, self.options.classes, at)

    @property
    def most_classes(self) -> int:
        """The classes of the rank with the most."""
        classes = self.options.classes
        return classes if self.classes is None else self.classes.largest_shape((classes, 1))[0]

    def program(
        self, needed: Sequence[bool], at: Coordinate, space: Session, tensors: Sequence[Tensor]
    ) -> Program[tuple[Tensor, ...]]:
        """The loss, and, if it is reduced to a number, the factor of the gradients that follow: of x, weight and bias.

        Those not `needed` have no elements.
        """
        rank, is_number = _Rank(self, at, space, tensors), self.options.reduction != "none"
        gradients = _Gradients(rank, [is_needed and is_number for is_needed in needed])
        losses, total, count = [], rank.zero(), rank.zero()
        for part in rank.parts():
            targets = rank.targets(part)
            loss, probabilities = yield from rank.rows_loss(part, targets, gradients.any)
            loss = loss.where(targets.kept, 0)
            if not is_number:
                losses.append(loss)
                continue
            total += loss.sum()
            if self.options.reduction == "mean":
                count += targets.weights(rank.wide).sum()
            if probabilities is not None:
                gradient = gradient_of_logits(probabilities, targets, rank.x.dtype)
                del probabilities  # which is as large, and of a wider dtype
                gradients.add(part, gradient, targets.kept)
                del gradient  # before the logits of the next chunk are there
        if not is_number:
            rows = yield from rank.joined(torch.cat(losses), rank.axes("classes"), "sum", rank.most_rows)
            return (rows.to(rank.result).reshape(rank.target_shape),)
        loss, factor = yield from self._reduced(rank, total, count)
        return (loss, factor, *gradients.results())

    def gradients(
        self, needed: Sequence[bool], at: Coordinate, space: Session, tensors: Sequence[Tensor]
    ) -> Program[tuple[Tensor, ...]]:
        """The gradients of x, weight and bias, of rows whose losses have gradients of their own, the first tensor."""
        grad, *operands = tensors
        rank = _Rank(self, at, space, operands)
        gradients, of_rows = _Gradients(rank, needed), grad.reshape(-1).to(rank.wide)
        for part in rank.parts():
            targets = rank.targets(part)
            _, probabilities = yield from rank.rows_loss(part, targets, True)
            assert probabilities is not None
            factor = of_rows[part].where(targets.kept, 0)
            gradient = gradient_of_logits(probabilities, targets, rank.x.dtype)
            del probabilities
            gradients.add(part, gradient, factor)
            del gradient
        return gradients.results()

    @staticmethod
    def scaled(grad: Tensor, factor: Tensor, *gradients: Tensor, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
        """Gradients of the sum of all rows times the gradient of the result and its factor, in these dtypes."""
        times = grad.to(factor.dtype) * factor
        return tuple(
            torch.mul(each, times, out=torch.empty_like(each, dtype=dtype))
            for each, dtype in zip(gradients, dtypes, strict=True)
        )

    def _reduced(self, rank: _Rank, total: Tensor, count: Tensor) -> Program[tuple[Tensor, Tensor]]:
        """The sum or mean of all rows, and the factor of its gradient: none where no row counts."""
        axes = (*rank.axes("rows"), *rank.axes("classes"))
        if self.options.reduction == "sum":
            total = yield from rank.joined(total.reshape(1), axes, "sum", 1)
            return total.reshape(()).to(rank.result), total.new_ones(())
        numbers = torch.stack([total, count if rank.is_first("classes") else torch.zeros_like(count)])
        total, count = (yield from rank.joined(numbers, axes, "sum", 2)).unbind()
        return (total / count).to(rank.result), count.reciprocal().where(count != 0, 0)


class _Rank:
    """The rank at a coordinate: its rows, and what joins its numbers with those of others."""

    def __init__(self, loss: ChunkedLoss, at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> None:
        self.loss, self.at, self.space, self.held = loss, at, space, loss.held(at)
        x, self.weight, target, *rest = tensors
        self.shape, self.target_shape, self.target = x.shape, target.shape, target.reshape(-1).long()
        self.x = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        self.bias = rest[0] if loss.has_bias else None
        self.class_weight = rest[-1] if loss.has_weight else None
        self.wide, self.result = sum_dtype(x.dtype), loss.options.dtype or x.dtype

    def zero(self) -> Tensor:
        """A sum of nothing."""
        return self.x.new_zeros((), dtype=self.wide)

    def parts(self) -> Iterator[slice]:
        """Yield the rows of each chunk, of which there are equally many on all ranks."""
        for start in range(0, self.most_rows, self.loss.size):
            yield slice(min(start, len(self.x)), min(start + self.loss.size, len(self.x)))

    @property
    def most_rows(self) -> int:
        """The rows of the rank with the most, or one."""
        return max(self.loss.most, 1)

    def axes(self, what: str) -> tuple[int, ...]:
        """The mesh axes that shard rows, classes or features."""
        return () if self.loss.joining is None else getattr(self.loss.joining, what)

    def is_first(self, what: str) -> bool:
        """Whether this is the first of the ranks that share a row's classes, or its features."""
        return not any(self.at[axis] for axis in self.axes(what))

    def targets(self, part: slice) -> ChunkTargets:
        """The targets of a chunk."""
        return chunk_targets(self.target[part], self.held, self.class_weight, self.loss.options, self.wide)

    def rows_loss(
        self, part: slice, targets: ChunkTargets, differentiated: bool
    ) -> Program[tuple[Tensor, Probabilities | None]]:
        """What this rank's classes add to the loss of each row, and their probabilities, if these are needed."""
        logits = yield from self._logits(part)
        if not self.axes("classes"):
            wide = logits.to(self.wide)
            del logits
            logarithms = wide.log_softmax(1)
            del wide
            return linear_terms(logarithms, targets), Probabilities(logarithms) if differentiated else None
        rows, n = self.loss.size, len(logits)
        most = logits.amax(1) if logits.shape[1] else logits.new_full((n,), -torch.inf)
        most = yield from self.joined(most.to(self.wide), self.axes("classes"), "max", rows)
        wide = logits.sub_(most.unsqueeze(1)) if logits.dtype == self.wide else logits - most.unsqueeze(1)
        del logits
        loss = linear_terms(wide, targets)
        exponentials = wide.exp_()
        total = yield from self.joined(exponentials.sum(1), self.axes("classes"), "sum", rows)
        if self.is_first("classes"):
            log_sum = total.log()
            loss += log_sum if targets.share is None else log_sum.mul_(targets.share)
        return loss, Probabilities(exponentials, total.reciprocal()) if differentiated else None

    def _logits(self, part: slice) -> Program[Tensor]:
        """The logits of this rank's classes, of some rows."""
        x, bias = self.x[part], self.bias
        if not self.axes("features"):
            return x @ self.weight.t() if bias is None else torch.addmm(bias, x, self.weight.t())
        terms, most = (x @ self.weight.t()).to(self.wide), self.loss.size * self.loss.most_classes
        logits = (yield from self.joined(terms.reshape(-1), self.axes("features"), "sum", most)).reshape(terms.shape)
        return logits if bias is None else logits + bias

    def joined(self, x: Tensor, axes: Sequence[int], op: ReduceOp, elements: int) -> Program[Tensor]:
        """The reduction of flat numbers over mesh axes; all ranks send so many `elements`, whatever they have."""
        joining, n = self.loss.joining, len(x)
        if joining is None or not axes:
            return x
        moved = joining.plan(axes, elements, op, x.itemsize)
        runtime = self.space.runtime
        backend = planned_backend(joining.mesh) if runtime is None else runtime.backend
        steps = steps_of(moved, None, self.at, x.dtype, backend)
        if not steps:
            return x
        sent = x.contiguous() if n == elements else torch.cat([x, x.new_zeros(elements - n)])
        arrived = yield from redistributed(steps, sent, self.space)
        result: Tensor = arrived[:n].clone() if self.space.lends else arrived[:n]
        self.space.give(arrived)
        return result


class _Gradients:
    """The gradients of x, weight and bias, which sum over chunks, in a dtype in which sums are exact enough."""

    def __init__(self, rank: _Rank, needed: Sequence[bool]) -> None:
        self.rank, wide = rank, rank.wide
        for_x, for_weight, for_bias = needed
        self.any = any(needed)
        self.of_x = torch.empty_like(rank.x, memory_format=torch.contiguous_format) if for_x else None
        self.of_weight = torch.zeros_like(rank.weight, dtype=wide) if for_weight else None
        self.of_bias = None if rank.bias is None or not for_bias else torch.zeros_like(rank.bias, dtype=wide)

    def add(self, part: slice, gradient: Tensor, factor: Tensor) -> None:
        """Add what a chunk adds, of the gradient by its logits and a factor for each row."""
        rank = self.rank
        if self.of_bias is not None and rank.is_first("features"):
            self.of_bias += factor.to(gradient.dtype) @ gradient
        rows = factor.to(gradient.dtype).unsqueeze(1)
        if self.of_weight is not None:
            scaled = rank.x[part] * rows
            if self.of_weight.dtype == gradient.dtype:
                torch.addmm(self.of_weight, gradient.t(), scaled, out=self.of_weight)
            else:
                self.of_weight += gradient.t() @ scaled
        if self.of_x is not None:
            self.of_x[part] = (gradient @ rank.weight).mul_(rows)

    def results(self) -> tuple[Tensor, ...]:
        """The gradients; those of which there are none have no elements."""
        empty = self.rank.x.new_empty(0)
        of_x = empty if self.of_x is None else self.of_x.view(self.rank.shape)
        return (of_x, *(empty if each is None else each for each in (self.of_weight, self.of_bias)))
