"""See what a layer costs on 512 GPUs, on a laptop: no processes, no data.

python examples/plan_before_launch.py
"""

import torch
import torch.nn.functional as F

from dshard import Mesh, Replicate, Shard, Topology, distribute_tensor, explain, use_topology

TOKENS, WIDTH = 65536, 8192
mesh = Mesh((64, 8), ("dp", "tp"), device_type="cuda")


def mlp(x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, w_in)), w_out)


def laid(*shape: int, placements: list) -> torch.Tensor:
    return distribute_tensor(torch.empty(shape, dtype=torch.bfloat16, device="meta"), mesh, placements)


x = laid(TOKENS, WIDTH, placements=[Shard(0), Replicate()])
w_in = laid(4 * WIDTH, WIDTH, placements=[Replicate(), Shard(0)])
w_out = laid(WIDTH, 4 * WIDTH, placements=[Replicate(), Shard(1)])

with use_topology(Topology.preset("dgx-h100", nodes=64)):
    report = explain(mlp, x, w_in, w_out)
    partial = mlp(x, w_in, w_out)
    print(report)
    print("\nbringing the result together:", explain(partial.redistribute, mesh, [Shard(0), Replicate()]), sep="\n")
