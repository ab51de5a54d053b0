"""Random values in a compiled graph: the draw is taken when the graph runs, not when it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from dshard.layout import Region, Shape
from dshard.ops.random import draw
from dshard.ops.random.distributions import Distribution, named
from dshard.ops.random.state import Draw, next_draw

_SIGN = 1 << 63
_SITES = count()
_LIBRARY = torch.library.Library("dshard", "DEF")
# `site` tells the draws of a graph apart, for equal calls would be merged. A checkpointed region takes its draws again
# in the backward pass, under the state that torch's generator for the device of `anchor` had: the CPU's has our mark.
_LIBRARY.define("next_draw(Tensor anchor, int site) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("drawn(Tensor like, Tensor draw, int[] shape, int[] starts, int[] stops, str distribution) -> Tensor")


def filled_later(like: Tensor, shape: Shape, region: Region, distribution: Distribution) -> Tensor:
    """A tensor like the local tensor `like` with the elements in `region` of a global random tensor of this shape."""
    starts, stops = [part.start for part in region], [part.stop for part in region]
    taken = torch.ops.dshard.next_draw(torch.empty(0), next(_SITES))
    local: Tensor = torch.ops.dshard.drawn(like, taken, list(shape), starts, stops, str(distribution))
    return local


def _next_draw(anchor: Tensor, site: int) -> Tensor:
    draw = next_draw(None)
    return torch.tensor([draw.seed - _SIGN, draw.number])


def _drawn(
    like: Tensor, draw_: Tensor, shape: Sequence[int], starts: Sequence[int], stops: Sequence[int], distribution: str
) -> Tensor:
    seed, number = draw_.tolist()
    out = torch.empty_like(like)
    draw.fill(out, tuple(shape), tuple(map(range, starts, stops)), Draw(seed + _SIGN, number), named(distribution))
    return out


_LIBRARY.impl("next_draw", _next_draw, "CompositeExplicitAutograd")
_LIBRARY.impl("drawn", _drawn, "CompositeExplicitAutograd")
torch.library.register_fake(
    "dshard::next_draw", lambda anchor, site: anchor.new_empty(2, dtype=torch.int64), lib=_LIBRARY
)
torch.library.register_fake("dshard::drawn", lambda like, *rest: torch.empty_like(like), lib=_LIBRARY)
