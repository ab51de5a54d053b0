"""What torch trains models with, given models of distributed parameters: as one device, or refused at the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in
from torch import Tensor, nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.func import functional_call
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dshard import DTensor, MeshError, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from dshard.comm import DeviceMesh, listen
from dshard.testing import RankPool
from dshard.torch_dtensor import IS_TORCHS

pytestmark = pytest.mark.skipif(not IS_TORCHS, reason="torch 2.11 cannot carry a subclass of its DTensor")

MEGATRON = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": Replicate()}


def network(features: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, features)).double()


def laid_out(model: nn.Sequential, mesh: DeviceMesh, *others: Placement) -> nn.Sequential:
    """`model` with its parameters on the last axis of `mesh` as Megatron has them, and on the others as given."""
    for name, placement in MEGATRON.items():
        layer, _, leaf = name.partition(".")
        value = distribute_tensor(model.get_parameter(name).detach(), mesh, [*others, placement])
        setattr(model.get_submodule(layer), leaf, nn.Parameter(value))
    return model


def data(mesh: DeviceMesh, x: Tensor) -> DTensor:
    return distribute_tensor(x, mesh, [Replicate()], src_data_rank=None)


def same(mine: Sequence[Any], theirs: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    for p, q in zip(mine, theirs, strict=True):
        assert isinstance(p, torch_tensor.DTensor)
        torch.testing.assert_close(p.full_tensor().detach(), q.detach(), rtol=tolerance, atol=tolerance)


# -- data parallelism

flatten = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))


def refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    dp, tp = mesh["dp"], mesh["tp"]
    groups: list[tuple[nn.Module, Any]] = [(laid_out(network(), line), line), (laid_out(network(), tp), None)]
    groups += [(laid_out(network(), mesh, Replicate()), over) for over in (dp, mesh)]
    assert not any(hasattr(p, "_fsdp_flattened") for model, _ in groups for p in model.parameters())
    events: list[Any] = []
    shared = r"{} between ranks \d, \d.* of the same ranks: it would take each rank's part for the whole; lay the model"
    with listen(events.append):
        for model, over in groups:
            with pytest.raises(MeshError, match=shared.format("fully_shard")):
                fully_shard(model, mesh=over)
        for model, over in groups[:2]:
            with pytest.raises(MeshError, match=shared.format("FullyShardedDataParallel")):
                flatten(model, process_group=over and over.get_group())
        with pytest.raises(MeshError, match=shared.format("FullyShardedDataParallel")):
            flatten(laid_out(network(), mesh, Replicate()), device_mesh=dp)
        with pytest.raises(MeshError, match=r"flattens them as if they were plain .* device_mesh=mesh\[\"dp\"\]"):
            flatten(laid_out(network(), tp), process_group=dp.get_group())
    assert {event.collective for event in events} <= {"scatter", "broadcast"}  # what lays the models out


def flattened() -> None:
    """FSDP1 takes the local tensors where it has the mesh of the data axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    mine: Any = flatten(laid_out(network(), tp), device_mesh=dp, use_orig_params=True)
    theirs = network()
    steps = [AdamW(model.parameters(), lr=0.02) for model in (mine, theirs)]
    for _ in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        mine(data(tp, x.chunk(2)[dp.get_local_rank()])).square().sum().div(2).backward()
        theirs(x).square().sum().div(4).backward()
        for optimiser in steps:
            optimiser.step()
            optimiser.zero_grad()
    with FullyShardedDataParallel.summon_full_params(mine):
        same(list(mine.parameters()), list(theirs.parameters()))


# -- torch's pipelines


class Stage(nn.Module):
    """A stage of a pipeline that takes and gives local tensors, or distributed ones."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh, local: bool) -> None:
        super().__init__()
        self.block, self.mesh, self.local = block, mesh, local

    def forward(self, x: Tensor) -> Tensor:
        given = x if isinstance(x, torch_tensor.DTensor) else DTensor.from_local(x, self.mesh, [Replicate()])
        out = self.block(given).redistribute(placements=[Replicate()])
        return out.to_local() if self.local else out  # type: ignore[no-any-return]


def whole(x: Any) -> Tensor:
    value: Tensor = x.full_tensor() if isinstance(x, torch_tensor.DTensor) else x
    return value


def piped() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    tp, stage, pp = mesh["tp"], mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    for schedule in (ScheduleGPipe, Schedule1F1B):
        for local in (True, False):
            blocks = [network(6), network(6)]
            theirs = nn.Sequential(*deepcopy(blocks))
            mine = laid_out(blocks[stage], tp)
            module = Stage(mine, tp, local)
            part = PipelineStage(module, stage, 2, torch.device("cpu"), group=pp, get_mesh=lambda names, layout: tp)
            run = schedule(part, 4, loss_fn=lambda y, t: (whole(y) - t).square().mean())
            losses: list[Tensor] = []
            run.step(x) if stage == 0 else run.step(target=target, losses=losses)
            pairs = zip(x.chunk(4), target.chunk(4), strict=True)
            expected = [(theirs(a) - b).square().mean() for a, b in pairs]
            torch.stack(expected).mean().backward()
            if losses:
                torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
            same([p.grad for p in mine.parameters()], [p.grad for p in theirs[stage].parameters()])  # type: ignore[misc]


# -- what is around a model


def averaged() -> None:
    mesh, x = init_device_mesh("cpu", (4,)), torch.ones(4, 6, dtype=torch.float64)
    for how in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"avg_fn": lambda a, p, n: 0.9 * a + 0.1 * p}):
        models = [laid_out(network(), mesh), network()]
        averages: list[Any] = [AveragedModel(model, **how) for model in models]  # type: ignore[arg-type]
        for model, average, given in zip(models, averages, (data(mesh, x), x), strict=True):
            optimiser = SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimiser.zero_grad()
                model(given).square().sum().backward()
                optimiser.step()
                average.update_parameters(model)
        assert {type(p) for p in averages[0].parameters()} == {DTensor}
        same(*[list(average.parameters()) for average in averages])


def called() -> None:
    mesh, x = init_device_mesh("cpu", (4,)), torch.ones(4, 6, dtype=torch.float64)
    models = [laid_out(network(), mesh), network()]
    given: list[dict[str, Any]] = [
        {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()} for model in models
    ]
    outs = [
        functional_call(model, params, (y,)).square().sum()
        for model, params, y in zip(models, given, (data(mesh, x), x), strict=True)
    ]
    for out in outs:
        out.backward()
    same(outs[:1], outs[1:])
    same(*[[p.grad for p in params.values()] for params in given])


def scaled() -> None:
    """Mixed precision with a scaled loss, one of which is infinite on every rank: the step is left out on all."""
    mesh = init_device_mesh("cpu", (4,))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    models, scales = [laid_out(network().float(), mesh), network().float()], []
    for model, given in zip(models, (data(mesh, x), x), strict=True):
        optimiser = AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for i in range(4):
            optimiser.zero_grad()
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                y = model(given)
            assert y.dtype == torch.bfloat16
            loss = y.float().square().sum() * (torch.inf if i == 2 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimiser)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimiser)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [256.0, 256.0]  # doubled after two steps, halved after the infinite one
    same(*[list(model.parameters()) for model in models], tolerance=1e-2)  # type: ignore[arg-type, misc]


@pytest.mark.ranks
@pytest.mark.parametrize("program", one_in(2, [refused, flattened, piped, averaged, called, scaled]))
def test_torch_trains_distributed_models(ranks: RankPool, program: Callable[[], None]) -> None:
    ranks.run(program)
