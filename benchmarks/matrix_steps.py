"""A step of Muon on matrices that are sharded over four ranks, by itself and planned, with owners and without.

    python benchmarks/matrix_steps.py [--matrices 16] [--size 256] [--steps 5]

Ranks are processes of this machine that send over gloo. Of each way it prints the fastest step's seconds, the bytes
that the first rank received in it, and its collectives.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from unittest.mock import patch

import torch
from torch import nn

from dshard import Shard, distribute_tensor, init_device_mesh, trace
from dshard.parallel import plan_steps, planned_steps
from dshard.testing import rank_pool

WARM = 3
WAYS = ("by itself", "planned layouts", "planned, with owners")


def timed(way: str, matrices: int, size: int, steps: int) -> tuple[float, int, int]:
    """Seconds, received bytes and collectives of a step."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    torch.manual_seed(0)
    parameters = []
    for _ in range(matrices):
        value, grad = torch.randn(2, size, size)
        p = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None))
        p.grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
        parameters.append(p)
    optimizer = torch.optim.Muon(parameters)
    if way != WAYS[0]:
        plan_steps(optimizer)
    without = patch.object(planned_steps, "owners_plan", lambda planned: None)
    with without if way == WAYS[1] else patch.dict({}):
        for _ in range(WARM):
            optimizer.step()
        seconds = []
        for _ in range(steps):
            begin = perf_counter()
            with trace() as sent:
                optimizer.step()
            seconds.append(perf_counter() - begin)
    return min(seconds), sum(event.nbytes for event in sent.events), len(sent.events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("matrices", 16), ("size", 256), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with rank_pool(4) as pool:
        for way in WAYS:
            found = pool.run(timed, way, options.matrices, options.size, options.steps, timeout=600.0)
            seconds, nbytes, collectives = found[0]
            print(f"{way:22} {seconds:8.3f} s {nbytes / 1e6:8.2f} MB {collectives:5} collectives")


if __name__ == "__main__":
    main()
