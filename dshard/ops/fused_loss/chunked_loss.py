"""The program of a rank: the loss of its rows, and the gradients, one chunk of rows after the other.

Of a chunk the logits and their log probabilities are there, and nothing else of their size. The gradients are those of
a sum of the rows' losses, and accumulate with the loss: in the backward pass they are multiplied by the gradient of the
result alone (Liger Kernel, Hsu et al. 2024). Ranks with some of the classes join two numbers of each row (Megatron-LM,
vocab-parallel cross entropy), ranks with some of the features the logits of the chunk.

The loss of a row is share * log(sum exp logits) - own * logits[target] - sum(spread * logits): without class weights
and label smoothing, share and own are 1 and spread is 0. It does not change if a number is added to all logits of a
row, so it is computed of logits minus the largest, or of log probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

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
    """The targets of rows, as far as the loss and its gradient need them, with a number for each row.

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

    @property
    def are_plain(self) -> bool:
        """Whether a row's loss is the logarithm of its target's probability, without class weights and smoothing."""
        return self.share is None and not isinstance(self.spread, Tensor) and not self.spread

    def part(self, rows: slice) -> ChunkTargets:
        """Those of some rows."""
        own = self.own[rows] if isinstance(self.own, Tensor) else self.own
        each, share = (None if x is None else x[rows] for x in (self.each, self.share))
        return ChunkTargets(self.kept[rows], self.here[rows], self.index[rows], each, own, share, self.spread)

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


