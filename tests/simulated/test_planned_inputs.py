"""Plans that choose all layouts together say for each input how it is read, and models take them so."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.default_cases import one_way_each
from helpers.vision_transformer import classifier
from torch import Tensor, nn

from dshard import Layout, Mesh, Replicate, Shard, Topology, distribute_batch, parallelize, use_topology
from dshard.layout import layout_of
from dshard.parallel import ModelPlan, plan_model
from dshard.parallel.plan_files import plan_from
from dshard.parallel.trace_step import record_step
from dshard.parallel.whole_plan import as_plan
from dshard.planning.plan_step import StepPlan, plan_step
from dshard.planning.step_graph import StepGraph
from dshard.planning.step_tables import StepTables, Weights
from dshard.testing import distribute, simulated, whole

MESHES = [Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y"))]


def chosen_plan(model: nn.Module, args: Any, mesh: Mesh, preset: str) -> tuple[StepGraph, StepPlan, ModelPlan]:
    graph = record_step(model, args, {}).graph().copies()
    chosen = plan_step(StepTables(graph, mesh, Topology.preset(preset)), Weights(memory=1e-6))
    return graph, chosen, replace(as_plan(graph, chosen, mesh), ndim=4)


def taken(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Layout]]:
    """The loss of a parallelized model, and the layouts of the inputs as its forward pass has them."""
    layouts = dict[str, Layout]()

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        own = dict(zip(("images", "targets", "weight"), args, strict=False)) | kwargs
        own["targets.labels"] = own.pop("targets")["labels"]
        layouts.update({name: x.layout for name, x in own.items()})

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    loss = model(*args, **kwargs)
    hook.remove()
    return loss, layouts


@pytest.mark.parametrize(("mesh", "preset"), one_way_each(MESHES, ["dgx-h100", "cpu"], every=len(MESHES)))
def test_inputs_are_taken_as_they_are_read(mesh: Mesh, preset: str) -> None:
    model, args = classifier()
    alone = copy.deepcopy(model)
    expected = alone(*args)
    expected.backward()
    graph, chosen, plan = chosen_plan(model, args, mesh, preset)
    with simulated(mesh), use_topology(Topology.preset(preset)):
        parallelize(model, mesh, plan)
        loss, layouts = taken(model, *args)
        loss.backward()
        by_name, again = taken(model, targets=args[1], images=args[0], weight=args[2])

        assert again == layouts
        assert torch.equal(whole(by_name.detach()), whole(loss.detach()))
        torch.testing.assert_close(whole(loss.detach()), expected.detach())
        for own, p in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(own.grad), p.grad)
    for value in graph.values:
        if value.kind == "input":
            assert {chosen.calls[use.call].inputs[use.position] for use in value.uses} == {layouts[value.name]}


def by_rows() -> tuple[nn.Module, tuple[Any, ...], ModelPlan]:
    """A plan that reads images by rows, and labels whole."""
    model, args = classifier()
    plan = chosen_plan(model, args, MESHES[0], "cpu")[2]
    return model, args, replace(plan, inputs={"": (Shard(0),), "targets.labels": (Replicate(),)})


def test_a_plan_that_names_inputs_is_printed_and_saved(tmp_path: Path) -> None:
    plan = by_rows()[2]
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    one_layout = {name: each for name, each in data.items() if name != "inputs"} | {"batch": "x:S(0)"}

    assert "batch [x:S(0)], targets.labels [x:R]" in str(plan)
    assert plan_from(data, plan.mesh) == plan
    assert plan_from(one_layout, plan.mesh).inputs == {"": (Shard(0),)}


def test_inputs_that_a_plan_cannot_lay_out_follow_the_batch() -> None:
    """One image without rows is whole, and so is what has fewer dims than its layout shards."""
    model, args, plan = by_rows()
    laid = replace(plan, inputs={**plan.inputs, "weight": (Shard(1),)}, calls=())
    with simulated(plan.mesh):
        parallelize(model, plan.mesh, laid)
        _, layouts = taken(model, *args)
        batches = distribute_batch(model, {"images": args[0], "labels": args[1]["labels"]})

    whole_ones = {name for name, layout in layouts.items() if layout == layout_of(plan.mesh, [Replicate()], 1)}
    assert whole_ones == {"targets.labels", "weight"}
    assert [str(x.layout) for x in batches.values()] == ["x:S(0)", "x:S(0)"]


@pytest.mark.thorough  # test_whole_plans.py compares it with all names
@pytest.mark.parametrize("preset", ["dgx-h100", "cpu"])
def test_auto_is_at_most_as_dear_as_data(preset: str) -> None:
    model, args = classifier(layers=1, width=16)
    args = (args[0].repeat(8, 1, 1, 1), {"labels": args[1]["labels"].repeat(8)}, args[2])
    with use_topology(Topology.preset(preset)):
        auto, data = (plan_model(model, MESHES[0], name, *args) for name in ("auto", "data"))

    assert auto.cost.seconds <= data.cost.seconds * (1 + 1e-9)


class Ragged(nn.Module):
    """Rows of several lengths, of which the longest says how much of a batch is read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.position = nn.Linear(16, 16), nn.Embedding(32, 16)

    def forward(self, x: Tensor, lengths: Tensor, keep: Tensor) -> Tensor:
        longest = lengths.max()
        at = torch.arange(longest, device=x.device)
        self.read = f"{longest} of {lengths.float().mean():.2f}"
        if lengths.sum() < 0:
            raise ValueError("lengths")
        rows = (self.up(x)[:, :longest] + self.position(at)) * (at < lengths[:, None])[..., None]
        return (rows * keep.to(device=x.device, dtype=torch.bool)[:, None, None]).square().mean()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_numbers_may_be_read_from_tensors_by_any_function(placement: Shard | Replicate) -> None:
    """What `arange` and slices take is asked for once more where the step is priced, and so is a number in a text."""
    torch.manual_seed(0)
    model, mesh = Ragged().double(), MESHES[0]
    batch = torch.randn(4, 8, 16).double(), torch.tensor([1, 2, 6, 3]), torch.tensor([1, 0, 1, 1])
    expected, read = model(*batch), model.read

    with simulated(mesh), use_topology(Topology.preset("cpu")):
        plan = plan_model(model, mesh, "auto", *batch)
        assert plan.cost is not None
        assert model.read == read  # nothing stays of planning
        parallelize(model, mesh, plan)
        loss = model(*[distribute(x, layout_of(mesh, (placement,), x.dim())) for x in batch])

    torch.testing.assert_close(whole(loss), expected)
    assert model.read == read == "6 of 3.00"


class Kept(nn.Module):
    """Reads a number behind a batch norm, and keeps a parameter and positions in caches of one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(16), nn.Linear(16, 16)

    @lru_cache(maxsize=1)  # noqa: B019
    def positions(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.arange(n, dtype=dtype)

    @lru_cache(maxsize=1)  # noqa: B019
    def weight(self) -> Tensor:
        return self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if x.max() < 0:
            raise ValueError("x")
        x = (x * self.positions(16, x.dtype)) @ self.weight()
        return (x[:, 1:] * self.positions(15, x.dtype)).square().mean()


@pytest.mark.parametrize("strategy", ["fsdp", "auto"])
@pytest.mark.parametrize("calls", [0, 2])
def test_planning_leaves_buffers_and_bounded_caches(strategy: str, calls: int) -> None:
    torch.manual_seed(0)
    model, x = Kept().double(), torch.randn(8, 16).double()
    for _ in range(calls):
        model(x)
    before = copy.deepcopy(model.state_dict())

    with use_topology(Topology.preset("cpu")):
        plan_model(model, MESHES[0], strategy, x)

    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.positions(16, x.dtype).device.type == "cpu"
    assert model.weight() is model.up.weight
    model(x).backward()
    assert model.up.weight.grad is not None
