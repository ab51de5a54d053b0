"""Wrong calls of the public surface, argument by argument: each is refused where it is made, in words that help."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import dshard
from dshard import (
    ArgumentError,
    CheckpointError,
    DTensor,
    DtypeError,
    Layout,
    LayoutError,
    Mesh,
    MeshError,
    MixedError,
    NotationError,
    Partial,
    Replicate,
    Schedule,
    ShapeError,
    Shard,
    StrategyError,
    Stream,
    Topology,
    TopologyError,
    checkpoint,
    distribute_tensor,
    parallel,
    pipeline,
    register_rule,
    use_strategy,
    use_topology,
    visualize,
)
from dshard.debug import visualize_sharding
from dshard.errors import RankError, ScheduleError
from dshard.experimental import local_map, register_sharding
from dshard.explain import explain_matmul, parse_dtype
from dshard.layout import parse_layout
from dshard.pipeline import Costs, Edge, Pipeline, Program, Stage, StageCost, chain
from dshard.placements import parse_placement, parse_placements
from dshard.simulate import record
from dshard.testing import RankPool, check_call, check_rule, distribute, parts, simulated, whole, whole_numbers
from dshard.tools.cli import main
from dshard.topology import Device, Layer, Link, Measured

Row = tuple[Callable[[], object], type[Exception], str]
MESH, LINE = Mesh((2, 2), ("dp", "tp")), Mesh((4,), ("x",))


def planned(*shape: int, placements: Any = None, mesh: Mesh = MESH, dtype: torch.dtype = torch.float32) -> DTensor:
    """A tensor that is only planned with."""
    return distribute_tensor(torch.empty(shape, dtype=dtype, device="meta"), mesh, placements)


X = planned(4, 4, placements=[Shard(0), Replicate()])
ON_LINE = planned(4, 4, placements=[Shard(0)], mesh=LINE)
W = planned(4, 4, placements=[Replicate(), Shard(1)])
EMPTY = planned(0, 4, placements=[Shard(0), Replicate()])
WHOLE = Layout(LINE, (Replicate(),))
DGX = Topology.preset("dgx-a100")
COSTS = pipeline.uniform(2, chain(2), StageCost())
EXAMPLE = torch.empty(8, 8, device="meta")


class Net(nn.Module):
    """Two layers, without data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8, device="meta"), nn.LayerNorm(8, device="meta")

    def forward(self, x: Any) -> Any:
        return self.norm(self.fc(x))


def entered(context: Callable[[], Any]) -> Callable[[], object]:
    """A call that enters the context."""

    def call() -> object:
        with context():
            return None

    return call


def linear() -> nn.Linear:
    """A layer without data."""
    return nn.Linear(8, 8, device="meta")


def measured(**changes: Any) -> Measured:
    """A measured figure."""
    return Measured(**({"mesh": MESH, "axes": ("dp",), "latency": 0.0, "bandwidth": 1.0} | changes))


MESHES: list[Row] = [
    (
        lambda: nn.functional.embedding(planned(3, dtype=torch.int64), planned(4, 4).requires_grad_(), sparse=True),
        LayoutError,
        r"embedding\(sparse=True\) of a distributed table.*leave out sparse=True.*Adam",
    ),
    (lambda: Mesh(4), MeshError, r"4 is no sequence: give each axis at least one rank"),
    (lambda: Mesh(None), MeshError, "None is no sequence"),
    (lambda: Mesh("22"), MeshError, "'22' is no sequence"),
    (lambda: Mesh((2.0, 2)), MeshError, "give each axis at least one rank"),
    (lambda: Mesh((True, 2)), MeshError, "give each axis at least one rank"),
    (lambda: Mesh((-2,)), MeshError, "give each axis at least one rank"),
    (lambda: Mesh((10**9,)), MeshError, "has 1,000,000,000 ranks: one has at most"),
    (lambda: Mesh((2, 2), "dp"), MeshError, r"'dp' is no sequence: give a name for each axis, such as \('dp', 'tp'\)"),
    (lambda: Mesh((2, 2), (0, 1)), MeshError, "a name is one word"),
    (lambda: Mesh((2, 2), (["a"], "b")), MeshError, "a name is one word"),
    (lambda: Mesh((2,), ("a\nb",)), MeshError, "a name is one word"),
    (lambda: Mesh((2,), ("a",), (-1, 0)), MeshError, "-1 is not a whole number of at least 0"),
    (lambda: Mesh((2,), ("a",), (0, 0)), MeshError, "needs 2 different ranks, got 0, 0"),
    (lambda: Mesh((2,), ("a",), (0.0, 1.0)), MeshError, "0.0 is not a whole number"),
    (lambda: Mesh((2,), ("a",), (False, True)), MeshError, "False is not a whole number"),
    (lambda: Mesh((2,), ("a",), "01"), MeshError, "'01' is no sequence"),
    (lambda: Mesh((2,), ("a",), 3), MeshError, "3 is no sequence: give the rank of each place"),
    (lambda: Mesh((2,), device_type="tpu"), MeshError, "'tpu' is no type of device: use one of torch's"),
    (lambda: Mesh((2,), device_type="cud"), MeshError, "did you mean 'cuda'"),
    (lambda: Mesh((2,), device_type="cuda:0"), MeshError, "without an index"),
    (lambda: Mesh((2,), device_type=None), MeshError, "None is no type of device"),
    (lambda: Mesh((2,), device_type=torch.device("cpu")), MeshError, "is no type of device"),
    (lambda: MESH.axis("tpp"), MeshError, "did you mean 'tp'"),
    (lambda: MESH.coordinate([0]), MeshError, r"rank \[0\] is not in the mesh"),
    (lambda: MESH.rank((0,)), MeshError, r"has no coordinate \(0,\): give an index of each axis"),
    (lambda: MESH.rank((0, 5)), MeshError, "has no coordinate"),
    (lambda: MESH.rank((0, -1)), MeshError, "has no coordinate"),
    (lambda: MESH.rank((0, 2)), MeshError, "has no coordinate"),
    (lambda: MESH.rank(0), MeshError, "0 is no sequence: give one index for each axis"),
    (lambda: MESH.group(["dp"], (0,)), MeshError, "give an index of each axis"),
    (lambda: MESH.group(["dp"], (0, 9)), MeshError, "has no coordinate"),
    (lambda: dshard.init_device_mesh("cpu", 2), MeshError, "2 is no sequence"),
    (lambda: dshard.init_device_mesh("tpu", (2,)), MeshError, "'tpu' is no type of device"),
    (lambda: dshard.init_device_mesh(None, (2,)), MeshError, "None is no type of device"),
    (lambda: dshard.init_device_mesh("cuda:0", (2,)), MeshError, "without an index"),
    (lambda: dshard.init_device_mesh("cpu", (4, 0)), MeshError, "give each axis at least one rank"),
    (lambda: dshard.init_device_mesh("cpu", (-2, -2)), MeshError, "give each axis at least one rank"),
    (lambda: dshard.init_device_mesh("cpu", ()), MeshError, "give each axis at least one rank"),
    (lambda: dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a",)), MeshError, "give each axis its own name"),
    (lambda: dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names="ab"), MeshError, "'ab' is no sequence"),
]

