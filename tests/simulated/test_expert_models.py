"""Unmodified models with experts: each layer of experts is one operator, and a step equals one device's."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.default_cases import one_way_each
from helpers.expert_models import OwnExperts, OwnModel, batch, expert_model, mesh_of, parallelized, trained
from torch import Tensor, nn

import dshard
from dshard import DTensor, Replicate, Routing, Shard, Topology, plan_model
from dshard.comm import plain
from dshard.errors import LayoutError, NotationError, StrategyError
from dshard.mesh import Mesh
from dshard.ops.matmul.options import current_options
from dshard.parallel import Auto, register_experts
from dshard.parallel.expert_modules import ExpertsModule, experts_form
from dshard.parallel.factors import trace_factors
from dshard.parallel.roles import FeatureKind, roles_of
from dshard.testing import simulated
from dshard.topology import BYTES, Layer

MESH = Mesh((4,), ("x",))
HOSTS = Topology("of two", (Layer("node", 4, 1e9, hardware="network"), Layer("gpu", 2, 1e11, hardware="nvlink")))


@pytest.mark.parametrize(
    ("family", "implementation", "strategy"),
    [
        ("mixtral", "eager", "expert"),
        ("gpt-oss", None, "fsdp x expert"),
        pytest.param("deepseek", "batched_mm", "megatron", marks=pytest.mark.thorough),
        ("qwen3-moe", "grouped_mm", "expert x megatron"),
        pytest.param("mixtral", "eager", "fsdp", marks=pytest.mark.thorough),
    ],
)
def test_steps_are_those_of_one_device(family: str, implementation: str | None, strategy: str) -> None:
    expected = trained(expert_model(family, implementation))
    mesh = mesh_of(strategy)

    with simulated(mesh), dshard.use_topology(BYTES):
        steps = trained(parallelized(expert_model(family, implementation), mesh, strategy))

    assert steps.differs(expected) < 1e-4


@pytest.mark.parametrize(("family", "shape"), one_way_each(["mixtral", "gpt-oss", "deepseek"], [(2, 2), (4,)], every=3))
def test_planned_experts_are_called_as_planned(family: str, shape: tuple[int, ...]) -> None:
    expected = trained(expert_model(family), steps=4)
    mesh = Mesh(shape, ("x", "y")[: len(shape)])
    limits = Auto(pins={"*.experts.*_proj": [Shard(0), *[Replicate()] * (mesh.ndim - 1)]})

    with simulated(mesh), dshard.use_topology(Topology.preset("dgx-h100")):
        plan = plan_model(expert_model(family), mesh, limits, **batch())
        assert {call.is_laid_out for call in plan.calls if call.name == "experts"} == {True}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "the model was planned to call")
            steps = trained(parallelized(expert_model(family), mesh, plan), steps=4)

    assert steps.differs(expected) < 1e-4


@pytest.mark.parametrize("strategy", ["expert", Auto(routing=Routing.zipf(1.0), seconds=0.1)], ids=["name", "auto"])
def test_a_plan_keeps_its_routing_in_its_file_and_runs_by_it(tmp_path: Path, strategy: Any) -> None:
    own, file, seen = Routing.zipf(1.0), tmp_path / "plan.json", []
    routing = own if isinstance(strategy, str) else None

    with simulated(MESH), dshard.use_topology(BYTES):
        plan = plan_model(expert_model("mixtral"), MESH, strategy, routing=routing, **batch())
        plan.save(file)
        model = dshard.parallelize(expert_model("mixtral"), MESH, file, **batch())
        experts = next(module for module in model.modules() if isinstance(module, ExpertsModule))
        experts.register_forward_pre_hook(lambda *args: seen.append(current_options().routing))
        model(**batch())
        with dshard.use_strategy(routing=Routing.uniform()):
            model(**batch())

    assert plan.routing == plan_model(expert_model("mixtral"), MESH, file, **batch()).routing == own
    assert seen == [own, Routing.uniform()]


def test_jitter_of_routers_is_that_of_one_rank() -> None:
    losses = []
    for mesh, strategy in ((Mesh((1,), ("x",)), "data"), (MESH, "expert")):
        with simulated(mesh), dshard.use_topology(BYTES):
            dshard.manual_seed(5)
            losses.append(trained(parallelized(expert_model("mixtral", router_jitter_noise=0.3), mesh, strategy)))

    assert losses[1].differs(losses[0]) < 1e-4
    assert losses[0].differs(trained(expert_model("mixtral"))) > 1e-3


def test_an_eager_loop_is_planned_as_one_operator() -> None:
    model = expert_model("mixtral", "eager")
    before = [type(module) for module in model.modules()]

    roles = roles_of(trace_factors(model, (), batch()))

    kinds = {
        name.rpartition(".")[2]: [role.kind for role in dims]
        for name, dims in roles.parameters.items()
        if ".experts." in name
    }
    assert kinds == {
        "gate_up_proj": [FeatureKind.EXPERT, FeatureKind.INNER, FeatureKind.RESIDUAL],
        "down_proj": [FeatureKind.EXPERT, FeatureKind.RESIDUAL, FeatureKind.INNER],
    }
    assert [type(module) for module in model.modules()] == before
    assert not any("_experts_form" in vars(module) for module in model.modules())


def test_data_parallel_experts_send_their_gradients_alone() -> None:
    model = expert_model("mixtral", hidden_size=32, intermediate_size=8, num_local_experts=4)
    tokens = torch.randint(3, 32, (16, 32))
    plan = dshard.plan_model(model, MESH, "data", input_ids=tokens, labels=tokens)

    nbytes = sum(move.nbytes for move in plan.cost.moves if move.module.endswith("experts"))
    weights = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)

    assert nbytes == 2 * 3 * weights // 4


def test_megatron_reduces_the_gradient_of_tokens_once() -> None:
    model, (rows, length, width) = expert_model("mixtral"), (4, 6, 16)
    with dshard.use_topology(BYTES):
        plan = dshard.plan_model(model, MESH, "megatron", **batch(rows, length))

    sent = Counter(m.nbytes for m in plan.cost.moves if ".mlp" in m.module or m.module.endswith("o_proj"))
    all_reduced = 2 * 3 * rows * length * width * 4 // 4
    assert sent == Counter({all_reduced: 2, 2 * 3 * rows * length * 2 * 4 // 4: 1})  # there, back, and weights


def test_the_expert_strategy_keeps_experts_and_gathers_the_rest() -> None:
    model = expert_model("mixtral")
    plan = dshard.plan_model(model, mesh_of("fsdp x expert"), "fsdp x expert", **batch())
    down, dense = "model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj.weight"

    assert plan.parameters[down] == (Shard(1), Shard(0))
    assert plan.gathered_axes(down) == ("a",)
    assert plan.gathered_axes(dense) == ("a", "b")
    assert [m.count for m in plan.cost.moves if m.module.endswith("experts") and m.axis == "a"] == [1, 1]  # of both


def test_megatron_splits_packed_gate_and_up_of_experts_and_takes_none_apart() -> None:
    plan = dshard.plan_model(expert_model("mixtral"), MESH, "megatron", **batch())
    experts = "model.layers.0.mlp.experts"

    assert plan.parameters[f"{experts}.gate_up_proj"] == (Shard(1, blocks=2),)
    assert plan.parameters[f"{experts}.down_proj"] == (Shard(2),)
    assert "all_to_all" not in {move.collective for move in plan.cost.moves if "mlp" in move.module}


@pytest.mark.usefixtures("_taught")
def test_more_ranks_than_experts_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"has 4 experts, split over 5 ranks .*: 1 have none; use 'fsdp'"):
        dshard.plan_model(OwnModel(), Mesh((5,), ("x",)), "expert", torch.ones(10, 8))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dshard.plan_model(OwnModel(), Mesh((2, 3), ("a", "b")), "fsdp x expert", torch.ones(12, 8))


@pytest.mark.usefixtures("_taught")
@pytest.mark.parametrize(
    ("mesh", "topology", "strategy", "finer", "shape", "gathered"),
    [
        (Mesh((6,), ("x",)), BYTES, "expert", "fsdp x expert", {"x0": 3, "x1": 2}, ("x0",)),
        (Mesh((2, 6), ("a", "x")), BYTES, "data x expert", "data x fsdp x expert", {"a": 2, "x0": 3, "x1": 2}, ("x0",)),
        (MESH, HOSTS, "expert", "expert x expert", {"x0": 2, "x1": 2}, ()),
        pytest.param(
            MESH,
            Topology("cpus", (Layer("host", None, 1e9), Layer("rank", 2, 1e10))),
            "expert",
            "expert x expert",
            {"x0": 2, "x1": 2},
            (),
            marks=pytest.mark.thorough,
        ),
        (Mesh((8,), ("x",)), HOSTS, "expert", "fsdp x expert x expert", {"x0": 2, "x10": 2, "x11": 2}, ("x0",)),
        (MESH, BYTES, "expert", "expert", {"x": 4}, ()),
    ],
)
def test_an_axis_of_experts_is_refined_for_their_number_and_for_hosts(
    mesh: Mesh, topology: Topology, strategy: str, finer: str, shape: dict[str, int], gathered: tuple[str, ...]
) -> None:
    alone, x = OwnModel(), torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    alone(x).backward()

    with simulated(mesh), dshard.use_topology(topology), warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = dshard.plan_model(OwnModel(), mesh, strategy, x)
        model = dshard.parallelize(OwnModel(), mesh, strategy, x)
        model(x).backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)

        again = dshard.plan_model(OwnModel(), plan.mesh, plan.strategy, x)

    assert plan.strategy == again.strategy == finer
    assert dict(zip(plan.mesh.names, plan.mesh.shape, strict=True)) == shape
    assert plan.gathered_axes("experts.w2") == gathered
    assert again.parameters == plan.parameters
    assert again.mesh == plan.mesh


def test_a_model_without_experts_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    with pytest.raises(
        StrategyError,
        match=r"has none that are known: use fsdp; or teach its modules .* by dshard.parallel.register_experts",
    ):
        dshard.plan_model(net, MESH, "expert", torch.ones(4, 4))


@pytest.fixture
def _taught() -> Any:
    register_experts(OwnExperts, "e f d, e d f, e f d", counts=["count"])


class ModelOfData(OwnModel):
    """A model that cannot run without data."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # which torch refuses for meta
            return super().forward(x)


