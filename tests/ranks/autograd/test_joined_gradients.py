"""Gradients that are reduced together: as on one device, in few collectives, in one order on all ranks."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.held_memory import PATIENCE, Held
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dshard import (
    DTensor,
    Layout,
    Mesh,
    Replicate,
    Shard,
    accumulate,
    distribute_tensor,
    init_device_mesh,
    parallelize,
    rehearsing,
    trace,
    use_topology,
)
from dshard.autograd import joined_gradients
from dshard.autograd.joined_gradients import bucket_bytes
from dshard.comm import Lane
from dshard.comm.events import CommEvent, listen
from dshard.testing import RankPool, distribute, simulated, whole
from dshard.topology import Layer, Topology
from dshard.torch_private import no_torch_function
from dshard.trace import Trace

MESHES = {(4,): ("d",), (2, 2): ("d", "t")}
SIZES = ((8, 8), (5, 3), (3,), (1, 7), (0, 4), (2, 3, 5), ())
DTYPES = (torch.float64, torch.float64, torch.float64, torch.float32, torch.bfloat16)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.25}
"""Terms of a gradient are as large as 16, of which bfloat16 has steps of an eighth."""


def leaves(seed: int, mesh: Any, ndim: int, split: float) -> tuple[list[Tensor], list[Any]]:
    """Leaves on one device, and the same in random layouts; `split` is the chance of a Shard.

    With 0.0 nothing is sent in a forward pass over them.
    """
    draw, single, distributed = random.Random(seed), [], []
    torch.manual_seed(seed)
    for _ in range(draw.randint(2, 9)):
        shape, dtype = draw.choice(SIZES), draw.choice(DTYPES) if split else torch.float64
        x = torch.randn(shape).to(dtype).requires_grad_()
        placements = [
            Shard(draw.randrange(len(shape))) if shape and draw.random() < split else Replicate() for _ in range(ndim)
        ]
        single.append(x)
        distributed.append(distribute_tensor(x.detach(), mesh, placements, src_data_rank=None).requires_grad_())
    return single, distributed


def loss_of(xs: list[Any], seed: int, rows: Any, order: int = 0) -> Any:
    """A loss of some of the leaves, some of them twice, with rows of data; `order` is that in which terms are made."""
    draw = random.Random(seed)
    uses = [draw.choice((0, 1, 1, 1, 2)) for _ in xs]
    terms: list[Any] = [None] * len(xs)
    for i in range(len(xs))[:: -1 if order else 1]:
        x, data = xs[i], rows.to(xs[i].dtype)
        terms[i] = sum((data.view(-1, *(1,) * x.dim()) * x).sum() * (k + 1) for k in range(uses[i]))
        if uses[i] == 2:
            terms[i] = terms[i] + (data.view(-1, *(1,) * x.dim()) * x * x).sum()
    return sum(term if term.dtype == torch.float64 else term.double() for term in terms if isinstance(term, Tensor))


def matches(x: Any, expected: Tensor | None) -> None:
    assert (x is None) == (expected is None)
    if expected is not None:
        torch.testing.assert_close(
            x.full_tensor(), expected, rtol=TOLERANCES[expected.dtype], atol=TOLERANCES[expected.dtype]
        )


def sent(found: Trace) -> list[tuple[str, ...]]:
    return [(event.op, event.collective, event.axis) for event in found.events]


def passes(seed: int, shape: tuple[int, ...], turned: bool) -> tuple[int, object]:
    """Backward passes over random leaves: as on one device, also where one rank makes its graph in another order."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=MESHES[shape])
    single, distributed = leaves(seed, mesh, len(shape), 0.0 if turned else 0.3)
    order, n, all_sent = int(turned and dist.get_rank() == 1), 0, []
    for k in range(4):
        torch.manual_seed(seed + k)
        rows = torch.randn(6, dtype=torch.float64)
        split = distribute_tensor(rows, mesh, [Shard(0)] * len(shape), src_data_rank=None)
        kind = seed + k if k < 3 else seed + 1  # not the same leaves each time
        expected, out = loss_of(single, kind, rows), loss_of(distributed, kind, split, order)
        if isinstance(expected, int):
            continue
        with trace() as found:
            if k == 2:
                gradients = torch.autograd.grad(expected, single, allow_unused=True)
                for x, y in zip(torch.autograd.grad(out, distributed, allow_unused=True), gradients, strict=True):
                    matches(x, y)
            else:
                expected.backward()
                out.backward()
        all_sent.append(sent(found))
        n += sum(event.op.startswith("gradients of") for event in found.events)
        for x, y in zip(distributed, single, strict=True):
            assert x.grad is None or x.grad.layout == x.layout
            matches(x.grad, y.grad)
        if k == 1:
            for x in (*single, *distributed):
                x.grad = None
    return n, all_sent


