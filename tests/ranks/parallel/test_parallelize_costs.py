"""What parallelize plans: the cheapest plan, what it sends and holds, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in, one_way_each
from helpers.demo_model import demo_plan, images
from helpers.transformer_layers import Layer, Stack, middle, planned
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import (
    Layout,
    LayoutError,
    Mesh,
    Placement,
    Replicate,
    Shard,
    StrategyError,
    Topology,
    distribute_tensor,
    trace,
    use_topology,
)
from dshard.comm import planning
from dshard.parallel import Auto, ModelPlan, parallelize, plan_model
from dshard.parallel.auto import names, unfoldings, uniform
from dshard.parallel.factors import trace_factors
from dshard.parallel.roles import roles_of
from dshard.parallel.strategies import STRATEGIES
from dshard.simulate import record
from dshard.testing import RankPool, simulated, whole
from dshard.tools.demo.vit import build as build_demo

SEQUENCES = {"context", "ulysses"}


def thorough(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.thorough) for name in names]


# -- auto


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh((2,), ("x",)),
        pytest.param(Mesh((4,), ("x",)), marks=pytest.mark.thorough),
        pytest.param(Mesh((2, 2), ("a", "b")), marks=pytest.mark.thorough),
    ],
)
def test_auto_is_never_worse_than_a_named_strategy(mesh: Mesh) -> None:
    found = demo_plan("auto", mesh)
    named = [demo_plan(name, each) for each in unfoldings(mesh, 2) for name in STRATEGIES if _fits(name, each)]

    assert len(named) > 3
    assert all(found.cost.seconds <= plan.cost.seconds for plan in named)


def _fits(name: str, mesh: Mesh) -> bool:
    return len(STRATEGIES[name]) <= mesh.ndim and name != "expert"


def long_sequence(plan: Any, rows: int, mesh: Mesh) -> ModelPlan:
    """The plan of a layer that is given long sequences."""
    with torch.device("meta"):
        return plan_model(nn.Sequential(nn.Linear(8, 64), Layer(64, 8)), mesh, plan, torch.empty(rows, 2048, 8))


def test_auto_splits_a_sequence_that_no_other_rows_stand_beside() -> None:
    mesh = Mesh((2,), ("x",))
    plans = {name: long_sequence(name, 1, mesh) for name in names(1)}
    limit = min(plan.cost.memory.total for name, plan in plans.items() if name not in SEQUENCES) - 1
    found = long_sequence(Auto(memory=limit), 1, mesh)

    assert set(SEQUENCES) < set(plans)
    assert found.cost.memory.total <= limit
    assert all(found.cost.seconds <= plan.cost.seconds for plan in plans.values() if plan.cost.memory.total <= limit)


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_auto_is_never_worse_than_a_strategy_that_splits_sequences(rows: int) -> None:
    mesh = Mesh((4,), ("x",))
    found = long_sequence("auto", rows, mesh)

    for unfolded in unfoldings(mesh, 2):
        for name in names(unfolded.ndim):
            assert found.cost.seconds <= long_sequence(name, rows, unfolded).cost.seconds, name


def test_sequences_of_rows_that_divide_are_not_split_by_auto() -> None:
    with torch.device("meta"):
        roles = roles_of(trace_factors(Stack(64, 8), (torch.empty(4, 16, 8),), {}))

    assert not any(SEQUENCES & set(p.strategy.split(" x ")) for p in uniform(roles, Mesh((2, 2), ("a", "b"))))
    assert any(SEQUENCES & set(p.strategy.split(" x ")) for p in uniform(roles, Mesh((2, 3), ("a", "b"))))


@pytest.mark.thorough
def test_auto_respects_the_memory_of_a_rank() -> None:
    mesh = Mesh((4,), ("x",))
    free = demo_plan("auto", mesh)
    limit = free.cost.memory.total - 1
    bound = demo_plan(Auto(memory=limit), mesh)

    assert bound.cost.memory.total <= limit
    assert bound.cost.seconds >= free.cost.seconds
    with pytest.raises(StrategyError, match=r"no plan on 4 ranks holds at most 1 KiB: .* needs the least"):
        demo_plan(Auto(memory=1024), mesh)


@pytest.mark.thorough
def test_a_model_laid_out_by_auto_computes_the_same() -> None:
    mesh, model = Mesh((4,), ("x",)), build_demo(0)
    expected = model(images().float())
    with simulated(mesh):
        parallelize(model, mesh, "auto", images().float())
        found = model(images().float())

        torch.testing.assert_close(whole(found.detach()), expected.detach())


class Recomputed(nn.Module):
    """Two linear layers whose activations the backward pass computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: self.down(F.gelu(self.up(x))), x, use_reentrant=False)
        return x + y


