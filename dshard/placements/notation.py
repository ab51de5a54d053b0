"""One notation for placements, in reprs, errors, tests and on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dshard.errors import NotationError
from dshard.placements.types import REDUCE_OPS, Partial, Placement, Replicate, Shard
from dshard.validate import check_type

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
