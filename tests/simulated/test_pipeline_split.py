"""A module cut into parts is the module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dshard import Mesh, Shard, distribute_module, distribute_tensor
from dshard.errors import ScheduleError
from dshard.pipeline import Stage, edges_of, split
from dshard.testing import simulated, whole


class Net(nn.Module):
    """A skip over a stage, and an argument that only the last stage needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(12, 4)
        self.d = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.a(x).relu()
        k = self.c(torch.cat([self.b(h).relu(), h], 1))
        return self.d(k.tanh()) * mask + h[:, :4]


def run(parts, values):
    for part in parts:
        out = part.module(*(values[name] for name in part.takes))
        values.update(zip(part.gives, out if isinstance(out, tuple) else (out,), strict=True))
    return values[parts[-1].gives[0]]


def test_the_parts_one_after_the_other_are_the_module():
    net, x, mask = Net(), torch.randn(3, 4), torch.randn(3, 4)

    parts = split(net, (x, mask), at=["b", "d"])

    edges = edges_of([(part.takes, part.gives) for part in parts], batch=["x", "mask"])
    assert [(edge.src, edge.dst) for edge in edges] == [(0, 1), (0, 2), (1, 2)]
    torch.testing.assert_close(run(parts, {"x": x, "mask": mask}), net(x, mask))
    assert [sorted({n.partition(".")[0] for n, _ in part.module.named_parameters()}) for part in parts] == [
        ["a"],
        ["b", "c"],
        ["d"],
    ]


def test_parts_run_on_distributed_tensors():
    net, x, mask = Net(), torch.randn(3, 4), torch.randn(3, 4)
    expected = net(x, mask)
    parts = split(net, (x, mask), at=["b", "d"])
    mesh = Mesh((2,), ("dp",))

    with simulated(mesh):
        for part in parts:
            distribute_module(part.module, mesh)
        laid = {"x": distribute_tensor(x, mesh, [Shard(0)]), "mask": distribute_tensor(mask, mesh, [Shard(0)])}
        found = whole(run(parts, laid))

    torch.testing.assert_close(found, expected)


def test_a_stage_takes_a_part_and_its_names() -> None:
    parts = split(Net(), (torch.randn(3, 4), torch.randn(3, 4)), at=["b", "d"])

    stages = [Stage(part, Mesh((2,), ("dp",))) for part in parts]

    for part, stage in zip(parts, stages, strict=True):
        assert stage.module is part.module
        assert (stage.takes, stage.gives) == (part.takes, part.gives)
        assert len(stage.parameters()) == len(list(part.module.parameters())) > 0
    named = Stage(parts[2], Mesh((2,), ("dp",)), placements={"mask": [Shard(0)]})
    assert named.input_layout("mask", 2).placements == (Shard(0),)


def test_a_submodule_that_is_not_there_is_named():
    with pytest.raises(ScheduleError, match="no submodule 'e' to begin a stage at"):
        split(Net(), (torch.zeros(1, 4), torch.zeros(1, 4)), at=["e"])


def test_tied_parameters_in_two_parts_are_refused():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight

    with pytest.raises(ScheduleError, match=r"is also 0.weight of part 0: keep both uses in one part"):
        split(tied, (torch.zeros(2, 4),), at=["1"])