LAYOUTS: list[Row] = [
    (lambda: Shard("0"), LayoutError, "the tensor dim must be an int"),
    (lambda: Shard(True), LayoutError, "the tensor dim must be an int"),
    (lambda: Partial("mean"), LayoutError, "did you mean 'avg'"),
    (lambda: Partial("summ"), LayoutError, "did you mean 'sum'"),
    (lambda: Partial(["sum"]), LayoutError, "must be one of sum, avg"),
    (lambda: parse_placement(0), NotationError, "0 is an int: write R, S"),
    (lambda: parse_placements(["R"]), NotationError, "is a list: write one for each mesh axis"),
    (lambda: parse_layout(3, MESH), NotationError, "3 is an int"),
    (lambda: parse_layout("R R", "m"), NotationError, "'m' is a str: give a dshard.Mesh"),
    (lambda: parse_layout("dp:S(0) tp:S(0); ²:tp,dp", MESH), NotationError, "is no order of mesh axes"),
    (lambda: Layout("cpu", (Shard(0),)), LayoutError, "a layout on 'cpu': give a dshard.Mesh"),
    (lambda: Layout(LINE, Shard(0)), LayoutError, r"Shard\(dim=0\) is one placement; .* give 1, .* as in \[Shard\(0\)"),
    (lambda: Layout(MESH, None), LayoutError, "None is no sequence of placements"),
    (lambda: Layout(MESH, "dp:S(0) tp:R"), LayoutError, "is text, which dshard.placements.parse_placements reads"),
    (lambda: Layout(MESH, (Shard, Replicate())), LayoutError, "is no placement.*a value and not its class"),
    (lambda: Layout(MESH, (Shard(-1), Replicate())), LayoutError, "of tensors of any shape: count dims from 0"),
    (lambda: Layout(MESH, (Shard(0), Shard(0)), (1, 0)), LayoutError, "give pairs of a tensor dim, each once"),
    (lambda: Layout(MESH, (Shard(0), Shard(0)), "0:tp,dp"), LayoutError, "give pairs of a tensor dim, each once"),
    (lambda: Layout(MESH, (Shard(0),) * 2, ((0, (0, 1)), (0, (1, 0)))), LayoutError, "give pairs .* each once"),
    (lambda: Layout(MESH, (Shard(0), Shard(0))).replace(5, Shard(0)), LayoutError, "5 is no index of an axis"),
    (lambda: Layout(MESH, (Shard(0), Shard(0))).replace(-1, Shard(0)), LayoutError, "-1 is no index of an axis"),
    (lambda: Layout(MESH, (Shard(0), Shard(0))).replace("dp", Shard(0)), LayoutError, "as mesh.axis"),
    (lambda: Layout(MESH, (Shard(0), Replicate())).split(1, [9]), LayoutError, "9 is no index of an axis"),
    (lambda: visualize([1], (4,)), ArgumentError, "is a list: give a DTensor, or a dshard.Layout"),
    (lambda: visualize(X.layout, (-4, 4)), ShapeError, "-4 is not a whole number of at least 0"),
    (lambda: visualize(X.layout, 4), ShapeError, "4 is no sequence"),
    (lambda: visualize(X.layout, "44"), ShapeError, "'44' is no sequence"),
    (lambda: visualize_sharding(torch.ones(3)), ArgumentError, "is a Tensor: give a DTensor"),
]

