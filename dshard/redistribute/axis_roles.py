"""Mesh axes that may trade places: redistributions that differ only in their names are planned once."""

from __future__ import annotations

from itertools import combinations

from dshard.caches import cached
from dshard.mesh import Mesh
from dshard.redistribute.price import RUNS
from dshard.topology import Link, Topology


@cached("links of a mesh", 256)
def links_of(mesh: Mesh, topology: Topology) -> dict[frozenset[int], tuple[Link, ...]]:
    """The link of each collective along each set of mesh axes; axes of one rank have none."""
    wide = [axis for axis, n in enumerate(mesh.shape) if n > 1]
    sets = [axes for count in range(1, len(wide) + 1) for axes in combinations(wide, count)]
    collectives = tuple(dict.fromkeys((None, *RUNS.values())))
    return {
        frozenset(axes): tuple(topology.link(mesh, [mesh.names[i] for i in axes], each) for each in collectives)
        for axes in sets
    }


@cached("mesh roles", 256)
def roles(mesh: Mesh, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Groups of mesh axes that may trade places: of one size, and with the same links, together with any others.

    >>> roles(Mesh((2, 2, 2), ("x", "y", "z")), Topology.preset("dgx-h100", nodes=2, ranks=4))
    ((0,), (1, 2))
    """
    links, groups = links_of(mesh, topology), list[list[int]]()
    for axis, n in enumerate(mesh.shape):
        for group in groups:
            if mesh.shape[group[0]] == n and (n == 1 or _trade(group[0], axis, links)):
                group.append(axis)
                break
        else:
            groups.append([axis])
    return tuple(map(tuple, groups))


def _trade(a: int, b: int, links: dict[frozenset[int], tuple[Link, ...]]) -> bool:
    return all(links[axes ^ {a, b}] == along for axes, along in links.items() if a in axes and b not in axes)
