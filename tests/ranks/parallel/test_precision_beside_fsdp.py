"""Losses with weights and gradients in other dtypes, beside FSDP2 with the same policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.token_net import Net
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dshard import Shard, distribute_tensor, init_device_mesh, parallelize
from dshard.testing import RankPool


def losses(policy: MixedPrecisionPolicy, peer: bool) -> list[float]:
    """Mean losses of four steps."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    ids = torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(1))
    targets: Any = ids
    model: nn.Module = Net()
    if peer:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=replace(policy, output_dtype=None))
        fully_shard(model, mesh=mesh, mp_policy=policy)
        ids = targets = ids.chunk(4)[dist.get_rank()]
    else:
        parallelize(model, mesh, "fsdp", ids, precision=policy)
        targets = distribute_tensor(ids, mesh, [Shard(0)], src_data_rank=None)
    optimiser, seen = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    for _ in range(4):
        optimiser.zero_grad()
        loss: Any = F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten(0, 1))
        loss.backward()
        optimiser.step()
        mean = loss.detach().clone() if peer else loss.detach().full_tensor()
        if peer:
            dist.all_reduce(mean)
            mean /= 4
        seen.append(mean.item())
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        (MixedPrecisionPolicy(), 1e-6),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 1e-6),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32), 1e-6),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), 1e-2),
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), 1e-2),
    ],
)
def test_losses_are_those_of_fsdp(ranks: RankPool, policy: MixedPrecisionPolicy, tolerance: float):
    ours, theirs = (ranks.run(losses, policy, peer, timeout=200.0)[0] for peer in (False, True))
    assert ours[0] - ours[-1] > 0.2, "it learns"
    assert ours == pytest.approx(theirs, rel=tolerance)