def many_passes(count: int, first: int) -> tuple[int, object]:
    found = {seed: passes(seed, [*MESHES][seed % 2], turned=seed % 3 == 0) for seed in range(first, first + count)}
    return sum(n for n, _ in found.values()), [all_sent for seed, (_, all_sent) in found.items() if seed % 3 == 0]


def check_passes(found: list[tuple[int, object]], count: int) -> None:
    assert all(n > count and all_sent == found[0][1] for n, all_sent in found), "in one order on all ranks"


def test_gradients_are_those_of_one_device(ranks: RankPool):
    check_passes(ranks.run(many_passes, 4, 0), 4)


@pytest.mark.thorough
@pytest.mark.parametrize("first", [1000, 1750])
def test_many_gradients_are_those_of_one_device(ranks: RankPool, first: int):
    check_passes(ranks.run(many_passes, 750, first, timeout=3000.0), 750)


def products(rows: Any, *xs: Any) -> Any:
    return tuple(rows.view(-1, *(1,) * x.dim()) * x * x for x in xs)


class Nested(torch.autograd.Function):
    """`products` whose backward pass computes them again, and runs a backward pass of its own to aliases of leaves."""

    @staticmethod
    def forward(ctx: Any, rows: Any, *xs: Any) -> Any:
        ctx.rows, ctx.xs = rows, xs
        ctx.set_materialize_grads(False)
        return products(rows, *xs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with no_torch_function():
            aliases = [torch.Tensor.requires_grad_(x.detach()) for x in ctx.xs]
        with torch.enable_grad():
            every = zip(products(ctx.rows, *aliases), grads, strict=True)
            outs, given = zip(*((y, grad) for y, grad in every if grad is not None), strict=True)
        with no_torch_function():
            return None, *torch.autograd.grad(outs, aliases, given, allow_unused=True)


def nested_passes(count: int, first: int) -> list[object]:
    """Backward passes over random leaves, of which one rank runs parts in backward passes within the pass."""
    mesh, all_sent = init_device_mesh("cpu", (4,), mesh_dim_names=("d",)), []
    for seed in range(first, first + count):
        draw, (single, distributed) = random.Random(seed), leaves(seed, mesh, 1, 0.0)
        for _ in range(4):
            rows = torch.randn(6, dtype=torch.float64)
            split = distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None)
            within = [i for i in range(len(single)) if draw.random() < 0.5]
            used = {i for i in range(len(single)) if draw.random() < 0.7} or {0}
            function = Nested.apply if dist.get_rank() == 2 and used & {*within} else products
            inner = dict(zip(within, function(split, *(distributed[i] for i in within)), strict=True))
            ours = [(inner[i] if i in inner else products(split, distributed[i])[0]).sum() for i in used]
            theirs = [products(rows, single[i])[0].sum() for i in used]
            with trace() as found:
                torch.stack(ours).sum().backward()
            torch.stack(theirs).sum().backward()
            all_sent.append(sent(found))
            for x, y in zip(distributed, single, strict=True):
                matches(x.grad, y.grad)
    return all_sent


