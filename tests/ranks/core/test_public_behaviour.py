"""What programs written for torch's distributed tensors rely on, by subject: values, placements, collectives, errors.

Each subject is one call on four ranks, and compares with torch on one device.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_in
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed import tensor as torch_tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing import assert_close

import dshard
from dshard import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from dshard.comm import DeviceMesh
from dshard.debug import CommDebugMode
from dshard.experimental import local_map
from dshard.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from dshard.testing import RankPool

C = torch.ops.c10d_functional
SUBJECTS: dict[str, Callable[[], None]] = {}


def subject(function: Callable[[], None]) -> Callable[[], None]:
    SUBJECTS[function.__name__] = function
    return function


@functools.cache
def line() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


@functools.cache
def grid() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def numbers(*shape: int) -> Tensor:
    """Alike on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def sharded(x: Tensor, placement: Any = Shard(0)) -> Any:  # noqa: B008  # a value
    return distribute_tensor(x, line(), [placement])


def partial(value: float, op: Any = "sum") -> Any:
    return DTensor.from_local(torch.full((4, 2), value), line(), [Partial(op)])


def same(x: Any, expected: Tensor) -> None:
    assert_close(x.full_tensor() if isinstance(x, DTensor) else x, expected, rtol=1e-4, atol=1e-5)


def sends(call: Callable[[], Any], **counts: int) -> Any:
    """The result of a call that runs these collectives and no others."""
    with CommDebugMode() as comm:
        out = call()
    assert comm.get_comm_counts() == {getattr(C, name): count for name, count in counts.items()}
    return out


def like_one_device(function: Callable[..., Any], x: Tensor, placement: Any) -> None:
    """The function's values and gradients are those of one device."""
    mine, theirs = sharded(x.clone(), placement).requires_grad_(), x.clone().requires_grad_()
    out, expected = function(mine), function(theirs)
    same(out.detach(), expected.detach())
    out.square().sum().backward()
    expected.square().sum().backward()
    same(mine.grad, theirs.grad)  # type: ignore[arg-type]


ANY = (Shard(0), Shard(1), Replicate())

# -- making tensors


@subject
def factories() -> None:
    for make, value in ((dshard.zeros, 0.0), (dshard.ones, 1.0)):
        for placement in (*ANY, Shard(-1), Partial()):
            x = make(6, 4, device_mesh=line(), placements=[placement], layout=torch.strided, requires_grad=True)
            assert x.requires_grad
            assert x.is_leaf
            same(x.detach(), torch.full((6, 4), value))
    same(dshard.full((4, 2), 6.5, device_mesh=line(), placements=[Partial("max")]), torch.full((4, 2), 6.5))
    drawn = dshard.rand(4, device_mesh=line(), placements=[Partial()], layout=torch.strided)
    assert drawn.placements == (Partial(),)
    assert 0 <= drawn.full_tensor().min() <= drawn.full_tensor().max() < 1
    with line():
        assert dshard.zeros(4, 4, placements=[Shard(0)]).to_local().shape == (1, 4)
        assert distribute_tensor(torch.ones(4)).placements == (Replicate(),)
        assert DTensor.from_local(torch.ones(1), placements=[Shard(0)]).shape == (4,)
        assert isinstance(distribute_module(nn.Linear(2, 2)).weight, DTensor)
    dshard.manual_seed(3, line())


@subject
def distributing() -> None:
    for op in ("sum", "avg", "max", "min", "product"):
        x = distribute_tensor(numbers(3, 2), line(), [Partial(op)])
        assert x.placements == (Partial(op),)
        same(x, numbers(3, 2))
    same(distribute_tensor(numbers(4, 4), grid(), [Shard(0), Partial()]), numbers(4, 4))
    with pytest.raises(RuntimeError, match="autograd has recorded"):
        distribute_tensor(torch.ones(4, requires_grad=True) * 2, line(), [Shard(0)])
    for mesh, placements in ((grid(), [Shard(0), Replicate()]), (line(), [Shard(1)])):
        with pytest.raises(ValueError, match="given a DTensor"):
            distribute_tensor(sharded(torch.ones(4, 4)), mesh, placements)


@subject
def constructing() -> None:
    meta = TensorMeta(torch.Size([12, 3]), (3, 1), torch.float32)
    spec = DTensorSpec(line(), (torch_tensor.Shard(0),), tensor_meta=meta)
    x = DTensor(torch.ones(3, 3), spec, requires_grad=True)
    assert x.requires_grad
    assert x._spec == spec
    same(x.detach(), torch.ones(12, 3))