def test_a_model_that_computes_again_is_planned() -> None:
    mesh, model, x = Mesh((2,), ("x",)), Recomputed(), torch.linspace(-1, 1, 24).view(4, 6)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with simulated(mesh):
        parallelize(model, mesh, "auto", x)
        model(x).square().sum().backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(whole(p.grad), grad)


class Pooled(nn.Module):
    """A head on the mean of a sequence, so that the gradient of the head's input is gathered beside its weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        out: Tensor = self.head((y + self.down(y)).mean(1))
        return out


def test_uneven_shards_are_planned_as_the_busiest_rank_receives_them() -> None:
    mesh, x = Mesh((2,), ("x",)), torch.randn(3, 16, 4)
    planned = plan_model(Pooled(), mesh, "context", x).cost.nbytes
    with simulated(mesh):
        model = parallelize(Pooled(), mesh, "context", x)
        with trace() as sent:
            out = model(x)
            out.backward(torch.empty_like(out))
        assert planned == sum(event.nbytes for event in sent.events)


class Scaled(nn.Module):
    """A linear layer whose outputs are scaled by a number, or by a plain tensor of one element that it makes."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(6, 8), size

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        scale: Any = torch.full(self.size, 3.0) if self.size else 3.0
        return torch.where(y > 0, y * scale, scale)


@pytest.mark.parametrize("strategy", ["auto", "data", "fsdp"])
def test_tensors_of_one_element_send_what_numbers_send(strategy: str) -> None:
    mesh = Mesh((2,), ("x",))
    costs = [plan_model(Scaled(*size), mesh, strategy, torch.empty(4, 5, 6)).cost for size in ((), (1,), (1, 1))]

    assert [cost.nbytes for cost in costs] == [costs[0].nbytes] * 3
    activations = [cost.memory.activations for cost in costs]
    assert activations == [activations[0], *[activations[0] + 4] * 2]  # the tensor itself is kept for backward


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_inputs_on_the_given_mesh_are_taken_though_the_plan_folds_it(placement: Placement) -> None:
    """Six images on four ranks: the chunks of the mesh are not those of its folding."""
    given, alone = Mesh((4,), ("x",)), build_demo(0, torch.float64)
    plan, plain_images = demo_plan("optimus", Mesh((2, 2), ("x0", "x1"))), images().requires_grad_()
    expected = alone(plain_images)
    expected.square().sum().backward()
    with simulated(given):
        model = parallelize(build_demo(0, torch.float64), given, plan)
        x = distribute_tensor(images(), given, [placement], src_data_rank=None).requires_grad_()
        found = model(x)
        found.square().sum().backward()

        torch.testing.assert_close(whole(found.detach()), expected.detach())
        torch.testing.assert_close(whole(x.grad), plain_images.grad)
        assert x.grad.layout.mesh == given


def test_weights_are_gathered_along_their_own_axis_alone() -> None:
    """Biases too, of which both axes shard the one dim: the gathering axis splits what the other has made of it."""
    plan = demo_plan("fsdp x megatron", Mesh((2, 2), ("dp", "tp")))
    assert plan.cost is not None
    assert {move.axis for move in plan.cost.moves} == {"dp", "tp"}
    bias = Layout(plan.mesh, plan.placements("blocks.0.up.bias"))
    assert bias.axes_of(0) == (1, 0)


# -- errors


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        StrategyError,
        match=r"no strategy is called 'megatorn'; did you mean 'megatron'[?]; there are data, fsdp, expert, megatron",
    ):
        demo_plan("megatorn", Mesh((4,), ("tp",)))


def test_a_mesh_of_too_few_axes_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"needs 2 mesh axes .* make one of the shape \(2, 2\)"):
        demo_plan("optimus", Mesh((4,), ("tp",)))


def test_sequences_that_are_not_there_are_not_split() -> None:
    mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    with pytest.raises(StrategyError, match=r"context and ulysses split the sequence .* keep none"):
        plan_model(mlp, Mesh((4,), ("x",)), "context", torch.empty(4, 8, device="meta"))


def test_attention_that_cannot_be_split_by_heads() -> None:
    layer, x = Wide().to("meta"), torch.empty(4, 8, 16, device="meta")
    with pytest.raises(StrategyError, match=r"ulysses splits attention by heads, .* calls no scaled_dot.* use context"):
        plan_model(nn.Sequential(layer, layer), Mesh((4,), ("x",)), "ulysses", x)
    for strategy, mesh in ("ulysses", Mesh((16,), ("cp",))), ("ulysses x megatron", Mesh((4, 4), ("cp", "tp"))):
        with pytest.raises(
            StrategyError, match=r"the 8 heads of attention over 16 ranks .* at most 8 ranks there, and"
        ):
            planned(strategy, mesh, 64, 8)