@pytest.mark.usefixtures("_taught")
def test_a_trace_on_data_finds_the_loops_of_experts_as_one_without() -> None:
    x = torch.ones(8, 8)
    without, on_data = trace_factors(OwnModel(), (x,), {}), trace_factors(ModelOfData(), (x,), {})

    assert without.step.answers is not None
    assert on_data.step.answers is None
    assert roles_of(on_data).parameters == roles_of(without).parameters
    assert roles_of(on_data).has_experts
    with pytest.raises(
        LayoutError, match=r"does not run without data .*, and is not priced: lay it out by parallelize"
    ):
        dshard.plan_model(ModelOfData(), MESH, "expert", x)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["expert", "fsdp x expert", "expert x megatron"])
def test_adapters_on_parameters_of_experts_train_as_on_one_device(strategy: str) -> None:
    peft = pytest.importorskip("peft")

    @plain()
    def adapted() -> Any:
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = peft.get_peft_model(expert_model("mixtral"), peft.LoraConfig(r=2, target_parameters=names))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        return model

    torch.manual_seed(0)
    expected = trained(adapted())
    mesh = mesh_of(strategy)
    torch.manual_seed(0)
    with simulated(mesh), dshard.use_topology(BYTES):
        model = parallelized(adapted(), mesh, strategy)
        weight = next(p for name, p in model.named_parameters() if name.endswith("base_layer.down_proj"))
        steps = trained(model)

    assert Shard(0) in weight.placements
    assert steps.differs(expected) < 1e-4


