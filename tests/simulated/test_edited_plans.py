"""Plans that "auto" makes within limits: pins, words that an axis may not shard, seconds; edited, compared, saved."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in
from test_whole_plans import language, without_data
from torch import Tensor, nn

from dshard import (
    LayoutError,
    Mesh,
    MeshError,
    NotationError,
    Replicate,
    Shard,
    StrategyError,
    Topology,
    parallelize,
    use_topology,
)
from dshard.layout import Layout
from dshard.parallel import Auto, ModelPlan, Precision, model_plan, plan_model
from dshard.parallel.auto import PlanSearch
from dshard.parallel.plan_limits import Words, dim_words, limits_of, refined_axes
from dshard.parallel.plan_values import Pins
from dshard.parallel.trace_step import record_step
from dshard.placements import Placement
from dshard.planning.plan_step import StepPlan, plan_step
from dshard.planning.step_limits import WORDS
from dshard.planning.step_tables import StepTables
from dshard.testing import simulated, whole

MESH = Mesh((2, 2), ("x", "y"))
H100 = Topology.preset("dgx-h100")


def small() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return without_data(4096, 256, 4, 128)


def planned(mesh: Mesh = MESH, **limits: Any) -> ModelPlan:
    model, args = small()
    with use_topology(H100):
        return plan_model(model, mesh, Auto(**limits), *args)


@pytest.fixture(scope="module")
def free() -> ModelPlan:
    return planned()


def trains_as_one_device(plan: Any, mesh: Mesh = MESH) -> None:
    model, args = language(8)
    alone = copy.deepcopy(model)
    expected = alone(*args)
    expected.backward()
    with simulated(mesh), use_topology(H100):
        parallelize(model, mesh, plan, *args)
        loss = model(*args)
        loss.backward()

        torch.testing.assert_close(whole(loss.detach()), expected.detach())
        for own, p in zip(model.parameters(), alone.parameters(), strict=True):
            assert own.grad is not None
            torch.testing.assert_close(whole(own.grad), p.grad)  # type: ignore[arg-type]


# -- pins


def moves_of_results(plan: ModelPlan) -> dict[str, Any]:
    """The placements to which the result of each module's last call is redistributed, if it is."""
    return {call.module: call.results[0] and call.results[0].placements for call in plan.calls}


def test_pinned_plans_have_their_pins_and_compute_what_one_device_does() -> None:
    model, args = language(8)
    pins: Pins = {"head.weight": "x:S(0) y:R", "blocks.*.up.weight": [Shard(1), Shard(0)], "blocks.0.q": "x:R y:S(1)"}
    with use_topology(H100):
        plan = plan_model(model, MESH, Auto(pins=pins), *args)

    assert plan.placements("head.weight") == (Shard(0), Replicate())
    assert {plan.placements(f"blocks.{i}.up.weight") for i in range(2)} == {(Shard(1), Shard(0))}
    assert moves_of_results(plan)["blocks.0.q"] == (Replicate(), Shard(1))
    assert plan.certificate == pytest.approx(1.0)
    trains_as_one_device(plan)


def test_a_pin_may_name_a_tied_parameter_by_any_of_its_names() -> None:
    model, args = language(4, tied=True)
    with use_topology(H100):
        plan = plan_model(model, MESH, Auto(pins={"head.weight": "x:S(0) y:S(1)"}), *args)

    assert plan.placements("embedding.weight") == (Shard(0), Shard(1))


@pytest.mark.parametrize("name", one_in(3, ["fsdp x megatron", "data x fsdp", "megatron x megatron"]))
def test_a_name_can_say_where_parameters_lie_and_leave_the_rest_to_the_search(name: str) -> None:
    model, args = small()
    with use_topology(H100):
        named = plan_model(model, MESH, name, *args)
        plan = plan_model(model, MESH, Auto(pins=named.parameters), *args)
    assert {own: plan.placements(own) for own in named.parameters} == named.parameters
    assert plan.cost.seconds <= 1.05 * named.cost.seconds
    assert plan.cost.memory.parameters == named.cost.memory.parameters


