"""`dshard.DTensor` is torch's: what asks for torch's class, placements and spec gets what it would of torch's own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_global_tensor_info,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import dshard
import dshard.placement_types
from dshard import DTensor, Layout, LayoutError, Mesh, MeshError, Partial, Replicate, Shard, distribute_tensor
from dshard.comm import DeviceMesh
from dshard.layout import layout_of
from dshard.parallel import parallelize
from dshard.testing import RankPool, distribute, simulated
from dshard.torch_dtensor import IS_TORCHS

pytestmark = pytest.mark.skipif(not IS_TORCHS, reason="torch 2.11 cannot carry a subclass of its DTensor")

FULL = states.StateDictOptions(full_state_dict=True)
BROADCAST = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def line(n: int = 4) -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (n,), mesh_dim_names=("x",))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))


def laid_out(model: nn.Sequential, mesh: DeviceMesh, placements: Iterable[Any] = (Shard(0),)) -> nn.Sequential:
    for layer, name in ((layer, name) for layer in (model[0], model[2]) for name in ("weight", "bias")):
        parameter = getattr(layer, name)
        setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [*placements])))
    return model


def same(a: nn.Module, b: nn.Module) -> None:
    """The parameters of `a`, which are distributed by dshard, are those of `b`."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert type(p) is DTensor
        torch.testing.assert_close(p.full_tensor(), q.detach())


