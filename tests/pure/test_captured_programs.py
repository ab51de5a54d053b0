"""A replay in a CUDA graph does what the step does; here the graph is one that runs the program again on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dshard
from dshard.errors import ReplayError
from dshard.mesh import Mesh
from dshard.parallel.same_program import Draws
from dshard.replay import step_program

STEPS = 8


def rerun(run: Callable[..., tuple[Any, ...]], inputs: list[Tensor]) -> tuple[Callable[[], None], list[Tensor]]:
    """A graph of the CPU: nothing runs when it is captured, and each launch writes to the same results."""
    results: list[Tensor] = []

    def launch() -> None:
        with torch.no_grad():
            new = run(*inputs)
        if results:
            torch._foreach_copy_(results, new)
        else:
            results.extend(new)

    return launch, results


@pytest.fixture
def graph_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_program, "DEVICE", "cpu")
    monkeypatch.setattr(step_program, "captured", rerun)


def step_of(*, cuda_graph: bool, inside: bool = True, zero: bool = True) -> tuple[Any, nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if zero:
            optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        if inside:
            optimizer.step()
        return loss.detach(), out.detach()

    return (dshard.replay(step, cuda_graph=True) if cuda_graph else step), model, optimizer


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)


@pytest.mark.usefixtures("graph_of_cpu")
@pytest.mark.parametrize("inside", [True, False])
def test_captured_steps_are_those_of_python(inside: bool) -> None:
    runs = []
    for cuda_graph in (False, True):
        step, model, optimizer = step_of(cuda_graph=cuda_graph, inside=inside)
        seen = []
        for seed in range(STEPS):
            seen.append((*step(*batch(seed)), *(p.grad.clone() for p in model.parameters())))
            if not inside:
                optimizer.step()
        runs.append([x for each in seen for x in each] + [*model.parameters()])
        if cuda_graph:
            assert step.replays == STEPS - 3
    assert all(map(torch.equal, *runs))


@pytest.mark.usefixtures("graph_of_cpu")
def test_gradients_stay_in_the_memory_of_the_graph_and_results_do_not() -> None:
    step, model, _ = step_of(cuda_graph=True)
    for seed in range(4):
        step(*batch(seed))
    first, second = (
        ([x.data_ptr() for x in (*step(*batch(seed)),)], [p.grad for p in model.parameters()]) for seed in (4, 5)
    )
    assert not set(first[0]) & {x.data_ptr() for x in second[1]}
    assert [x.data_ptr() for x in first[1]] == [x.data_ptr() for x in second[1]]


def refused(step: Any, *args: Any, calls: int = STEPS) -> str:
    def run() -> None:
        for _ in range(calls):
            step(*args)

    with pytest.raises(ReplayError, match="step cannot run in a CUDA graph: ") as error:
        run()
    return str(error.value)


def test_a_step_of_another_device_is_refused_and_stays_so() -> None:
    step, _, _ = step_of(cuda_graph=True)
    for _ in range(2):  # nor is it replayed without a graph after that
        assert "runs on cpu; change that, or leave out cuda_graph=True" in refused(step, *batch(0))
    assert step.replays == 0


@pytest.mark.usefixtures("graph_of_cpu")
def test_a_rate_that_changes_is_refused_unless_it_is_a_tensor() -> None:
    step, _, optimizer = step_of(cuda_graph=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def trained() -> None:
        step(*batch(0))
        schedule.step()

    trained.__qualname__ = "trained"
    assert "follows an option of an optimiser that is a number: give the option as a tensor" in refused(trained)


@pytest.mark.usefixtures("graph_of_cpu")
def test_what_adds_to_an_earlier_gradient_or_writes_to_an_argument_is_refused() -> None:
    step, _, _ = step_of(cuda_graph=True, inside=False, zero=False)
    assert "adds to a gradient of an earlier call: call zero_grad first" in refused(step, *batch(0))

    def writes(x: Tensor) -> Tensor:
        return x.add_(1).sum()

    writes.__qualname__ = "step"
    assert "add_.Tensor at" in refused(dshard.replay(writes, cuda_graph=True), torch.zeros(3))


@pytest.mark.usefixtures("graph_of_cpu")
def test_numbers_of_the_host_are_refused() -> None:
    dropped = nn.Dropout(0.5)

    def step(x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        first = dropped(x)
        torch.set_rng_state(state)
        return first + dropped(x)

    step.__qualname__ = "step"
    assert "takes other numbers of the host in each call" in refused(
        dshard.replay(step, cuda_graph=True), torch.ones(4)
    )


def test_a_forward_pass_in_a_capture_reads_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Tensor:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    for module, name, answer in (
        (torch.backends.cuda, "is_built", lambda: True),
        (torch.cuda, "is_current_stream_capturing", lambda: True),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "get_rng_state", refused),
    ):
        monkeypatch.setattr(module, name, answer)
    draws, module = (
        Draws({"torch's generator": "ranks [0], [1]"}, False, Mesh((2,), ("x",), device_type="cuda")),
        nn.Identity(),
    )

    draws.enter(module)
    draws.leave(module)
