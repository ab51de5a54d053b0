"""A mesh of one rank needs nothing that starts ranks: the same program runs alone, and in a notebook."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
import dshard
mesh = dshard.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
expected = model(torch.ones(4, 4)).sum()
model = dshard.parallelize(model, mesh, "data x megatron", torch.ones(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
loss = model(torch.ones(4, 4)).sum()
loss.backward()
optimizer.step()
assert torch.equal(loss.full_tensor(), expected)
optimizer.zero_grad()
with torch.profiler.profile(record_shapes=True) as profile:
    model(torch.ones(4, 4)).sum().backward()
weights = [list(p.shape) for p in model.parameters()]
copied = [e for e in profile.events() if e.name in ("aten::clone", "aten::copy_") and e.input_shapes[:1] in weights]
assert not copied, copied
print(dist.get_world_size(), dist.get_backend())
"""


@pytest.mark.thorough
def test_a_program_runs_alone_and_copies_no_gradient():
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "gloo"]