def test_pins_hold_on_the_axes_into_which_theirs_is_unfolded() -> None:
    plan = planned(Mesh((4,), ("x",)), pins={"head.weight": "x:S(1)"}, forbid={"x": "batch"})

    assert set(plan.placements("head.weight")) == {Shard(1)}
    assert plan.search is not None
    assert plan.search.meshes == 2
    assert refined_axes((4, 2), (2, 2, 2)) == ((0, 1), (2,))
    assert refined_axes((4, 2), (2, 4)) is None


def test_an_edited_plan_is_the_one_that_is_searched_with_its_pins(free: ModelPlan) -> None:
    first, second = {"head.weight": "x:S(0) y:R"}, {"blocks.1.v": "x:R y:S(1)"}
    edited = free.edit(first).edit(second)
    searched = planned(pins=first | second)

    assert edited.placements("head.weight") == (Shard(0), Replicate())
    assert moves_of_results(edited)["blocks.1.v"] == (Replicate(), Shard(1))
    assert edited.search is not None
    assert searched.search is not None
    assert edited.bound == pytest.approx(edited.search.seconds)
    assert edited.search.seconds >= (free.bound or 0.0)
    model, args = small()
    with use_topology(H100):
        assert plan_model(model, MESH, edited, *args).cost.seconds >= searched.cost.seconds * (1 - 1e-9)


def test_the_runner_up_is_the_least_of_all_other_layouts(free: ModelPlan) -> None:
    model, args = small()
    graph, name = record_step(model, args, {}).graph().copies(), "head.weight"
    assert free.search is not None
    space: Any = free.search.space
    least = plan_step(space.tables, space.weights).total
    dims: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    tables, sums = StepTables(graph, MESH, H100), {}
    for layout in (Layout(MESH, (a, b)) for a in dims for b in dims):
        sums[layout.placements] = plan_step(tables.pinned({name: layout}), space.weights).total
    del sums[free.placements(name)]
    other = free.runner_up(name)

    assert other.plan.placements(name) != free.placements(name)
    assert other.seconds == pytest.approx(min(sums.values()) - least, abs=1e-12)
    assert 0 <= other.seconds <= free.runner_up("blocks.*.q").seconds + free.runner_up("*").seconds


# -- words


@pytest.mark.parametrize("forbid", [{"x": "batch"}, {"y": ["features", "batch"]}, {"x": WORDS, "y": "sequence"}])
def test_no_call_shards_what_an_axis_may_not(forbid: dict[str, Any]) -> None:
    model, args = without_data(4096, 256, 64, 512)
    graph = record_step(model, args, {}).graph().copies()
    own: Words = {axis: frozenset([words] if isinstance(words, str) else words) for axis, words in forbid.items()}
    words, limits = dim_words(graph), limits_of(graph, MESH, {}, own, {})

    def sharded(chosen: StepPlan) -> set[tuple[str, str | None]]:
        """The axes that shard a dim of a call, with what that counts."""
        found = set()
        for call, candidate in zip(graph.calls, chosen.calls, strict=True):
            tensors = zip((*call.operands, *call.results), (*candidate.inputs, *candidate.outputs), strict=True)
            for value, layout in tensors:
                placements = zip(MESH.names, layout.placements, strict=True)
                found |= {(axis, words[value.number][p.dim]) for axis, p in placements if isinstance(p, Shard)}
        return found

    forbidden = {(axis, word) for axis, own_words in own.items() for word in own_words}
    chosen = plan_step(StepTables(graph, MESH, H100, limits))
    assert forbidden & sharded(plan_step(StepTables(graph, MESH, H100)))
    assert not forbidden & sharded(chosen)
    if ("x", "parameters") in forbidden:
        assert all(layout.placements[0] == Replicate() for layout in chosen.parameters.values())


