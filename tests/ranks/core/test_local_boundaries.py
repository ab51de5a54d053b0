"""Between local and distributed tensors: what is sent, what is checked, and where gradients are summed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from helpers.looking_soon import looking_soon
from torch import Tensor, nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.tensor.debug import CommDebugMode

import dshard
from dshard import DTensor, LayoutError, Mesh, Partial, Placement, Replicate, Shard, distribute_tensor
from dshard.caches import clear_caches
from dshard.comm import DeviceMesh, store_messages
from dshard.errors import MeshError, MixedError, ShapeError
from dshard.experimental import local_map
from dshard.testing import RankPool, count_traffic, rank_pool, simulated
from dshard.torch_dtensor import IS_TORCHS

GRID = Mesh((2, 2), ("a", "b"))
WAIT = 300.0  # seconds, for torch's DTensor imports half of torch at its first use


@functools.cache
def line() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))


@functools.cache
def grid() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


# -- from_local


LOCALS: list[tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = [
    ((4, 6), (0, 1), [Shard(0), Replicate()]),
    ((4, 6), (1, 0), [Shard(0), Shard(1)]),
    ((4, 6, 3), (1, 2, 0), [Shard(1), Shard(1)]),
    ((4, 6, 3), (2, 0, 1), [Shard(-1), Partial()]),
    ((2, 6), (1, 0), [Shard(0), Partial("max")]),
]


def torchs(placement: Any) -> Any:
    kind = next(kind for kind in (Shard, Replicate, Partial) if isinstance(placement, kind))
    fields = [name for name in kind.__match_args__ if name != "blocks"]  # of which torch's class has none
    return getattr(torch_tensor, kind.__name__)(*(getattr(placement, name) for name in fields))


def as_torch_makes_them() -> int:
    """The collectives in making distributed tensors, each compared with torch's."""
    sent = 0
    for sizes, order, placements in LOCALS:
        local = torch.ones(sizes).permute(order)
        theirs = torch_tensor.DTensor.from_local(local, grid(), [torchs(p) for p in placements])
        with count_traffic() as traffic, grid():
            found = [
                DTensor.from_local(local, grid(), placements),
                DTensor.from_local(local, None, placements, run_check=False),
                DTensor.from_local(local, placements=placements, shape=theirs.shape, stride=theirs.stride()),
            ]
        for mine in found:
            assert (mine.shape, mine.stride(), mine.placements) == (theirs.shape, theirs.stride(), theirs.placements)
            assert (mine.to_local().data_ptr(), mine.device_mesh) == (local.data_ptr(), grid())
        sent += len(traffic.collectives)
    with pytest.raises(MixedError, match="not a DTensor"):
        DTensor.from_local(DTensor.from_local(torch.ones(4), grid()), grid())
    return sent


@pytest.mark.ranks
def test_from_local_sends_nothing_and_makes_what_torch_makes(ranks: RankPool) -> None:
    assert ranks.run(as_torch_makes_them, timeout=WAIT) == [0] * 4