TENSORS: list[Row] = [
    (lambda: DTensor(torch.ones(3)), ArgumentError, "is not made by its class: use dshard.distribute_tensor"),
    (lambda: DTensor(torch.ones(3), WHOLE), ArgumentError, "is not made by its class"),
    (lambda: distribute_tensor([1, 2], MESH), ArgumentError, r"takes the whole tensor, .* not \[1, 2\], a list"),
    (lambda: distribute_tensor(np.zeros(4), MESH), ArgumentError, "torch.as_tensor"),
    (lambda: distribute_tensor(None, MESH), ArgumentError, "not None, a NoneType"),
    (lambda: distribute_tensor(nn.Linear(2, 2), MESH), ArgumentError, "a Linear"),
    (lambda: distribute_tensor(torch.ones(4), None), MeshError, "no mesh was given: pass a DeviceMesh"),
    (lambda: distribute_tensor(torch.ones(4), LINE, Shard(0)), LayoutError, r"is one placement; for the mesh \(x=4\)"),
    (lambda: distribute_tensor(torch.ones(4), MESH, "dp:S(0) tp:R"), LayoutError, "is text"),
    (lambda: distribute_tensor(torch.ones(4), MESH, X.layout), LayoutError, "is a layout, .* give its .placements"),
    (lambda: distribute_tensor(torch.ones(4), MESH, {"dp": Shard(0)}), LayoutError, "is no sequence of placements"),
    (lambda: distribute_tensor(torch.ones(4), MESH, 0), LayoutError, "0 is no sequence of placements"),
    (lambda: distribute_tensor(torch.ones(4), MESH, [Shard(0), None]), LayoutError, "None is no placement"),
    (
        lambda: distribute_tensor(torch.ones(4), MESH, [_StridedShard(0, split_factor=3), torch_tensor.Shard(0)]),
        LayoutError,
        "split_factor=3.* no order of the axes",
    ),
    (lambda: distribute_tensor(torch.ones(4), MESH, src_data_rank="0"), MeshError, "src_data_rank '0'"),
    (lambda: distribute_tensor(torch.ones(4), MESH, src_data_rank=True), MeshError, "src_data_rank True"),
    (lambda: distribute_tensor(torch.ones(4), MESH, src_data_rank=0.0), MeshError, "src_data_rank 0.0"),
    (lambda: distribute_tensor(torch.eye(4).to_sparse(), MESH), LayoutError, "a DTensor is strided"),
    (
        lambda: distribute_tensor(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), MESH),
        LayoutError,
        "that is quantized: a DTensor is strided",
    ),
    (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), LayoutError, "torch.qint8: .* no quantized dtype"),
    (lambda: X.to(torch.quint8), LayoutError, r"torch.quint8: .* call it on x.full_tensor\(\)"),
    (lambda: DTensor.from_local([1.0], MESH), ArgumentError, "takes this rank's local tensor"),
    (lambda: DTensor.from_local(np.zeros(3), MESH), ArgumentError, "a ndarray|an ndarray"),
    (lambda: DTensor.from_local(torch.ones(4), LINE, Shard(0)), LayoutError, "is one placement"),
    (lambda: DTensor.from_local(torch.ones(4), LINE, [Shard(0)], shape=16), ShapeError, "16 is no sequence"),
    (lambda: DTensor.from_local(torch.ones(4), LINE, [Shard(0)], shape=(16.0,)), ShapeError, "16.0 is not a whole"),
    (lambda: DTensor.from_local(torch.ones(0), LINE, [Shard(0)], shape=(-4,)), ShapeError, "-4 is not a whole"),
    (lambda: DTensor.from_local(torch.ones(4), LINE, [Shard(0)], shape="16"), ShapeError, "'16' is no sequence"),
    (lambda: DTensor.from_local(torch.ones(4, 4), LINE, stride=(1,)), ShapeError, "for a tensor of 2 dims"),
    (lambda: DTensor.from_local(torch.ones(4, 4), LINE, stride=4), ShapeError, "stride: 4 is no sequence"),
    (lambda: DTensor.from_local(torch.ones(4, 4), LINE, stride=(-4, 1)), ShapeError, "-4 is not a whole number"),
    (lambda: DTensor.from_local(torch.ones(4), MESH, grad_placements="x"), LayoutError, "is text"),
    (lambda: DTensor.from_local(torch.ones(4), LINE, grad_placements=[Shard(3)]), LayoutError, "out of range"),
    (lambda: DTensor.from_local(torch.eye(4).to_sparse(), LINE), LayoutError, "a DTensor is strided"),
    (lambda: DTensor.from_local(torch.ones(4).long(), LINE, [Partial("avg")]), LayoutError, "a mean of whole numbers"),
    (
        lambda: DTensor.from_local(torch.ones(4) * 1j, LINE, [Partial("max")]),
        LayoutError,
        "complex numbers have no order",
    ),
    (lambda: X.redistribute(placements=Shard(0)), LayoutError, "is one placement"),
    (lambda: X.redistribute(placements=3), LayoutError, "3 is no sequence of placements"),
    (lambda: X.redistribute(placements=X.layout), LayoutError, "give its .placements"),
    (lambda: X.to_local(grad_placements=[Shard(0)]), LayoutError, "1 placements"),
    (lambda: X.to_local(grad_placements="x"), LayoutError, "is text"),
    (lambda: X.full_tensor(grad_placements=[Shard(0)]), LayoutError, "1 placements"),
    (
        lambda: ON_LINE.to_local(grad_placements=[Replicate()]),
        LayoutError,
        r"on the last rank \(1, 4\), and would have \(4, 4\)",
    ),
    (
        lambda: ON_LINE.to_local(grad_placements=[Shard(1)]),
        LayoutError,
        "shard the dims that the local tensor is a shard of",
    ),
    (
        lambda: ON_LINE.full_tensor(grad_placements=[Shard(0)]),
        LayoutError,
        "full_tensor.*a gradient has the shape of the",
    ),
    (
        lambda: DTensor.from_local(torch.ones(1, 4), LINE, [Shard(0)], grad_placements=[Replicate()]),
        LayoutError,
        "from_local.*a gradient has the shape of the local tensor",
    ),
    (lambda: copy.deepcopy(X.clone().requires_grad_() * 2), ShapeError, "only leaf DTensors"),
]

FACTORIES: list[Row] = [
    (lambda: dshard.zeros(-4, device_mesh=MESH), ShapeError, "size: -4 is not a whole number of at least 0"),
    (lambda: dshard.zeros(4.0, device_mesh=MESH), ShapeError, "size: 4.0 is not a whole number"),
    (lambda: dshard.zeros("4", device_mesh=MESH), ShapeError, "size: '4' is not a whole number"),
    (lambda: dshard.zeros(True, device_mesh=MESH), ShapeError, "True is not a whole number"),
    (lambda: dshard.zeros(None, device_mesh=MESH), ShapeError, "None is not a whole number"),
    (lambda: dshard.zeros([4], 4, device_mesh=MESH), ShapeError, r"\[4\] is not a whole number"),
    (lambda: dshard.zeros(4, size=(4,), device_mesh=MESH), ArgumentError, "give the sizes once"),
    (lambda: dshard.zeros(4, device_mesh=MESH, dtype="float32"), ArgumentError, "give a dtype of torch's"),
    (lambda: dshard.zeros(4, device_mesh=MESH, device="cpu"), ArgumentError, "lies on the devices of its mesh"),
    (lambda: dshard.zeros(4, device_mesh=MESH, layout=torch.sparse_coo), ArgumentError, "takes no layout"),
    (lambda: dshard.zeros(4, device_mesh=MESH, placement=[]), ArgumentError, "did you mean 'placements'"),
    (lambda: dshard.zeros(4, device_mesh=LINE, placements=Shard(0)), LayoutError, "is one placement"),
    (lambda: dshard.full(1.5, 4, device_mesh=MESH), ShapeError, "1.5 is not a whole number"),
    (lambda: dshard.randn("a", device_mesh=MESH), ShapeError, "'a' is not a whole number"),
    (lambda: dshard.rand(4, device_mesh=MESH, generator=3), ArgumentError, "give a torch.Generator"),
    (lambda: dshard.randint(5, device_mesh=MESH), ArgumentError, r"give randint\(\[low,\] high, size\)"),
    (lambda: dshard.randint(device_mesh=MESH), ArgumentError, r"give randint\(\[low,\] high, size\)"),
    (lambda: dshard.randint(0, 5.5, (4,), device_mesh=MESH), ArgumentError, "a bound: 5.5 is not a whole number"),
    (lambda: dshard.randint(0, 5, 6, (4,), device_mesh=MESH), ArgumentError, "4 bounds and sizes"),
    (lambda: dshard.randperm(-1, device_mesh=MESH), ShapeError, "-1 is not a whole number of at least 0"),
    (lambda: dshard.randperm(4.0, device_mesh=MESH), ShapeError, "4.0 is not a whole number"),
    (lambda: dshard.randperm((4,), device_mesh=MESH), ShapeError, r"\(4,\) is not a whole number"),
    (lambda: dshard.randperm(4, device_mesh=MESH, dtype="int64"), ArgumentError, "give a dtype of torch's"),
    (lambda: dshard.randperm(1000, device_mesh=MESH, dtype=torch.int8), DtypeError, "does not hold all numbers"),
    (lambda: dshard.randperm(4, device_mesh=MESH, foo=1), ArgumentError, "takes no 'foo'"),
    (lambda: dshard.manual_seed("1"), ArgumentError, "manual_seed: '1' is not a whole number"),
    (lambda: dshard.manual_seed(1.5), ArgumentError, "1.5 is not a whole number"),
    (lambda: dshard.manual_seed(None), ArgumentError, "None is not a whole number"),
    (lambda: dshard.set_rng_state(None), ArgumentError, "pass what dshard.get_rng_state"),
    (lambda: dshard.set_rng_state([0, 0]), ArgumentError, "pass what dshard.get_rng_state"),
    (lambda: dshard.distribute_module(torch.ones(3), MESH), ArgumentError, "a tensor is for distribute_tensor"),
    (lambda: dshard.distribute_module(nn.ReLU(), "cpu"), MeshError, "'cpu' is no mesh"),
    (lambda: dshard.distribute_module(linear(), MESH, "rows"), ArgumentError, "partition_fn: 'rows' cannot be called"),
    (lambda: dshard.distribute_module(linear(), MESH, None, 3), ArgumentError, "input_fn: 3 cannot be called"),
]

