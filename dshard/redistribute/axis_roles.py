"""Interchangeable mesh axes: redistributions that differ only by such a permutation are planned once."""

from __future__ import annotations

from itertools import combinations

from dshard.caches import cached
from dshard.cost import Terms, terms_of
from dshard.mesh import Mesh
from dshard.redistribute.layout_state import RUNS
from dshard.topology import Collective, Topology

COLLECTIVES = tuple(collective for collective in dict.fromkeys(RUNS.values()) if collective is not None)
"""The collectives that steps run."""


@cached("network", 256)
def step_terms(mesh: Mesh, topology: Topology) -> dict[frozenset[int], dict[Collective, Terms]]:
    """The terms of each collective that steps run along each set of mesh axes; axes of one rank have none."""
    wide = [axis for axis, n in enumerate(mesh.shape) if n > 1]
    terms: dict[frozenset[int], dict[Collective, Terms]] = {}
    for axes in [axes for count in range(1, len(wide) + 1) for axes in combinations(wide, count)]:
        names = tuple([mesh.names[axis] for axis in axes])
        terms[frozenset(axes)] = {each: terms_of(each, mesh, names, topology) for each in COLLECTIVES}
    return terms


@cached("network", 256)
def roles(mesh: Mesh, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Groups of interchangeable mesh axes: of one size, and with the same terms, also together with any others.

    >>> roles(Mesh((2, 2, 2), ("x", "y", "z")), Topology.preset("dgx-h100", nodes=2, ranks=4))
    ((0,), (1, 2))
    """
    terms, groups = step_terms(mesh, topology), list[list[int]]()
    for axis, n in enumerate(mesh.shape):
        for group in groups:
            if mesh.shape[group[0]] == n and (n == 1 or _trade(group[0], axis, terms)):
                group.append(axis)
                break
        else:
            groups.append([axis])
    return tuple(map(tuple, groups))


def _trade(a: int, b: int, terms: dict[frozenset[int], dict[Collective, Terms]]) -> bool:
    return all(terms[axes ^ {a, b}] == along for axes, along in terms.items() if a in axes and b not in axes)