def added() -> tuple[nn.Sequential, dict[str, Tensor]]:
    """A network with other values than `network`, and its state."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model, {name: value.clone() for name, value in model.state_dict().items()}


# -- the class, its spec and its placements


PAIRS: list[tuple[Any, Any]] = [
    (Shard(1), torch_tensor.Shard(1)),
    (Replicate(), torch_tensor.Replicate()),
    (Partial("avg"), torch_tensor.Partial("avg")),
]


@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_a_placement_equals_torchs_and_no_other(mine: Any, theirs: Any) -> None:
    assert mine == theirs
    assert theirs == mine
    assert hash(mine) == hash(theirs)
    assert [mine == other for _, other in PAIRS].count(True) == 1
    assert mine != _StridedShard(1, split_factor=2)
    asked = ((), (1,), (0,)), ((),), ((), ("avg",), ("sum",))
    for name, options in zip(("is_shard", "is_replicate", "is_partial"), asked, strict=True):
        for args in options:
            assert getattr(mine, name)(*args) == getattr(theirs, name)(*args)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_placements_of_a_tensor_say_the_order_of_the_axes(order: tuple[int, ...]) -> None:
    mesh = Mesh((2, 2, 3))
    layout = Layout(mesh, (Shard(0),) * 3, order=((0, order),))
    with simulated(mesh):
        x = distribute(torch.arange(24.0).view(24, 1), layout)
        assert all(isinstance(p, Shard) for p in x.placements)
        assert layout_of(mesh, x.placements, x.ndim) == layout
        assert x.redistribute(placements=x.placements) is x


@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_a_placement_is_one_of_torchs_to_all_that_ask(mine: Any, theirs: Any) -> None:
    for copied in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert isinstance(copied, type(theirs))
        assert copied == mine
    for size, ranks, rank in ((7, 3, 2), (4, 4, 0), (2, 4, 3)):
        of_both = [
            _compute_local_shape_and_global_offset((5, size), (ranks,), [rank], [placement])
            for placement in (mine, theirs)
        ]
        assert of_both[0] == of_both[1]


def test_placements_stand_in_a_module_of_torchs_name() -> None:
    for name in ("Partial", "Placement", "Replicate", "Shard"):
        assert getattr(dshard.placement_types, name) is getattr(dshard, name)


def test_strided_placements_that_no_order_makes_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"split_factor=3\) on mesh axis 0, of 2 ranks: no order of the axes"):
        layout_of(Mesh((2, 2)), [_StridedShard(0, split_factor=3), torch_tensor.Shard(0)], 1)


def spec_and_class() -> None:
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [torch_tensor.Shard(0), torch_tensor.Replicate()])
    theirs = torch_tensor.distribute_tensor(torch.arange(15.0).view(5, 3), mesh, x.placements)
    for placements in (
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(1), Partial("max")),
        (Shard(0), Shard(1)),
    ):
        shape, offset = compute_local_shape_and_global_offset(x.shape, mesh, placements)
        mine = distribute_tensor(x.full_tensor(), mesh, placements)
        assert shape == mine.to_local().shape
        region = mine.layout.region(x.shape, mine.layout.mesh.coordinate(dist.get_rank()))
        assert offset == tuple(indices.start for indices in region)
        even = torch.zeros(2, 3)
        whole, _ = compute_global_tensor_info(even, mesh, placements)
        assert tuple(whole) == DTensor.from_local(even, mesh, placements).shape
    built = torch_tensor.distribute_tensor(torch.arange(15.0).view(5, 3), mesh, (Shard(0), Replicate()))
    assert torch.equal(built.to_local(), theirs.to_local())
    assert isinstance(x, torch_tensor.DTensor)
    assert issubclass(DTensor, torch_tensor.DTensor)
    assert all(isinstance(p, torch_tensor.Placement) for p in x.placements)
    assert x.placements == theirs.placements == (Shard(0), Replicate())
    spec: Any = x._spec
    assert isinstance(spec, type(theirs._spec))
    for name in ("mesh", "placements", "tensor_meta", "shard_order", "num_shards_map", "dim_map", "ndim"):
        assert getattr(spec, name) == getattr(theirs._spec, name), name
    assert torch.equal(x._local_tensor, theirs._local_tensor)
    assert x.device_mesh == mesh


@pytest.mark.ranks
def test_a_tensor_has_torchs_class_and_spec(ranks: RankPool) -> None:
    ranks.run(spec_and_class)


# -- torch's tensors among dshard's


class Scaled(nn.Module):
    """A layer, and a plain tensor that is trained and no parameter, so that `parallelize` does not see it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 8, bias=False)
        self.scale = torch.ones(8, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


def together() -> None:
    mesh, value = line(), torch.arange(20.0).view(5, 4)
    theirs = torch_tensor.distribute_tensor(value, mesh, [torch_tensor.Shard(0)]).requires_grad_()
    mine = distribute_tensor(torch.ones(5, 4), mesh, [Shard(1)]).requires_grad_()
    for out in (theirs * mine, mine * theirs, torch.stack([mine, theirs]).prod(0)):
        assert type(out) is DTensor
        torch.testing.assert_close(out.full_tensor(), value)
        theirs.grad = mine.grad = None
        out.sum().backward()
        torch.testing.assert_close(theirs.grad.full_tensor(), torch.ones(5, 4))
        torch.testing.assert_close(mine.grad.full_tensor(), value)
    for placements in ([Shard(0)], [Replicate()], [Partial()]):
        x = DTensor.from_local(
            torch.ones(5, 4), mesh, placements, shape=(20, 4) if placements[0].is_shard() else (5, 4)
        )
        y = x.to_torch()
        assert type(y) is torch_tensor.DTensor
        assert y._local_tensor.data_ptr() == x.to_local().data_ptr()
        back = dshard.from_torch(y)
        assert (type(back), back.layout, back.to_local().data_ptr()) == (DTensor, x.layout, y.to_local().data_ptr())
        torch.testing.assert_close(back.full_tensor(), y.full_tensor())
    for replication in (implicit_replication, dshard.implicit_replication):
        with replication():
            assert (mine * torch.arange(4.0)).placements == mine.placements
            plain = torch.ones(4, requires_grad=True)
            (mine * plain).sum().backward()
            assert type(plain.grad) is Tensor
            torch.testing.assert_close(plain.grad, torch.full((4,), 5.0))
    scaled = Scaled()
    parallelize(scaled, mesh, {"layer.weight": [Shard(0)]}, torch.ones(2, 4))(torch.ones(2, 4)).sum().backward()
    assert type(scaled.scale.grad) is Tensor
    torch.testing.assert_close(scaled.scale.grad, scaled.layer.weight.sum(1).full_tensor().detach() * 2)  # type: ignore[attr-defined]
    apart = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("without_a_model",))
    mine = distribute_tensor(torch.ones(5, 4), apart, [Shard(0)]).requires_grad_()
    for refused in (lambda: mine * torch.arange(4.0), lambda: torch.zeros(5, 4).copy_(mine)):
        with pytest.raises(dshard.MixedError, match="a plain torch"):
            refused()
    copied, plain = mine.detach().clone(), torch.ones(4, 5, requires_grad=True)
    copied.copy_(plain.t()).square().sum().backward()
    torch.testing.assert_close(plain.grad, torch.full((4, 5), 2.0))


