"""Models laid out by plans that choose all layouts together compute what one device does, at the planned price."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in, one_way_each
from helpers.planned_models import FAMILIES, as_meta, batch, language_model, mesh_of, planned_bytes, planned_copies
from helpers.planned_models import Adapted as SmallAdapted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dshard import Layout, LayoutError, Mesh, Partial, Shard, StrategyError, Topology, parallelize, trace, use_topology
from dshard.caches import clear_caches
from dshard.comm import plain, planning
from dshard.core.observe import OperatorMode
from dshard.layout import layout_of, replicated
from dshard.parallel import Auto, ModelPlan, Precision, plan_model
from dshard.parallel.auto import PlanSearch, names, unfoldings
from dshard.parallel.factors import trace_factors
from dshard.parallel.model_plan import plan_by_name, step_graph
from dshard.parallel.reachable_state import ReachableState
from dshard.parallel.roles import roles_of
from dshard.parallel.step_price import StepPrices
from dshard.parallel.trace_step import record_step
from dshard.parallel.whole_plan import as_plan
from dshard.planning.plan_step import plan_step
from dshard.planning.step_tables import StepTables, Weights
from dshard.testing import simulated, whole
from dshard.topology import BYTES

MESHES = [Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y"))]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.n2(x))))
        return out


class Language(nn.Module):
    """A small language model, whose head may be tied to its embedding; it returns its loss."""

    def __init__(self, vocabulary: int, width: int, heads: int, tied: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


class Adapted(nn.Module):
    """A linear layer that is not trained, and two that are, beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = (nn.Linear(*size, bias=False) for size in ((12, 20), (12, 3), (3, 20)))
        self.base.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.b(self.a(x))).square().mean()