def uneven() -> tuple[str, tuple[int, ...], int]:
    """What the debug mode says of parts of 3, 3, 3 and 1 rows; the shape that `run_check` finds, and what it sends."""
    local = torch.ones(1 if dist.get_rank() == 3 else 3, 2)
    with count_traffic() as traffic:
        shape = tuple(DTensor.from_local(local, line(), [Shard(0)], run_check=True).shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSHARD_DEBUG", "1")
        clear_caches()
        DTensor.from_local(torch.ones(2, 2), line(), [Shard(0)])
        DTensor.from_local(local, line(), [Shard(0)], shape=(10, 2))
        with pytest.raises(ShapeError) as caught:
            DTensor.from_local(local, line(), [Shard(0)])
    clear_caches()
    return str(caught.value), shape, len(traffic.collectives)


@pytest.mark.ranks
def test_uneven_parts_need_a_shape_or_a_check(ranks: RankPool) -> None:
    for rank, (told, shape, sent) in enumerate(ranks.run(uneven)):
        guess = (4, 2) if rank == 3 else (12, 2)
        assert f"count as even parts of a tensor of shape {guess}" in told
        assert "give the global shape, shape=(10, 2), or let the ranks tell each other, run_check=True" in told
        assert (shape, sent) == ((10, 2), 1)


PARTS = {
    "of new shapes": [(3, 2), (2, 2)],
    "of a shape that one rank has taken before": [(4, 2), (5, 2)],
    "of different dtypes": [torch.float32, torch.float64],
}
"""Local tensors of rank 0 and of the other ranks, which no rank compares before it sends."""


@looking_soon()
def beside_uneven_parts(case: str) -> list[str]:
    """What this rank is told by programs of one collective, after one of parts that are even, of 4 rows."""
    mesh, told = line(), list[str]()
    DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)]).sum().full_tensor()
    first, others = PARTS[case]
    given = first if dist.get_rank() == 0 else others
    local = torch.ones(3, 3, dtype=given) if isinstance(given, torch.dtype) else torch.ones(given)
    x = DTensor.from_local(local, mesh, [Shard(0)])
    try:
        x.full_tensor()
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.parametrize("case", PARTS)
def test_uneven_parts_are_refused_before_anything_is_sent(case: str) -> None:
    with rank_pool(2) as pool:  # groups that an error of one rank has ended are of no further use
        for (told,) in pool.run(beside_uneven_parts, case, timeout=WAIT):
            if "dtypes" in case:
                assert re.search(r"of torch.float\d\d on rank \d and .*: convert them to one, with .to\(dtype\)", told)
            else:
                assert re.search(r"uneven local tensors, .* on rank \d and .* on rank \d", told)
                assert "give the global shape, shape=..., or let the ranks tell each other, run_check=True" in told


GIVEN = {
    "of other shapes": [(5, 2), (4, 2)],
    "of which one is empty": [(4, 2), (0, 2)],
    "of a shape that one rank has given before": [(6, 2), (4, 2)],
    "of different dtypes": [torch.float32, torch.float64],
}
"""Whole tensors of rank 0 and of the other ranks, which `distribute_tensor` would send parts of."""


@looking_soon()
def distributed_otherwise(case: str, placement: Placement) -> str:
    """What this rank is told of whole tensors that differ, after one that does not."""
    distribute_tensor(torch.ones(6, 2), line(), [placement])
    given = GIVEN[case][dist.get_rank() > 0]
    x = torch.ones(3, 3, dtype=given) if isinstance(given, torch.dtype) else torch.ones(given)
    try:
        distribute_tensor(x, line(), [placement]).sum().full_tensor()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("case", "placement"), one_way_each(GIVEN, [Shard(0), Replicate()]), ids=str)
def test_whole_tensors_that_differ_are_refused_before_anything_is_sent(case: str, placement: Placement) -> None:
    with rank_pool(2) as pool:  # as above
        for told in pool.run(distributed_otherwise, case, placement, timeout=WAIT):
            if "dtypes" in case:
                assert re.search(r"of torch.float\d\d on rank \d and .*: convert them to one, with .to\(dtype\)", told)
            else:
                assert re.search(
                    r"distribute_tensor of another tensor on each rank, .* on rank \d and .* on rank \d", told
                )
                assert "every rank gives the whole tensor; where each has a part, use DTensor.from_local" in told


def stored_while_warm() -> int:
    """How often this rank has written to the store, or read it, for parts of a shape that it had taken before."""
    calls = list[str]()
    for _ in range(2):
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("append", "appended"):
                patch.setattr(store_messages, name, counted(getattr(store_messages, name), calls))
            DTensor.from_local(torch.ones(7, 2), line(), [Shard(0)]).sum().full_tensor()
            distribute_tensor(torch.ones(7, 2), line(), [Shard(0)])
    return len(calls)


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """The function, which adds its name to `calls`."""

    def call(*args: Any) -> Any:
        calls.append(function.__name__)
        return function(*args)

    return call