PRODUCTS: list[Row] = [
    (lambda: dshard.matmul(X, 3), ArgumentError, "3, an int: it multiplies two DTensors"),
    (lambda: dshard.matmul(X, None), ArgumentError, "it multiplies two DTensors"),
    (lambda: dshard.matmul(X, torch.ones(4, 4)), MixedError, "wrap a plain torch.Tensor"),
    (lambda: dshard.matmul(X, W, strategy="suma"), StrategyError, "did you mean 'summa'"),
    (lambda: dshard.matmul(X, W, strategy=3), StrategyError, "give a name, or a dshard.Schedule"),
    (lambda: dshard.matmul(X, W, strategy=["summa"]), StrategyError, "give a name, or a dshard.Schedule"),
    (lambda: dshard.matmul(X, W, out_placements=Shard(0)), LayoutError, "is one placement"),
    (lambda: dshard.matmul(X, W, saved="move"), StrategyError, "use 'auto', 'moved' or 'stored'"),
    (lambda: dshard.matmul(X, W, panels=True), StrategyError, "panels=True: give a number of them, or 'auto'"),
    (lambda: dshard.matmul(X, W, panels=2.0), StrategyError, "panels=2.0"),
    (lambda: dshard.linear(X, None), ArgumentError, "it multiplies two DTensors"),
    (lambda: dshard.linear(None, W), ArgumentError, "it multiplies two DTensors"),
    (lambda: dshard.linear(X, W, "bias"), ArgumentError, "bias: 'bias' is a str: give a DTensor, or None"),
    (lambda: Schedule(("m",), ("k",), 4), LayoutError, "a schedule in 4: give a dshard.Stream"),
    (lambda: Schedule(None, None), LayoutError, "None is no sequence"),
    (lambda: Schedule((["m"],), ("k",)), LayoutError, "is no loop"),
    (lambda: Stream(True), StrategyError, "panels=True"),
    (entered(lambda: use_strategy(matmul=3)), StrategyError, "give a name, or a dshard.Schedule"),
    (entered(lambda: use_strategy(matmul=["summa"])), StrategyError, "give a name, or a dshard.Schedule"),
    (entered(lambda: use_strategy(saved=None)), StrategyError, "saved=None"),
    (entered(lambda: use_strategy(panels="auto", buffer_bytes="1GB")), StrategyError, "'1GB' is not a whole number"),
    (entered(lambda: use_strategy(panels="auto", buffer_bytes=1.5)), StrategyError, "1.5 is not a whole number"),
    (
        entered(lambda: use_topology("dgx-h100")),
        TopologyError,
        r"Topology.preset\('dgx-h100', nodes=1\), or of as many",
    ),
    (entered(lambda: use_topology("dgx-h10")), TopologyError, "is no Topology.*did you mean 'dgx-h100'"),
    (entered(lambda: use_topology(None)), TopologyError, "None is no Topology"),
    (entered(lambda: use_topology({})), TopologyError, "is no Topology"),
    (entered(lambda: use_topology(Topology)), TopologyError, "is no Topology"),
    (lambda: explain_matmul(2.5, 2, 2, MESH), ShapeError, "2.5 is not a whole number"),
    (lambda: explain_matmul(2, 2, 2, "2x2"), MeshError, "'2x2' is a str: give a dshard.Mesh"),
    (lambda: explain_matmul(2, 2, 2, MESH, a="R R", b="R R"), LayoutError, "'R R' is a str: give a dshard.Layout"),
    (lambda: explain_matmul(2, 2, 2, MESH, a=WHOLE, b=WHOLE), LayoutError, "give one mesh"),
    (lambda: explain_matmul(2, 2, 2, MESH, dtype="bf16"), ArgumentError, "give one of torch's"),
    (lambda: explain_matmul(2, 2, 2, MESH, "dgx-h100"), TopologyError, "is the name of a preset"),
    (lambda: parse_dtype("float23"), NotationError, "did you mean 'float32'"),
    (lambda: parse_dtype(None), NotationError, "None is no dtype"),
    (lambda: dshard.explain(X), ArgumentError, "cannot be called: give a function and its arguments"),
    (lambda: dshard.explain("x @ w"), ArgumentError, "cannot be called"),
    (lambda: dshard.explain(lambda: 1).chosen, MixedError, "no operator on distributed tensors was called"),
    (lambda: dshard.explain(torch.matmul, X, W).top(-1), ArgumentError, "-1 is not a whole number of at least 0"),
    (lambda: dshard.explain(torch.matmul, X, W).top("3"), ArgumentError, "'3' is not a whole number"),
]