def test_dims_count_what_rules_join() -> None:
    model, args = small()
    graph = record_step(model, args, {}).graph().copies()
    words = dim_words(graph)
    attention = next(call for call in graph.calls if call.name == "scaled_dot_product_attention")

    assert words[attention.operands[1].number] == ("batch", "features", "sequence", None)
    assert all({*words[value.number]} == {"features"} for value in graph.parameters())


# -- seconds


@pytest.mark.parametrize("case", one_in(3, ["chain", "tied", "language"]))
def test_a_search_without_time_gives_a_plan_with_a_bound(case: str) -> None:
    torch.manual_seed(0)
    model, args = language(4, tied=case == "tied")
    if case == "chain":
        model, args = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.randn(4, 8),)
    with use_topology(H100):
        hurried, free = (plan_model(model, MESH, Auto(seconds=n), *args) for n in (1e-9, 1e9))

    assert hurried.search is not None
    assert free.search is not None
    assert 1.0 <= (hurried.certificate or 0.0) < float("inf")
    assert not free.search.are_alike
    assert hurried.search.are_alike
    assert "axes used alike" in hurried.notes()[1]
    if hurried.strategy == "planned":
        assert all(len({*placements}) == 1 for placements in hurried.parameters.values())
    pinned = hurried.edit({next(iter(hurried.parameters)): "x:S(0) y:R"})  # which no plan does that uses axes alike
    assert pinned.search is not None
    assert (pinned.search.bound, pinned.search.are_alike) >= (free.search.bound * (1 - 1e-8), False)
    assert [each.strategy for each in hurried.search.tried] in (["planned", "data x data"], ["data x data", "planned"])