class Packed(nn.Module):
    """Attention whose queries, keys and values are made by one layer, and a gated layer whose halves are."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.gated, self.down = nn.Linear(width, 8 * width, bias=False), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).split(x.shape[-1], -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        gate, up = self.gated(x).chunk(2, -1)
        return (x + self.down(F.silu(gate) * up)).square().mean()


def packed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(5)
    return Packed(16, 4).double(), (torch.randn(2, 4, 16, dtype=torch.float64),)


def language(rows: int, tied: bool = False, width: int = 16, heads: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(rows)
    tokens = torch.randint(0, 24, (rows, 8))
    return Language(24, width, heads, tied).double(), (tokens, tokens.roll(-1, 1))


def adapted() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(3)
    return Adapted().double(), (torch.randn(8, 12, dtype=torch.float64),)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "language": lambda: language(8),
    "tied": lambda: language(4, tied=True),
    "uneven": lambda: language(3, width=15, heads=3),
    "adapted": adapted,
    "packed": packed,
}


def planned(model: nn.Module, args: Any, mesh: Mesh, topology: Topology, weights: Weights) -> ModelPlan:
    graph = record_step(model, args, {}).graph().copies()
    plan = as_plan(graph, plan_step(StepTables(graph, mesh, topology), weights), mesh)
    return replace(plan, ndim=args[0].dim())


AIMS = {"bytes": (BYTES, 1e-3), "time": (Topology.preset("dgx-h100"), 0.0), "memory": (Topology.preset("cpu"), 1e-6)}


@pytest.mark.parametrize(("case", "way"), one_way_each(CASES, [*product(AIMS, MESHES)]))
def test_planned_models_compute_what_one_device_does(case: str, way: tuple[str, Mesh]) -> None:
    aim, mesh = way
    topology, byte = AIMS[aim]
    model, args = CASES[case]()
    alone = copy.deepcopy(model)
    expected = alone(*args)
    expected.backward()
    plan = planned(model, args, mesh, topology, Weights(memory=byte))
    with simulated(mesh), use_topology(topology):
        parallelize(model, mesh, plan)
        for _ in range(2):  # recorded, and as recorded
            model.zero_grad()
            loss = model(*args)
            loss.backward()

        torch.testing.assert_close(whole(loss.detach()), expected.detach())
        for (name, own), p in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (own.grad is None) == (p.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(whole(own.grad), p.grad)


@pytest.mark.parametrize("mesh", one_in(2, MESHES), ids=["4", "2x2"])
def test_packed_layers_run_in_blocks(mesh: Mesh) -> None:
    """Weights that are dear to move lie in blocks, and nothing is sent but sums: two of layers, one of a gradient."""
    model, args = packed()
    alone = copy.deepcopy(model)
    expected = alone(*args)
    expected.backward()
    tables = StepTables(record_step(model, args, {}).graph().copies(), mesh, Topology.preset("dgx-h100"))
    pins = {"qkv.weight": Shard(0, blocks=3), "gated.weight": Shard(0, blocks=2)}
    pins |= dict.fromkeys(("out.weight", "down.weight"), Shard(1))
    pinned = tables.pinned({name: Layout(mesh, (shard,) * mesh.ndim) for name, shard in pins.items()})
    plan = replace(as_plan(tables.graph, plan_step(pinned, Weights(beside=1e3)), mesh), ndim=3)
    with simulated(mesh), use_topology(tables.topology):
        parallelize(model, mesh, plan)
        with trace() as traced:
            loss = model(*args)
            loss.backward()

        torch.testing.assert_close(whole(loss.detach()), expected.detach())
        for own, p in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(own.grad), p.grad)  # type: ignore[arg-type]
    assert [event.collective for event in traced.events] == ["all_reduce"] * 3


def test_what_a_model_returns_is_charged_its_sum() -> None:
    """Features of a layer that two ranks sum over leave it partial: that is no way to send nothing."""
    mesh, topology = Mesh((2, 2), ("x", "y")), Topology.preset("dgx-h100")
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)), torch.empty(8, 4096)
    with use_topology(topology):
        plan = plan_model(model, mesh, "auto", x)

    assert plan.cost.nbytes > 0
    assert not any(isinstance(p, Partial) for placements in plan.outputs.values() for p in placements)


def without_data(vocabulary: int, width: int, rows: int, length: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device("meta"):
        tokens = torch.empty(rows, length, dtype=torch.long)
        return Language(vocabulary, width, width // 64), (tokens, tokens)


NAMES = ("data x data", "data x megatron", "data x megatron-sp", "data x ulysses", "data x fsdp", "fsdp x megatron")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 2), (32000, 512, 8, 512)),
        ((2, 4), (32000, 512, 8, 512)),
        ((8, 8), (51200, 2048, 8, 2048)),
    ],
)
def test_auto_is_at_most_as_dear_as_names(shape: tuple[int, ...], sizes: tuple[int, int, int, int]) -> None:
    """Where rows are fewer than ranks, no strategy by name comes near."""
    mesh, topology = Mesh(shape, ("x", "y")), Topology.preset("dgx-h100", nodes=max(1, shape[0] * shape[1] // 8))
    model, args = without_data(*sizes)
    with use_topology(topology):
        auto = plan_model(model, mesh, "auto", *args)
        names = [plan_model(model, mesh, name, *args).cost.seconds for name in NAMES]

    assert auto.cost.seconds <= min(names)
    assert shape != (8, 8) or auto.cost.seconds * 1.05 < min(names)


def named_seconds(model: nn.Module, args: Any, mesh: Mesh) -> dict[tuple[str, str], float]:
    """The seconds of each name and mixture of two that the model allows, on the mesh or one that it unfolds to."""
    found = dict[tuple[str, str], float]()
    for unfolded in unfoldings(mesh, most=max(2, mesh.ndim)):
        for name in names(unfolded.ndim, experts=any("router" in name for name, _ in model.named_parameters())):
            with suppress(StrategyError):
                found[str(unfolded), name] = plan_model(model, unfolded, name, *args).cost.seconds
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("preset", ["dgx-h100", "dgx-a100", "cpu"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (8,), (2, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_name_nor_mixture_of_names_is_cheaper_than_auto(family: str, shape: tuple[int, ...], preset: str) -> None:
    """All of them, of which the search traces sixteen."""
    mesh = Mesh(shape, ("x", "y")[: len(shape)])
    model, args = as_meta(language_model(family, layers=1).float(), batch(8))
    with use_topology(Topology.preset(preset)):
        auto, by_name = plan_model(model, mesh, Auto(seconds=inf), *args), named_seconds(model, args, mesh)
    assert len(by_name) > 16
    assert auto.cost.seconds <= min(by_name.values()) * (1 + 1e-9), min(by_name, key=lambda name: by_name[name])


@pytest.mark.thorough
@pytest.mark.parametrize("preset", ["dgx-h100", "dgx-a100", "cpu"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_traced_names_have_the_cheapest_of_all_among_them(
    family: str, shape: tuple[int, ...], preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without plans that choose all layouts together; of four rows on eight CPUs the cheapest mixes two names."""
    mesh = Mesh(shape, ("x", "y"))
    model, args = as_meta(language_model(family, layers=1).float(), batch(4))
    monkeypatch.setattr(PlanSearch, "add_planned", lambda self, tables: None)
    with use_topology(Topology.preset(preset)):
        auto, by_name = plan_model(model, mesh, Auto(seconds=inf), *args), named_seconds(model, args, mesh)
    assert auto.strategy in names(mesh.ndim, experts=family == "mixture")
    assert auto.cost.seconds <= min(by_name.values()) * (1 + 1e-9), min(by_name, key=lambda name: by_name[name])