RULES: list[Row] = [
    (lambda: register_rule(torch.mm, "a -> a"), NotationError, "is no operator name: write namespace::name"),
    (lambda: register_rule(3, "a -> a"), NotationError, "3 is no operator name"),
    (
        lambda: register_rule("none::such", "a -> a"),
        NotationError,
        "there is no operator 'none::such': define it before",
    ),
    (lambda: register_rule("aten::", "a -> a"), NotationError, "there is no operator 'aten::'"),
    (lambda: register_rule("aten::add.Tensor", "a, a -> a"), NotationError, "leave out '.Tensor'"),
    (lambda: register_rule("aten::mm", "m k -> m k"), NotationError, "has 1 operands and 1 outputs, but aten::mm is"),
    (lambda: register_rule("aten::mm", "m k, k n, n -> m n"), NotationError, "has 3 operands"),
    (lambda: register_rule("aten::mm", "m k, k n -> m n, m"), NotationError, "and 2 outputs"),
    (lambda: register_rule("aten::mm", "m k, k n -> m n q"), NotationError, r"splits 'q', .*write it \[q\]"),
    (lambda: register_rule("aten::mm", "... k ..., k n -> ... n"), NotationError, "several '...' in one term"),
    (lambda: register_rule("aten::mm", "*m k, k n, n q, q -> m"), NotationError, "has 4 operands"),
    (lambda: register_rule("aten::mm", "m k, k n -> m n", reduce=None), NotationError, "reduces by"),
    (lambda: register_rule("aten::mm", "m k, k n -> m n", reduce=[["sum"]]), NotationError, "reduces by"),
    (lambda: register_rule("aten::mm", "m k, k n -> m n", linear=0), NotationError, "linear: 0 is no sequence"),
    (lambda: register_rule("aten::mm", "m k, k n -> m n", linear=("a",)), NotationError, "'a' is not a whole number"),
    (lambda: register_rule("aten::mm", None), NotationError, "write it like 'm k, k n -> m n'"),
    (lambda: register_sharding("aten::mm"), ArgumentError, "give an overload, such as torch.ops.aten.mm.default"),
    (lambda: register_sharding(torch.ops.aten.mm), ArgumentError, "give some of torch.ops.aten.mm.default"),
    (lambda: register_sharding(None), ArgumentError, "give an overload"),
    (lambda: register_sharding([]), ArgumentError, "give an overload"),
    (lambda: local_map(3, [Shard(0)]), ArgumentError, "local_map: 3 cannot be called"),
    (lambda: local_map(abs, Shard(0))(X), LayoutError, "is one placement"),
    (lambda: local_map(abs, [Shard(0)] * 2, in_placements=3), ArgumentError, "in_placements: 3 is no sequence"),
    (
        lambda: local_map(abs, [Shard(0)] * 2, in_placements=[Shard(0), Replicate()]),
        LayoutError,
        r"has the entry S\(0\): give a sequence of placements for each argument",
    ),
    (lambda: local_map(abs, [Shard(0)] * 2, in_grad_placements="x"), ArgumentError, "'x' is no sequence"),
    (lambda: local_map(abs, [Shard(0)] * 2, device_mesh="cpu"), MeshError, "'cpu' is no mesh"),
]

TOPOLOGIES: list[Row] = [
    (lambda: Topology.preset("dgx-h10"), TopologyError, "did you mean 'dgx-h100'"),
    (lambda: Topology.preset(["cpu"]), TopologyError, "no preset is called"),
    (lambda: Topology.flat(nan), TopologyError, "group_bandwidth: nan is not a number above 0"),
    (lambda: Topology.flat(-1.0), TopologyError, "is not a number above 0"),
    (lambda: Topology.flat(1e9, nan), TopologyError, "latency: nan is not a number of at least 0"),
    (lambda: Topology.flat(1e9, device="cpu"), TopologyError, "device: 'cpu' is a str: give a dshard.topology.Device"),
    (lambda: Topology.flat(1e9, source=None), TopologyError, "source: None is no text"),
    (lambda: Topology.torus(4, 1e9), TopologyError, "shape: 4 is no sequence"),
    (lambda: Topology.torus((4,), inf), TopologyError, "inf is not a number"),
    (lambda: Topology("a", None), TopologyError, "layers: None is no sequence"),
    (lambda: Topology("a", ("x",)), TopologyError, r"layers\[0\]: 'x' is a str: give a dshard.topology.Layer"),
    (lambda: Topology("a", Layer("r", 4, 1e9)), TopologyError, "is no sequence: give them as a tuple"),
    (lambda: Topology("a", (Layer("r", 4, 1e9),), measured=("x",)), TopologyError, "give a dshard.topology.Measured"),
    (lambda: Topology("a", (Layer("r", 4, 1e9),), None), TopologyError, "give a dshard.topology.Device"),
    (lambda: Layer("r", 2, 1e9, pair_bandwidth=[1, 2]), TopologyError, "a row of them for each unit"),
    (lambda: Device("d", 1e9, 1e9, 0), TopologyError, "give pairs of a dtype's name and a rate"),
    (lambda: Device("d", "float32", 1e9, 0), TopologyError, "give pairs of a dtype's name and a rate"),
    (lambda: Link(0, 1, points=(1, 1)), TopologyError, "give pairs of bytes and seconds"),
    (lambda: measured(mesh="m"), TopologyError, "give the dshard.Mesh whose groups were measured"),
    (lambda: measured(axes="dp"), TopologyError, "'dp' is no sequence: give the names of mesh axes"),
    (lambda: measured(sizes=4), TopologyError, "sizes: 4 is no sequence"),
    (lambda: measured(points=(1, 2)), TopologyError, "give pairs of bytes and seconds"),
    (lambda: DGX.link(MESH, 0), TopologyError, "axes: 0 is no sequence"),
    (lambda: DGX.link("m", ["tp"]), TopologyError, "the mesh of a link: 'm' is a str"),
    (lambda: DGX.check("8"), TopologyError, "'8' is not a whole number"),
    (lambda: DGX.with_measured(measured()), TopologyError, "give a sequence of dshard.topology.Measured"),
    (lambda: DGX.with_measured(["x"]), TopologyError, "give a dshard.topology.Measured"),
    (lambda: Topology.from_json({}), TopologyError, "give its JSON as text"),
    (lambda: Topology.load("dgx-h100"), TopologyError, "cannot read the topology"),
]