class Chunked(nn.Module):
    """Attention within one chunk of the sequence, written as products, before that of all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(self.norm(x)).unflatten(-1, (4, 4)).transpose(1, 2)
        chunks = heads.unflatten(2, (1, -1))
        within = ((chunks @ chunks.transpose(-1, -2)).softmax(-1) @ chunks).flatten(2, 3)
        return x + self.down(F.scaled_dot_product_attention(heads, heads, within).transpose(1, 2).flatten(2))


def test_chunks_of_a_sequence_are_no_heads() -> None:
    layers = nn.Sequential(Chunked(), Chunked()).to("meta")
    plan = plan_model(layers, Mesh((4,), ("cp",)), "ulysses", torch.empty(4, 8, 16, device="meta"))
    assert plan.attention == ("h",)


def test_ulysses_takes_attention_to_its_heads_and_back() -> None:
    """Of four tensors of a quarter of the tokens each rank keeps a quarter: DeepSpeed-Ulysses, section 3.2."""
    tokens, hidden, batch, ranks = 32, 256, 4, 4
    plan = planned("ulysses", Mesh((ranks,), ("cp",)), hidden, 64, batch, tokens)
    nbytes = batch * tokens * hidden * 4

    for direction in ("forward", "backward"):
        moves = [move for move in middle(plan, direction) if move.module == "layers.1.attention"]
        assert [(move.collective, move.count) for move in moves] == [("all_to_all", 4)]
        assert moves[0].nbytes == 4 * nbytes // ranks * (ranks - 1) // ranks
    assert plan.attention == ("h",)
    assert planned("context x ulysses", Mesh((2, 2), ("a", "b")), hidden, 64, batch, tokens).attention == (None, "h")


def test_more_ranks_than_heads() -> None:
    with pytest.raises(StrategyError, match=r"has 8 heads in dim 0, split over 16 ranks .* use at most 8 ranks there"):
        demo_plan("megatron", Mesh((16,), ("tp",)))


def test_more_ranks_than_groups() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GroupNorm(2, 16), nn.ReLU(), nn.Linear(16, 8))
    with pytest.raises(StrategyError, match=r"has 2 groups in dim 0, split over 4 ranks .* use at most 2 ranks there"):
        plan_model(model, Mesh((4,), ("tp",)), "megatron", torch.randn(4, 8))


class HeadWiseGates(nn.Module):
    """Attention of 6 heads and 2 groups of keys, whose gates are a projection of one row for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(24, 24), nn.Linear(24, 8), nn.Linear(24, 24)
        self.gate, self.out = nn.Linear(24, 6), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (f(x).unflatten(-1, (-1, 4)) for f in (self.query, self.key, self.value))
        key = key.repeat_interleave(3, dim=2)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, value))).transpose(1, 2)
        return x + self.out((mixed * self.gate(x).sigmoid().unsqueeze(-1)).flatten(2))


def test_heads_that_a_projection_has_one_row_for_are_as_many_as_its_rows() -> None:
    torch.manual_seed(0)
    model, x, mesh = (
        nn.Sequential(HeadWiseGates(), HeadWiseGates()).double(),
        torch.randn(2, 5, 24).double(),
        Mesh((3,)),
    )
    expected = model(x)

    with pytest.raises(StrategyError, match=r"has 6 heads in dim 0, split over 7 ranks .*: 1 would have none"):
        plan_model(model, Mesh((7,)), "megatron", x)
    with simulated(mesh):
        torch.testing.assert_close(whole(parallelize(model, mesh, "megatron", x)(x).detach()), expected.detach())


def test_heads_that_do_not_divide_work() -> None:
    mesh = Mesh((3,), ("tp",))
    model = build_demo(0)
    expected = model(images().float())
    with simulated(mesh):
        found = parallelize(model, mesh, "megatron", images().float())(images().float())

        torch.testing.assert_close(whole(found.detach()), expected.detach())


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(LayoutError, match=r"the pattern '\*.qvk' matches no parameter of ViT"):
        demo_plan({"*.qvk": [Shard(0)]}, Mesh((4,), ("tp",)))


def test_a_model_that_must_be_traced_needs_an_example() -> None:
    with pytest.raises(LayoutError, match="give an example batch after the plan"):
        parallelize(build_demo(0), Mesh((4,), ("tp",)), "megatron")