@pytest.mark.parametrize("count", [4, pytest.param(400, marks=pytest.mark.thorough)])
def test_backward_passes_within_the_pass_of_one_rank_send_the_same(ranks: RankPool, count: int):
    found = ranks.run(nested_passes, count, 0, timeout=3000.0)
    assert all(each == found[0] for each in found)
    assert any("gradients of" in event[0] for each in found[0] for event in each)


def alone_and_not(reset: bool) -> None:
    """Backward passes over one leaf, then over several, begun in another order on one rank, and over the one again."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    torch.manual_seed(0)
    single = [torch.randn(n, dtype=torch.float64).requires_grad_() for n in (3, 4, 5)]
    leaves_of = [distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_() for x in single]
    for used in ([1], [1], [1], [1, 0], [1, 0], [1], [1], [1], [2, 1, 0], [0], [0], [0], [0, 1], [0, 1], [1], [1]):
        rows = torch.randn(6, 1, dtype=torch.float64)
        split = distribute_tensor(rows, mesh, [Shard(0)])
        order = used[::-1] if dist.get_rank() == 1 else used
        terms = {i: (split * leaves_of[i] * leaves_of[i]).sum() for i in order}
        torch.stack([terms[i] for i in used]).sum().backward()
        torch.stack([(rows * single[i] * single[i]).sum() for i in used]).sum().backward()
        for x, y in zip(leaves_of, single, strict=True):
            matches(x.grad, y.grad)
            if reset:
                x.grad = y.grad = None


@pytest.mark.parametrize("reset", [True, False])
def test_a_gradient_that_was_alone_is_joined_again_with_others(ranks: RankPool, reset: bool):
    ranks.run(alone_and_not, reset)


def mlp(layers: int, width: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh()) for _ in range(layers)),
    )


def few_collectives() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = (mlp(12, 145) for _ in range(2))  # 24 parameters, 1 MiB of gradients in single precision
    model, reference = model.float(), reference.float()
    x = torch.randn(8, 145)
    parallelize(model, mesh, "data", x)
    for _ in range(3):
        with trace() as found:
            out = model(x).square().sum()
            out.backward()
        reference(x).square().sum().backward()
        assert len(found.events) <= 2, found.summary()
        sent = 4 * sum(p.numel() for p in reference.parameters())
        assert abs(found.nbytes - 2 * 3 * sent / 4) < 64, "2 (n - 1) / n of the gradients, but for rounding"
        for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-5)
    assert {path for event in found.events for path, _ in event.members} >= {"Sequential.0.0", "Sequential.11.0"}


def test_data_parallel_sends_two_collectives_for_a_mebibyte(ranks: RankPool):
    ranks.run(few_collectives)


def differentiated_again() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = (mlp(3, 6) for _ in range(2))
    x = torch.randn(8, 6, dtype=torch.float64)
    parallelize(model, mesh, "data", x)
    for _ in range(3):
        losses = list[Any]()
        for net in (model, reference):
            loss = net(x).square().sum()
            with trace() as found:
                grads = torch.autograd.grad(loss, [*net.parameters()], create_graph=True)
            if net is model:
                assert len(found.events) == 1, found.summary()
            losses.append(sum(((grad**3).sum() for grad in grads), torch.zeros((), dtype=torch.float64)))
            losses[-1].backward()
        torch.testing.assert_close(losses[0].full_tensor(), losses[1], rtol=1e-12, atol=0)
        for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), expected.grad, rtol=1e-10, atol=1e-12)


def test_gradients_that_are_differentiated_again_are_reduced_together(ranks: RankPool):
    ranks.run(differentiated_again)


def begun_within_passes(losses: str) -> tuple[list[tuple[int, int]], object]:
    """For a sequence of passes over one network (d), or over it and another (g): collectives, and those begun within.

    Rank 1 runs operators of its own beside each. All run by Python, of whose passes buckets learn: rehearsed ones
    begin them sooner.
    """
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    begun, all_sent = [], []
    with use_topology(Topology.flat(bandwidth=1e6, latency=1e-4)), rehearsing(False):  # more than one bucket
        judge, maker = mlp(4, 16), mlp(4, 16)
        data = torch.randn(8, 16, dtype=torch.float64)
        for model in (judge, maker):
            parallelize(model, mesh, "data", data)
        for loss in losses:
            x = distribute_tensor(data, mesh, [Shard(0)]).requires_grad_()
            y = x * 1  # whose gradient comes after those of the leaves beside it
            out = judge(y if loss == "d" else maker(y)).square().sum()
            within: list[int] = []
            with trace() as found:
                x.register_hook(lambda grad, found=found, within=within: within.append(len(found.events)))
                if dist.get_rank() == 1:
                    local = out.detach().to_local().clone().requires_grad_()
                    (local * local).sum().backward()
                out.backward()
            begun.append((within[0], len(found.events)))
            all_sent.append(sent(found))
    return begun, all_sent


@pytest.mark.parametrize(("losses", "learned"), [("ddddd", {1, 2, 3, 4}), ("dgdgdgdg", {3, 4, 5, 6, 7})])
def test_buckets_begin_within_the_pass(ranks: RankPool, losses: str, learned: set[int]):
    found = ranks.run(begun_within_passes, losses)
    for begun, all_sent in found:
        assert all_sent == found[0][1]
        for i, (within, every) in enumerate(begun):
            assert every > 1
            assert (within >= every - 1) == (i in learned), f"pass {i} of {losses}: {within} of {every}"
            assert i not in learned or every == begun[losses.rindex(losses[i])][1], "as many in each pass of a kind"


def step_now(p: Tensor) -> None:
    assert p.grad is not None
    p.data.sub_(0.1 * p.grad)


def used_at_once() -> None:
    """Hooks that use a gradient in the backward pass, an optimiser within it, and a pass that raises."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = mlp(3, 6), mlp(3, 6)
    x = torch.randn(8, 6, dtype=torch.float64)
    parallelize(model, mesh, "data", x)
    for each in (model, reference):
        parameters = list(each.parameters())
        parameters[0].register_hook(lambda grad: 2 * grad)
        parameters[3].register_post_accumulate_grad_hook(step_now)
    for _ in range(3):
        for each in (model, reference):
            each(x).square().sum().backward()
    compare(model, reference)

    def refuse(grad: Tensor) -> None:
        raise ValueError("no")

    for each in (model, reference):
        handle = next(iter(each.parameters())).register_hook(refuse)
        with pytest.raises(ValueError, match="no"):
            each(x).square().sum().backward()
        handle.remove()
        each.zero_grad()
        each(x).square().sum().backward()
    compare(model, reference)


