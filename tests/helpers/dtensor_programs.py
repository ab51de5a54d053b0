"""Programs on distributed tensors that run with both torch's DTensor and dshard's, through a `Library` argument.

Each holds some of torch's documented behaviour; written for four ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import debug as torch_debug
from torch.distributed.tensor import experimental as torch_experimental
from torch.distributed.tensor import parallel as torch_parallel
from torch.testing import assert_close

import dshard
import dshard.debug
import dshard.experimental
import dshard.parallel

Library: TypeAlias = Any
LIBRARIES: dict[str, Library] = {}
for name, modules in {
    "torch": (torch_parallel, torch_debug, torch_experimental, torch_tensor),
    "dshard": (dshard.parallel, dshard.debug, dshard.experimental, dshard),
}.items():
    LIBRARIES[name] = SimpleNamespace(
        **{key: getattr(module, key) for module in modules for key in (*dir(module), *getattr(module, "__all__", ()))}
    )
    LIBRARIES[name].init_device_mesh = dshard.init_device_mesh if name == "dshard" else init_device_mesh
    LIBRARIES[name].name = name

PROGRAMS: dict[str, Callable[[Library], None]] = {}


def program(function: Callable[[Library], None]) -> Callable[[Library], None]:
    PROGRAMS[function.__name__] = function
    return function


@functools.cache
def mesh_of(name: str, *shape: int) -> Any:
    return LIBRARIES[name].init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def line(lib: Library) -> Any:
    return mesh_of(lib.name, 4)


def grid(lib: Library) -> Any:
    return mesh_of(lib.name, 2, 2)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_line(lib: Library, x: Tensor, placement: Any) -> Any:
    return lib.distribute_tensor(x, line(lib), [placement])


def kinds(lib: Library, *dims: int) -> list[Any]:
    return [*(lib.Shard(dim) for dim in dims), lib.Replicate()]


def refused(call: Callable[[], object], *errors: type[Exception]) -> None:
    try:
        call()
    except errors:
        return
    raise AssertionError(f"not refused with {errors}")


def counts(lib: Library, call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Call `call`; return its result, and the number of each collective that it runs."""
    with lib.CommDebugMode() as comm:
        out = call()
    return out, {str(op).rpartition(".")[2].rstrip(")>' "): n for op, n in comm.get_comm_counts().items() if n}


# -- making and reading


