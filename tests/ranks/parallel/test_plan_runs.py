"""What `plan model` ranks and says that `parallelize` runs, it runs, and it equals one device."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import DeviceMesh, Mesh, Replicate, Shard, parallelize
from dshard.comm import as_mesh, plain
from dshard.errors import StrategyError
from dshard.parallel.strategies import axes_of
from dshard.pipeline import Pipeline, Stage
from dshard.simulate import FORMS, Model, Setup
from dshard.simulate.setup_search import MOST_TENSOR, setups
from dshard.simulate.training_step import setup_data
from dshard.testing import rank_pool, simulated, whole

MODEL = Model(layers=2, hidden=16, heads=8, sequence=4, ffn=24)
DEVICES, BATCH = 8, 8
RANKED = list(setups(MODEL, DEVICES, BATCH, list(FORMS.values()), MOST_TENSOR))
QUICK = {"tesseract, d=2 r=2 c=2", "ulysses x megatron-sp, cp=4 tp=2, 4 microbatches"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = MODEL.hidden
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, MODEL.qkv), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, MODEL.width), nn.Linear(MODEL.width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (MODEL.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@plain()
def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(MODEL.layers))).double()


@plain()
def batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, MODEL.sequence, MODEL.hidden, dtype=torch.float64, generator=generator)


@cache
def alone() -> tuple[Tensor, list[Tensor]]:
    model = build()
    out = model(batch())
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def written(setup: Setup, folder: Path) -> tuple[Path, Mesh]:
    """The file of a plan, and a mesh as it asks for."""
    path = folder / "plan.json"
    path.write_text(json.dumps(setup_data(setup)))
    return path, Mesh(setup.mesh.shape[1:], setup.mesh.names[1:])


ROWS = [
    pytest.param(setup, id=str(setup), marks=[] if str(setup) in QUICK else pytest.mark.thorough)
    for setup in RANKED
    if not setup.beyond
]


@pytest.mark.parametrize("setup", ROWS)
def test_every_row_that_is_said_to_run_equals_one_device(setup: Setup, tmp_path: Path) -> None:
    path, mesh = written(setup, tmp_path)
    expected, gradients = alone()
    with simulated(mesh):
        model = parallelize(build(), mesh, path, batch())
        found = []
        for part in batch().chunk(setup.microbatches):
            out = model(part)
            out.square().sum().backward()
            found.append(whole(out.detach()))

        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-9, atol=1e-9)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(whole(parameter.grad), gradient, rtol=1e-9, atol=1e-9)


def test_every_other_row_is_refused_with_what_it_asks_for(tmp_path: Path) -> None:
    others = [setup for setup in RANKED if setup.beyond]
    for setup in others:
        path, mesh = written(setup, tmp_path)
        with pytest.raises(StrategyError, match=f"asks for {' and '.join(setup.beyond)}, which parallelize does not"):
            parallelize(nn.Linear(2, 2), mesh, path, batch())
    assert {what for setup in others for what in setup.beyond} == {
        "pipeline stages",
        "recomputation",
        "a shared optimiser",
    }
    assert len(others) + len(ROWS) == len(RANKED)


# -- pipelines: each stage laid out by the strategy of the file, on real ranks

PIPED = [setup for setup in RANKED if setup.beyond == ("pipeline stages",)]


@plain()
def target() -> Tensor:
    return batch().flip(0)


def piped(setup: Setup) -> float:
    """The largest error of the loss and of the gradients of this rank's stage, in the second of two steps."""
    ranks = torch.arange(DEVICES).view(setup.mesh.shape)
    meshes = [DeviceMesh("cpu", part, mesh_dim_names=setup.mesh.names[1:]) for part in ranks]
    single, blocks = build(), build()
    expected = F.mse_loss(single(batch()), target())
    expected.backward()
    each, own = MODEL.layers // setup.stages, ranks.flatten(1).eq(dist.get_rank()).any(1).tolist().index(True)
    mine = slice(own * each, (own + 1) * each)
    lies = tuple(Shard(0) if axis.batch else Replicate() for axis in axes_of(setup.strategy, as_mesh(meshes[own])))
    part = parallelize(blocks[mine], meshes[own], setup.strategy, batch().chunk(setup.microbatches)[0])
    stages = [
        Stage(part if i == own else None, mesh, placements={"x": lies, "target": lies}) for i, mesh in enumerate(meshes)
    ]
    pipeline = Pipeline(stages, n_microbatches=setup.microbatches, loss=F.mse_loss)
    pipeline.step(batch(), target())
    part.zero_grad()
    found = [(pipeline.step(batch(), target()).detach() - expected.detach()).abs()]
    for parameter, theirs in zip(part.parameters(), single[mine].parameters(), strict=True):
        found.append((whole(parameter.grad) - theirs.grad).abs().max())
    return max(error.item() for error in found)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("setup", [pytest.param(setup, id=str(setup)) for setup in PIPED])
def test_every_pipeline_of_laid_out_stages_equals_one_device(setup: Setup) -> None:
    """Claim E5 on eight ranks: stages of data and tensor parallelism, two stages of (2, 2) among them."""
    assert max(rank_pool(DEVICES).run(piped, setup, timeout=300)) < 1e-9
