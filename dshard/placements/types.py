"""The placement of a tensor on one mesh axis: a closed union of frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from typing_extensions import assert_never

from dshard.errors import LayoutError
from dshard.validate import as_int, suggestion

ReduceOp: TypeAlias = Literal["sum", "avg", "product", "max", "min"]
REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds one chunk of tensor dimension `dim`.

    >>> str(Shard(0))
    'S(0)'
    """

    dim: int

    def __post_init__(self) -> None:
        if type(self.dim) is int:
            return
        try:
            dim = as_int(self.dim, "dim", LayoutError)
        except LayoutError:
            raise LayoutError(f"Shard({self.dim!r}): the tensor dim must be an int, such as Shard(0)") from None
        object.__setattr__(self, "dim", dim)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank holds the whole tensor.

    >>> str(Replicate())
    'R'
    """

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank holds one term of a reduction; the tensor is the reduced value.

    >>> str(Partial())
    'P(sum)'

    Raises:
        LayoutError: `reduce_op` is not one of sum, avg, product, max, min.
    """

    reduce_op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            meant = "; did you mean 'avg'?" if str(self.reduce_op) == "mean" else suggestion(self.reduce_op, REDUCE_OPS)
            raise LayoutError(
                f"Partial({self.reduce_op!r}): the reduction must be one of {', '.join(REDUCE_OPS)}{meant}"
            )

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


Placement: TypeAlias = Shard | Replicate | Partial


def cotangent(placement: Placement) -> Placement:
    """The placement of the gradient of a tensor placed as `placement`.

    Every term of a partial sum gets the same gradient, so a Partial becomes a Replicate.

    >>> cotangent(Shard(1)), cotangent(Partial())
    (Shard(dim=1), Replicate())
    """
    match placement:
        case Shard() | Replicate():
            return placement
        case Partial():
            return Replicate()
        case _:
            assert_never(placement)