def compare(model: nn.Module, reference: nn.Module) -> None:
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), expected)
        torch.testing.assert_close(p.grad.full_tensor(), expected.grad)


def test_a_gradient_used_within_the_pass_is_reduced_then(ranks: RankPool):
    ranks.run(used_at_once)


def of_steps(found: Trace) -> list[Any]:
    """The collectives that were traced, but for the numbers that the program makes."""
    return [event for event in found.events if event.op != "number"]


def accumulated() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = mlp(4, 6), mlp(4, 6)
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    parallelize(model, mesh, "data", batches[0])
    kept: list[Any] = []
    for x in batches:
        with trace() as found:
            model(x).square().sum().backward()
        reference(x).square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        assert len(of_steps(found)) == 1, "accumulated gradients are reduced together, too"
        assert not kept or all(x is y for x, y in zip(kept, gradients, strict=True)), "as on one device"
        kept = gradients
    compare(model, reference)
    norm, expected = (nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, reference))
    torch.testing.assert_close(norm.full_tensor(), expected)  # type: ignore[attr-defined]
    compare(model, reference)
    for each in (model, reference):
        for p in [*each.parameters()][::2]:
            p.grad = torch.ones(p.shape, dtype=torch.float64)
        each(batches[0]).square().sum().backward()
    for p, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert right.grad is not None
        torch.testing.assert_close(whole(p.grad) if isinstance(p.grad, DTensor) else p.grad, right.grad)