def test_a_forward_pass_that_looks_at_values() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.sum().item() > 0 else x

    mesh = Mesh((2,), ("tp",))
    assert plan_model(Looks(), mesh, "data", torch.ones(2, 2)).cost.nbytes > 0
    assert plan_model(Looks(), mesh, "data", -torch.ones(2, 2)).cost.nbytes == 0, "the layer is left out"
    with pytest.raises(LayoutError, match=r"Looks depends on the values of its tensors.*give an example of x with"):
        plan_model(Looks(), mesh, "data", torch.ones(2, 2, device="meta"))


def test_an_operator_that_torch_cannot_run_without_data_is_refused_in_our_words() -> None:
    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale, zero = torch.ones(1), torch.zeros(1)
            return super().forward(torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, -8, 7, 1.0))

    with pytest.raises(LayoutError, match=r"Rounded.*give the placements of its parameters by name"):
        plan_model(Rounded(2, 2), Mesh((2,), ("tp",)), "data", torch.ones(2, 2))


# -- what is sent


def sent_on_ranks(strategy: str) -> Counter[tuple[str, str, int]]:
    """The collectives of a step on this rank: their kinds, mesh axes and bytes."""
    mesh, x = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), images().float()
    model = parallelize(build_demo(0), mesh, strategy, x)

    def step() -> None:
        out = model(x)
        torch.autograd.backward([out], [torch.ones_like(out)])
        model.zero_grad()

    step()
    with trace() as sent:
        step()
    return totals((event.collective, event.axis, 1, event.nbytes) for event in sent.events)


def totals(moves: Iterable[tuple[str, str, int, int]]) -> Counter[tuple[str, str, int]]:
    found: Counter[tuple[str, str, int]] = Counter()
    for collective, axis, count, nbytes in moves:
        found[collective, axis, 0] += count
        found[collective, axis, 1] += nbytes
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", one_in(6, ["fsdp", "data", "megatron-sp", "megatron", "optimus", "atp"]))
def test_planned_collectives_are_those_that_ranks_run(ranks: RankPool, strategy: str) -> None:
    moves = demo_plan(strategy, Mesh((2, 2), ("a", "b"))).cost.moves

    planned = totals((move.collective, move.axis, move.count, move.nbytes) for move in moves)

    assert planned == ranks.run(sent_on_ranks, strategy)[0]


# -- memory


def held(strategy: str, shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, int]:
    """What a rank holds of a model, of its optimiser, and after the forward pass."""
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = parallelize(build_demo(0), mesh, strategy, images().float())
    optimiser, x = torch.optim.AdamW(model.parameters()), images().float()
    for _ in range(2):
        model(x).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
    kept: list[Tensor] = []
    activations = record(lambda: kept.append(model(x)), warm=True).held
    kept.pop().sum().backward()
    moments = [t for state in optimiser.state.values() for t in state.values() if t.dim()]
    return {
        "parameters": sum(p._local_tensor.nbytes for p in model.parameters()),
        "gradients": sum(p.grad._local_tensor.nbytes for p in model.parameters()),
        "optimizer": sum(t._local_tensor.nbytes for t in moments),
        "activations": activations,
    }


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [*thorough("data", "megatron", "atp", "megatron-sp", "fsdp"), "optimus"], ids=str)
def test_planned_memory_is_counted_memory(ranks: RankPool, strategy: str) -> None:
    planned = demo_plan(strategy, Mesh((2, 2), ("a", "b"))).cost.memory
    found = ranks.run(held, strategy, (2, 2), ("a", "b"))[0]
    activations = found.pop("activations")

    assert found == {name: getattr(planned, name) for name in found}
    # a rank has its part of the inputs in memory of its own, without data it is a view
    assert planned.activations <= activations <= planned.activations + images().float().nbytes


def test_a_plan_costs_the_same_whatever_was_planned_before() -> None:
    """Ways that a program is remembered by do not change its price."""
    mesh, x = Mesh((2, 2), ("a", "b")), torch.empty(8, 5, 16, device="meta")
    first, _, again = (
        plan_model(nn.Sequential(Gated(), Gated()).to("meta"), mesh, strategy, x).cost
        for strategy in ("megatron-sp", "optimus", "megatron-sp")
    )

    assert again == first
    assert first.work > 0


