"""What `plan model` ranks, `parallelize` runs, and it equals one device."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import THOROUGH
from torch import Tensor, nn

from dshard import DeviceMesh, Mesh, Replicate, Shard, Topology, parallelize, plan_model, use_topology
from dshard.comm import as_mesh, plain
from dshard.errors import MeshError, StrategyError
from dshard.parallel import PlanTable, plan_table
from dshard.parallel.strategies import axes_of
from dshard.pipeline import Pipeline, Stage
from dshard.testing import rank_pool, simulated, whole
from dshard.tools.calibrate.block_program import TransformerBlock

DEVICES, BATCH, TOKENS, HIDDEN, HEADS = 8, 8, 4, 16, 8
STRATEGIES = (
    "data x megatron",
    "fsdp x megatron-sp",
    "fsdp x context",
    "ulysses x megatron-sp",
    "tesseract",
    "fsdp x atp",
)


@plain()
def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(TransformerBlock(HIDDEN, HEADS) for _ in range(2))).double()


@plain()
def batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64, generator=generator)


@cache
def alone() -> tuple[Tensor, list[Tensor]]:
    model = build()
    out = model(batch())
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@cache
def ranked() -> PlanTable:
    """What is ranked for eight devices: all that is common, and all foldings of some."""
    model, x = build().to("meta"), batch().to("meta")
    topology = Topology.preset("dgx-h100")
    tables = [plan_table(model, DEVICES, topology, (x,), {}, strategies=names) for names in ((), STRATEGIES)]
    return replace(tables[0], plans=(*tables[0].plans, *tables[1].plans))


@pytest.mark.thorough
def test_every_row_equals_one_device(tmp_path: Path) -> None:
    expected, gradients = alone()
    rows = {(each.plan.strategy, each.mesh): each for each in ranked().plans}
    assert len(rows) > 12
    for i, each in enumerate(rows.values()):
        path = tmp_path / f"{i}.json"
        path.write_text(json.dumps(each.data()))
        with simulated(each.mesh):
            model = parallelize(build(), each.mesh, path, batch())
            out = model(batch())
            out.square().sum().backward()
            torch.testing.assert_close(whole(out.detach()), expected, rtol=1e-9, atol=1e-9)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(whole(parameter.grad), gradient, rtol=1e-9, atol=1e-9)


NAMED = ("planned", "fsdp", "data x megatron-sp")


@cache
def ranked_by_name() -> PlanTable:
    model, x = build().to("meta"), batch().to("meta")
    return plan_table(model, DEVICES, Topology.preset("dgx-h100"), (x,), {}, strategies=NAMED)


def test_the_table_and_plan_model_agree_to_the_digit() -> None:
    model, x = build().to("meta"), batch().to("meta")
    with use_topology(Topology.preset("dgx-h100")):
        for each in ranked_by_name().plans[:: 1 if THOROUGH else 3]:
            plan = each.plan if each.plan.strategy == "planned" else each.plan.strategy
            assert plan_model(model, each.mesh, plan, x).cost == each.plan.cost


def test_a_plan_is_for_a_mesh_of_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(ranked_by_name().plans[0].data()))
    with pytest.raises(MeshError, match="make one of that shape"):
        plan_model(build(), Mesh((2, 2, 2)), path, batch())
    path.write_text("{}")
    with pytest.raises(StrategyError, match="names no strategy"):
        plan_model(build(), Mesh((8,)), path, batch())


# -- pipelines: each stage laid out by the strategy of the file, on real ranks


class Piped(NamedTuple):
    """Stages, each laid out by a strategy on a mesh of this shape."""

    strategy: str
    shape: tuple[int, ...]
    stages: int
    microbatches: int


PIPED = [
    Piped("data x megatron", (2, 2), 2, 2),
    Piped("fsdp x megatron", (2, 2), 2, 4),
    Piped("data x megatron-sp", (2, 2), 2, 4),
    Piped("data x data", (1, 4), 2, 2),
    Piped("optimus", (2, 2), 2, 2),
]


@plain()
def target() -> Tensor:
    return batch().flip(0)


def piped(setup: Piped) -> float:
    """The largest error of the loss and of the gradients of this rank's stage, in the second of two steps."""
    ranks = torch.arange(DEVICES).view(setup.stages, *setup.shape)
    meshes = [DeviceMesh("cpu", part, mesh_dim_names=("dp", "tp")) for part in ranks]
    single, blocks = build(), build()
    expected = F.mse_loss(single(batch()), target())
    expected.backward()
    each, own = 2 // setup.stages, ranks.flatten(1).eq(dist.get_rank()).any(1).tolist().index(True)
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
def test_every_pipeline_of_laid_out_stages_equals_one_device(setup: Piped) -> None:
    """Claim E5 on eight ranks: stages of data and tensor parallelism, two stages of (2, 2) among them."""
    assert max(rank_pool(DEVICES).run(piped, setup, timeout=300)) < 1e-9