HOSTS = Topology("hosts", (Layer("host", 2, 1e8), Layer("rank", 2, 1e10)))
"""Between hosts an all_reduce sends what was reduced on each."""


def table_alone() -> list[tuple[list[str], list[str]]]:
    """The collectives of a table's gradient in each pass, in all and up to the next node of the graph."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("d", "t"))
    table = distribute_tensor(torch.randn(512, 256), mesh, [Replicate(), Replicate()]).requires_grad_()
    x = distribute_tensor(torch.randn(64, 256), mesh, [Shard(0), Shard(0)], src_data_rank=None).requires_grad_()
    passes = []
    for _ in range(3):
        events, h = list[CommEvent](), x * 2
        h.register_hook(lambda grad, events=events: passes.append([event.collective for event in events]))
        with listen(events.append):
            total = (h @ table.T).sum()
            with use_topology(HOSTS):
                total.backward()
        passes[-1] = passes[-1], [event.collective for event in events]
        table.grad = x.grad = None
    return passes


def test_a_gradient_alone_runs_its_collectives_at_once(ranks: RankPool):
    """Begun and left, the first of several would hold the gradient and its buffer beside the rest of the pass."""
    for passes in ranks.run(table_alone):
        assert all(len(every) > 2 and at_once == every for at_once, every in passes[1:]), "the first is not expected"


def test_gradients_accumulate_over_backward_passes(ranks: RankPool):
    ranks.run(accumulated)


def accumulated_in_parts(strategy: str) -> None:
    """Microbatches whose gradients are added without a collective, and reduced once."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = mlp(3, 6), mlp(3, 6)
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(6)]
    parallelize(model, mesh, strategy, batches[0])
    for start in (0, 3):
        with trace() as before, accumulate():
            for x in batches[start : start + 2]:
                model(x).square().sum().backward()
        assert not [event for event in of_steps(before) if "gather" not in event.collective], before.summary()
        assert all(p.grad.layout.partial_axes() for p in model.parameters())
        with trace() as last:
            model(batches[start + 2]).square().sum().backward()
        assert sum("gather" not in event.collective for event in of_steps(last)) == 1, last.summary()
        for x in batches[start : start + 3]:
            reference(x).square().sum().backward()
        compare(model, reference)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters()), "none is left behind"
        for each in (model, reference):
            each.zero_grad()
    with accumulate():
        (grad,) = torch.autograd.grad(model(batches[0]).sum(), [next(model.parameters())])
    (expected,) = torch.autograd.grad(reference(batches[0]).sum(), [next(reference.parameters())])
    torch.testing.assert_close(grad.full_tensor(), expected)
    with accumulate():
        model(batches[0]).square().sum().backward()
    reference(batches[0]).square().sum().backward()
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, msg="a step reduces what is partial")


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_accumulated_gradients_are_reduced_once(ranks: RankPool, strategy: str):
    ranks.run(accumulated_in_parts, strategy)


def accumulated_to_zeros() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = (mlp(2, 6) for _ in range(2))
    x = torch.randn(8, 6, dtype=torch.float64)
    for net in (model, reference):
        for p in net.parameters():
            p.data = p.data.movedim(-1, 0).contiguous().movedim(0, -1)  # a leaf that lies otherwise than its gradients
    parallelize(model, mesh, "data", x)
    for _ in range(2):
        for net in (model, reference):
            net.zero_grad(set_to_none=False)
        losses = [net(part).square().sum() for net in (model, reference) for part in x.split(4)]
        with accumulate(), trace() as found:
            losses[0].backward()
        assert not found.events, found.summary()
        with trace() as found:
            losses[1].backward()
        assert [event.op for event in found.events] == ["gradients of 4 leaves"], found.summary()
        sum(losses[2:]).backward()
        compare(model, reference)