def test_prices_of_the_planner_are_those_of_the_traced_step() -> None:
    mesh, topology = Mesh((2, 4), ("x", "y")), Topology.preset("dgx-h100")
    model, args = without_data(32000, 1024, 8, 1024)
    graph = record_step(model, args, {}).graph().copies()
    chosen = plan_step(StepTables(graph, mesh, topology))
    with use_topology(topology):
        cost = StepPrices(model, args, {})(as_plan(graph, chosen, mesh))

    assert chosen.parts.work == pytest.approx(cost.work, rel=0.02)
    assert chosen.parts.exposed + chosen.parts.beside == pytest.approx(cost.communication, rel=0.1)


def test_gradients_share_collectives_where_two_steps_are_faster_for_one_alone() -> None:
    """On 8 A100s a gradient of 8 MiB is reduced faster by a reduce_scatter and an exchange, which nothing joins."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)]).bfloat16()
        x = torch.empty(512, 2048, dtype=torch.bfloat16)
    with use_topology(Topology.preset("dgx-a100")):
        moves = plan_model(model, Mesh((8,), ("x",)), "data", x).cost.moves

    assert {move.collective for move in moves} == {"all_reduce"}
    assert sum(move.count for move in moves) < 8


def test_weights_are_planned_in_the_dtype_in_which_they_are_used() -> None:
    """Casts are priced: local work is within a tenth of the traced step's, and what it sends within a fifth."""
    model, args = without_data(32000, 1024, 8, 1024)
    policy, mesh = Precision(torch.bfloat16, torch.float32), Mesh((2, 4), ("x", "y"))
    reached = ReachableState(model, args, {})
    graph = step_graph(record_step(model, args, {}, reached), model, args, {}, reached, policy)
    assert graph is not None
    assert ({value.dtype for value in graph.parameters()}, graph.dtypes) == (
        {torch.bfloat16},
        (torch.float32, torch.float32),
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    topology = Topology.preset("dgx-h100")
    chosen = plan_step(StepTables(graph, mesh, topology))
    with use_topology(topology):
        cost = StepPrices(model, args, {})(replace(as_plan(graph, chosen, mesh), precision=policy))

    # the planner counts what is packed for joined collectives with these, a recorded step with its work
    moved = chosen.parts.exposed + chosen.parts.beside
    assert moved == pytest.approx(cost.communication, rel=0.2)
    assert chosen.parts.work + moved == pytest.approx(cost.work + cost.communication, rel=0.1)


@pytest.mark.parametrize("preset", ["dgx-h100", "dgx-a100", "cpu"])
def test_adapters_share_the_latencies_of_their_own_reductions(preset: str) -> None:
    """Frozen weights beside them, of thousands of times their bytes, are not reduced, and share nothing with them."""
    with torch.device("meta"):
        model = nn.Sequential(SmallAdapted(4096, 16384, 16), nn.GELU(), SmallAdapted(16384, 4096, 16)).bfloat16()
        args = (torch.empty(4096, 4096, dtype=torch.bfloat16),)
    mesh, topology = Mesh((8,), ("x",)), Topology.preset(preset)
    graph = record_step(model, args, {}).graph().copies()
    chosen = plan_step(StepTables(graph, mesh, topology))
    with use_topology(topology):
        cost = StepPrices(model, args, {})(as_plan(graph, chosen, mesh))

    assert chosen.parts.exposed + chosen.parts.beside == pytest.approx(cost.communication, rel=0.25)


def test_the_sum_of_the_gradients_of_a_tied_weight_is_work() -> None:
    """Untied, the second weight has the same work but for that sum, which reads and writes all of the weight."""
    mesh, topology = Mesh((4,), ("x",)), Topology.preset("dgx-h100")
    work = dict[bool, tuple[float, float]]()
    for tied in (False, True):
        with torch.device("meta"):
            model, tokens = Language(32000, 256, 4, tied), torch.empty(8, 64, dtype=torch.long)
        graph = record_step(model, (tokens, tokens), {}).graph().copies()
        whole_weights = {name: replicated(mesh) for name, _ in model.named_parameters()}
        chosen = plan_step(StepTables(graph, mesh, topology).pinned(whole_weights), Weights(beside=0.0))
        with use_topology(topology):
            slots = StepPrices(model, (tokens, tokens), {}).slots(as_plan(graph, chosen, mesh))
        work[tied] = chosen.parts.work, sum(slot.event.seconds for slot in slots if slot.event.name == "add")
    planned, traced = (tied - untied for untied, tied in zip(work[False], work[True], strict=True))

    assert planned == pytest.approx(traced)
    assert planned > 0


class Logged(Language):
    """A language model that returns its logits, too."""

    def forward(self, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.norm(self.embedding(tokens)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), target.flatten()), "logits": logits}


