"""The placement of a tensor on one mesh axis: a closed union of frozen values.

They have the methods of torch's placements, and equal those that say the same, with the same hash.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from typing_extensions import Self, assert_never

from dshard.errors import LayoutError, NotationError
from dshard.validate import as_int, check_type, of_wrong_type, suggestion

ReduceOp: TypeAlias = Literal["sum", "avg", "product", "max", "min"]
REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)
TORCH_PLACEMENTS = "torch.distributed.tensor.placement_types"
"""The module of torch's placements, by which they are known here without torch."""


TORCH_TWINS: dict[type, type] = {}
"""For each class below the one that derives from torch's, too, whose instances are made; empty until torch is there.

These initialise what they make in `__new__`.
"""


_MADE: dict[tuple[object, ...], Any] = {}
"""The one placement of a class with these arguments."""
_OF_FIELDS = {int, str}


class _Placement:
    """The questions that torch's placements answer. No slots: `TORCH_TWINS` derive from torch's, too."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        known: Any = _MADE.get((cls, *args)) if {*map(type, args)} <= _OF_FIELDS and not kwargs else None
        if known is not None:
            return known  # type: ignore[no-any-return]
        kind: Any = TORCH_TWINS.get(cls)
        if kind is None:
            return super().__new__(cls)
        made: Any = kind.__new__(kind, *args, **kwargs)
        return _MADE.setdefault((cls, *args), made) if not kwargs else made  # type: ignore[no-any-return]

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a Shard, of tensor dim `dim` if one is given."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Whether this is a Replicate."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a Partial, of the reduction `reduce_op` if one is given."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


def _is_torchs(placement: object, name: str) -> bool:
    """Whether this is a placement of torch's class of this name."""
    kind = type(placement)
    return kind.__name__ == name and kind.__module__ == TORCH_PLACEMENTS


@dataclass(frozen=True, eq=False)
class Shard(_Placement):
    """Each rank holds one chunk of tensor dimension `dim`, or one of each of `blocks` equal blocks of it.

    Blocks are for tensors of which parts are packed along a dim: gate and up are 2, query, key and value are 3. A rank
    holds its chunk of each part, one after the other, so that it takes the parts apart by itself. It is what
    `Shard(dim + 1)` is of the tensor with the dim unflattened to (blocks, size / blocks).

    >>> str(Shard(0)), str(Shard(0, blocks=2))
    ('S(0)', 'S(0,blocks=2)')

    Raises:
        LayoutError: a dim or a number of blocks that is no int, or less than one block.
    """

    dim: int
    blocks: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", checked_dim(self.dim))
        object.__setattr__(self, "blocks", checked_blocks(self.blocks))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Shard):
            return self.dim == other.dim and self.blocks == other.blocks
        if _is_torchs(other, "Shard"):
            return self.blocks == 1 and self.dim == other.dim  # type: ignore[attr-defined]
        return _is_torchs(other, "_StridedShard") and (self.dim, self.blocks) == (other.dim, other.split_factor)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.dim) if self.blocks == 1 else hash((self.dim, self.blocks))

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})" if self.blocks == 1 else f"Shard(dim={self.dim}, blocks={self.blocks})"

    def __str__(self) -> str:
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim},blocks={self.blocks})"


