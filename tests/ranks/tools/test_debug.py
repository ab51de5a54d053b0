"""torch's debugging helpers by their names: the counts and drawings that torch gives."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.distributed.tensor.debug as their_debug
import torch.distributed.tensor.experimental as their_experimental
from torch import nn

import dshard
import dshard.debug
import dshard.experimental
from dshard import Layout, Mesh, Partial, Replicate, Shard
from dshard.debug import CommDebugMode, visualize_sharding
from dshard.testing import RankPool, distribute, simulated

GRID = Mesh((2, 2), ("dp", "tp"))
OPS = torch.ops.c10d_functional


@functools.cache
def mesh_of_four() -> Any:
    return dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def counts(library: Any, mode: Any) -> list[dict[str, int]]:
    """The collectives of some redistributions, as `mode` counts them."""
    mesh, whole, split = mesh_of_four(), [library.Replicate()], [library.Shard(0)]
    x = library.DTensor.from_local(torch.ones(4, 8), mesh, split, shape=(16, 8), stride=(8, 1))
    term = library.DTensor.from_local(torch.ones(16, 8), mesh, [library.Partial()], shape=(16, 8), stride=(8, 1))
    programs = [
        lambda: x.redistribute(mesh, whole),
        lambda: term.redistribute(mesh, whole),
        lambda: term.redistribute(mesh, split),
        lambda: x + x,
        lambda: x.redistribute(mesh, whole).sum() + term.redistribute(mesh, whole).sum(),
    ]
    found = []
    for program in programs:
        with mode() as comm:
            program()
        found.append({str(op): n for op, n in comm.get_comm_counts().items() if n})
        assert comm.get_total_counts() == sum(found[-1].values())
    return found


def both() -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    return counts(dshard, CommDebugMode), counts(theirs, their_debug.CommDebugMode)


@pytest.mark.ranks
def test_collectives_are_counted_as_torch_counts_its_own(ranks: RankPool) -> None:
    for ours, torchs in ranks.run(both):
        assert ours == torchs
        assert ours[0] == {"c10d_functional.all_gather_into_tensor": 1}


def test_a_model_is_told_by_module(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    with simulated(GRID):
        net[0].weight = nn.Parameter(distribute(net[0].weight.detach(), Layout(GRID, (Replicate(), Shard(0)))))
        net[2].weight = nn.Parameter(distribute(net[2].weight.detach(), Layout(GRID, (Replicate(), Shard(1)))))
        net[0].bias = net[2].bias = None
        x = distribute(torch.ones(4096, 64), Layout(GRID, (Shard(0), Replicate())))
        with CommDebugMode() as comm:
            net(x).redistribute(placements=[Shard(0), Replicate()])

    assert comm.get_comm_counts() == {OPS.all_reduce: 1}
    assert comm.get_comm_counts()[OPS.broadcast] == 0
    assert comm.get_sharding_info() == {
        "Sequential.0.weight": (Replicate(), Shard(0)),
        "Sequential.2.weight": (Replicate(), Shard(1)),
    }
    assert comm.get_parameter_info()["Sequential.0"]["weight"].shape == (256, 64)
    assert repr(comm) == "CommDebugMode(get_total_counts()=1)"
    assert "all_reduce" in comm.generate_comm_debug_tracing_table(0)
    assert "Sequential.0.weight" not in comm.generate_comm_debug_tracing_table(0)
    comm.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"))
    assert "Sequential.0.weight  R S(0)" in (tmp_path / "log.txt").read_text()
    comm.generate_json_dump(str(tmp_path / "log.json"))
    assert json.loads((tmp_path / "log.json").read_text())["sharding"]["Sequential.2.weight"] == ["R", "S(1)"]


def test_a_tensor_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.zeros(5, 4)
    with simulated(GRID):
        visualize_sharding(distribute(x, Layout(GRID, (Shard(0), Shard(1)))), header="grid")
        visualize_sharding(distribute(x[:, 0], Layout(GRID, (Replicate(), Shard(0)))))
        visualize_sharding(distribute(x[:1], Layout(GRID, (Partial(), Shard(0)))), use_rich=True)
        visualize_sharding(distribute(x[:0], Layout(GRID, (Shard(0), Shard(1)))))
        with pytest.raises(RuntimeError, match="draws tensors of one or two dims, and this one has 3"):
            visualize_sharding(distribute(torch.zeros(2, 2, 2), Layout(GRID, (Shard(0), Shard(1)))))

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:5] == [
        "grid",
        "         Col 0-1  Col 2-3",
        "-------  -------  -------",
        "Row 0-2  cpu:0    cpu:1",
        "Row 3-4  cpu:2    cpu:3",
    ]
    assert lines[5:9] == ["         Col 0-0", "-------  -------", "Row 0-2  cpu:0,2", "Row 3-4  cpu:1,3"]
    assert any("Row 0-0" in line and "cpu:0,2" in line for line in lines[9:])


def test_all_of_torchs_names_are_here() -> None:
    for name in theirs.__all__:
        assert hasattr(dshard, name), name
    for name in their_debug.__all__:
        assert hasattr(dshard.debug, name)
    public = {n for n in dir(their_debug.CommDebugMode) if n.startswith(("get_", "generate_", "log_"))}
    for name in public:
        mine, reference = getattr(CommDebugMode, name), getattr(their_debug.CommDebugMode, name)
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(reference).parameters)
    for name in ("local_map", "register_sharding"):
        mine, reference = getattr(dshard.experimental, name), getattr(their_experimental, name)
        names = [each for each in inspect.signature(reference).parameters if each != "spmd_types"]  # a package's types
        assert list(inspect.signature(mine).parameters) == names
