"""Functions of tensors whose layouts are chosen together: values, gradients, what they send, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor, nn

from dshard import (
    ArgumentError,
    LayoutError,
    Mesh,
    MeshError,
    Placement,
    Replicate,
    Shard,
    Topology,
    distribute_tensor,
    trace,
    use_topology,
)
from dshard.parallel import plan_function, plan_steps
from dshard.testing import simulated, whole

R, S = Replicate(), Shard
LINE, GRID = Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y"))


def sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a @ b + c @ d


def low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ a) @ b


def feed_forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(x, up)), down)


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    heads = [(x @ w).unflatten(-1, (4, 4)).transpose(1, 2) for w in (q, k, v)]
    return x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2) @ out


def softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1) @ w.T + x.sum()


CASES: list[tuple[Callable[..., Tensor], Mesh, Sequence[tuple[tuple[int, ...], tuple[Placement, ...]]]]] = [
    (sum_of_products, LINE, [((12, 9), (S(1),)), ((9, 7), (S(0),))] * 2),
    (sum_of_products, GRID, [((12, 9), (S(1), R)), ((9, 7), (R, S(0))), ((12, 8), (R, S(1))), ((8, 7), (S(1), S(0)))]),
    (low_rank, LINE, [((64, 32), (R,)), ((32, 2), (R,)), ((2, 48), (S(1),))]),
    (low_rank, GRID, [((30, 14), (S(0), S(1))), ((14, 2), (S(1), R)), ((2, 7), (R, S(1)))]),
    (feed_forward, GRID, [((6, 5, 8), (S(0), R)), ((16, 8), (R, S(0))), ((8, 16), (R, S(1)))]),
    (attention, GRID, [((4, 6, 16), (S(0), R)), *[((16, 16), (R, S(1)))] * 3, ((16, 16), (R, S(0)))]),
    (softmax, GRID, [((7, 5), (S(0), S(1))), ((5, 6), (S(1), R))]),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_values_and_gradients_equal_one_device(case: int) -> None:
    function, mesh, given = CASES[case]
    torch.manual_seed(case)
    alone = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape, _ in given]
    expected = function(*alone)
    expected.sin().sum().backward()
    with simulated(mesh):
        pairs = zip(alone, given, strict=True)
        mine = [distribute_tensor(x.detach(), mesh, at).requires_grad_() for x, (_, at) in pairs]
        plan = plan_function(function, *mine)
        out = plan(*mine)
        out.sin().sum().backward()

        assert plan.certificate == pytest.approx(1)
        torch.testing.assert_close(whole(out.detach()), expected.detach())
        for x, y in zip(mine, alone, strict=True):
            torch.testing.assert_close(whole(x.grad), y.grad)


def test_two_products_make_one_reduction() -> None:
    with simulated(LINE):
        a, b, c, d = (distribute_tensor(torch.randn(64, 64), LINE, [S(dim)]) for dim in (1, 0, 1, 0))
        plan = plan_function(sum_of_products, a, b, c, d)
        with trace() as sent:
            out = plan(a, b, c, d)

        assert [event.collective for event in sent.events] == ["all_reduce"]
        assert [(line.call, str(line.makes[0])) for line in plan.lines[-3:]] == [
            ("matmul", "x:P(sum)"),
            ("add", "x:P(sum)"),
            ("return", "x:R"),
        ]
        torch.testing.assert_close(whole(out), whole(a) @ whole(b) + whole(c) @ whole(d))


def test_a_low_rank_stays_whole() -> None:
    with simulated(LINE):
        x, a, b = (torch.randn(512, 64), torch.randn(64, 4), torch.randn(4, 1024))
        mine = [distribute_tensor(t, LINE, [at]) for t, at in ((x, R), (a, R), (b, S(1)))]
        plan = plan_function(lambda x, a, b: ((x @ a) @ b).relu(), *mine)
        with trace() as sent:
            out = plan(*mine)

        assert not sent.events
        assert [str(line.makes[0]) for line in plan.lines if line.call == "matmul"] == ["x:R", "x:S(1)"]
        torch.testing.assert_close(whole(out), (x @ a @ b).relu())


def test_arguments_may_be_plain_nested_or_partial_sums() -> None:
    with simulated(LINE):
        a, w = (distribute_tensor(torch.randn(8, 8), LINE, [S(dim)]) for dim in (1, 0))
        partial = a @ w
        plain = torch.randn(8, 8)

        def function(tensors: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
            return {"sum": (tensors["partial"] + tensors["plain"]).relu() * scale, "same": tensors["plain"]}

        plan = plan_function(function, {"partial": partial, "plain": plain}, scale=2.0)
        out = plan({"partial": partial, "plain": plain}, scale=2.0)

        assert str(partial.layout) == "x:P(sum)"
        torch.testing.assert_close(whole(out["sum"]), 2 * (whole(partial) + plain).relu())
        assert str(plan).endswith("within 1.000 of any choice of layouts")


def test_what_cannot_be_planned_is_refused() -> None:
    with simulated(LINE):
        x, w = (distribute_tensor(torch.ones(8, 8), LINE, [S(0)]) for _ in range(2))
        with pytest.raises(LayoutError, match=r"does not run without data \(Tensor\.item\(\).*asks for no values"):
            plan_function(lambda x: x * x.sum().item(), x)
        with pytest.raises(LayoutError, match=r"uses a distributed tensor that is no argument.*give it as one"):
            plan_function(lambda x: x @ w, x)
        with pytest.raises(ArgumentError, match=r"plan_function plans for the tensors of a call: give them"):
            plan_function(lambda x: x)
        with pytest.raises(MeshError, match=r"no mesh was given"):
            plan_function(lambda x: x, torch.ones(3))

        plan = plan_function(lambda x, y: x @ y, x, w)
        with pytest.raises(LayoutError, match=r"planned for 2 tensors, called with 1: plan the function for these"):
            plan(x)
        with pytest.raises(
            LayoutError,
            match=r"argument 1 was planned as a tensor.*in \[x:S\(0\)\], and is.*plain",
        ):
            plan(x, torch.ones(8, 8))


SHAPES = [(256, 256), (256, 192), (130, 257), (64, 512)]
LAID = [(GRID, (S(0), S(1))), (LINE, (S(0),)), (LINE, (S(1),)), (GRID, (S(0), R))]


@pytest.mark.parametrize(("shape", "way"), one_way_each(SHAPES, LAID))
def test_muon_gathers_a_matrix_once(shape: tuple[int, int], way: tuple[Mesh, tuple[Placement, ...]]) -> None:
    mesh, at = way
    torch.manual_seed(0)
    alone = nn.Parameter(torch.randn(shape))
    steps, grads = torch.optim.Muon([alone], lr=0.1), torch.randn(3, *shape)
    with simulated(mesh), use_topology(Topology.preset("dgx-h100")):
        mine = nn.Parameter(distribute_tensor(alone.detach().clone(), mesh, at))
        planned = plan_steps(torch.optim.Muon([mine], lr=0.1))
        for grad in grads:
            alone.grad, mine.grad = grad, distribute_tensor(grad, mesh, at)
            with trace() as sent:
                steps.step()
                planned.step()

        axes = sum(n - 1 for n, p in zip(mesh.shape, at, strict=True) if isinstance(p, Shard))
        gathered = 2 * shape[0] * shape[1] * (1 - 1 / mesh.size if axes > 1 else 1 / 2)
        assert sum(event.nbytes for event in sent.events) <= 1.05 * gathered
        assert mine.placements == planned.state[mine]["momentum_buffer"].placements == at
        assert [event for event in sent.events if event.collective == "all_reduce"] == []
        torch.testing.assert_close(whole(mine.detach()), alone.detach(), atol=2e-3, rtol=1e-2)  # of bfloat16


def test_steps_of_several_matrices_follow_one_plan() -> None:
    shapes, ways = [(24, 16), (16, 40), (24, 16)], [(S(0), S(1)), (R, S(0)), (S(1), R)]
    torch.manual_seed(1)
    alone = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    grads = [[torch.randn(shape) for shape in shapes] for _ in range(4)]
    with simulated(GRID):
        mine = [
            nn.Parameter(distribute_tensor(p.detach().clone(), GRID, at)) for p, at in zip(alone, ways, strict=True)
        ]
        one, several = torch.optim.Muon(alone, lr=0.1), plan_steps(torch.optim.Muon(mine, lr=0.1))
        for step, given in enumerate(grads):
            for p, q, at, grad in zip(alone, mine, ways, given, strict=True):
                p.grad, q.grad = grad, distribute_tensor(grad, GRID, at)
            for group in (*one.param_groups, *several.param_groups):
                group["lr"] = 0.1 / (1 + step)
            one.step()
            several.step()
        for p, q in zip(alone, mine, strict=True):
            torch.testing.assert_close(whole(q.detach()), p.detach(), atol=5e-3, rtol=2e-2)


def test_steps_by_element_run_as_before_under_a_scheduler() -> None:
    torch.manual_seed(2)
    start, grads = torch.randn(8, 6), torch.randn(4, 8, 6)
    alone = nn.Parameter(start.clone())
    with simulated(GRID):
        mine = nn.Parameter(distribute_tensor(start.clone(), GRID, (S(0), S(1))))
        both = torch.optim.AdamW([alone], lr=0.1), plan_steps(torch.optim.AdamW([mine], lr=0.1))
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in both]
        for grad in grads:
            alone.grad, mine.grad = grad, distribute_tensor(grad, GRID, (S(0), S(1)))
            for each in (*both, *schedulers):
                each.step()
        torch.testing.assert_close(whole(mine.detach()), alone.detach())


def test_a_step_that_reads_values_is_refused() -> None:
    with simulated(LINE):
        p = nn.Parameter(distribute_tensor(torch.ones(8, 8), LINE, [S(0)]))
        optimizer = plan_steps(torch.optim.Adafactor([p]))
        p.grad = distribute_tensor(torch.ones(8, 8), LINE, [S(0)])
        optimizer.step()
        with pytest.raises(LayoutError, match=r"Adafactor\.step does not run without data .*asks for no values"):
            optimizer.step()