@pytest.mark.ranks
def test_even_parts_of_a_shape_that_is_known_ask_nobody(ranks: RankPool) -> None:
    assert ranks.run(stored_while_warm) == [0] * 4


def test_uneven_parts_of_simulated_ranks_need_a_shape() -> None:
    with simulated(GRID):
        parts = dshard.distribute_tensor(torch.ones(3, 2), GRID, [Shard(0), Replicate()]).to_local()
        with pytest.raises(ShapeError, match=r"give the global shape, shape=\(3, 2\)"):
            DTensor.from_local(parts, GRID, [Shard(0), Replicate()])
        assert DTensor.from_local(parts, GRID, [Shard(0), Replicate()], run_check=True).shape == (3, 2)


# -- gradients


A, B, C = (
    torch.arange(float(n), dtype=torch.float64).sin().view(*size) for n, *size in ((48, 8, 6), (24, 4, 6), (36, 6, 6))
)
Mapped = Callable[..., Any]
MAPPED: dict[str, tuple[Mapped, Any, tuple[Any, ...]]] = {
    "sharded data": (lambda a, b: a @ b.t(), [Shard(0), Shard(1)], ([Shard(0), Replicate()], [Replicate(), Shard(0)])),
    "a sum": (
        lambda a, b: (a @ b.t()).sum(0),
        [Partial(), Shard(0)],
        ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
    ),
    "a mean": (
        lambda a, b: (a @ b.t()).mean(0),
        [Partial("avg"), Replicate()],
        ([Shard(0), Replicate()], [Replicate()] * 2),
    ),
    "replicated": (lambda a, b: a @ b.t(), [Replicate()] * 2, ([Replicate()] * 2, [Replicate()] * 2)),
    "mixed outputs": (
        lambda a, b: (a @ b.t(), b.square().sum(1), (a @ b.t()).mean(0)),
        ([Shard(0), Replicate()], [Replicate(), Replicate()], [Partial("avg"), Replicate()]),
        ([Shard(0), Replicate()], [Replicate(), Replicate()]),
    ),
    "partial argument": (
        lambda a, b: a @ b.t(),
        [Partial(), Shard(1)],
        ([Partial(), Replicate()], [Replicate(), Shard(0)]),
    ),
}


def loss_of(outputs: Any) -> Any:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(((out + 1).square().sum() for out in outputs), start=torch.zeros((), dtype=torch.float64))


def mapped() -> None:
    """Values and gradients through `local_map` are those of one device."""
    for name, (function, out, placements) in MAPPED.items():
        plain = [x.clone().requires_grad_() for x in (A, B)]
        loss_of(function(*plain)).backward()
        mine = [
            distribute_tensor(x, grid()).redistribute(placements=p).detach().requires_grad_()
            for x, p in zip((A, B), placements, strict=True)
        ]
        loss = loss_of(local_map(function, out, placements)(*mine))
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), loss_of(function(A, B)), msg=name)
        for x, reference in zip(mine, plain, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), reference.grad, msg=name)  # type: ignore[union-attr]


@pytest.mark.ranks
def test_local_map_sums_the_gradients_that_vary(ranks: RankPool) -> None:
    ranks.run(mapped)


def terms() -> list[int]:
    """The collectives in backward passes to local tensors whose gradients are partial."""
    sent = []
    x = distribute_tensor(A, line(), [Shard(0)])
    for function in (lambda a, b: a @ b.t(), F.linear, lambda a, b: a * b[0]):
        plain, local = B.clone().requires_grad_(), B.clone().requires_grad_()
        function(A, plain).square().sum().backward()
        y = DTensor.from_local(local, line(), [Replicate()], grad_placements=[Partial()])
        loss = function(x, y).square().sum()
        with count_traffic() as traffic:
            loss.backward()
        sent.append(len(traffic.collectives))
        grad: Any = local.grad
        dist.all_reduce(grad)
        torch.testing.assert_close(grad, plain.grad)
    return sent


