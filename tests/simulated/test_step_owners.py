"""Steps of optimisers whose products owners run: two exchanges, and the numbers of one device to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dshard import DTensor, Mesh, Replicate, Shard, Topology, distribute_tensor, strict, trace, use_topology
from dshard.core.observe import Decision, observing
from dshard.parallel import plan_steps
from dshard.placements import Placement
from dshard.testing import simulated, whole

R, S = Replicate(), Shard
LINE, GRID, CUBE = Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y")), Mesh((2, 2, 2), ("x", "y", "z"))
Layouts = Sequence[Sequence[Placement]]
SHAPES = [(24, 16), (16, 40), (24, 16), (17, 23), (32, 32), (40, 16), (1, 9)]
TALL = [(24, 16), (16, 24), (24, 16), (24, 16), (24, 16), (16, 24), (24, 16), (24, 16)]


def drawn(shapes: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


class Run:
    """An optimiser's steps on one device and on a mesh, with the same gradients."""

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        mesh: Mesh,
        ways: Layouts,
        shapes: Sequence[tuple[int, int]] = SHAPES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(3)
        self.mesh, self.shapes, self.ways, self.dtype = (
            mesh,
            shapes,
            [ways[i % len(ways)] for i in range(len(shapes))],
            dtype,
        )
        self.alone = [nn.Parameter(x) for x in drawn(shapes, dtype)]
        self.grads = [drawn(shapes, dtype) for _ in range(6)]
        starts = zip(self.alone, self.ways, strict=True)
        self.mine = [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, at)) for p, at in starts]
        self.both = make(self.alone), plan_steps(make(self.mine))
        self.make = make

    def step(self, n: int) -> list[Any]:
        """What a step sends; both parameters and states are those of one device before it."""
        with torch.no_grad():
            for p, q, grad, at in zip(self.alone, self.mine, self.grads[n], self.ways, strict=True):
                p.grad, q.grad = grad.clone(), distribute_tensor(grad, self.mesh, at)
                q.copy_(distribute_tensor(p.detach(), self.mesh, at))
        self.both[0].step()
        with trace() as sent:
            self.both[1].step()
        return sent.events

    def check(self) -> None:
        for p, q, at in zip(self.alone, self.mine, self.ways, strict=True):
            assert q.placements == tuple(at)
            assert whole(q.detach()).equal(p.detach())
            for name, value in self.both[1].state[q].items():
                if isinstance(value, Tensor) and value.dim():
                    assert whole(value).equal(self.both[0].state[p][name]), name