def gradient_of_logits(
    probabilities: Probabilities, targets: ChunkTargets, picked: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of each row's loss, by its logits of the rank's classes; `probabilities` may be written over.

    `picked` are its values at the targets. The gradient of a target is a small difference, and so computed before it is
    rounded.
    """
    values, index = probabilities.values, targets.index.unsqueeze(1)
    if values.shape[1] == 0:
        return values.to(dtype)
    if (
        targets.are_plain and probabilities.times is None and values.dtype == dtype
    ):  # of rows that do not count nothing is added
        return values.exp_().scatter_(1, index, picked.expm1().unsqueeze(1))
    if targets.are_plain and values.dtype != dtype:
        here = probabilities.of(picked)
        gradient = probabilities.written(torch.empty_like(values, dtype=dtype))
        own = torch.where(targets.here, here - targets.own, here).to(dtype)
        return gradient.scatter_(1, index, own.unsqueeze(1))
    gradient = probabilities.written(values)
    if targets.share is not None:
        gradient.mul_(targets.share.unsqueeze(1))
    if not targets.are_plain:
        gradient.sub_(targets.spread)
    own = targets.here.to(gradient.dtype).mul_(targets.own).neg_()
    return gradient.scatter_add_(1, index, own.unsqueeze(1)).to(dtype)


FEWEST_CHUNKS, FEWEST_ROWS, ROWS = 8, 128, 1024
"""Rows of a chunk: an eighth of them, or fewer, but of few rows at least 128, and of many 1024: each chunk reads and
writes the sum of the weight's gradient, which takes as long as a product with few rows."""
FEWEST_OF_HALF, FEWEST_LOGITS = 4, 2**25
"""Products of half precision are so fast that chunks are larger: as many rows as features, or so many logits, up to a
quarter of the rows; so kernels of a chunk take longer than their launches, and the weight's gradient is summed seldom.
"""
MOST_ROUNDED = 16
"""The most chunks over which the gradient of the weight is summed in bfloat16: more of them round it too often."""


ON_HOST = 2**22
"""Logits of a chunk on a CPU: larger tensors get new pages from the system each time, and leave its caches."""
FEWEST_OF_FEATURES = 4
"""Rows of a chunk on a CPU are at least a part of the features: fewer wait for the sum of the weight's gradient."""


def rows_of_chunk(
    rows: int, classes: int, features: int, device: str = "cuda", dtype: torch.dtype = torch.float32
) -> int:
    """The rows of a chunk: so many that their logits take about as much memory as all rows, or an eighth.

    On a CPU chunks are smaller, and of half precision elsewhere larger.

    >>> rows_of_chunk(65536, 32768, 1024), rows_of_chunk(8192, 32768, 1024), rows_of_chunk(200, 32768, 1024)
    (2048, 1024, 128)
    >>> rows_of_chunk(8192, 8192, 1024, "cpu")
    512
    >>> rows_of_chunk(65536, 32768, 4096, dtype=torch.bfloat16), rows_of_chunk(8192, 8192, 512, dtype=torch.bfloat16)
    (8192, 2048)
    """
    eighth, alike = -(-rows // FEWEST_CHUNKS), -(-rows * features // max(1, classes))
    size = min(eighth, max(alike, ROWS))
    if device == "cpu":
        size = min(size, max(ON_HOST // max(1, classes), features // FEWEST_OF_FEATURES))
    elif dtype.itemsize == 2:
        size = min(-(-rows // FEWEST_OF_HALF), max(alike, features, FEWEST_LOGITS // max(1, classes)))
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
    chunk; the gradient of the weight is summed over chunks in the dtype `sums`.
    """

    options: LossOptions
    has_bias: bool
    has_weight: bool
    most: int
    size: int
    sums: torch.dtype
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
        losses, kept = _Losses(rank), rank.targets.kept
        for part in rank.parts():
            probabilities, picked = yield from losses.add(part, gradients.any)
            if probabilities is not None:
                gradient = gradient_of_logits(probabilities, rank.targets.part(part), picked, rank.x.dtype)
                del probabilities  # which is as large, and may be of a wider dtype
                gradients.add(part, gradient, kept)
                del gradient  # before the logits of the next chunk are there
        of_rows = losses.of_rows().where(kept, 0)
        if not is_number:
            rows = yield from rank.joined(of_rows, rank.axes("classes"), "sum", rank.most_rows)
            return (rows.to(rank.result).reshape(rank.target_shape),)
        loss, factor = yield from self._reduced(rank, of_rows.sum())
        return (loss, factor, *gradients.results(kept))

    def gradients(
        self, needed: Sequence[bool], at: Coordinate, space: Session, tensors: Sequence[Tensor]
    ) -> Program[tuple[Tensor, ...]]:
        """The gradients of x, weight and bias, of rows whose losses have gradients of their own, the first tensor."""
        grad, *operands = tensors
        rank = _Rank(self, at, space, operands)
        gradients, losses = _Gradients(rank, needed), _Losses(rank)
        factor = grad.reshape(-1).to(rank.wide).where(rank.targets.kept, 0)
        for part in rank.parts():
            probabilities, picked = yield from losses.add(part, True)
            assert probabilities is not None
            gradient = gradient_of_logits(probabilities, rank.targets.part(part), picked, rank.x.dtype)
            del probabilities
            gradients.add(part, gradient, factor)
            del gradient
        return gradients.results(factor)

    @staticmethod
    def scaled(grad: Tensor, factor: Tensor, *gradients: Tensor, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
        """Gradients of the sum of all rows times the gradient of the result and its factor, in these dtypes."""
        times = grad.to(factor.dtype) * factor
        return tuple(
            torch.mul(each, times, out=torch.empty_like(each, dtype=dtype))
            for each, dtype in zip(gradients, dtypes, strict=True)
        )

    def _reduced(self, rank: _Rank, total: Tensor) -> Program[tuple[Tensor, Tensor]]:
        """The sum or mean of all rows, and the factor of its gradient: none where no row counts."""
        axes = (*rank.axes("rows"), *rank.axes("classes"))
        if self.options.reduction == "sum":
            total = yield from rank.joined(total.reshape(1), axes, "sum", 1)
            return total.reshape(()).to(rank.result), total.new_ones(())
        count = rank.targets.weights(rank.wide).sum()
        numbers = torch.stack([total, count if rank.is_first("classes") else torch.zeros_like(count)])
        total, count = (yield from rank.joined(numbers, axes, "sum", 2)).unbind()
        return (total / count).to(rank.result), count.reciprocal().where(count != 0, 0)


def of_rows(
    options: LossOptions,
    has: tuple[bool, bool],
    x: tuple[int, int],
    classes: int,
    held: tuple[torch.dtype, str],
    rows: int | None,
) -> ChunkedLoss:
    """The loss of a rank that has all classes and features, with chunks of so many `rows`, or as many as suit it.

    `x` are the numbers of rows and features, `held` the dtype and device of x; `has` tells of a bias and class weights.
    """
    (most, features), (dtype, device) = x, held
    size = rows_of_chunk(most, classes, features, device, dtype) if rows is None else max(1, min(rows, most))
    is_rounded = dtype is torch.bfloat16 and most <= MOST_ROUNDED * size
    return ChunkedLoss(options, *has, most, size, dtype if is_rounded else sum_dtype(dtype))


class _Rank:
    """The rank at a coordinate: its rows, and what joins its numbers with those of others."""

    def __init__(self, loss: ChunkedLoss, at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> None:
        self.loss, self.at, self.space, self.held = loss, at, space, loss.held(at)
        x, self.weight, target, *rest = tensors
        self.shape, self.target_shape = x.shape, target.shape
        self.x = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        self.bias = rest[0] if loss.has_bias else None
        self.wide, self.result = sum_dtype(x.dtype), loss.options.dtype or x.dtype
        class_weight = rest[-1] if loss.has_weight else None
        self.targets = chunk_targets(target.reshape(-1).long(), self.held, class_weight, loss.options, self.wide)

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

    def logits(self, part: slice) -> Program[Tensor]:
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


class _Losses:
    """What a rank's classes add to the losses of its rows: of each chunk a few numbers of a row, put together at last.

    `picked` are the values of targets, logits minus a number of each row: the largest, where ranks join classes, or
    log(sum exp).
    """

    def __init__(self, rank: _Rank) -> None:
        self.rank, self.picked = rank, rank.x.new_zeros(len(rank.x), dtype=rank.wide)
        spread = rank.targets.spread
        self.spread = torch.zeros_like(self.picked) if isinstance(spread, Tensor) or spread else None
        joins = rank.axes("classes") and rank.is_first("classes")
        self.log_sums = torch.zeros_like(self.picked) if joins else None

    def add(self, part: slice, differentiated: bool) -> Program[tuple[Probabilities | None, Tensor]]:
        """Add some rows; returns their probabilities, if these are needed, and the values of these at the targets.

        Where nothing but the target's is read of the logarithms they have the dtype of the logits, as those of torch's
        loss in that dtype have.
        """
        rank = self.rank
        logits = yield from rank.logits(part)
        if not rank.axes("classes"):
            is_rounded = rank.targets.are_plain and rank.result == logits.dtype
            wide = logits if is_rounded else logits.to(rank.wide)
            del logits
            logarithms = wide.log_softmax(1)
            del wide
            return Probabilities(logarithms) if differentiated else None, self._picked(part, logarithms)
        rows, n = rank.loss.size, len(logits)
        most = logits.amax(1) if logits.shape[1] else logits.new_full((n,), -torch.inf)
        most = yield from rank.joined(most.to(rank.wide), rank.axes("classes"), "max", rows)
        shifted = logits.sub_(most.unsqueeze(1)) if logits.dtype == rank.wide else logits - most.unsqueeze(1)
        del logits
        picked = self._picked(part, shifted).exp_()
        exponentials = shifted.exp_()
        total = yield from rank.joined(exponentials.sum(1), rank.axes("classes"), "sum", rows)
        if self.log_sums is not None:
            self.log_sums[part] = total.log()
        return Probabilities(exponentials, total.reciprocal()) if differentiated else None, picked

    def _picked(self, part: slice, values: Tensor) -> Tensor:
        """The values of the targets of some rows, which are noted, with what others add to the loss."""
        targets = self.rank.targets
        if values.shape[1] == 0:
            return values.new_zeros(len(values))
        picked = values.gather(1, targets.index[part].unsqueeze(1)).squeeze(1)
        self.picked[part] = picked
        if self.spread is not None:
            spread = targets.spread
            self.spread[part] = values.mv(spread) if isinstance(spread, Tensor) else values.sum(1).mul_(spread)
        return picked

    def of_rows(self) -> Tensor:
        """The terms of all rows."""
        targets = self.rank.targets
        terms = self.picked.where(targets.here, 0).mul_(targets.own).neg_()
        if self.spread is not None:
            terms -= self.spread
        if self.log_sums is not None:
            terms += self.log_sums if targets.share is None else self.log_sums * targets.share
        return terms


class _Gradients:
    """The gradients of x, weight and bias, of which the last two sum over chunks."""

    def __init__(self, rank: _Rank, needed: Sequence[bool]) -> None:
        self.rank = rank
        for_x, self.for_weight, for_bias = needed
        self.any = any(needed)
        self.of_x = torch.empty_like(rank.x, memory_format=torch.contiguous_format) if for_x else None
        self.of_weight: Tensor | None = None
        self.of_bias = None if rank.bias is None or not for_bias else torch.zeros_like(rank.bias, dtype=rank.wide)

    def add(self, part: slice, gradient: Tensor, factor: Tensor) -> None:
        """Add what a chunk adds, of the gradient by its logits and a factor for each row."""
        rank, rows = self.rank, factor[part].to(gradient.dtype)
        if self.of_bias is not None and rank.is_first("features"):
            self.of_bias += rows @ gradient
        if self.for_weight:
            scaled, sums = rank.x[part] * rows.unsqueeze(1), rank.loss.sums
            if self.of_weight is None:
                self.of_weight = (gradient.t() @ scaled).to(sums)
            elif sums == gradient.dtype:
                torch.addmm(self.of_weight, gradient.t(), scaled, out=self.of_weight)
            else:
                self.of_weight += gradient.t() @ scaled
        if self.of_x is not None:
            torch.mm(gradient, rank.weight, out=self.of_x[part])

    def results(self, factor: Tensor) -> tuple[Tensor, ...]:
        """The gradients, with the factor of each row; those of which there are none have no elements."""
        rank, empty = self.rank, self.rank.x.new_empty(0)
        of_x = empty if self.of_x is None else self.of_x.mul_(factor.to(empty.dtype).unsqueeze(1)).view(rank.shape)
        of_weight = self.of_weight if self.for_weight else empty
        return of_x, cast(Tensor, of_weight), empty if self.of_bias is None else self.of_bias