@pytest.mark.ranks
def test_partial_gradients_of_local_tensors_are_not_reduced(ranks: RankPool) -> None:
    assert ranks.run(terms) == [[0, 0, 0]] * 4


Loss = Callable[[Any, Any, Any], Any]
WITH_TERMS: dict[str, Loss] = {
    "a matmul": lambda lib, x, y: (x @ y.t()).square().sum(),
    "times two": lambda lib, x, y: (y * 2).to_local(grad_placements=[lib.Partial()]).sum() * (1 + dist.get_rank()),
    "an exponential": lambda lib, x, y: (x @ y.exp().t()).sum(),
    "a chain": lambda lib, x, y: (x @ ((y * 2).sin() * 3).t()).square().sum(),
    "the sum alone": lambda lib, x, y: y.sum(),
    "reduced": lambda lib, x, y: (x @ y.redistribute(placements=[lib.Replicate()]).t()).square().sum(),
}
"""Losses of a sharded tensor and one made by `from_local`, partial, replicated, or either, whose gradient has terms."""
PARTIAL_IN, REPLICATED_IN = ("times two", "the sum alone", "reduced"), ("a matmul", "an exponential", "the sum alone")


def counted_backward(lib: Any, loss: Loss, placement: str) -> tuple[Tensor, int]:
    """The gradient of the local tensor, of which each rank wants a term, and the collectives of the backward pass."""
    mesh = line()
    x, local = lib.distribute_tensor(A, mesh, [lib.Shard(0)]), B.clone().requires_grad_()
    y = lib.DTensor.from_local(local, mesh, [getattr(lib, placement)()], grad_placements=[lib.Partial()])
    out = loss(lib, x, y)
    if lib is dshard:
        with count_traffic() as traffic:
            out.backward()
        return local.grad, len(traffic.collectives)  # type: ignore[return-value]
    with CommDebugMode() as mode:
        out.backward()
    return local.grad, mode.get_total_counts()  # type: ignore[return-value]


def beside_torch() -> None:
    for placement, names in (("Partial", PARTIAL_IN), ("Replicate", REPLICATED_IN)):
        for name in names:
            grad, sent = counted_backward(torch_tensor, WITH_TERMS[name], placement)
            for _ in range(3):  # cold, specialised, warm
                own, own_sent = counted_backward(dshard, WITH_TERMS[name], placement)
                torch.testing.assert_close(own, grad, msg=f"{name}, {placement}")
                assert own_sent == sent, f"{name}, {placement}"
    assert counted_backward(dshard, WITH_TERMS["a chain"], "Replicate")[1] == 0


@pytest.mark.ranks
@pytest.mark.skipif(not IS_TORCHS, reason="from_local of torch 2.11 has no grad_placements")
def test_each_rank_gets_its_term_of_a_gradient_as_with_torch(ranks: RankPool) -> None:
    ranks.run(beside_torch)


def compared() -> list[str]:
    """What the debug mode says of replicas that differ, and of gradients that are terms."""
    told = []
    rank, c = dist.get_rank(), distribute_tensor(C, line()).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSHARD_DEBUG", "1")
        clear_caches()
        DTensor.from_local(C * (1 + 1e-15 * rank), line())  # rounding
        DTensor.from_local(C * rank, line(), [Partial()])
        (c.to_local() * 2).sum().backward()
        (c.to_local(grad_placements=[Partial()]) * rank).sum().backward()
        torch.testing.assert_close(c.grad.full_tensor(), torch.full_like(C, 2.0 + 6.0))
        for wrong in (
            lambda: DTensor.from_local(C * rank, line()),
            lambda: (c.to_local() * rank).sum().backward(),
        ):
            with pytest.raises(LayoutError) as caught:
                wrong()
            told.append(str(caught.value))
    clear_caches()
    return told