MODELS: list[Row] = [
    (lambda: dshard.parallelize(torch.ones(3), LINE), ArgumentError, "give an nn.Module"),
    (lambda: dshard.parallelize(Net, LINE, "data", EXAMPLE), ArgumentError, "the class Net, not one of its values"),
    (lambda: dshard.parallelize(Net(), LINE, None, EXAMPLE), ArgumentError, "the plan: None is a NoneType"),
    (lambda: dshard.parallelize(Net(), LINE, 3, EXAMPLE), ArgumentError, "give the name of a strategy"),
    (lambda: dshard.plan_model(Net(), LINE, [Shard(0)], EXAMPLE), ArgumentError, "placements by name"),
    (lambda: dshard.plan_model(Net(), LINE, parallel.Auto, EXAMPLE), ArgumentError, "the class Auto"),
    (lambda: dshard.plan_model(Net(), LINE, plan="data"), ArgumentError, "the plan is the third argument, by position"),
    (lambda: dshard.plan_model(Net(), LINE, {0: [Shard(0)]}, EXAMPLE), LayoutError, "give names of parameters"),
    (lambda: dshard.plan_model(Net(), LINE, {"fc.weight": Shard(0)}, EXAMPLE), LayoutError, "is one placement"),
    (lambda: dshard.plan_model(Net(), LINE, {"fc.bias": [Partial()]}, EXAMPLE), LayoutError, "is never partial"),
    (
        lambda: dshard.parallelize(linear(), LINE, dshard.plan_model(Net(), LINE, "data", EXAMPLE), EXAMPLE),
        LayoutError,
        "a plan for another model: Linear has no parameter",
    ),
    (
        lambda: dshard.plan_model(Net(), Mesh((2,)), dshard.plan_model(Net(), LINE, "data", EXAMPLE), EXAMPLE),
        MeshError,
        "give one of the same ranks, or plan again",
    ),
    (lambda: dshard.plan_model(Net(), LINE, "data", EXAMPLE).placements("fc.weigth"), LayoutError, "did you mean"),
    (lambda: parallel.Auto(-5), StrategyError, "memory: -5 is not a number above 0"),
    (lambda: parallel.Auto("80GB"), StrategyError, "memory: '80GB' is not a number"),
    (lambda: parallel.ColwiseParallel(input_layouts="S(0)"), LayoutError, "input_layouts: 'S.0.' is a str"),
    (lambda: parallel.ColwiseParallel(output_layouts=Shard), LayoutError, "the class Shard, not one of its values"),
    (lambda: parallel.ColwiseParallel(input_layouts=(Shard(0),)), LayoutError, "give one placement"),
    (lambda: parallel.RowwiseParallel(output_layouts="R"), LayoutError, "output_layouts: 'R' is a str"),
    (lambda: parallel.PrepareModuleInput(desired_input_layouts=Shard(0)), LayoutError, "say how the inputs lie, too"),
    (
        lambda: parallel.PrepareModuleInput(input_layouts="S(0)", desired_input_layouts="S(0)"),
        LayoutError,
        "give one placement",
    ),
    (
        lambda: parallel.PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"y": Shard(0)}
        ),
        LayoutError,
        "name the same in both",
    ),
    (
        lambda: parallel.PrepareModuleInput(input_kwarg_layouts=[Shard(0)], desired_input_kwarg_layouts=[Shard(0)]),
        LayoutError,
        "give a placement for each name",
    ),
    (lambda: parallel.parallelize_module(None, LINE, {}), ArgumentError, "give an nn.Module"),
    (
        lambda: parallel.parallelize_module(linear(), LINE, parallel.ColwiseParallel(), src_data_rank="0"),
        MeshError,
        "src_data_rank: '0' is not a whole number",
    ),
    (
        lambda: parallel.parallelize_module(nn.Sequential(linear()), LINE, {0: parallel.ColwiseParallel()}),
        LayoutError,
        "give names of submodules",
    ),
    (lambda: parallel.checkpoint(X), ArgumentError, "cannot be called: give a function and its arguments"),
    (lambda: parallel.checkpoint(None, X), ArgumentError, "None cannot be called"),
]

PIPELINES: list[Row] = [
    (
        lambda: StageCost(-1),
        ScheduleError,
        "of the costs of a pipeline none is negative; StageCost.forward: -1 is not a number of at least 0",
    ),
    (lambda: StageCost(nan), ScheduleError, "nan is not a number"),
    (lambda: StageCost("1"), ScheduleError, "'1' is not a number"),
    (lambda: Costs(None), ScheduleError, "stages: None is no sequence"),
    (lambda: Costs(StageCost()), ScheduleError, "give a StageCost for each, as a tuple"),
    (lambda: Costs((1, 2)), ScheduleError, "give a StageCost for each"),
    (lambda: Costs((StageCost(),), (Edge("x", 0, 1),)), ScheduleError, "give a EdgeCost for each"),
    (lambda: pipeline.uniform("2", (), StageCost()), ScheduleError, "n_stages: '2' is not a whole number"),
    (lambda: chain(0), ScheduleError, "n_stages: 0 is not a whole number above 0"),
    (lambda: chain("3"), ScheduleError, "n_stages: '3'"),
    (lambda: Edge("x", 1, 1), ScheduleError, "from a stage to itself"),
    (lambda: Edge("x", -1, 1), ScheduleError, "-1 is not a whole number of at least 0"),
    (lambda: Edge("x", "0", "1"), ScheduleError, "'0' is not a whole number"),
    (lambda: pipeline.edges_of([("x", "y")], batch=["x"]), ScheduleError, "'x' is no sequence: give names in a tuple"),
    (lambda: pipeline.edges_of([["x"]], batch=["x"]), ScheduleError, "is no pair"),
    (lambda: Program("1f1", 2, 2, chain(2)), ScheduleError, "did you mean '1f1b'"),
    (lambda: Program(["1f1b"], 2, 2, chain(2)), ScheduleError, "there is no schedule"),
    (lambda: Program("1f1b", "2", 2, ()), ScheduleError, "n_stages: '2' is not a whole number"),
    (lambda: Program("1f1b", 2.0, 2, chain(2)), ScheduleError, "n_stages: 2.0 is not a whole number"),
    (lambda: Program("1f1b", 2, True, chain(2)), ScheduleError, "n_microbatches: True"),
    (lambda: Program("1f1b", 2, 2, chain(2), 0.5), ScheduleError, "delay: 0.5 is not a whole number"),
    (lambda: Program("1f1b", 2, 2, chain(2) * 2), ScheduleError, "an edge is given twice"),
    (lambda: Program("1f1b", 2, 2, ((0, 1),)), ScheduleError, r"give an Edge\(value, src, dst\)"),
    (lambda: Program("1f1b", 2, 2, chain(2)).actions(5), ScheduleError, "there is no stage 5: they are 0 to 1"),
    (lambda: pipeline.lead_of("1f1b", 9, 2, 2), ScheduleError, "there is no stage 9"),
    (lambda: list(pipeline.computes(9, 2)), ScheduleError, "a lead of 9 forwards is more than the 2 microbatches"),
    (lambda: list(pipeline.computes(0, 2)), ScheduleError, "lead: 0 is not a whole number above 0"),
    (lambda: list(pipeline.computes(1, 2, -1)), ScheduleError, "delay: -1"),
    (lambda: pipeline.simulate("1f1b", COSTS), ScheduleError, "program: '1f1b' is a str"),
    (lambda: pipeline.simulate(Program("1f1b", 2, 2, chain(2)), None), ScheduleError, "costs: None is a NoneType"),
    (lambda: pipeline.play([[pipeline.Forward(0)]] * 3, COSTS), ScheduleError, "actions of 3 stages, and costs of 2"),
    (lambda: pipeline.play([["F0"], []], COSTS), ScheduleError, "an action: 'F0' is a str"),
    (lambda: pipeline.choose(COSTS, 2, chain(2), "1GB"), ScheduleError, "budget: '1GB' is not a number"),
    (lambda: pipeline.choose(COSTS, 2, chain(2), delays=()), ScheduleError, "delays: none are given"),
    (lambda: pipeline.rank_schedules(COSTS, 2, "x"), ScheduleError, "edges: 'x' is no sequence"),
    (lambda: pipeline.split(Net(), EXAMPLE, ["norm"]), ScheduleError, "give the tensors of one microbatch in a tuple"),
    (lambda: pipeline.split(Net(), (EXAMPLE,), "norm"), ScheduleError, "'norm' is no sequence"),
    (lambda: pipeline.split(Net(), (EXAMPLE,), ["norm", "norm"]), ScheduleError, "each once"),
    (lambda: pipeline.split(Net, (EXAMPLE,), ["norm"]), ScheduleError, "give an nn.Module"),
    (lambda: Stage(None, "cpu"), MeshError, "the mesh of a stage: 'cpu' is a str"),
    (lambda: Stage("net", LINE), ArgumentError, "the module of a stage: 'net' cannot be called"),
    (lambda: Stage(None, LINE, takes="hidden"), ScheduleError, "'hidden' is no sequence: give names in a tuple"),
    (lambda: Stage(None, LINE, gives=()), ScheduleError, "a stage gives nothing"),
    (lambda: Stage(None, LINE, gives=("x", "x")), ScheduleError, "name each value once"),
    (lambda: Stage(None, LINE, takes=(0,)), ScheduleError, "give names as text"),
    (lambda: Stage(None, LINE, placements=[Shard(0)]), ScheduleError, "a sequence of placements for each name"),
    (lambda: Stage(None, LINE, placements={"y": [Shard(0)]}), ScheduleError, "'y' is none: use x, target"),
    (lambda: Stage(None, LINE, placements={"x": Shard(0)}), LayoutError, "is one placement"),
    (lambda: Stage(None, MESH, placements={"x": [Shard(0)]}), LayoutError, "1 placements"),
    (lambda: Stage(None, LINE, placements={"x": [Partial()]}), LayoutError, "what crosses is whole"),
    (lambda: Pipeline([], n_microbatches=2), ScheduleError, "a pipeline without stages: give each"),
    (lambda: Pipeline(Stage(None, LINE), n_microbatches=2), ScheduleError, "is no sequence: give each a Stage"),
    (lambda: Pipeline([linear()], n_microbatches=2), ScheduleError, "is a Linear: give each a Stage"),
    (
        lambda: Pipeline([Stage(None, LINE)], n_microbatches=2, reduction="avg"),
        ScheduleError,
        "reduction: 'avg' is none: use mean, sum",
    ),
    (
        lambda: Pipeline([Stage(None, LINE)], n_microbatches=2, loss="mse"),
        ArgumentError,
        "loss: 'mse' cannot be called",
    ),
    (lambda: Pipeline([Stage(None, LINE)], n_microbatches=2, timeout=-1), ScheduleError, "timeout: -1 is not a number"),
    (lambda: Pipeline([Stage(None, LINE)], n_microbatches=2, timeout=nan), ScheduleError, "timeout: nan"),
    (lambda: Pipeline([Stage(None, LINE)], n_microbatches=2, batch="x"), ScheduleError, "batch: 'x' is no sequence"),
    (lambda: Pipeline([Stage(None, LINE)], n_microbatches=2, batch=("x", "x")), ScheduleError, "name each value once"),
    (lambda: Pipeline([Stage(None, LINE)], n_microbatches=2, batch=("x", "target")), ScheduleError, "given to step"),
    (lambda: Pipeline([Stage(None, LINE)], n_microbatches=2, costs=COSTS), ScheduleError, 'use schedule="auto"'),
]

