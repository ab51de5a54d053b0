"""A tensor-parallel model under FSDP2 saves what one device has, and others load it: on other meshes, and alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard

import dshard
from dshard import Replicate, Shard, distribute_tensor
from dshard.comm import DeviceMesh
from dshard.testing import RankPool

FULL = states.StateDictOptions(full_state_dict=True)
LAYOUTS = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": Replicate()}
STEPS = 3
"""Steps before the state is saved; one more after it is loaded."""
Trained = tuple[nn.Module, torch.optim.Optimizer]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5)).double()


def laid_out(mesh: DeviceMesh) -> nn.Sequential:
    model = network()
    for name, placement in LAYOUTS.items():
        layer, _, leaf = name.partition(".")
        value = distribute_tensor(model.get_parameter(name).detach(), mesh, [placement])
        setattr(model.get_submodule(layer), leaf, nn.Parameter(value))
    return model


def with_optimizer(model: nn.Module) -> Trained:
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def step(trained: Trained, number: int, mesh: DeviceMesh | None = None, part: int | None = None) -> None:
    model, optimizer = trained
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    x = x if part is None else x.chunk(2)[part]
    model(x if mesh is None else distribute_tensor(x, mesh, [Replicate()])).square().sum().div(len(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def alone(steps: int) -> Trained:
    trained = with_optimizer(network())
    for number in range(steps):
        step(trained, number)
    return trained


def same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        mine = state[name].full_tensor() if isinstance(state[name], torch_tensor.DTensor) else state[name]
        torch.testing.assert_close(mine, value, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


def continued(trained: Trained, directory: str, kind: str, **where: Any) -> None:
    """Load a checkpoint, make one more step, and compare with one device."""
    if kind == "full":
        state: Any = torch.load(f"{directory}/full.pt")
    else:
        state = dict(zip(("model", "optimizer"), states.get_state_dict(*trained), strict=True))
        dcp.load(state, checkpoint_id=f"{directory}/sharded", no_dist=not where)
    options = FULL if kind == "full" and where else None
    loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    states.set_state_dict(*trained, **loaded, options=options)
    step(trained, STEPS, **where)
    same(dict(trained[0].named_parameters()), dict(alone(STEPS + 1)[0].named_parameters()))


def sharded() -> tuple[Trained, dict[str, Any]]:
    """The model under FSDP2 over tensor parallel, and where its steps are made."""
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = laid_out(mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return with_optimizer(model), {"mesh": mesh["tp"], "part": mesh["dp"].get_local_rank()}


def saved_and_loaded(directory: str) -> None:
    trained, where = sharded()
    for number in range(STEPS):
        step(trained, number, **where)
    full = dict(zip(("model", "optimizer"), states.get_state_dict(*trained, options=FULL), strict=True))
    model, optimizer = states.get_state_dict(*alone(STEPS))
    same(full["model"], model)
    for name in LAYOUTS:
        same(full["optimizer"]["state"][name], optimizer["state"][name])  # type: ignore[index]
    assert {type(value) for value in full["model"].values()} == {Tensor}
    if dist.get_rank() == 0:
        torch.save(full, f"{directory}/full.pt")
    parts = dict(zip(("model", "optimizer"), states.get_state_dict(*trained), strict=True))
    dcp.save(parts, checkpoint_id=f"{directory}/sharded")
    dist.barrier()
    line = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    for kind in ("full", "sharded"):
        continued(with_optimizer(laid_out(line)), directory, kind, mesh=line)
    again, where = sharded()
    continued(again, directory, "sharded", **where)


@pytest.mark.ranks
@pytest.mark.thorough
def test_what_fsdp_over_tensor_parallel_saves_is_loaded_anywhere(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(saved_and_loaded, str(tmp_path), timeout=300.0)
    for kind in ("full", "sharded"):
        continued(alone(0), str(tmp_path), kind)