@dataclass(frozen=True, eq=False)
class Replicate(_Placement):
    """Each rank holds the whole tensor.

    >>> str(Replicate())
    'R'
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replicate) or _is_torchs(other, "Replicate")

    __hash__ = (-1).__hash__  # torch's, without a call of Python: layouts are made of these

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, eq=False)
class Partial(_Placement):
    """Each rank holds one term of a reduction; the tensor is the reduced value.

    >>> str(Partial())
    'P(sum)'

    Raises:
        LayoutError: `reduce_op` is not one of sum, avg, product, max, min.
    """

    reduce_op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        checked_reduce_op(self.reduce_op)

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, Partial) or _is_torchs(other, "Partial")) and self.reduce_op == other.reduce_op  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return 1 + hash(self.reduce_op)

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


def checked_dim(dim: Any) -> int:
    """The tensor dim of a Shard."""
    if type(dim) is int:
        return dim
    try:
        return as_int(dim, "dim", LayoutError)
    except LayoutError:
        raise of_wrong_type(LayoutError)(f"Shard({dim!r}): the tensor dim must be an int, such as Shard(0)") from None


def checked_blocks(blocks: Any) -> int:
    """The number of blocks of a Shard."""
    try:
        number = as_int(blocks, "blocks", LayoutError)
    except LayoutError:
        kind = of_wrong_type(LayoutError)
        raise kind(f"Shard(dim, blocks={blocks!r}): the number of equal blocks must be an int, such as 2") from None
    if number < 1:
        raise LayoutError(f"Shard(dim, blocks={number}): a dim has at least one block; leave blocks out for one")
    return number


def checked_reduce_op(reduce_op: Any) -> ReduceOp:
    """The reduction of a Partial."""
    if reduce_op not in REDUCE_OPS:
        meant = "; did you mean 'avg'?" if str(reduce_op) == "mean" else suggestion(reduce_op, REDUCE_OPS)
        kind = LayoutError if isinstance(reduce_op, str) else of_wrong_type(LayoutError)
        raise kind(f"Partial({reduce_op!r}): the reduction must be one of {', '.join(REDUCE_OPS)}{meant}")
    return reduce_op  # type: ignore[no-any-return]


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


# -- the one notation, in reprs, errors, tests and on the command line

_SHARD = re.compile(r"S\((-?\d+)(?:,blocks=(\d+))?\)")
_PARTIAL = re.compile(r"P(?:\((\w+)\))?")
_LEGAL = f"R, S(dim) or P(op) with op one of {', '.join(REDUCE_OPS)}; S(dim,blocks=n) is of n blocks"


def parse_placement(text: str) -> Placement:
    """The placement that `text` writes: `R`, `S(0)`, `S(0,blocks=2)`, `P(sum)` or `P`.

    >>> parse_placement("S(1)"), parse_placement("P(max)")
    (Shard(dim=1), Partial(reduce_op='max'))
    """
    check_type(text, str, "a placement", f"write {_LEGAL}", NotationError)
    text = text.strip()
    if text == "R":
        return Replicate()
    if match := _SHARD.fullmatch(text):
        return Shard(int(match[1])) if match[2] is None else Shard(int(match[1]), blocks=int(match[2]))
    match = _PARTIAL.fullmatch(text)
    if match and (match[1] or "sum") in REDUCE_OPS:
        return Partial(match[1] or "sum")  # type: ignore[arg-type]  # membership was just checked
    raise NotationError(f"{text!r} is no placement: write {_LEGAL}")


def format_placements(placements: Sequence[Placement], names: Sequence[str] | None = None) -> str:
    """`placements` in the notation, each after the name of its mesh axis where names are given.

    >>> format_placements([Shard(0), Replicate()], ["dp", "tp"])
    'dp:S(0) tp:R'
    >>> format_placements([Shard(0), Replicate()])
    'S(0) R'
    """
    if names is None:
        return " ".join(map(str, placements))
    return " ".join(f"{name}:{placement}" for name, placement in zip(names, placements, strict=True))


def parse_placements(text: str, names: Sequence[str] | None = None) -> tuple[Placement, ...]:
    """The placements that `text` writes, one for each mesh axis, in the axes' order.

    >>> parse_placements("dp:S(0) tp:R", ["dp", "tp"])
    (Shard(dim=0), Replicate())
    """
    check_type(text, str, "placements", "write one for each mesh axis, as in 'dp:S(0) tp:R'", NotationError)
    words = text.split()
    if names is None:
        return tuple(map(parse_placement, words))
    pairs = [word.partition(":") for word in words]
    if [name for name, _, _ in pairs] != list(names):
        raise NotationError(f"{text!r} must name the mesh axes {', '.join(names)}, in this order, as in 'axis:S(0)'")
    return tuple(parse_placement(placement) for _, _, placement in pairs)
