"""Flat buffers between ranks, in every dtype and size; what the ranks agree on; who is told."""

from __future__ import annotations

from functools import cache
from time import sleep

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dshard import DeviceMesh, DTensor, Layout, Mesh, MeshError, Partial, Replicate, ShapeError, Shard, zeros
from dshard.comm import bind, collectives, init_device_mesh, listen, runtime_of, transport
from dshard.comm.collective import reduce as reduce_terms
from dshard.comm.process_groups import Group
from dshard.placements import REDUCE_OPS, ReduceOp
from dshard.testing import RankPool, distribute, simulated, whole, whole_numbers
from dshard.testing.simulated_ranks import reduce

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1))


@cache
def group(order: tuple[int, ...]) -> Group:
    """All ranks as one axis, in this order."""
    made = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("x",))
    runtime = runtime_of(bind(made))
    assert runtime is not None
    return runtime.group(("x",))


def terms(size: int, dtype: torch.dtype) -> list[Tensor]:
    """A flat tensor for each rank of a group."""
    return [strided(whole_numbers((size,), dtype, seed)) for seed in range(4)]


def strided(x: Tensor) -> Tensor:
    """The same numbers, not adjacent in memory."""
    return torch.stack([x, x], 1)[:, 0]


# -- what runs on each rank: returns what went wrong


def unwanted_messages() -> list[str]:
    """Messages that two ranks never wait for, begun while one of the others is late; then numbers for all."""
    wrong, n = [], 4
    for late in (0, 3):
        for size in (1, 2**16):
            g = group(ORDERS[0])
            transport.all_reduce(torch.zeros(1), "sum", g)
            sleep(0.05 if dist.get_rank() == late else 0)
            sent = torch.full((size,), float(dist.get_rank()))
            wait = collectives.exchange_pieces([sent] * n, torch.empty(n * size), [size] * n, g)
            if dist.get_rank() % 2 and not wait().equal(torch.arange(4.0).repeat_interleave(size)):
                wrong.append(f"late {late}, {size}: what was wanted is wrong")
            del wait
            if transport.all_reduce(torch.ones(1), "sum", g).item() != n:
                wrong.append(f"late {late}, {size}: what came next is wrong")
    return wrong


def reduced() -> list[str]:
    """all_reduce and reduce_scatter of every op in every dtype."""
    wrong = []
    for order in ORDERS:
        g = group(order)
        for dtype in DTYPES:
            for op in REDUCE_OPS:
                if dtype.is_complex and op in ("max", "min"):
                    continue
                given = terms(10, dtype)
                expected = expected_reduction(given, op)  # type: ignore[arg-type]
                pieces = [3, 0, 5, 2]
                mine = expected.split(pieces)[g.index]
                wrong += differ(transport.all_reduce(given[g.index].clone(), op, g), expected, f"all_reduce {op}")  # type: ignore[arg-type]
                wrong += differ(transport.reduce_scatter(given[g.index], pieces, op, g), mine, f"reduce_scatter {op}")  # type: ignore[arg-type]
    return wrong


def expected_reduction(given: list[Tensor], op: ReduceOp) -> Tensor:
    if op == "avg" and given[0].dtype == torch.bool:
        return torch.stack(given).long().sum(0).div(4, rounding_mode="floor").bool()
    return reduce(given, [op], [4])


def gathered() -> list[str]:
    """all_gather, all_to_all, broadcast, scatter and permute of uneven pieces in every dtype."""
    wrong = []
    for order in ORDERS:
        g = group(order)
        for dtype in DTYPES:
            for sizes in ([2, 2, 2, 2], [3, 0, 1, 4], [0, 0, 0, 0]):
                whole_buffer = whole_numbers((sum(sizes),), dtype)
                parts = whole_buffer.split(sizes)
                found = transport.all_gather(strided(parts[g.index]), sizes, g)
                wrong += differ(found, whole_buffer, f"gather {sizes}")
                wrong += differ(exchange(sizes, dtype, g), exchanged(sizes, dtype, g.index), f"exchange {sizes}")
                for source in range(4):
                    x = strided(whole_buffer) if g.index == source else whole_buffer[:0]
                    found = transport.scatter(x, sizes, source, g)
                    wrong += differ(found, parts[g.index], f"scatter {sizes} from {source}")
                    found = transport.broadcast(strided(whole_buffer * (g.index == source)), source, g)
                    wrong += differ(found, whole_buffer, f"broadcast from {source}")
            ring = terms(3, dtype)
            found = transport.permute(ring[g.index], (g.index + 1) % 4, (g.index - 1) % 4, 3, g)
            wrong += differ(found, ring[(g.index - 1) % 4], "permute")
    return wrong