def test_strategies_by_name_are_priced_before_the_mesh_is_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a search whose time ends is never dearer than they are."""
    price, priced = PlanSearch.price, list[ModelPlan]()
    monkeypatch.setattr(PlanSearch, "price", lambda own, plan, *rest: priced.append(plan) or price(own, plan, *rest))

    planned(Mesh((4,), ("x",)), seconds=1e9)

    ndims = [plan.mesh.ndim for plan in priced]
    assert ndims == sorted(ndims)
    assert ndims[-1] > 1
    assert {plan.strategy for plan in priced if plan.mesh.ndim == 1} >= {"data", "fsdp"}


# -- what is refused


@pytest.mark.parametrize(
    ("limits", "error", "says"),
    [
        (
            {"pins": {"head.weight": "x:S(0) y:S(7)"}},
            LayoutError,
            r"'head.weight', 4096x256, which linear reads, cannot lie",
        ),
        ({"pins": {"head.weight": "x:P y:R"}}, LayoutError, "never partial.*pin another layout"),
        ({"pins": {"head.weight": "x:R"}}, NotationError, "pins: 'head.weight': .* must name the mesh axes x, y"),
        ({"pins": {"hed.weight": "x:R y:R"}}, LayoutError, "no parameter and no module.*did you mean 'head.weight'"),
        (
            {"pins": {"blocks.0.q": "x:S(2) y:S(2)"}, "forbid": {"x": "features"}},
            StrategyError,
            r"view in blocks.0 cannot read what blocks.0.q returns in the layout \[x:S\(2\) y:S\(2\)\].*pin one of",
        ),
        (
            {"pins": {"head.weight": "x:R y:S(0)"}, "forbid": {"y": "parameters"}},
            StrategyError,
            "leave out one of the two",
        ),
        ({"forbid": {"z": "batch"}}, MeshError, r"no axis 'z': use x, y"),
        (
            {"memory": 1000, "seconds": 0.05},
            StrategyError,
            r"needs the least, .* MiB, most of it for .*, .*, .*; use more",
        ),
    ],
)
def test_limits_that_cannot_be_met_are_refused_in_words(limits: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        planned(**limits)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"forbid": {"y": "bach"}}, "'bach' is none: use batch, sequence.*did you mean 'batch'"),
        ({"forbid": "y"}, "forbid: 'y' is a str: give words by the name of a mesh axis"),
        ({"pins": ["head.weight"]}, "pins: .* is a list: give layouts by the name"),
        ({"seconds": 0}, "seconds: 0 is not a number above 0"),
    ],
)
def test_limits_that_are_none_are_refused_where_they_are_written(limits: Any, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        Auto(**limits)


def test_what_the_model_returns_is_not_pinned() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    with pytest.raises(StrategyError, match=r"makes what the model returns: give its placements as outputs="):
        plan_model(model, MESH, Auto(pins={"0": "x:R y:R"}), x)


def test_pins_need_a_step_without_data() -> None:
    class OfData(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale, zero = torch.ones(1), torch.zeros(1)
            return super().forward(torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, -8, 7, 1.0))

    with pytest.raises(StrategyError, match="takes a step that runs without data"):
        plan_model(OfData(8, 8), MESH, Auto(forbid={"x": "batch"}), torch.ones(4, 8))


# -- files


def test_a_plan_is_pickled_as_it_is_saved(free: ModelPlan) -> None:
    received = pickle.loads(pickle.dumps(free))

    assert received == free
    with pytest.raises(StrategyError, match="has no step from which it is edited"):
        received.edit({})


def test_a_saved_plan_is_read_and_runs_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, (model, args) = tmp_path / "plan.json", language(8)
    with use_topology(H100):
        plan = plan_model(model, MESH, Auto(pins={"blocks.*.q.weight": "x:S(0) y:S(1)"}), *args)
    plan.save(path)
    monkeypatch.setattr(model_plan, "cheapest", None)
    with use_topology(H100):
        loaded = plan_model(model, MESH, path, *args)

    assert loaded == plan
    assert loaded.certificate == plan.certificate
    trains_as_one_device(path)
    with pytest.raises(StrategyError, match="no step from which it is edited: take one that plan_model made"):
        loaded.edit({})
    with pytest.raises(StrategyError, match="compared with others"):
        loaded.runner_up("head.weight")
    with pytest.raises(MeshError, match="make one of that shape"):
        plan_model(model, Mesh((2, 3), ("x", "y")), path, *args)
    path.write_text(path.read_text().replace("S(0)", "S[0]"))
    with pytest.raises(StrategyError, match="is not understood"):
        plan_model(model, MESH, path, *args)


@pytest.mark.parametrize("name", one_in(2, ["fsdp x megatron-sp", "data x megatron", "optimus", "fsdp x fsdp"]))
def test_plans_by_name_are_read_as_they_were(name: str, tmp_path: Path) -> None:
    model, args = language(8)
    policy = Precision(torch.bfloat16, torch.float32)
    plan = plan_model(model, MESH, name, *args, precision=policy, group=["blocks.*"])
    plan.save(tmp_path / "plan.json")
    loaded = plan_model(model, MESH, tmp_path / "plan.json", *args)

    assert loaded == plan
    assert replace(loaded, strategy="") != plan


# -- text


def test_a_plan_is_told_by_blocks(free: ModelPlan) -> None:
    text = str(free)
    _, _, others, *parts = free.notes()

    assert "blocks.0-1.up (x2)" in text
    assert "blocks.1.up" not in text
    assert re.search(r"ms, within 1\.000 of any plan of this space \(1 folding, \d x 10\^\d+ assignments, ", text)
    assert re.match(r"others: .* on \(x=2 y=2\) (at least )?[\d.]+ ms;", others)
    assert any(re.match(r"blocks\.0-1 \(x2\): .* ms; as [a-z x-]+: \+[\d.]+ ms", part) for part in parts)
    received = sum(move.nbytes for move in free.cost.moves)
    assert received == free.cost.nbytes
    assert len(free.rows()) == len({row[0] for row in free.rows()})