def test_gradients_are_accumulated_to_what_a_step_has_left(ranks: RankPool):
    ranks.run(accumulated_to_zeros)


def test_simulated_ranks_send_the_same():
    mesh = Mesh((4,), ("d",))
    with simulated(mesh), trace() as found:
        xs = [distribute(torch.randn(n, 3), Layout(mesh, (Replicate(),))).requires_grad_() for n in (2, 5)]
        rows = distribute(torch.randn(8, 1, 1), Layout(mesh, (Shard(0),)))
        ((rows * xs[0]).sum() + (rows * xs[1]).sum()).backward()
        assert [x.grad.placements for x in xs] == [(Replicate(),)] * 2
        torch.testing.assert_close(whole(xs[1].grad), whole(rows).sum().expand(5, 3))
    (event,) = of_steps(found)
    assert (event.op, event.collective) == ("gradients of 2 leaves", "all_reduce")
    assert event.nbytes == 4 * (3 * 6 + 15), "21 elements in chunks of at most six"


def collectives_of(xs: list[Any], rows: Any, used: list[int]) -> int:
    """The collectives of a backward pass over some of the leaves, whose gradients are as on one device."""
    with trace() as found:
        sum((rows * xs[i]).sum() for i in used).backward()  # type: ignore[attr-defined]
    for i, x in enumerate(xs):
        assert (x.grad is None) == (i not in used)
        if i in used:
            torch.testing.assert_close(whole(x.grad), whole(rows).sum().expand(*x.shape))
        x.grad = None
    return len(of_steps(found))


def test_leaves_that_come_later_share_buckets_with_others():
    mesh = Mesh((4,), ("d",))
    with simulated(mesh):
        xs = [distribute(torch.randn(n, 3), Layout(mesh, (Replicate(),))).requires_grad_() for n in (2, 5, 3)]
        rows = distribute(torch.randn(8, 1, 1), Layout(mesh, (Shard(0),)))
        passes = [[0], [0], [0, 1], [0, 1], [0, 1], [1], [1], [0, 1], [2, 1, 0], [2, 1, 0], [2], [2]]
        counts = [collectives_of(xs, rows, used) for used in passes]
    assert counts == [1, 1, 2, 1, 1, 1, 1, 2, 2, 1, 1, 1], "a second one in a pass that was expected to have fewer"


def test_leaves_that_are_no_more_take_no_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joined_gradients, "_MOST", 4)
    mesh = Mesh((4,), ("here",))
    with simulated(mesh):
        rows = distribute(torch.randn(8, 1), Layout(mesh, (Shard(0),)))
        for _ in range(6):
            xs = [distribute(torch.randn(3), Layout(mesh, (Replicate(),))).requires_grad_() for _ in range(3)]
            assert collectives_of(xs, rows, [0, 1, 2]) == 1
    (leaves_of,) = (found for key, found in joined_gradients._MESHES.items() if key[0] == mesh)
    assert len(leaves_of.buckets) == 3


class TestBuckets:
    LANE = Lane(Mesh((4,), ("d",)), (("all_reduce", ("d",), "sum"),))

    def test_their_number_takes_the_least_time(self):
        slow = Topology.flat(bandwidth=1e9, latency=1e-3)
        for total in (2**16, 2**20, 2**24, 2**28):
            limit = bucket_bytes(total, self.LANE, slow)
            ring, transfer = 6e-3, total / 1e9
            n = round(total / limit)
            assert n == max(1, int((transfer / ring) ** 0.5))

    def test_without_latency_nothing_is_gained(self):
        assert bucket_bytes(2**20, self.LANE, Topology.preset("bytes")) == 0.0