@program
def even_local_parts(lib: Library) -> None:
    x = lib.DTensor.from_local(torch.full((2, 3), float(dist.get_rank())), line(lib), [lib.Shard(0)])
    assert x.shape == (8, 3)
    assert x.stride() == (3, 1)
    assert x.full_tensor()[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@program
def uneven_local_parts_with_shape_and_stride(lib: Library) -> None:
    rows = [2, 2, 1, 0][dist.get_rank()]
    local = torch.arange(5.0)[2 * dist.get_rank() :][:rows].unsqueeze(1)
    x = lib.DTensor.from_local(local, line(lib), [lib.Shard(0)], shape=torch.Size([5, 1]), stride=(1, 1))
    assert x.full_tensor().flatten().tolist() == [0, 1, 2, 3, 4]


@program
def strides_of_a_transposed_part(lib: Library) -> None:
    x = lib.DTensor.from_local(torch.ones(3, 2).t(), line(lib), [lib.Shard(0)])
    assert x.shape == (8, 3)
    assert x.stride() == (1, 8)
    assert x.t().is_contiguous()


@program
def parts_cut_of_copies_keep_the_memory_order(lib: Library) -> None:
    orders = drawn(12, 8).t(), drawn(8, 8, 4, 4).to(memory_format=torch.channels_last), drawn(4, 8, 12).permute(2, 0, 1)
    for whole in orders:
        for placement in kinds(lib, 0, 1):
            x = lib.distribute_tensor(whole, line(lib), [placement], src_data_rank=None)
            assert x.stride() == whole.stride()
            if placement.is_shard():  # torch's replicas are contiguous
                assert x.to_local().stride() == whole.chunk(4, placement.dim)[dist.get_rank()].clone().stride()
            assert_close(x.full_tensor(), whole)
            assert_close((x * 2 + x.contiguous()).full_tensor(), 3 * whole)
    images = lib.distribute_tensor(orders[1], line(lib), [lib.Shard(0)], src_data_rank=None)
    assert images.is_contiguous(memory_format=torch.channels_last)


@program
def strides_of_sliced_parts(lib: Library) -> None:
    part = drawn(6, 8, 10)
    for local, dim, strides in (
        (part[0, :, :4], 0, (10, 1)),
        (part[0, :, :4], 1, (40, 1)),
        (part[0, :, ::2].t(), 0, (2, 40)),
        (part[:, 1:3], 2, (320, 40, 1)),
        (part[..., 0], 1, (320, 10)),
    ):
        x = lib.DTensor.from_local(local, line(lib), [lib.Shard(dim)])
        whole = torch.cat([local] * 4, dim)
        assert x.stride() == strides
        assert not x.is_contiguous()
        assert x.contiguous().stride() == (x + 1).contiguous().stride() == whole.contiguous().stride()
        assert_close(x.redistribute(placements=[lib.Shard(1 - dim % 2)]).full_tensor(), whole)
        assert_close((x.transpose(0, 1) * 2).full_tensor(), 2 * whole.transpose(0, 1))
    assert lib.DTensor.from_local(part[0, :1].expand(4, 10), line(lib), [lib.Shard(1)]).stride() == (0, 1)


@program
def replicas_checked(lib: Library) -> None:
    x = lib.DTensor.from_local(torch.full((2,), float(dist.get_rank())), line(lib), [lib.Replicate()], run_check=True)
    assert x.to_local().tolist() == [0.0, 0.0]


@program
def gradient_of_from_local(lib: Library) -> None:
    local = torch.ones(2, 2, requires_grad=True)
    x = lib.DTensor.from_local(local, line(lib), [lib.Shard(0)])
    (x * 3).sum().backward()
    assert local.grad.tolist() == [[3, 3], [3, 3]]


@program
def gradient_of_to_local(lib: Library) -> None:
    x = on_line(lib, torch.ones(8, 2), lib.Shard(0)).requires_grad_()
    (x.to_local() * (1 + dist.get_rank())).sum().backward()
    assert x.grad.placements == (lib.Shard(0),)
    assert x.grad.full_tensor()[:, 0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]


@program
def gradient_placements_of_to_local(lib: Library) -> None:
    x = on_line(lib, torch.ones(4), lib.Replicate()).requires_grad_()
    (x.to_local(grad_placements=[lib.Partial()]) * (1 + dist.get_rank())).sum().backward()
    assert x.grad.full_tensor().tolist() == [10] * 4


@program
def gradient_placements_of_full_tensor(lib: Library) -> None:
    x = on_line(lib, torch.arange(8.0), lib.Shard(0)).requires_grad_()
    (x.full_tensor(grad_placements=[lib.Replicate()]) ** 2).sum().backward()
    assert_close(x.grad.full_tensor(), 2 * torch.arange(8.0))


@program
def distributing_takes_rank_zero(lib: Library) -> None:
    x = lib.distribute_tensor(torch.full((4,), float(dist.get_rank())), line(lib), [lib.Shard(0)])
    assert x.full_tensor().tolist() == [0] * 4
    y = lib.distribute_tensor(torch.arange(4.0) * 1, line(lib), [lib.Shard(0)], src_data_rank=None)
    assert y.to_local().tolist() == [dist.get_rank()]


@program
def what_distributing_sends(lib: Library) -> None:
    with lib.CommDebugMode() as comm:
        for placement in kinds(lib, 0):
            on_line(lib, drawn(8, 3), placement)
    assert comm.get_comm_counts() == {torch.ops.c10d.scatter_: 1, torch.ops.c10d.broadcast_: 1}


@program
def distributing_from_another_rank(lib: Library) -> None:
    x = lib.distribute_tensor(torch.full((4,), float(dist.get_rank())), line(lib), [lib.Replicate()], src_data_rank=2)
    assert x.full_tensor().tolist() == [2] * 4


@program
def distributing_keeps_what_a_leaf_is(lib: Library) -> None:
    x = lib.distribute_tensor(torch.ones(4, requires_grad=True), line(lib), [lib.Shard(0)])
    assert x.requires_grad
    assert x.is_leaf
    weight = nn.Parameter(lib.distribute_tensor(torch.ones(4), line(lib), [lib.Shard(0)]))
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight.data, lib.DTensor)


@program
def negative_dims_count_from_the_end(lib: Library) -> None:
    x = on_line(lib, drawn(3, 8), lib.Shard(-1))
    assert x.placements == (lib.Shard(1),)
    assert x.redistribute(placements=[lib.Shard(-2)]).placements == (lib.Shard(0),)