@subject
def local_tensors() -> None:
    permuted = torch.ones(8, 4, 8).permute(1, 2, 0)
    assert DTensor.from_local(permuted, line(), [Shard(1)]).stride() == (32, 1, 128)
    meta = DTensor.from_local(torch.ones(2, 4, device="meta"), line(), [Shard(0)])
    assert meta.is_meta
    assert meta.shape == (8, 4)
    given = torch.ones(8, 3, requires_grad=True)
    x = DTensor.from_local(given, line(), [Shard(0)])

    def there_and_back() -> None:
        x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).sum().backward()

    sends(there_and_back, all_gather_into_tensor=1, reduce_scatter_tensor=1)
    assert_close(given.grad, torch.full((8, 3), 4.0))


@subject
def modules() -> None:
    def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def given(inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

    layer = nn.Linear(4, 8)
    expected = copy.deepcopy(layer)(torch.ones(2, 4))
    dist.broadcast(expected.detach(), 0)
    with pytest.warns(FutureWarning, match="input_fn of two arguments"):
        distribute_module(layer, line(), shard, given, lambda module, out, mesh: out.full_tensor())
    assert layer.weight.placements == (Shard(0),)  # type: ignore[attr-defined]
    assert_close(layer(torch.ones(2, 4)), expected)
    with pytest.raises(RuntimeError, match="called for before"):
        distribute_module(layer, line())
    with pytest.raises(ValueError, match="should take in 3 arguments"):
        distribute_module(nn.Linear(2, 2), line(), None, lambda inputs: inputs)
    meta = parallelize_module(nn.Linear(4, 8, device="meta"), line(), ColwiseParallel())
    meta.to_empty(device="cpu")
    assert not meta.weight.is_meta
    assert not meta.weight.to_local().is_meta  # type: ignore[operator]


# -- redistribution


@subject
def redistributing() -> None:
    t = numbers(8, 4)
    for forward, backward in itertools.product((None, torch.bfloat16, torch.float64), repeat=2):
        for x in (sharded(t), DTensor.from_local(t / 4, line(), [Partial()])):
            x.requires_grad_()
            out = x.redistribute(placements=[Replicate()], forward_dtype=forward, backward_dtype=backward)
            assert out.dtype == (forward or torch.float32)
            assert_close(out.full_tensor().float(), t, rtol=2e-2, atol=2e-2)
            out.sum().backward()
            assert x.grad.dtype == torch.float32
            same(x.grad, torch.ones(8, 4))
    for op, value in (("sum", 6.0), ("avg", 1.5), ("max", 3.0), ("min", 0.0)):
        same(partial(float(dist.get_rank()), op).redistribute(placements=[Shard(0)]), torch.full((4, 2), value))
    x = sharded(t)
    sends(lambda: x.redistribute(placements=[Replicate()]), all_gather_into_tensor=1)
    sends(lambda: partial(1.0).redistribute(placements=[Shard(-1)]), reduce_scatter_tensor=1)
    with pytest.raises(RuntimeError, match="needs the placements"):
        x.redistribute(line())


@subject
def counted() -> None:
    """Collectives of the program itself count, too."""
    x, t = sharded(torch.ones(8, 4)), torch.ones(4)
    sends(lambda: funcol.all_reduce(t, "sum", line()).sum(), all_reduce=1)
    summed = local_map(lambda a: funcol.all_reduce(a, "sum", line()) + 0, out_placements=[Replicate()])
    same(sends(lambda: summed(x), all_reduce=1), torch.full((2, 4), 4.0))
    with CommDebugMode() as comm:
        dist.all_reduce(t)
        x.full_tensor()
        dist.barrier()
    assert comm.get_comm_counts() == {torch.ops.c10d.allreduce_: 1, C.all_gather_into_tensor: 1}
    assert comm.get_total_counts() == 2


# -- operators


@subject
def partial_values() -> None:
    p = partial(2.0)
    for out, value in ((p + p, 16.0), (p * 2, 16.0), (p / 2, 4.0), (p - p, 0.0), (-p, -8.0)):
        assert out.placements == (Partial(),)
        same(out, torch.full((4, 2), value))
    for out, value in ((p + 1, 9.0), (p * p, 64.0), (1 / p, 0.125), (p > 3, True), (F.relu(p), 8.0)):
        same(out, torch.full((4, 2), value))
    same(torch.where(p > 9, 0.0, p), torch.full((4, 2), 8.0))
    for pieces in (p.split(1), p.chunk(2, 1), p.unbind(0), [torch.stack([p, p], 1)]):
        assert all(piece.placements == (Partial(),) for piece in pieces)
    same(partial(2.0).fill_(8.0), torch.full((4, 2), 8.0))
    same(partial(float(dist.get_rank()), "max") * -1, torch.full((4, 2), -3.0))
    assert p.sum(0).placements == (Partial(),)
    for norm, value in zip(torch._foreach_norm([p, partial(2.0, "avg")]), (512.0, 32.0), strict=True):  # type: ignore[call-overload]
        same(norm, torch.tensor(value).sqrt())
    with pytest.raises(RuntimeError, match="is partial"):
        p.__create_chunk_list__()
    with pytest.raises(ValueError, match="is partial"):
        p.__get_tensor_shard__(None)


@subject
def indexing() -> None:
    t, index = numbers(8, 4), torch.tensor([1, 3])
    expected = t.index_put((index,), torch.ones(2, 4))
    for placement, of_values in itertools.product(ANY, (Replicate(), Shard(1), Partial())):
        x, values = sharded(t, placement), sharded(torch.ones(2, 4), of_values)
        same(torch.index_put(x, (sharded(index, Replicate()),), values), expected)
    classes = torch.tensor([1, 0, 3, 2, 2])
    for placement in ANY:
        like_one_device(lambda x: torch.topk(x, 3, 1).values, t, placement)
        like_one_device(lambda x: torch.where(x > 0, x, 0.0), t, placement)
        like_one_device(lambda x: x.gather(0, _as(x, torch.zeros(2, 4, dtype=torch.long))), t, placement)
        like_one_device(lambda x: F.one_hot(_as(x, classes), 8).to(x.dtype) @ x, t, placement)
        edges = torch.tensor([-1.0, 0.0, 1.0])
        same(torch.bucketize(sharded(t, placement), sharded(edges, Replicate())), torch.bucketize(t, edges))
    with pytest.raises(RuntimeError, match=r"plain torch\.Tensor"):
        sharded(t) + t
    for one in (torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([[2.0]])):
        same(sharded(t) * one, t * 2)
        same(one - sharded(t), 2 - t)


def _as(x: Tensor, plain: Tensor) -> Any:
    """`plain`, distributed where `x` is."""
    return sharded(plain, Replicate()) if isinstance(x, DTensor) else plain


@subject
def norms_and_losses() -> None:
    t = numbers(8, 4, 6)
    for placement in ANY:
        for make in (lambda: nn.LayerNorm(6), lambda: nn.RMSNorm(6), lambda: nn.GroupNorm(2, 4)):
            layer = make()
            mine = distribute_module(copy.deepcopy(layer), line())
            x, y = sharded(t, placement).requires_grad_(), t.clone().requires_grad_()
            mine(x).square().sum().backward()
            layer(y).square().sum().backward()
            same(x.grad, y.grad)  # type: ignore[arg-type]
            for a, b in zip(mine.parameters(), layer.parameters(), strict=True):
                same(a.grad, b.grad)  # type: ignore[arg-type]
        like_one_device(lambda x: x.cumsum(1), t, placement)
        like_one_device(lambda x: torch.logsumexp(x, (0, 2)), t, placement)
        same(torch.linalg.vector_norm(sharded(t, placement), 3), torch.linalg.vector_norm(t, 3))
    logits, target = numbers(16, 8), torch.arange(16) % 8
    for reduction in ("none", "sum", "mean"):
        x, y = sharded(logits).requires_grad_(), logits.clone().requires_grad_()
        loss = F.cross_entropy(x, sharded(target), reduction=reduction)
        if reduction != "mean":  # whose weights are counted
            sends(lambda loss=loss: loss.backward(torch.ones_like(loss)))
        F.cross_entropy(y, target, reduction=reduction).sum().backward()
        if reduction == "mean":
            loss.backward()
        same(x.grad, y.grad)  # type: ignore[arg-type]
        split = sharded(logits, Shard(1)).requires_grad_()
        with loss_parallel():
            sends(functools.partial(F.cross_entropy, split, target, reduction=reduction), all_reduce=3).sum().backward()
        same(split.grad, y.grad)  # type: ignore[arg-type]


# -- styles


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(self.norm(x))))


PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE: dict[str, Any] = {
    "norm": SequenceParallel(sequence_dim=0),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}


def gradients(mine: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        if isinstance(a.grad, DTensor):
            same(a.grad, b.grad)  # type: ignore[arg-type]


@subject
def style_collectives() -> None:
    x = numbers(8, 8)
    part = x.chunk(4)[dist.get_rank()]
    block, reference = parallelize_module(Block(), line(), PLAN), Block()
    given = x.clone().requires_grad_()
    out = sends(lambda: block(given), all_reduce=1)
    assert_close(out, reference(x))
    sends(lambda: out.sum().backward(), all_reduce=1)
    block.zero_grad()
    with CommDebugMode() as comm:
        block(given).sum().backward()
    counts = comm.comm_module_counts
    assert counts["Global"] == counts["Block"] == {"forward": {C.all_reduce: 1}, "backward": {C.all_reduce: 1}}
    assert counts["Block.up"] == {"forward": {}, "backward": {C.all_reduce: 1}}
    reference(x).sum().backward()
    gradients(block, reference)
    block = parallelize_module(Block(), line(), SEQUENCE)
    out = sends(lambda: block(part), all_gather_into_tensor=1, reduce_scatter_tensor=1)
    assert_close(out, reference(x).chunk(4)[dist.get_rank()])
    out.sum().backward()
    gradients(block, reference)


@subject
def style_inputs() -> None:
    part = torch.ones(2, 8)
    gather = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
    whole = parallelize_module(nn.Identity(), line(), PrepareModuleInput(**gather, use_local_output=True))
    assert sends(lambda: whole(part), all_gather_into_tensor=1).shape == (8, 8)
    scatter = {"output_layouts": Replicate(), "desired_output_layouts": Shard(0)}
    both = PrepareModuleInputOutput(**gather, **scatter, use_local_input=True)
    assert sends(lambda: parallelize_module(nn.Linear(8, 8), line(), both)(part), all_gather_into_tensor=1).shape == (
        2,
        8,
    )
    with pytest.raises(AssertionError, match="input_layouts and desired_input_layouts should have same length!"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(),))
    with pytest.raises(AssertionError, match="output_layouts and desired_output_layouts should have same length!"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Replicate(), None))
    with pytest.raises(ValueError, match="module inputs and input_layouts should have same length!"):
        parallelize_module(nn.Bilinear(8, 8, 2), line(), PrepareModuleInput(**gather))(part, part)
    with pytest.raises(TypeError, match="parallelize_plan is int"):
        parallelize_module(Block(), line(), 5)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="No parallelize_plan is provided"):
        parallelize_module(Block(), line())