def exchange(sizes: list[int], dtype: torch.dtype, g: Group) -> Tensor:
    """Rank i sends `sizes[j]` elements to rank j."""
    mine = strided(whole_numbers((sum(sizes),), dtype, g.index))
    return transport.all_to_all(mine, sizes, [sizes[g.index]] * 4, g)


def exchanged(sizes: list[int], dtype: torch.dtype, index: int) -> Tensor:
    return torch.cat([whole_numbers((sum(sizes),), dtype, peer).split(sizes)[index] for peer in range(4)])


def differ(found: Tensor, expected: Tensor, what: str) -> list[str]:
    same = found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)
    return [] if same else [f"{what} of {expected.dtype}: {found.tolist()} instead of {expected.tolist()}"]


@pytest.mark.ranks
@pytest.mark.parametrize("check", [reduced, gathered])
def test_every_collective_in_every_dtype(ranks: RankPool, check: object) -> None:
    assert ranks.run(check) == [[]] * 4  # type: ignore[arg-type]


def with_nan() -> list[bool]:
    """Whether a NaN of one rank survives each reduction."""
    g = group(ORDERS[0])
    x = torch.full((5,), float("nan") if g.index == 2 else 1.0)
    return [bool(transport.all_reduce(x.clone(), op, g).isnan().all()) for op in REDUCE_OPS]  # type: ignore[arg-type]


@pytest.mark.ranks
def test_messages_that_nobody_wants_hold_up_nothing(ranks: RankPool) -> None:
    assert ranks.run(unwanted_messages) == [[]] * 4


@pytest.mark.ranks
def test_a_nan_is_never_lost(ranks: RankPool) -> None:
    assert ranks.run(with_nan) == [[True] * len(REDUCE_OPS)] * 4


ODD_DTYPES = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.complex32]
"""Dtypes that torch moves, but does not add on a CPU."""


def of_odd_dtypes() -> list[str]:
    """What is not reduced right; the last rank has no elements of its own chunk."""
    g, wrong = group(ORDERS[0]), []
    for dtype in ODD_DTYPES:
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        top = torch.iinfo(dtype).max // 2 + 1 if is_whole else 4
        expected_numbers = {"sum": [12, 2, top + 3], "product": [81, 0, top], "max": [3, 1, top], "min": [3, 0, 1]}
        for op, numbers in expected_numbers.items():
            if dtype.is_complex and op in ("max", "min"):
                continue
            term = torch.tensor([3, g.index % 2, top if g.index == 1 else 1], dtype=torch.uint64).to(dtype)
            reduced = transport.all_reduce(term, op, g)  # type: ignore[arg-type]
            expected = torch.tensor(numbers, dtype=torch.uint64).to(dtype)
            wrong += (
                []
                if transport.bytes_of(reduced).equal(transport.bytes_of(expected))
                else [f"{op} of {dtype}: {reduced.tolist()}"]
            )
    return wrong


@pytest.mark.ranks
def test_dtypes_that_torch_cannot_add_are_reduced(ranks: RankPool) -> None:
    assert ranks.run(of_odd_dtypes) == [[]] * 4


# -- process groups


def groups_of_axes() -> list[object]:
    """Groups along several axes, where this rank is in more groups than others are."""
    DeviceMesh("cpu", torch.tensor([1, 3]))
    mesh = bind(DeviceMesh("cpu", torch.arange(4).view(2, 1, 2), mesh_dim_names=("a", "b", "c")))
    runtime = runtime_of(mesh)
    assert runtime is not None
    wide, narrow = runtime.group(("a", "b")), runtime.group(("b", "c"))
    x = torch.tensor([dist.get_rank()])
    return [
        wide.ranks,
        transport.all_gather(x, [1] * 2, wide).tolist(),
        narrow.ranks,
        transport.all_gather(x, [1] * 2, narrow).tolist(),
        runtime.group(("a", "b")) is wide,
        runtime.group(("a", "b", "c")).ranks,
    ]


@pytest.mark.ranks
def test_ranks_in_different_numbers_of_groups_can_make_one_more(ranks: RankPool) -> None:
    everyone = (0, 1, 2, 3)
    assert ranks.run(groups_of_axes) == [
        [(0, 2), [0, 2], (0, 1), [0, 1], True, everyone],
        [(1, 3), [1, 3], (0, 1), [0, 1], True, everyone],
        [(0, 2), [0, 2], (2, 3), [2, 3], True, everyone],
        [(1, 3), [1, 3], (2, 3), [2, 3], True, everyone],
    ]


# -- agreement