def muon(**options: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Of two rounds of products instead of torch's five, which are the same calls again."""
    return lambda parameters: torch.optim.Muon(parameters, lr=0.1, ns_steps=2, **options)


WAYS = {
    "fsdp": (LINE, [[S(0)]]),
    "columns": (LINE, [[S(1)]]),
    "data": (LINE, [[R]]),
    "mixed": (GRID, [[S(0), S(1)], [R, S(0)], [S(1), R], [S(0), S(0)], [R, R]]),
    "three axes": (CUBE, [[S(0), R, S(1)], [S(1), S(0), S(0)]]),
    "packed": (LINE, [[S(0, blocks=2)], [S(1)]]),
}


@pytest.mark.parametrize("way", one_in(6, [*WAYS][3:] + [*WAYS][:3]))
def test_owners_step_as_one_device_with_two_exchanges(way: str) -> None:
    mesh, ways = WAYS[way]
    shapes = TALL if way == "packed" else SHAPES
    with simulated(mesh), use_topology(Topology.preset("dgx-h100")):
        run = Run(muon(), mesh, ways, shapes)
        run.step(0)
        for n in (1, 2, 3):
            assert [event.collective for event in run.step(n)] == ["all_to_all"] * (1 if way == "data" else 2)
            run.check()


@pytest.mark.parametrize(
    "options",
    one_in(3, [{"weight_decay": 0.0, "nesterov": False}, {"weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}]),
)
def test_owners_keep_to_the_options(options: dict[str, Any]) -> None:
    mesh, ways = WAYS["mixed"]
    with simulated(mesh), use_topology(Topology.preset("dgx-h100")):
        run = Run(muon(**options), mesh, ways)
        for n in (0, 1, 2):
            sent = run.step(n)
            assert not n or {event.collective for event in sent} == {"all_to_all"}
        run.check()


def test_owners_step_on_matrices_in_half_precision() -> None:
    mesh, ways = WAYS["mixed"]
    with simulated(mesh), use_topology(Topology.preset("dgx-h100")):
        run = Run(muon(), mesh, ways, dtype=torch.bfloat16)
        for n in (0, 1, 2):
            sent = run.step(n)
        assert [event.op for event in sent] == ["Muon.step"] * 2
        for p, q in zip(run.alone, run.mine, strict=True):  # torch rounds sums of transposed tensors otherwise
            torch.testing.assert_close(whole(q.detach()), p.detach(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("count", "parts"), [(9, 3), (4, 1)])
def test_each_rank_receives_its_own_matrices_and_its_shards(count: int, parts: int) -> None:
    shape, n = (32, 16), LINE.size
    with simulated(LINE), use_topology(Topology.preset("dgx-h100")):
        run = Run(muon(), LINE, [[S(0)]], [shape] * count)
        run.step(0)
        there, back = (event.nbytes for event in run.step(1))
        matrix = 2 * shape[0] * shape[1] * (n - 1) // n
        assert there == parts * matrix  # in bfloat16, of the busiest rank
        assert back == (count - count // n) * 2 * shape[0] * shape[1] // n
        if count % n == 0:
            assert there + back == count * matrix * 2 // n


class Polar(torch.optim.Optimizer):
    """A step as users write it: through `.data`, with numbers in its states, and other products from step to step."""

    def __init__(self, params: Any, lr: float = 0.1, other_after: int = 100, keeps: bool = False) -> None:
        super().__init__(params, {"lr": lr, "other_after": other_after, "keeps": keeps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(p)
                    state["count"] = torch.ones(())
                state["step"] += 1
                average = state["average"].mul_(0.9).add_(p.grad.data)
                x = average / (average.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                if state["step"] > group["other_after"]:
                    x = x.tanh() @ torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
                if group["keeps"]:
                    state["last"] = x
                p.data.add_(x.to(p.dtype), alpha=-group["lr"] / float(state["step"]))
                p.data.mul_(1 - 0.1 * group["lr"])
                p.data.sub_(x.mean() / state["count"])
                state["count"] += 1


def test_owners_step_as_users_write_it() -> None:
    with simulated(GRID), use_topology(Topology.preset("dgx-h100")):
        run = Run(Polar, GRID, WAYS["mixed"][1])
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in run.both]
        for n in range(4):
            sent = run.step(n)
            for each in schedulers:
                each.step()
        assert [event.op for event in sent][:2] == ["Polar.step"] * 2
        for p, q in zip(run.alone, run.mine, strict=True):
            torch.testing.assert_close(whole(q.detach()), p.detach())
            assert run.both[1].state[q]["step"] == 4
            assert run.both[1].state[q]["count"].item() == 5


def test_a_step_with_other_calls_runs_by_cost_and_is_planned_anew() -> None:
    with simulated(LINE), use_topology(Topology.preset("dgx-h100")):
        run = Run(lambda parameters: Polar(parameters, other_after=3), LINE, WAYS["fsdp"][1])
        for n in range(3):
            run.step(n)
        with pytest.warns(UserWarning, match=r"Polar\.step was planned to call \w+, and calls tanh: from here on"):
            run.step(3)
        for n in (4, 5):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                sent = run.step(n)
            for p, q in zip(run.alone, run.mine, strict=True):
                torch.testing.assert_close(whole(q.detach()), p.detach())
        assert [event.op for event in sent][:2] == ["Polar.step"] * 2


class OtherState(torch.optim.Optimizer):
    """A step that reads one state twice and, from the fourth on, another one the second time, by the same functions."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state |= {"step": 0, "one": torch.full_like(p, 0.5), "two": torch.full_like(p, -2.0)}
            state["step"] += 1
            x = p.grad @ p.grad.mT @ p.grad / 1000
            p.add_(x * state["one"])
            p.add_(x * state["one" if state["step"] < 4 else "two"])


def test_a_step_on_other_tensors_by_the_same_functions_runs_by_cost() -> None:
    with simulated(LINE), use_topology(Topology.preset("dgx-h100")):
        run = Run(OtherState, LINE, WAYS["fsdp"][1])
        for n in range(3):
            sent = run.step(n)
        assert [event.op for event in sent][:2] == ["OtherState.step"] * 2
        with pytest.warns(
            UserWarning, match=r"OtherState\.step was planned to call mul, and calls mul on other tensors"
        ):
            run.step(3)
        for p, q in zip(run.alone, run.mine, strict=True):
            torch.testing.assert_close(whole(q.detach()), p.detach())


def test_hooks_of_steps_see_the_parameters_before_and_after() -> None:
    with simulated(LINE), use_topology(Topology.preset("dgx-h100")):
        run = Run(muon(), LINE, WAYS["fsdp"][1])
        seen: list[list[float]] = [[], []]
        for each, own in zip(run.both, seen, strict=True):

            def note(optimizer: Any, *_: object, own: list[float] = own) -> None:
                held = [p.detach() for group in optimizer.param_groups for p in group["params"]]
                own += [float((whole(p) if isinstance(p, DTensor) else p).sum()) for p in held]

            each.register_step_pre_hook(note)
            each.register_step_post_hook(note)
        counts = [0, 0]

        def count(optimizer: Any, *_: object) -> None:
            counts[run.both.index(optimizer)] += 1
            assert all(p.detach().sum() is not None for group in optimizer.param_groups for p in group["params"])

        every = [register_optimizer_step_pre_hook(count), register_optimizer_step_post_hook(count)]
        for n in range(3):
            run.step(n)
        for handle in every:
            handle.remove()
        assert seen[0][-14:] == pytest.approx(seen[1][-14:])
        assert counts == [6, 6]
        assert len(run.both[1]._optimizer_step_post_hooks) == len(run.both[1]._optimizer_step_pre_hooks) == 1


def test_products_that_states_keep_have_no_owners() -> None:
    with simulated(LINE), use_topology(Topology.preset("dgx-h100")):
        run = Run(lambda parameters: Polar(parameters, keeps=True), LINE, WAYS["fsdp"][1])
        for n in range(4):
            sent = run.step(n)
        assert "Polar.step" not in {event.op for event in sent}
        for p, q in zip(run.alone, run.mine, strict=True):
            torch.testing.assert_close(whole(q.detach()), p.detach())
            torch.testing.assert_close(whole(run.both[1].state[q]["last"]), run.both[0].state[p]["last"])


def test_exchanges_are_planned_in_the_trace_and_asked_for() -> None:
    with simulated(LINE), use_topology(Topology.preset("dgx-h100")):
        run = Run(muon(), LINE, [[S(0)]], [(32, 16)] * 8)
        run.step(0)
        run.step(1)
        decisions: list[Decision] = []
        with strict(), observing(decisions.append):
            sent = run.step(2)
        (planned,) = [each for each in decisions if each.exchanges]
        assert planned.op == "Muon.step"
        assert [each.nbytes for each in planned.collectives()] == [event.nbytes for event in sent]


def test_one_matrix_is_gathered() -> None:
    with simulated(LINE), use_topology(Topology.preset("dgx-h100")):
        run = Run(muon(), LINE, [[S(0)]], [(256, 256)])
        run.step(0)
        assert [event.op for event in run.step(1)] == ["redistribute"]


@pytest.mark.parametrize("way", ["two meshes", "plain ones among them"])
def test_parameters_of_several_kinds_step_as_on_one_device(way: str) -> None:
    shapes = [(16, 24)] * 4
    torch.manual_seed(7)
    starts, grads = drawn(shapes), [drawn(shapes) for _ in range(3)]
    with simulated(GRID):

        def laid_out(i: int, x: Tensor) -> Tensor:
            if i % 2:
                return distribute_tensor(x.clone(), GRID, [S(0), S(1)])
            return distribute_tensor(x.clone(), LINE, [S(0)]) if way == "two meshes" else x.clone()

        alone = [nn.Parameter(x.clone()) for x in starts]
        mine = [nn.Parameter(laid_out(i, x)) for i, x in enumerate(starts)]
        both = torch.optim.Muon(alone, lr=0.1), plan_steps(torch.optim.Muon(mine, lr=0.1))
        for given in grads:
            for i, (p, q, grad) in enumerate(zip(alone, mine, given, strict=True)):
                p.grad, q.grad = grad, laid_out(i, grad)
            for each in both:
                each.step()
        for p, q in zip(alone, mine, strict=True):
            found = whole(q.detach()) if isinstance(q, DTensor) else q.detach()
            torch.testing.assert_close(found, p.detach(), atol=5e-3, rtol=2e-2)