SIMULATIONS: list[Row] = [(lambda: record(3), ArgumentError, "record: 3 cannot be called")]

TESTING: list[Row] = [
    (lambda: check_rule(3, (torch.ones(2),)), ArgumentError, "check_rule: 3 cannot be called"),
    (lambda: check_rule(torch.sin), ArgumentError, "check_rule without samples checks nothing"),
    (lambda: check_rule(torch.sin, (torch.ones(3),), mesh_shapes=[]), ArgumentError, "without meshes checks nothing"),
    (lambda: check_rule(torch.sin, (torch.ones(3),), limit=0), ArgumentError, "limit: 0"),
    (lambda: check_rule(torch.sin, (torch.ones(3),), placements=Shard(0)), ArgumentError, "some placements in a list"),
    (lambda: check_rule(torch.sin, (torch.ones(3),), placements="al"), ArgumentError, "give 'all'"),
    (lambda: check_call(torch.sin, (torch.ones(3),), []), LayoutError, "0 layouts for the 1 tensors"),
    (lambda: check_call(torch.sin, (torch.ones(3),), WHOLE), LayoutError, "give one for each tensor"),
    (entered(lambda: simulated("4")), MeshError, "'4' is not a whole number above 0"),
    (entered(lambda: simulated(0)), MeshError, "0 is not a whole number above 0"),
    (entered(lambda: simulated(2.0)), MeshError, "2.0 is not a whole number"),
    (entered(lambda: simulated((2, 2))), MeshError, "is not a whole number"),
    (lambda: distribute([1.0], WHOLE), ArgumentError, "distribute takes the whole tensor"),
    (lambda: distribute(torch.ones(3), "R"), LayoutError, "the layout: 'R' is a str"),
    (lambda: whole(torch.ones(3)), ArgumentError, "a plain tensor is whole"),
    (lambda: parts(torch.ones(3)), ArgumentError, "a plain tensor is whole"),
    (lambda: RankPool("2"), RankError, "n_ranks: '2' is not a whole number"),
    (lambda: RankPool(2.0), RankError, "n_ranks: 2.0"),
    (lambda: RankPool(2, timeout=-1), RankError, "timeout: -1 is not a number above 0"),
    (lambda: RankPool(2, timeout="3"), RankError, "timeout: '3'"),
    (lambda: RankPool(2, backend="glo"), RankError, "did you mean 'gloo'"),
    (lambda: RankPool(2).run("f"), ArgumentError, "what ranks run: 'f' cannot be called"),
    (lambda: whole_numbers((-1,)), ShapeError, "-1 is not a whole number"),
    (lambda: whole_numbers(3), ShapeError, "3 is no sequence"),
    (lambda: checkpoint.save([1], "/tmp/none"), ArgumentError, "the state of a checkpoint: .* give a dict"),
    (lambda: checkpoint.save("/tmp/none", {}), ArgumentError, "and the path after it"),
    (lambda: checkpoint.save(nn.Linear(2, 2), "/tmp/none"), ArgumentError, "give a dict, as in"),
    (lambda: checkpoint.save({}, None), ArgumentError, "give that of a directory"),
    (lambda: checkpoint.save({}, ""), ArgumentError, "is empty"),
    (lambda: checkpoint.load(nn.Linear(2, 2), "/tmp/none"), ArgumentError, "give a dict, as in"),
    (lambda: checkpoint.load({}, 3), ArgumentError, "3 is an int"),
    (lambda: checkpoint.load({"x": torch.ones(2)}, "/nonexistent"), CheckpointError, "does not exist"),
]

