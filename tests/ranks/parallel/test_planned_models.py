"""Models planned as a whole, on real ranks: they compute what one device does, and send what was planned."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.default_cases import one_in
from helpers.planned_models import FAMILIES, batch, language_model, mesh_of, planned_bytes
from helpers.vision_transformer import classifier
from torch import Tensor, nn

import dshard
from dshard import Layout, Replicate, Shard, Topology, parallelize, use_topology
from dshard.errors import MeshError, StrategyError
from dshard.parallel import Auto, ModelPlan, model_plan
from dshard.parallel.boundary import own_boundary
from dshard.parallel.trace_step import record_step
from dshard.parallel.whole_plan import as_plan
from dshard.placements import Placement
from dshard.planning.plan_step import plan_step
from dshard.planning.step_tables import StepTables, Weights
from dshard.testing import RankPool, rank_pool, whole
from dshard.testing.counter import count_traffic

SLOW = Topology.preset("cpu")
SIZES: dict[str, Any] = {"width": 64, "vocabulary": 512}
COUNTED = 3
LOSS = 8
"""Bytes of the sum of the loss, a number, for each rank but two: they send it in other rounds than its price has."""
NOTHING: Mapping[str, Placement] = MappingProxyType({})
PRICES = {"time": Weights(), "memory": Weights(memory=1e-7)}


def planned(
    family: str, shape: tuple[int, ...], weights: Weights, stored: Mapping[str, Placement] = NOTHING
) -> tuple[ModelPlan, dict[str, int]]:
    """The plan of a model of this family, and the bytes that it says each pass receives, without those of numbers.

    These parameters are `stored` in one way on all axes.
    """
    model, args, mesh = language_model(family, **SIZES), batch(4, 16, SIZES["vocabulary"]), mesh_of(shape)
    graph = record_step(model, args, {}).graph().copies()
    layouts = {name: Layout(mesh, (each,) * mesh.ndim) for name, each in stored.items()}
    chosen = plan_step(StepTables(graph, mesh, SLOW).pinned(layouts), weights)
    for value in graph.parameters():
        if value.name in stored:  # or it is moved once for all of its uses
            assert len({chosen.calls[call].inputs[i] for call, i in value.uses}) == len(value.uses)
    received = planned_bytes(graph, chosen, SLOW)
    of_passes = {d: sum(n for (_, each), n in received.items() if each == d) for d in ("forward", "backward")}
    return replace(as_plan(graph, chosen, mesh), ndim=2), of_passes


def trained(plan: ModelPlan, family: str, steps: int) -> tuple[list[dict[str, int]], str]:
    """What each step of a planned model receives in its passes, by this rank; it computes what one device does."""
    torch.set_num_threads(1)
    alone, args = language_model(family, **SIZES), batch(4, 16, SIZES["vocabulary"])
    mesh = dshard.init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names)
    received = []
    with use_topology(SLOW):
        model = parallelize(copy.deepcopy(alone), mesh, plan)
        expected = alone(*args)
        expected.backward()
        for step in range(steps):
            model.zero_grad()
            counts = step < COUNTED  # without a rehearsal
            with count_traffic() if counts else nullcontext() as forward:
                loss = model(*args)
            with count_traffic() if counts else nullcontext() as backward:
                loss.backward()
                for p in model.parameters():
                    p.grad is None or p.grad.to_local()
            if counts:
                received.append({"forward": forward.nbytes, "backward": backward.nbytes})
            torch.testing.assert_close(whole(loss.detach()), expected.detach())
            for (name, own), p in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert (own.grad is None) == (p.grad is None), name
                if p.grad is not None:
                    torch.testing.assert_close(whole(own.grad), p.grad, msg=name)
    return received, str(model.rehearsed)


def sends_as_planned(
    pool: RankPool, family: str, shape: tuple[int, ...], price: str, stored: Mapping[str, Placement] = NOTHING
) -> None:
    plan, expected = planned(family, shape, PRICES[price], stored)

    ran = pool.run(trained, plan, family, 5)
    steps = [received[-1] for received, _ in ran]  # the first ones compare their inputs, and the order of gradients
    most = {direction: max(step[direction] for step in steps) for direction in expected}
    assert abs(most["forward"] - expected["forward"]) <= LOSS * (prod(shape) - 2)
    assert most["backward"] == expected["backward"]
    assert all("calls of torch in 0 records" not in rehearsed for _, rehearsed in ran)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("case", [*product(FAMILIES, [(4,), (2, 2)], PRICES)], ids=str)
def test_planned_models_send_what_was_planned(ranks: RankPool, case: tuple[str, tuple[int, ...], str]) -> None:
    sends_as_planned(ranks, *case)


@pytest.mark.ranks
def test_a_weight_is_moved_once_for_a_use_that_has_it_otherwise_than_the_first(ranks: RankPool) -> None:
    sends_as_planned(ranks, "tied", (2, 2), "time", {"embedding.weight": Shard(1)})


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_models_send_what_was_planned_on_eight_ranks(family: str) -> None:
    with rank_pool(8) as pool:
        for shape in ((8,), (2, 4)):
            sends_as_planned(pool, family, shape, "memory")


def by_rows() -> ModelPlan:
    """A plan of four ranks that reads images by rows, and labels whole."""
    (model, args), mesh = classifier(), mesh_of((4,))
    graph = record_step(model, args, {}).graph().copies()
    plan = as_plan(graph, plan_step(StepTables(graph, mesh, SLOW), Weights(memory=1e-7)), mesh)
    assert plan.inputs == {"": (Shard(0),), "targets.labels": (Replicate(),)}
    return replace(plan, ndim=4)


def on_own_rows(plan: ModelPlan, inputs: Any) -> list[str]:
    """What differs from one device where a loader gives a planned model batches, or rows of each data rank."""
    torch.set_num_threads(1)
    (alone, (images, targets, weight)), wrong = classifier(), list[str]()
    mesh = dshard.init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names)
    model = parallelize(copy.deepcopy(alone), mesh, plan, images, targets, weight, inputs=inputs)
    n, at = dshard.data_ranks(model)
    own = slice(None) if inputs == "global" else slice(at * 8 // n, (at + 1) * 8 // n)
    alone(images, targets, weight).backward()
    rows = {"images": images[own], "targets": {"labels": targets["labels"][own]}}
    for each in dshard.batches(model, [rows] * 3):
        model.zero_grad()
        loss = model(weight=weight, **each)
        loss.backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            if not torch.allclose(whole(p.grad), q.grad, atol=1e-10):
                wrong.append(name)
    return wrong if n == 4 else [f"{n} data ranks"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "inputs", one_in(2, [{"weight": "global", "*": "per-data-rank"}, "global"]), ids=["own rows", "global"]
)
def test_inputs_are_read_one_by_one(ranks: RankPool, inputs: Any) -> None:
    assert ranks.run(on_own_rows, by_rows(), inputs) == [[]] * 4


def found() -> tuple[int, ModelPlan, str]:
    """The searches of this rank, the plan that it has, and the error where no plan keeps a limit."""
    searches = list[object]()

    def counted(*args: Any) -> ModelPlan:
        searches.append(args)
        return cheapest(*args)

    mesh = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    cheapest, model_plan.cheapest = model_plan.cheapest, counted
    try:
        model = parallelize(language_model("gpt"), mesh, Auto(seconds=0.1), *batch(4))
        with pytest.raises(StrategyError) as error:
            parallelize(language_model("gpt"), mesh, Auto(memory=1, seconds=0.1), *batch(4))
    finally:
        model_plan.cheapest = cheapest
    return len(searches), own_boundary(model).plan, str(error.value)


@pytest.mark.ranks
def test_the_first_rank_searches_for_all(ranks: RankPool) -> None:
    (searches, plan, error), *others = ranks.run(found)

    assert searches == 2
    assert "holds at most" in error
    for other in others:
        assert other[0] == 0
        assert other[1].data() == plan.data()
        assert other[2] == error


class Sending(nn.Module):
    """Its forward pass has a collective of numbers, in a tensor that is resized, of a buffer, or of lengths."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of, self.up = of, nn.Linear(8, 8)
        self.register_buffer("one", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "lengths":
            length = torch.tensor([len(x)], device=x.device)
            dist.all_gather(lengths := [torch.empty_like(length) for _ in range(4)], length)
            return self.up(x)[: int(torch.stack(lengths).max())].mean()
        number = self.one.clone() if self.of == "buffer" else torch.arange(8, out=torch.empty(0)).resize_(8)
        dist.all_reduce(number)
        return (self.up(x) * number).mean()


def of_sending(of: str, strategy: Any) -> tuple[float, str]:
    torch.manual_seed(0)
    mesh, model, x = dshard.init_device_mesh("cpu", (4,)), Sending(of), torch.randn(4, 8)
    expected = model(x).item()
    try:
        return parallelize(model, mesh, strategy, x)(x).item() - expected, ""
    except MeshError as error:
        return 0.0, str(error)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("of", "strategy", "error"),
    [
        ("numbers", "data", ""),
        ("numbers", "auto", "collective in the forward pass of a model that the first rank plans"),
        ("buffer", "auto", ""),
        ("lengths", "auto", "collective in the forward pass of a model that the first rank plans"),
    ],
)
def test_collectives_in_a_forward_pass_are_planned_or_refused(
    ranks: RankPool, of: str, strategy: str, error: str
) -> None:
    for difference, text in ranks.run(of_sending, of, strategy):
        assert abs(difference) < 1e-5
        assert error in text if error else not text
