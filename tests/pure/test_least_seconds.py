"""The least seconds of a redistribution, where mesh axes cross hosts."""

from __future__ import annotations

from itertools import product

from dshard import Layout, Mesh, Partial, Replicate, Shard, Topology
from dshard.redistribute.plan import plan_price
from dshard.redistribute.space import space_of

WORDS = (Replicate(), Partial(), Shard(0), Shard(1))


def test_what_crosses_hosts_takes_its_time_though_a_gather_within_them_is_fast() -> None:
    """A gather along the axes of hosts and of their ranks is as fast as any, but receives more than is missing."""
    mesh, topology = Mesh((8, 8), ("hosts", "ranks")), Topology.preset("dgx-h100", nodes=8)
    space = space_of(mesh, topology, (256, 4096, 1024), 2)
    states = [space.state_of(Layout(mesh, each)) for each in product(WORDS, repeat=2)]
    pairs = list(product(states, repeat=2))
    assert all(space.least(*pair) <= plan_price(*pair, space).seconds * (1 + 1e-12) for pair in pairs)

    ends = [space.state_of(Layout(mesh, (end, Shard(0)))) for end in (Shard(1), Replicate())]
    assert space.least(*ends) >= 0.75 * plan_price(*ends, space).seconds
