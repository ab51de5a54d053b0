"""Cut a batch into microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from dshard.errors import MixedError, ShapeError
from dshard.placements import chunk
from dshard.tensor import DTensor
from dshard.validate import check_type

TARGET = "target"
Reduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Some samples of each value of the batch, and the weight of their loss in that of the batch."""

    values: Mapping[str, Tensor]
    weight: float

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Cache key of the shapes sent between stages: equal for microbatches of equal shapes."""
        return tuple((name, tuple(x.shape), str(x.dtype)) for name, x in sorted(self.values.items()))


def cut_batch(values: Mapping[str, Tensor], n_microbatches: int, reduction: Reduction) -> Sequence[Microbatch]:
    """Cut the batch along dim 0 as `torch.chunk` does; the last microbatch may be smaller.

    With a mean loss a microbatch's weight is its share of the samples; with a sum it is one.
    """
    for name, x in values.items():
        check_type(x, Tensor, f"{name} of the batch", "give a torch.Tensor with the samples along dim 0")
        if isinstance(x, DTensor):
            raise MixedError(f"{name} is a DTensor: a pipeline takes the whole batch as plain tensors, on every rank")
    sizes = {x.shape[0] if x.dim() else None for x in values.values()}
    if len(sizes) != 1 or None in sizes:
        listed = ", ".join(f"{name} {tuple(x.shape)}" for name, x in values.items())
        raise ShapeError(f"the batch has {listed or 'nothing'}: give tensors with as many samples each along dim 0")
    size = sizes.pop() or 0
    parts = [chunk(size, n_microbatches, i) for i in range(n_microbatches)]
    if not all(parts):
        raise ShapeError(
            f"{size} samples in {n_microbatches} microbatches, as torch.chunk cuts them, leave some without any: "
            f"use a multiple of {n_microbatches} samples, or fewer microbatches"
        )
    return [
        Microbatch(
            {name: x[part.start : part.stop] for name, x in values.items()},
            len(part) / size if reduction == "mean" else 1.0,
        )
        for part in parts
    ]