@pytest.mark.ranks
def test_torchs_tensors_are_taken_in_any_expression(ranks: RankPool) -> None:
    ranks.run(together)


# -- state dicts


def full_state() -> None:
    mesh, model = line(), network()
    mine = laid_out(network(), mesh)
    for options in (FULL, states.StateDictOptions(full_state_dict=True, cpu_offload=True)):
        state = states.get_model_state_dict(mine, options=options)
        if not options.cpu_offload or dist.get_rank() == 0:
            assert {type(value) for value in state.values()} == {Tensor}
            for name, value in model.state_dict().items():
                assert torch.equal(state[name], value)
    other, values = added()
    states.set_model_state_dict(mine, dict(values), options=FULL)
    same(mine, other)
    mine = laid_out(network(), mesh)
    states.set_model_state_dict(mine, dict(values) if dist.get_rank() == 0 else {}, options=BROADCAST)
    same(mine, other)
    mine = laid_out(network(), mesh)
    mine.load_state_dict(values)
    same(mine, other)


def full_optimiser() -> None:
    mesh, x = line(), torch.ones(2, 6)
    mine, theirs = laid_out(network(), mesh), network()
    steps = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (mine, theirs)]

    def step() -> None:
        for model, optimiser in zip((mine, theirs), steps, strict=True):
            optimiser.zero_grad()
            model(distribute_tensor(x, mesh, [Replicate()]) if model is mine else x).square().sum().backward()
            optimiser.step()

    step()
    state: Any = states.get_optimizer_state_dict(mine, steps[0], options=FULL)
    for i, name in enumerate(("0.weight", "0.bias", "2.weight", "2.bias")):
        average = state["state"][name]["exp_avg"]
        assert type(average) is Tensor
        torch.testing.assert_close(average, steps[1].state_dict()["state"][i]["exp_avg"])
    states.set_optimizer_state_dict(mine, steps[0], state, options=FULL)
    step()
    same(mine, theirs)


def saved() -> None:
    mesh, model = line(), network()
    mine = laid_out(network(), mesh)
    buffer = io.BytesIO()
    torch.save(mine.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)  # weights_only
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name].full_tensor(), value)


def saved_by_parts(directory: str) -> None:
    mesh, other = line(), added()[0]
    dcp.save(laid_out(added()[0], mesh).state_dict(), checkpoint_id=directory)
    for placements in ((Shard(0),), (Replicate(),)):
        mine = laid_out(network(), mesh, placements)
        state = mine.state_dict()
        dcp.load(state, checkpoint_id=directory)
        mine.load_state_dict(state)
        same(mine, other)


@pytest.mark.ranks
@pytest.mark.parametrize("program", [full_state, full_optimiser, saved])
def test_state_dicts_are_those_of_one_device(ranks: RankPool, program: Callable[[], None]) -> None:
    ranks.run(program)


@pytest.mark.ranks
def test_torchs_checkpoints_hold_them(ranks: RankPool, tmp_path: Any) -> None:
    ranks.run(saved_by_parts, str(tmp_path / "checkpoint"))


# -- FSDP2 and DistributedDataParallel


def trained_by_fully_shard() -> None:
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    mine, theirs = network().double(), network().double()
    layouts = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": Replicate()}
    for name, placement in layouts.items():
        layer, _, leaf = name.partition(".")
        value = mine.get_parameter(name).detach()
        setattr(mine.get_submodule(layer), leaf, nn.Parameter(distribute_tensor(value, tp, [placement])))
    fully_shard(mine, mesh=dp)
    optimisers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (mine, theirs)]
    for i in range(20):
        torch.manual_seed(i)
        x = torch.randn(4, 6, dtype=torch.float64)
        part = x.chunk(2)[dp.get_local_rank()]
        losses = (mine(distribute_tensor(part, tp, [Replicate()])).square().sum() / 2, theirs(x).square().sum() / 4)
        norms = []
        for model, loss in zip((mine, theirs), losses, strict=True):
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(norm.full_tensor() if isinstance(norm, torch_tensor.DTensor) else norm)
        torch.testing.assert_close(*norms)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]