@subject
def compiled_styles() -> None:
    x = numbers(8, 8)
    for plan, given, expected in (
        (PLAN, x, lambda out: out),
        (SEQUENCE, x.chunk(4)[dist.get_rank()], lambda out: out.chunk(4)[dist.get_rank()]),
    ):
        torch._dynamo.reset()
        block, reference = parallelize_module(Block(), line(), plan), Block()
        out = torch.compile(block, backend="aot_eager", fullgraph=True)(given)
        assert_close(out, expected(reference(x)), rtol=1e-4, atol=1e-5)
        out.sum().backward()
        reference(x).sum().backward()
        gradients(block, reference)
    torch._dynamo.reset()


# -- the tensor as a Python object


@subject
def objects() -> None:
    x = sharded(numbers(7, 3)).requires_grad_()
    for copied in (copy.deepcopy(x), _loaded(x)):
        assert type(copied) is DTensor
        assert (copied.placements, copied.requires_grad) == (x.placements, True)
        same(copied.detach(), numbers(7, 3))
    arrived = x.detach().redistribute(placements=[Replicate()], async_op=True).to_local()
    assert not isinstance(arrived, AsyncCollectiveTensor)
    assert torch.equal(x, x.clone()) is True
    assert torch.equal(x, x + 1) is False
    (chunk,) = x.__create_chunk_list__()
    assert chunk.sizes == x.to_local().shape
    same(x.__get_tensor_shard__(None), x.to_local().detach())
    assert repr(x).startswith("DTensor(")


def _loaded(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def run(name: str) -> None:
    torch.manual_seed(0)
    SUBJECTS[name]()


SLOW = ("compiled_styles",)  # a default run compiles enough elsewhere
NAMES = [name for name in SUBJECTS if name not in SLOW]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [*one_in(2, NAMES), *(pytest.param(name, marks=pytest.mark.thorough) for name in SLOW)]
)
def test_programs_for_torchs_distributed_tensors_run(name: str, ranks: RankPool) -> None:
    ranks.run(run, name)