@pytest.mark.parametrize(
    ("strategy", "block"),
    one_way_each(["data", "fsdp", "megatron", "megatron-sp", "optimus", "atp"], ["Wide", "Gated"], every=2),
)
def test_planned_memory_is_what_a_step_without_data_holds(strategy: str, block: str) -> None:
    mesh, kept, kind = Mesh((2, 2), ("a", "b")), [], {"Wide": Wide, "Gated": Gated}[block]
    with torch.device("meta"):
        model, x = nn.Sequential(kind(), kind()), torch.empty(8, 6, 16)
        cost = plan_model(model, mesh, strategy, x).cost
        planned = cost.memory
        with planning():
            parallelize(model, mesh, strategy, x)

            def step() -> None:
                out = model(x)
                torch.autograd.backward([out], [torch.empty_like(out)])

            def forward() -> None:
                kept.append(model(x))

            record(step, warm=True)
            model.zero_grad()
            stepped = record(step, warm=True)
            model.zero_grad()
            activations = record(forward, warm=True).held

    assert activations == planned.activations
    assert stepped.held == planned.gradients == planned.parameters
    assert stepped.peak == planned.peak
    assert planned.transient > 0
    assert stepped.seconds == pytest.approx(cost.seconds), "joined collectives beside the same work"
    assert cost.hidden > 0 or strategy != "fsdp"  # all gradients of "data" are one bucket, which nothing runs beside


def test_what_a_collective_hides_is_at_most_the_work_beside_it() -> None:
    """On a slow network a step takes as long as its collectives but for that; on a fast one they are hidden nearly."""
    x, mesh = torch.empty(64, 16, 8, device="meta"), Mesh((4,), ("x",))
    costs = []
    for bandwidth in (1e3, 1e7, 1e15):
        with use_topology(Topology.flat(bandwidth, 1e-9)), torch.device("meta"):
            costs.append(plan_model(Stack(64, 4), mesh, "fsdp", x).cost)
    slow, medium, fast = costs

    assert slow.hidden * (1 - 1e-9) <= medium.hidden <= medium.work
    assert fast.hidden > 0.5 * fast.communication
    assert all(max(cost.work, cost.communication) <= cost.seconds for cost in costs)


def test_blocks_are_gathered_beside_work_also_where_some_parameters_are_not_gathered() -> None:
    x, mesh = torch.empty(64, 16, 8, device="meta"), Mesh((4,), ("x",))
    with use_topology(Topology.flat(1e9, 1e-9)), torch.device("meta"):
        model = Stack(64, 4)
        every = plan_model(model, mesh, "fsdp", x)
        names = [name for name, _ in model.named_parameters()]
        kept = {names[0]: (Replicate(),)}
        gathers: dict[str, tuple[str, ...]] = {"": ()} | dict.fromkeys(names[1:], ("x",))
        others = plan_model(model, mesh, replace(every, parameters={**every.parameters, **kept}, gathers=gathers), x)

    assert others.cost.hidden > 0.9 * every.cost.hidden > 0


def test_views_are_no_work() -> None:
    """A model that looks at its input in many ways has the work of one that does not."""

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = x.transpose(0, 1).unflatten(0, (2, -1)).flatten(0, 1).transpose(0, 1)
            return super().forward(x)

    x, mesh = torch.empty(16, 8, 16, device="meta"), Mesh((4,), ("x",))
    with torch.device("meta"):
        plain, looking = (plan_model(kind(16, 16), mesh, "data", x).cost for kind in (nn.Linear, Looks))

    assert looking.work == plain.work


@pytest.mark.parametrize("heads", [4, 2])
def test_planned_memory_of_attention_has_no_scores(heads: int) -> None:
    """Of queries, keys, values, the result and a sum for each query: linear in the tokens."""
    tokens, batch, width = 64, 2, 16

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * heads * 4)

        def forward(self, x: Tensor) -> Tensor:
            q, kv = (
                self.q(x).unflatten(-1, (4, -1)).transpose(1, 2),
                self.kv(x).unflatten(-1, (heads, -1)).transpose(1, 2),
            )
            return F.scaled_dot_product_attention(q, *kv.chunk(2, -1), is_causal=True, enable_gqa=True)

    with torch.device("meta"):
        memory = plan_model(Heads(), Mesh((1,), ("x",)), "data", torch.empty(batch, tokens, width)).cost.memory

    given, q, kv = batch * tokens * width * 4, batch * tokens * width * 4, 2 * batch * tokens * heads * 4 * 4
    assert memory.activations == given + q + kv + q + batch * 4 * tokens * 4


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Gated(nn.Module):
    """Two products of one input, which is moved for both at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.RMSNorm(16), *(nn.Linear(16, 64) for _ in "ab"), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(self.gate(h).relu() * self.up(h))