@pytest.mark.ranks
def test_fully_shard_trains_a_tensor_parallel_model_as_one_device(ranks: RankPool) -> None:
    ranks.run(trained_by_fully_shard)


def parallel_data() -> None:
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(MeshError, match=r"between ranks 0, 1, 2, 3.* would take each rank's part for the whole"):
        DistributedDataParallel(laid_out(network(), line()))
    mine = DistributedDataParallel(laid_out(network(), mesh["tp"]), process_group=mesh["dp"].get_group())
    theirs, x = network(), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    part = x.chunk(2)[mesh["dp"].get_local_rank()]
    (mine(distribute_tensor(part, mesh["tp"], [Replicate()])).square().sum() / 2).backward()
    (theirs(x).square().sum() / 4).backward()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]


@pytest.mark.ranks
def test_distributed_data_parallel_over_other_ranks_than_the_mesh(ranks: RankPool) -> None:
    ranks.run(parallel_data)


# -- values and devices


def values_of_tensors() -> None:
    mesh = line()
    x = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    assert x.tolist() == x.numpy().tolist() == [0, 1, 2, 3]
    for placement in (Shard(0), Partial()):
        laid = x.redistribute(placements=[placement])
        assert laid.requires_grad_().tolist() == [0, 1, 2, 3], "numbers of the global tensor, as those of item()"
    layer = nn.Linear(4, 6, bias=False, device="meta")
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)], src_data_rank=None))
    layer.to_empty(device="cpu")
    weight: Any = layer.weight
    assert (weight.is_meta, weight.to_local().is_meta, weight.placements) == (False, False, (Shard(0),))
    assert layer.share_memory().weight.to_local().is_shared()
    torch.testing.assert_close(nn.init.eye_(layer.weight).full_tensor(), torch.eye(6, 4))
    for made, plain in ((x, torch.empty(4)), (x.long().redistribute(placements=[Shard(0)]), torch.empty(4).long())):
        torch.testing.assert_close(torch.arange(4, out=made).full_tensor(), torch.arange(4, out=plain))  # type: ignore[union-attr]


@pytest.mark.ranks
def test_values_of_replicated_tensors_and_storage_for_meta_ones(ranks: RankPool) -> None:
    ranks.run(values_of_tensors)


# -- code of others, such as torchao's layers of float8, that makes torch's distributed tensors of dshard's


def as_torchs(x: Any) -> Any:
    if not isinstance(x, torch_tensor.DTensor):
        return x
    return torch_tensor.DTensor.from_local(x.to_local(), x.device_mesh, x.placements)


class MatmulOfTorchs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return as_torchs(x) @ as_torchs(w).t()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = map(as_torchs, ctx.saved_tensors)
        grad = as_torchs(grad)
        return grad @ w, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class LinearOfTorchs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = MatmulOfTorchs.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


def with_linears_of_torchs() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (LinearOfTorchs(8, 12, bias=False), nn.SiLU(), LinearOfTorchs(12, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    return nn.Sequential(*layers).double()


def trained_through_torchs(shape: tuple[int, ...], plan: str) -> None:
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    models, x = [with_linears_of_torchs() for _ in range(2)], torch.randn(8, 3, 8, dtype=torch.float64)
    dist.broadcast(x, 0)
    parallelize(models[0], mesh, plan, x)
    steps = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for _ in range(4):
        losses = [model(x).square().mean() for model in models]
        for loss, model, optimiser in zip(losses, models, steps, strict=True):
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
        torch.testing.assert_close(losses[0].item(), losses[1].item())
    same(*models)


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "plan"), [((4,), "data"), ((4,), "fsdp"), ((2, 2), "fsdp x megatron")])
def test_code_may_make_torchs_tensors_of_a_models(ranks: RankPool, shape: tuple[int, ...], plan: str) -> None:
    ranks.run(trained_through_torchs, shape, plan)


def test_a_step_that_fails_on_distributed_tensors_alone_is_not_priced() -> None:
    x = torch.empty(8, 3, 8, dtype=torch.float64, device="meta")
    with pytest.raises(
        LayoutError, match=r"a step of Sequential does not run without data .*lay it out by parallelize"
    ):
        dshard.plan_model(with_linears_of_torchs(), Mesh((4,), ("x",)), "auto", x)