@pytest.mark.ranks
def test_the_debug_mode_compares_what_counts_as_replicated(ranks: RankPool) -> None:
    for local, gradient in ranks.run(compared):
        assert "the local tensor given to from_local, [x:R], is not the same on rank 0 and rank 1" in local
        assert "the gradient of what to_local returned, [x:R], is not the same on rank 0 and rank 1" in gradient
        assert "give to_local(grad_placements=...) with Partial() there" in gradient


# -- ranks outside the mesh


@functools.cache
def pair() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 2], mesh_dim_names=("x",))


def trained(mesh: Any) -> list[torch.Tensor]:
    """Losses and parameters of a model that is trained on a mesh, or on one device."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).double()
    if mesh is not None:
        for name, placement in {"0.weight": Shard(0), "0.bias": Shard(0), "3.weight": Shard(1)}.items():
            layer, _, leaf = name.partition(".")
            value = distribute_tensor(net.get_parameter(name).detach(), mesh, [placement])
            net.get_submodule(layer).register_parameter(leaf, nn.Parameter(value))
        dshard.distribute_module(net, mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        x = A if mesh is None else distribute_tensor(A, mesh, [Shard(0)])
        loss = F.cross_entropy(net(x), (x.sum(1) * 3).long() % 4)
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach(), norm]
    return [x if mesh is None else x.full_tensor() for x in (*losses, *(p.detach() for p in net.parameters()))]


def same_lines() -> dict[str, Any]:
    """What one program gives on ranks of a mesh of ranks 0 and 2, and on those outside it."""
    mesh = pair()
    x, drawn = distribute_tensor(B, mesh, [Shard(0)]), dshard.randn(6, 5, device_mesh=mesh, placements=[Shard(1)])
    local = torch.ones(3, 4, requires_grad=True)
    y = DTensor.from_local(local, mesh, [Shard(0)])
    out = (y * 2).to_local()
    out.sum().backward()
    plain = distribute_tensor(C, mesh).requires_grad_()
    (plain @ plain).to_local().sum().backward()
    zeros = torch.zeros_like(drawn, device="cpu")
    for step in (torch.optim.SGD([plain], lr=0.1, momentum=0.9), torch.optim.Adagrad([plain], fused=True)):
        step.step()
    with count_traffic() as traffic:
        full = [t.full_tensor() for t in (x, x.sum(), x @ x.t(), x.t().softmax(0), zeros + 1)]
        values = trained(mesh)
    return {
        "shapes": [tuple(t.shape) for t in (x, drawn, y, plain.grad, torch.empty_like(x, device="cpu"))],  # type: ignore[arg-type]
        "locals": [tuple(t.to_local().shape) for t in (x, drawn, y, x[:3], x.sum(), *x.split(2), plain.grad)],  # type: ignore[union-attr]
        "full": full,
        "numbers": [x.sum().item(), bool((x > 0).any()), x.equal(x), x.allclose(x), x.max().long().item()],
        "gradient": local.grad,
        "device": (x.device, (x + 1).device, x.is_meta, drawn.device),
        "trained": values,
        "sent": len(traffic.collectives),
    }


@pytest.mark.ranks
def test_ranks_outside_a_mesh_run_the_same_lines_and_do_nothing(ranks: RankPool) -> None:
    inside, outside, *others = ranks.run(same_lines, timeout=WAIT)
    torch.testing.assert_close(inside["trained"], trained(None))
    torch.testing.assert_close(others[0]["trained"], trained(None))
    assert inside["shapes"] == outside["shapes"] == others[1]["shapes"]
    assert inside["device"] == outside["device"]
    assert inside["numbers"] == [B.sum().item(), True, True, True, 0]
    for rank in (outside, others[1]):
        assert rank["locals"] == [(0,), (0,), (0,), (0,), (), (0,), (0,), (0,)]
        assert [tuple(x.shape) for x in rank["full"]] == [(0,), (), (0,), (0,), (0,)]
        assert rank["numbers"] == [0.0, False, True, True, 0]
        assert rank["gradient"].tolist() == torch.zeros(3, 4).tolist()
        assert rank["sent"] == 0
        assert {x.numel() for x in rank["trained"] if x.ndim} == {0}


LINES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda x: x[[3, -1, 2]],
    "indices beside a slice": lambda x: x[1:, torch.tensor([0, 2])],
    "one value": lambda x: x.clone().index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(3.0).double()),
    "another dtype": lambda x: x.float().sin().double(),
    "a device": lambda x: x.to("cpu", torch.float32) + torch.zeros_like(x[0], device="cpu"),
    "a plain tensor first": lambda x: torch.arange(6.0).double() + x.sum(0),
    "a plain tensor that needs a gradient": lambda x: torch.ones(6).double().requires_grad_() * x,
    "a list of tensors": lambda x: torch.block_diag(x.sum(), x),
    "a number": lambda x: torch.quantile(x, 0.3, dim=-1),
    "numpy": lambda x: x + float(x.detach().sum().numpy()),
    "a histogram": lambda x: torch.histc(x, 4, -2, 2) + x.sum(),
}
"""Lines whose operators take lists, numbers, plain tensors or devices."""


def lines_outside() -> list[tuple[Any, ...]]:
    found = []
    for line in LINES.values():
        x = distribute_tensor(B.double(), pair(), [Shard(0)]).requires_grad_()
        with dshard.implicit_replication():
            y = line(x)
        if y.requires_grad:
            y.square().sum().backward()
        grad: Any = x.grad
        found.append((y.shape, y.dtype, y.device, *((grad.shape, grad.dtype) if y.requires_grad else ())))
    return found


@pytest.mark.ranks
def test_ranks_outside_a_mesh_run_lines_with_plain_operands(ranks: RankPool) -> None:
    inside, *others = ranks.run(lines_outside)
    for each in others:
        assert dict(zip(LINES, each, strict=True)) == dict(zip(LINES, inside, strict=True))


def looks_for_numbers() -> list[list[int] | str]:
    x = distribute_tensor(B, pair(), [Shard(0)])
    return [shape_or_refusal(line, x) for line in (torch.nonzero, lambda x: x[x > 0], torch.unique)]


def shape_or_refusal(line: Callable[[Any], Any], x: Any) -> list[int] | str:
    try:
        return [*line(x).shape]
    except MeshError as error:
        return str(error)


@pytest.mark.ranks
def test_a_rank_outside_a_mesh_refuses_what_numbers_decide(ranks: RankPool) -> None:
    inside, outside, *_ = ranks.run(looks_for_numbers)
    assert inside == [[*B.nonzero().shape], [*B[B > 0].shape], [*B.unique().shape]]
    for text in outside:
        assert "needs the numbers of its operands, which a rank outside their mesh does not have" in text


def to_another_mesh() -> list[torch.Tensor | None]:
    """A loss on ranks 1 and 3 of what ranks 0 and 2 have made, and the gradients on both."""
    there = DeviceMesh("cpu", [1, 3], mesh_dim_names=("x",))
    w, v = (distribute_tensor(C, mesh, [Shard(0)]).requires_grad_() for mesh in (pair(), there))
    y = (w * 2).redistribute(there, [Shard(1)])
    loss = (y @ v).square().sum()
    loss.backward()
    return [loss.full_tensor().detach(), w.grad.full_tensor(), v.grad.full_tensor()]  # type: ignore[union-attr]


@pytest.mark.ranks
def test_every_rank_runs_the_lines_of_both_meshes(ranks: RankPool) -> None:
    w, v = C.clone().requires_grad_(), C.clone().requires_grad_()
    loss = (w * 2 @ v).square().sum()
    loss.backward()
    for rank, (there, grad_w, grad_v) in enumerate(ranks.run(to_another_mesh)):
        torch.testing.assert_close(there, loss.detach() if rank % 2 else torch.zeros(()).double())
        torch.testing.assert_close(grad_w, torch.zeros(0).double() if rank % 2 else w.grad)
        torch.testing.assert_close(grad_v, v.grad if rank % 2 else torch.zeros(0).double())