NOTHING: list[Row] = [
    (lambda: EMPTY.argmax(), IndexError, r"argmax\(\): Expected reduction dim to be specified"),
    (lambda: EMPTY.argmin(), IndexError, r"argmin\(\): Expected reduction dim to be specified"),
    (lambda: X.index_select(0, planned(2, 2, dtype=torch.int64)), IndexError, "Index is supposed to be a vector"),
    (lambda: EMPTY.argmin(0), IndexError, "reduction dim 0 to have non-zero size"),
    (lambda: EMPTY.max(), RuntimeError, "Expected reduction dim to be specified"),
    (lambda: EMPTY.min(0), IndexError, "reduction dim 0 to have non-zero size"),
    (lambda: EMPTY.median(0), IndexError, r"median\(\): Expected reduction dim 0 to have non-zero size"),
    (lambda: EMPTY.nanmedian(-2), IndexError, "non-zero size"),
    (lambda: EMPTY.mode(0), IndexError, r"mode\(\): Expected reduction dim 0 to have non-zero size"),
    (lambda: EMPTY.kthvalue(1, 0), IndexError, r"kthvalue\(\): Expected reduction dim 0 to have non-zero size"),
    (
        lambda: planned(0).index_add(0, planned(2, dtype=torch.int64), planned(2)),
        IndexError,
        "index out of range in self",
    ),
    (
        lambda: EMPTY.gather(0, planned(2, 4, dtype=torch.int64)),
        RuntimeError,
        "index 0 is out of bounds for dimension 0",
    ),
]

WRONG = {
    "meshes": MESHES,
    "layouts": LAYOUTS,
    "tensors": TENSORS,
    "factories": FACTORIES,
    "products": PRODUCTS,
    "rules": RULES,
    "topologies": TOPOLOGIES,
    "models": MODELS,
    "pipelines": PIPELINES,
    "simulations": SIMULATIONS,
    "testing": TESTING,
    "nothing": NOTHING,
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_calls_are_refused_in_words(kind: str) -> None:
    wrong = [f"line {line_of(row[0])}: {text}" for row in WRONG[kind] if (text := not_refused(*row))]

    assert not wrong, "\n".join(wrong)


def line_of(call: Callable[[], object]) -> int:
    """The line of a call in this file."""
    return call.__code__.co_firstlineno


def not_refused(call: Callable[[], object], kind: type[Exception], message: str) -> str:
    """What is wrong with the error of a call, if anything."""
    try:
        given = call()
    except kind as error:
        return "" if re.search(message, str(error)) else f"{message!r} is not in {str(error)!r}"
    except Exception as error:
        return f"{type(error).__name__} instead of {kind.__name__}: {error}"
    return f"gives {given!r} instead of {kind.__name__}: {message!r}"


TAKEN: list[tuple[Callable[[], Any], object]] = [
    (lambda: Mesh((np.int64(2), np.int64(2))), Mesh((2, 2))),
    (lambda: Mesh(torch.Size([2, 2])), Mesh((2, 2))),
    (lambda: Mesh(n for n in (2, 2)), Mesh((2, 2))),
    (lambda: Mesh([2, 2], ["a", "b"]), Mesh((2, 2), ("a", "b"))),
    (lambda: Mesh((2, 2), None, None), Mesh((2, 2))),
    (lambda: Mesh((2,), ("a",), np.arange(2)[::-1]), Mesh((2,), ("a",), (1, 0))),
    (lambda: Mesh((2,), ("a",), torch.arange(2)), Mesh((2,), ("a",))),
    (lambda: [0] in MESH, False),
    (lambda: Shard(np.int64(1)), Shard(1)),
    (lambda: Layout(MESH, [Shard(0), Shard(0)], {0: [1, 0]}), Layout(MESH, (Shard(0),) * 2, ((0, (1, 0)),))),
    (lambda: tuple(dshard.zeros(np.int64(4), device_mesh=MESH).shape), (4,)),
    (lambda: tuple(dshard.zeros((np.int64(4), 2), device_mesh=MESH).shape), (4, 2)),
    (lambda: tuple(dshard.zeros(size=(4, 2), device_mesh=MESH).shape), (4, 2)),
    (lambda: tuple(dshard.zeros(torch.Size([4, 2]), device_mesh=MESH).shape), (4, 2)),
    (lambda: tuple(dshard.zeros(device_mesh=MESH).shape), ()),
    (lambda: tuple(dshard.randint(low=0, high=5, size=(4,), device_mesh=MESH).shape), (4,)),
    (lambda: tuple(dshard.randperm(np.int64(4), device_mesh=MESH).shape), (4,)),
    (lambda: dshard.manual_seed(np.int64(3)), None),
    (lambda: Stream(np.int64(2)), Stream(2)),
    (lambda: Schedule(["m", "n"], "kk"), Schedule(("m", "n"), ("k", "k"))),
    (lambda: dshard.matmul(X, W, strategy=Schedule(["m", "n"], ["k", "k"])).placements, (Shard(0), Shard(1))),
    (lambda: Device("d", {"float32": 1e9}, 1e9, 0), Device("d", (("float32", 1e9),), 1e9, 0)),
    (lambda: Link(0, 1, points=[(1, 1)]), Link(0, 1, points=((1, 1),))),
    (lambda: DGX.flops(torch.float32), DGX.flops("float32")),
    (lambda: Topology.torus([2, np.int64(2)], 1e9).size, 4),
    (lambda: Program("1f1b", 2, np.int64(2), list(chain(2))), Program("1f1b", 2, 2, chain(2))),
    (lambda: Costs([StageCost()]), Costs((StageCost(),))),
]


def test_what_is_as_good_is_taken() -> None:
    taken = [(line_of(call), call(), expected) for call, expected in TAKEN]

    assert [each for each in taken if each[1] != each[2]] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plan redistribute --mesh 99999x99999 --shape 4x4 --from R --to R", "one has at most"),
        ("plan matmul --m 4 --k 4 --n 4 --mesh 2 --a S(2) --b R", "is out of range for shape"),
        (
            "plan reshard --mesh 2 --to-mesh 2 --shape 4 --from R --to R --to-first -3",
            "is not a whole number of at least",
        ),
        ("plan redistribute --mesh 2 --shape 4 --from R --to S(0) --topology dgx-a10", "did you mean 'dgx-a100'"),
        ("explain x --mesh 2 --tensor x:4_R", "describes no tensor"),
        ("simulate pipeline --stages 2 --microbatches 2 --schedule 1f1", "did you mean '1f1b'"),
        ("simulate pipeline --stages 2 --microbatches 2 --skip 1-1", "from a stage to itself"),
    ],
)
def test_a_wrong_command_says_why(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(text.split())
    except SystemExit as error:  # of a text that is no mesh at all
        status = error.code

    assert status
    assert says in " ".join("".join(capsys.readouterr()).split())


def test_data_on_a_mesh_that_only_plans_is_dropped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="has no processes: the result is only planned with, and has no data") as told:
        x = distribute_tensor(torch.ones(4), LINE, [Shard(0)])

    assert x.to_local().is_meta
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distribute_tensor(torch.empty(4, device="meta"), LINE, [Shard(0)])