def from_parts(sizes: list[int], shape: tuple[int, ...] | None, placements: list[str]) -> str:
    """The global shape of local tensors with these numbers of rows, which the ranks check, or the error."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    local = torch.zeros(sizes[dist.get_rank()], 3)
    made = {"S": Shard(0), "R": Replicate(), "P": Partial()}
    try:
        x = DTensor.from_local(local, mesh, [made[name] for name in placements], shape=shape, run_check=True)
    except ShapeError as error:
        return str(error)
    return str(tuple(x.shape))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([2, 2, 2, 2], "(8, 3)"), ([2, 2, 2, 1], "(7, 3)"), ([1, 1, 0, 0], "(2, 3)"), ([0] * 4, "(0, 3)")],
)
def test_uneven_parts_are_understood(ranks: RankPool, sizes: list[int], expected: str) -> None:
    assert ranks.run(from_parts, sizes, None, ["S"]) == [expected] * 4


@pytest.mark.ranks
@pytest.mark.parametrize("sizes", [[1, 2, 2, 2], [2, 1, 2, 2], [0, 0, 0, 1], [3, 3, 1, 1]])
def test_parts_of_no_tensor_are_refused_on_all_ranks_alike(ranks: RankPool, sizes: list[int]) -> None:
    told = ranks.run(from_parts, sizes, None, ["S"])

    assert len(set(told)) == 1
    assert f"cannot be the parts of a tensor of shape ({sum(sizes)}, 3) laid out [x:S(0)]" in told[0]
    assert "split it as torch.chunk does, or use distribute_tensor" in told[0]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["R", "P"])
def test_replicas_and_terms_of_different_shapes_are_refused(ranks: RankPool, kind: str) -> None:
    told = ranks.run(from_parts, [2, 2, 3, 2], None, [kind])

    assert len(set(told)) == 1
    assert "(3, 3) at (2,)" in told[0]
    assert "cannot be the parts of a tensor of shape (2, 3)" in told[0]


def of_different_dims() -> str:
    """Local tensors with different numbers of dims."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    with pytest.raises(ShapeError) as caught:
        DTensor.from_local(torch.zeros((2,) * (1 + dist.get_rank() // 3)), mesh, [Shard(0)], run_check=True)
    return str(caught.value)


@pytest.mark.ranks
def test_parts_with_different_numbers_of_dims_are_refused(ranks: RankPool) -> None:
    told = ranks.run(of_different_dims)

    assert len(set(told)) == 1
    assert "have different numbers of dims: each rank must give a part of one tensor" in told[0]


def of_a_given_shape() -> list[str]:
    """What each rank is told of a global shape that does not fit."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    with pytest.raises(ShapeError) as caught:
        DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], shape=(9, 3))
    fits = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], shape=(8, 3))
    return [str(caught.value), str(tuple(fits.shape))]


@pytest.mark.ranks
def test_a_given_shape_is_checked(ranks: RankPool) -> None:
    for text, fits in ranks.run(of_a_given_shape):
        assert "cannot be the parts of a tensor of shape (9, 3)" in text
        assert fits == "(8, 3)"


def replicas() -> list[float]:
    """What each rank holds of a tensor whose replicas were different, after run_check."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = torch.full((2,), float(dist.get_rank()))
    return DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=True).to_local().tolist()


@pytest.mark.ranks
def test_run_check_makes_replicas_equal(ranks: RankPool) -> None:
    assert ranks.run(replicas) == [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]


# -- events


def test_listeners_hear_collectives_while_they_listen() -> None:
    mesh, events = Mesh((2, 2), ("dp", "tp")), []
    with simulated(mesh):
        x = distribute(torch.arange(8.0), Layout(mesh, (Shard(0), Replicate())))
        with listen(events.append):
            x.redistribute(placements=[Replicate(), Replicate()])
        x.redistribute(placements=[Replicate(), Replicate()])

    assert [(event.collective, event.axis, event.ranks, event.nbytes) for event in events] == [
        ("all_gather", "dp", 2, 16)
    ]


def test_slices_send_nothing() -> None:
    mesh, events = Mesh((2,), ("tp",)), []
    with simulated(mesh), listen(events.append):
        x = distribute(torch.arange(8.0), Layout(mesh, (Replicate(),)))
        sliced = x.redistribute(placements=[Shard(0)])

        assert whole(sliced).tolist() == list(range(8))
    assert events == []


# -- without processes


def test_a_mesh_without_processes_plans_but_sends_nothing() -> None:
    mesh = Mesh((64, 8), ("dp", "never_bound"))
    x = zeros(4096, 16, device_mesh=mesh, placements=[Shard(0), Replicate()])

    assert x._local_tensor.is_meta
    assert x.redistribute(placements=[Replicate(), Shard(1)])._local_tensor.shape == (4096, 2)
    with pytest.raises(MeshError, match="has no processes here: use whole within simulated"):
        whole(x)


def test_reductions_without_an_order_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"a partial max of torch.complex64: complex numbers have no order"):
        reduce_terms(torch.zeros(2, 3, dtype=torch.complex64), "max")