def test_results_of_which_a_loss_is_made_have_no_gradient_of_their_own() -> None:
    mesh, topology = Mesh((4,), ("x",)), Topology.preset("dgx-h100")
    with torch.device("meta"):
        model, tokens = Logged(32000, 256, 4), torch.empty(8, 64, dtype=torch.long)
    plan = plan_by_name(roles_of(trace_factors(model, (tokens, tokens), {})), "data", mesh)[0]
    with use_topology(topology):
        with_logits = StepPrices(model, (tokens, tokens), {})(plan)
        model.register_forward_hook(lambda model, args, out: out["loss"])
        assert with_logits.work == StepPrices(model, (tokens, tokens), {})(plan).work


def test_a_limit_of_memory_is_kept_at_the_least_cost() -> None:
    mesh = Mesh((8,), ("x",))
    with torch.device("meta"):
        model, args = Adapted(), (torch.empty(4096, 12),)
        model.base.weight.requires_grad_(True)
    with use_topology(Topology.preset("dgx-h100")):
        free = plan_model(model, mesh, "auto", *args)
        tight = plan_model(model, mesh, Auto(memory=free.cost.memory.total // 2), *args)

    assert tight.cost.memory.total <= free.cost.memory.total // 2
    assert tight.cost.seconds >= free.cost.seconds


@pytest.mark.parametrize("mesh", one_in(2, MESHES), ids=["4", "2x2"])
def test_no_name_is_cheaper_by_the_prices_of_the_planner(mesh: Mesh) -> None:
    """Of one row weights move more than features, and Megatron's, in blocks, do not move at all."""
    with torch.device("meta"):
        model, x = Packed(1024, 16), torch.empty(1, 64, 1024)
    model_trace = trace_factors(model, (x,), {})
    roles, graph = roles_of(model_trace), model_trace.step.graph().copies()
    tables = StepTables(graph, mesh, Topology.preset("dgx-h100"))
    free, sums = plan_step(tables), dict[str, float]()
    for name in names(mesh.ndim):
        with suppress(StrategyError):
            plan = plan_by_name(roles, name, mesh)[0]
            stored = {x.name: layout_of(mesh, plan.parameters[x.name], len(x.shape)) for x in graph.parameters()}
            pinned = plan_step(tables.pinned(stored))
            sums[name] = pinned.weights.of(pinned.parts)

    assert min(sums.values()) >= free.weights.of(free.parts) * (1 - 1e-9)
    assert mesh.ndim > 1 or sums["megatron"] == pytest.approx(free.weights.of(free.parts), rel=0.02)


@pytest.mark.parametrize(("family", "shape"), one_way_each(FAMILIES, [(2, 4), (8,)], every=2))
@pytest.mark.parametrize("preset", ["cpu", pytest.param("dgx-h100", marks=pytest.mark.thorough)])
def test_a_step_receives_the_bytes_that_were_planned(preset: str, family: str, shape: tuple[int, ...]) -> None:
    """On slow links bytes that are held have a price, so that weights are sharded, and gathered for use."""
    topology, size = Topology.preset(preset), (16, 1024, 2048) if preset == "dgx-h100" else (8, 64, 512)
    heads, width, vocabulary = size
    model, args = as_meta(language_model(family, width, vocabulary, heads).float(), batch(2, width, vocabulary))
    graph, mesh = record_step(model, args, {}).graph().copies(), mesh_of(shape)
    chosen = plan_step(StepTables(graph, mesh, topology), Weights(memory=1e-7 if preset == "cpu" else 0.0))
    received = planned_bytes(graph, chosen, topology)
    prices, plan = StepPrices(model, args, {}), as_plan(graph, chosen, mesh)
    with use_topology(topology):
        cost, events = prices(plan), [slot.event for slot in prices.slots(plan)]

    for direction in ("forward", "backward"):
        planned = sum(n for (_, each), n in received.items() if each == direction)
        assert planned == sum(move.nbytes for move in cost.moves if move.direction == direction), direction
        assert planned > 0
    copies, waited = planned_copies(graph, chosen, topology), [e for e in events if e.queue == "network" and e.waits]
    assert chosen.parts.exposed - copies == pytest.approx(sum(event.seconds for event in waited))
    copied = sum(event.seconds for event in events if event.name == "copy")
    assert 0 < copies <= copied * (1 + 1e-9)
    # a launch of a CPU is a hundredth of the work of these models
    assert chosen.parts.work == pytest.approx(cost.work - copied, rel=0.05 if preset == "cpu" else 0.02)


@pytest.mark.parametrize(("preset", "sums_on_ranks"), [("cpu", True), ("dgx-h100", False)])
def test_gradients_are_reduced_as_the_backend_of_the_topology_does(preset: str, sums_on_ranks: bool) -> None:
    """Of half precision gloo moves the terms, which ranks add in single precision; NCCL adds them on their way."""
    with torch.device("meta"):
        model, x = nn.Linear(64, 64).bfloat16(), torch.empty(8, 64, dtype=torch.bfloat16)
    with use_topology(Topology.preset(preset)), plain(), planning():
        plan, prices, called = plan_model(model, MESHES[0], "data", x), StepPrices(model, (x,), {}), set[object]()

        def run(func: Any, args: Any, kwargs: Any) -> Any:
            called.add(func)
            return func(*args, **kwargs)

        clear_caches()  # operators on tensors without data run once
        with OperatorMode(run):
            slots = prices.run(plan).slots

    assert (torch.ops.aten._to_copy.default in called) == sums_on_ranks
    assert "_to_copy" not in {slot.event.name for slot in slots}  # which the price of the collective has


class Branching(nn.Module):
    """A block that may leave out its norm, and run within a checkpoint, or as a part of one."""

    def __init__(self, norm: bool = True, checkpoints: str = "") -> None:
        super().__init__()
        self.n, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm, self.checkpoints = norm, checkpoints

    def inner(self, x: Tensor) -> Tensor:
        y = self.n(x).sin() if self.norm else x
        return x + self.down(F.gelu(self.up(y)))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints != "within":
            return self.inner(x)
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


class Branched(nn.Module):
    """Two such blocks, whose sum of squares it returns."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(Branching(True, checkpoints) for _ in range(2))
        self.around = checkpoints == "around"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        return x.square().mean()


def branched(checkpoints: str = "") -> tuple[nn.Module, nn.Module, tuple[Tensor, ...], ModelPlan]:
    """A model on one device and to be laid out, its batch, and a plan that holds few bytes."""
    model, args = Branched(checkpoints).double(), (torch.randn(8, 16, dtype=torch.float64),)
    plan = planned(model, args, MESHES[1], Topology.preset("cpu"), Weights(memory=1e-6))
    return model, copy.deepcopy(model), args, plan


@pytest.mark.parametrize("checkpoints", ["", "around", "within"])
def test_recomputed_calls_follow_the_plan_as_the_first_ones_do(checkpoints: str) -> None:
    model, alone, args, plan = branched(checkpoints)
    alone(*args).backward()
    assert any(call.is_laid_out for call in plan.calls)
    with simulated(MESHES[1]), use_topology(Topology.preset("cpu")):
        parallelize(model, MESHES[1], plan)
        with warnings.catch_warnings(action="error"):
            model(*args).backward()

        for own, p in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(own.grad), p.grad)


def test_calls_that_a_plan_does_not_have_are_warned_of_once() -> None:
    model, alone, args, plan = branched()
    alone.blocks[0].norm = model.blocks[0].norm = False
    alone(*args).backward()
    with simulated(MESHES[1]), use_topology(Topology.preset("cpu")):
        parallelize(model, MESHES[1], plan)
        with pytest.warns(UserWarning, match=r"planned to call \w+ in blocks.0\S*, and .* by cost"):
            model(*args).backward()
        model.zero_grad()
        with warnings.catch_warnings(action="error"):
            model(*args).backward()

        for own, p in zip(model.parameters(), alone.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(whole(own.grad), p.grad)


@pytest.mark.parametrize("forbidden", ["batch", "features"])
def test_what_a_call_writes_to_is_not_moved_before(forbidden: str) -> None:
    """Statistics of a norm whose features are sharded are written to the buffers, not to the shards that it reads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    alone, x, mesh = copy.deepcopy(model), torch.randn(8, 4, dtype=torch.float64), MESHES[0]
    alone(x)
    with simulated(mesh), use_topology(Topology.preset("cpu")):
        plan = plan_model(model, mesh, Auto(forbid={"x": forbidden}, pins={"0.weight": "x:S(0)"}), x)
        parallelize(model, mesh, plan)(x)

        for own, buffer in zip(model.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(whole(own), buffer)


@pytest.mark.parametrize("strategy", ["data", "auto"])
def test_sparse_gradients_of_tables_are_refused_in_words(strategy: str) -> None:
    tokens = torch.zeros(8, 3, dtype=torch.long)
    with simulated(MESHES[0]):
        model = nn.Sequential(nn.Embedding(30, 12, sparse=True), nn.Linear(12, 4))
        with pytest.raises(LayoutError, match=r"leave out sparse=True, and give the table to Adam"):
            parallelize(model, MESHES[0], strategy, tokens)(tokens)


def test_a_step_without_operators_has_a_plan() -> None:
    """Such as that of a forward pass that is a generator, or that returns its input while it trains."""

    class Passed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    plan = plan_model(Passed(8, 4), Mesh((2, 2), ("x", "y")), "auto", torch.empty(6, 8))
    assert plan.cost.nbytes == 0
