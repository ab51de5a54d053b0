"""Loop h over more ranks than there are key heads: a rank receives only the key heads of its queries.

Each key head is first repeated on the rank that stores a part of it, once for each group of ranks that needs it. Then
loop h can shard the heads, and an all_to_all sends every rank its own. The gradients of a head's copies are summed on
that rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod

from dshard.core.spec import Spec, contiguous_spec
from dshard.layout import Shape
from dshard.mesh import Mesh
from dshard.placements import Shard


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