def priced() -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    counts = []
    for topology in (Topology.flat(bandwidth=1e5, latency=1e-4), Topology.flat(bandwidth=1e12, latency=1.0)):
        with use_topology(topology):
            model = mlp(6, 64)
            x = torch.randn(8, 64, dtype=torch.float64)
            parallelize(model, mesh, "data", x)
            for _ in range(2):
                with trace() as found:
                    model(x).square().sum().backward()
            counts.append(len(of_steps(found)))
    return counts[0], counts[1]


def test_slow_links_take_more_buckets(ranks: RankPool):
    slow, late = ranks.run(priced)[0]
    assert late == 1 < slow


class Computed(TorchDispatchMode):
    """Lists the operators on local tensors that compute something: no views."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if not any(result.alias_info is not None for result in func._schema.returns):
            self.operators.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def packed() -> list[str]:
    """What is computed to reduce the gradients of leaves together, and to use them."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    rows = distribute_tensor(torch.rand(8, 3), mesh, [Shard(0)])
    leaves = [distribute_tensor(torch.rand(3), mesh, [Replicate()]).requires_grad_() for _ in range(4)]
    for _ in range(3):
        products = [rows * x for x in leaves]
        with Computed() as mode:
            torch.autograd.backward(products, [torch.ones_like(each) for each in products])
            found = [x.grad.to_local() for x in leaves]
        assert all(grad.is_contiguous() and not grad._is_view() for grad in found)
        version = found[0]._version
        found[1].add_(1)
        assert found[0]._version == version
        for x in leaves:
            x.grad = None
    return mode.operators


def test_gradients_are_packed_by_one_operator_and_unpacked_by_views(ranks: RankPool):
    operators = ranks.run(packed)[0]
    assert operators.count("cat") == 1
    assert not {"new_empty", "empty", "_foreach_copy_", "set_", "clone", "copy_"} & set(operators)


def mean_loss() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    torch.manual_seed(0)
    logits, targets = torch.randn(10, 7, dtype=torch.float64), torch.randint(7, (10,))
    targets[3] = -100
    x = distribute_tensor(logits, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    expected = F.cross_entropy(logits.requires_grad_(), targets)
    expected.backward()
    for _ in range(2):
        x.grad = None
        with trace() as found:
            loss: Any = F.cross_entropy(x, distribute_tensor(targets, mesh, [Shard(0)], src_data_rank=None))
            loss.backward()
        assert [event.collective for event in found.events] == ["all_reduce"]
        torch.testing.assert_close(loss.full_tensor(), expected)
        torch.testing.assert_close(x.grad.full_tensor(), logits.grad)


def test_a_mean_loss_reduces_its_sum_and_weight_together(ranks: RankPool):
    ranks.run(mean_loss)


def held_after_a_step() -> tuple[int, int, int]:
    """Bytes of the gradients of a rank, and those held at the end of a backward pass and after `zero_grad`."""
    mesh, x = init_device_mesh("cpu", (4,), mesh_dim_names=("d",)), torch.randn(8, 256)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    parallelize(model, mesh, "data", x)
    parameters = [p.to_local() for p in model.parameters()]
    for _ in range(3):
        with Held(x, *parameters) as memory:
            model(x).square().sum().backward()
            before = memory.alive()
            model.zero_grad()
        end = time.monotonic() + PATIENCE  # a thread of gloo's may let go late
        while memory.alive() and time.monotonic() < end:
            time.sleep(PATIENCE / 100)
    return sum(p.nbytes for p in parameters), before, memory.alive()


def test_a_step_leaves_no_memory_behind(ranks: RankPool) -> None:
    for gradients, before, after in ranks.run(held_after_a_step):
        assert before >= gradients
        assert after == 0