@pytest.mark.usefixtures("_taught")
@pytest.mark.parametrize("strategy", ["expert", "megatron", "expert x megatron"])
def test_a_class_that_is_registered_is_one_operator(strategy: str) -> None:
    alone, x = OwnModel(), torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    alone(x).backward()
    mesh = mesh_of(strategy)

    with simulated(mesh), dshard.use_topology(BYTES):
        model = dshard.parallelize(OwnModel(), mesh, strategy, x)
        model(x).backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert isinstance(p.grad, DTensor), name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
        last = model.experts.w1.grad.full_tensor()[3]

    assert isinstance(model.experts, ExpertsModule)
    assert isinstance(copy.deepcopy(alone.experts), OwnExperts)
    assert not last.any()  # zeros, so that optimisers step on all ranks alike


@pytest.mark.usefixtures("_taught")
def test_megatron_splits_the_inner_features_of_experts_where_a_rule_has_them() -> None:
    plan = dshard.plan_model(OwnModel(), MESH, "megatron", torch.ones(8, 8))

    assert [plan.parameters[f"experts.{name}"] for name in ("w1", "w2", "w3")] == [
        (Shard(1),),
        (Shard(2),),
        (Shard(1),),
    ]
    assert plan.parameters["router.weight"] == (Replicate(),)


def test_what_is_registered_is_checked() -> None:
    with pytest.raises(NotationError, match="each parameter has e, the experts"):
        register_experts(OwnExperts, "e f d, d f, e f d")
    with pytest.raises(NotationError, match="2 terms, but there are 1 parameters"):
        register_experts(OwnExperts, "e f d, e d f", parameters=["w1"])


def test_modules_that_share_parameters_between_experts_are_not_recognised() -> None:
    experts = expert_model("mixtral").model.layers[0].mlp.experts

    assert experts_form(experts) is not None
    experts.post_expert_norm = nn.LayerNorm(16)
    assert experts_form(experts) is None


def test_a_forward_of_other_arguments_is_refused() -> None:
    class Other(OwnExperts):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    register_experts(Other, "e f d, e d f, e f d")
    with pytest.raises(LayoutError, match=r"give it the arguments x, index and weight"):
        dshard.plan_model(nn.Sequential(nn.Linear(8, 8), Other()), MESH, "data", torch.ones(8, 8))