@program
def redistribute_backward_goes_back(lib: Library) -> None:
    for source in kinds(lib, 0, 1):
        for target in kinds(lib, 0, 1):
            x = on_line(lib, drawn(5, 6), source).requires_grad_()
            y = x.redistribute(placements=[target])
            y.backward(on_line(lib, drawn(5, 6, seed=1), target))
            assert x.grad.placements == (source,)
            assert_close(x.grad.full_tensor(), drawn(5, 6, seed=1))


@program
def partial_to_others(lib: Library) -> None:
    for op, value in (("sum", 4.0), ("avg", 1.0), ("max", 1.0), ("min", 1.0)):
        x = lib.DTensor.from_local(torch.ones(4, 2), line(lib), [lib.Partial(op)])
        for target in kinds(lib, 0, 1):
            assert_close(x.redistribute(placements=[target]).full_tensor(), torch.full((4, 2), value))


@program
def redistributing_on_two_axes(lib: Library) -> None:
    x = lib.distribute_tensor(drawn(5, 7), grid(lib), [lib.Shard(0), lib.Shard(1)])
    for target in ([lib.Shard(1), lib.Shard(0)], [lib.Replicate(), lib.Shard(0)], [lib.Shard(0), lib.Shard(0)]):
        y = x.redistribute(placements=target)
        assert y.placements == tuple(target)
        assert_close(y.full_tensor(), drawn(5, 7))


@program
def reductions_of_precision_on_the_way(lib: Library) -> None:
    x = on_line(lib, drawn(8, 2), lib.Shard(0)).requires_grad_()
    y = x.redistribute(placements=[lib.Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32


@program
def sub_meshes(lib: Library) -> None:
    tp = grid(lib)["tp"]
    x = lib.distribute_tensor(drawn(4, 2), tp, [lib.Shard(0)])
    assert x.device_mesh == tp
    assert x.to_local().shape == (2, 2)
    assert_close((x + x).full_tensor(), 2 * drawn(4, 2))


@program
def ranks_outside_a_mesh(lib: Library) -> None:
    mesh = lib.DeviceMesh("cpu", [0, 2])
    x = lib.distribute_tensor(torch.arange(4.0), mesh, [lib.Shard(0)])
    y = (x * 2).sum()
    inside = dist.get_rank() in (0, 2)
    assert x.to_local().numel() == (2 if inside else 0)
    assert y.full_tensor().item() == (12 if inside else 0)
    assert x.shape == (4,)


@program
def questions_send_nothing(lib: Library) -> None:
    x = on_line(lib, drawn(8, 4), lib.Shard(0))
    asked = ("is_pinned", "is_contiguous", "is_floating_point", "is_complex", "is_shared", "numel", "storage_offset")
    answers, sent = counts(lib, lambda: [getattr(x, name)() for name in asked])
    assert answers == [getattr(drawn(8, 4), name)() for name in asked]
    assert sent == {}


# -- factories


@program
def factories_on_meshes(lib: Library) -> None:
    for make, value in ((lib.zeros, 0.0), (lib.ones, 1.0)):
        x = make((5, 3), dtype=torch.float64, device_mesh=line(lib), placements=[lib.Shard(0)], requires_grad=True)
        assert x.dtype == torch.float64
        assert x.requires_grad
        assert x.to_local().shape[0] == [2, 2, 1, 0][dist.get_rank()]
        assert_close(x.full_tensor().detach(), torch.full((5, 3), value, dtype=torch.float64))
    assert lib.full((2, 2), 7.0, device_mesh=line(lib)).placements == (lib.Replicate(),)
    assert lib.empty(4, 4, device_mesh=line(lib), placements=[lib.Shard(1)]).to_local().shape == (4, 1)


@program
def factories_of_tensors_like_others(lib: Library) -> None:
    x = on_line(lib, drawn(8, 2), lib.Shard(0))
    for y in (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), torch.empty_like(x)):
        assert y.placements == x.placements
        assert y.to_local().shape == x.to_local().shape
    assert x.new_zeros(8, 2).full_tensor().sum() == 0
    assert torch.randn_like(x, dtype=torch.float64).dtype == torch.float64


@program
def meta_then_storage(lib: Library) -> None:
    x = lib.DTensor.from_local(torch.empty(2, 4, device="meta"), line(lib), [lib.Shard(0)])
    assert x.is_meta
    assert x.shape == (8, 4)
    y = torch.empty_like(x, device="cpu")
    assert not y.is_meta
    assert y.to_local().shape == (2, 4)
