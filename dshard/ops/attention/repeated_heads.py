"""Loop h over more ranks than there are key heads: a rank receives only the key heads of its queries.

Each key head is first repeated on the rank that stores a part of it, once for each group of ranks that needs it. Then
loop h can shard the heads, and an all_to_all sends every rank its own. The gradients of a head's copies are summed on
that rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import Any

from dshard.autograd.crossing import redistribute
from dshard.core.executable import ComposedExecutable, Executable
from dshard.core.observe import Decision
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.wrapper import is_recorded
from dshard.layout import Shape
from dshard.mesh import Mesh
from dshard.ops.composite import SavedOperands, run_recorded
from dshard.placements import Shard
from dshard.rules.strategy import Strategy


class RepeatedKeyHeads(ComposedExecutable):
    """Attention of key heads that are repeated `times` times; `attention` runs on the repeated heads."""

    def __init__(self, decision: Decision, strategy: Strategy, times: int, attention: Executable) -> None:
        super().__init__(decision, self._run)
        self.strategy, self.times, self.attention = strategy, times, attention

    def _run(self, tensors: Args, kwargs: Kwargs) -> Any:
        moved = [
            x.repeat_interleave(self.times, -3) if i in (1, 2) else redistribute(x, layout)
            for i, (x, layout) in enumerate(zip(tensors, self.strategy.inputs, strict=True))
        ]
        if is_recorded(tensors):
            return SavedOperands.apply(run_recorded(self.attention, *moved), *tensors)  # type: ignore[no-untyped-call]
        return self.attention(moved)


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
    return [
        contiguous_spec(spec.layout, shape, spec.dtype, spec.device) if i in (1, 2) else spec
        for i, spec in enumerate(specs)
        for shape in (_repeated_shape(spec.shape, times),)
    ]


def _repeated_shape(shape: Shape, times: int) -> Shape:
    return (*shape[:-3], shape[-3] * times, *shape[-2:]) if len(shape) > 2 else shape
