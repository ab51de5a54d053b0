"""`no_host_sync`: what makes the host wait is named, and warm steps of dshard do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dshard import parallelize
from dshard.testing import HostSyncError, nccl_contract, no_host_sync, rank_pool
from dshard.tools.nccl_contract.process_state import CURRENT
from dshard.tools.selftest.selftest_checks import PLANS, Place, model_of

X = torch.arange(6.0).view(2, 3)
WAITS: list[tuple[str, Callable[[], object]]] = [
    ("reads a number", lambda: X.sum().item()),
    ("reads a number", lambda: bool(X[0, 0] > 1)),
    ("reads a number", lambda: torch.equal(X, X)),
    ("depends on values", lambda: X.nonzero()),
    ("depends on values", lambda: X.masked_select(X > 1)),
    ("depends on values", lambda: X.unique()),
    ("a mask is an index", lambda: X[X > 1]),
    ("a mask is an index", lambda: X.clone().index_put_((X > 1,), torch.tensor(0.0))),
    ("output_size=", lambda: torch.repeat_interleave(torch.tensor([1, 2]))),
    ("check_errors=False", lambda: torch.linalg.inv(torch.eye(2))),
]


@pytest.mark.parametrize(("why", "call"), WAITS)
def test_what_makes_the_host_wait_is_an_error_at_its_line(why: str, call: Callable[[], object]) -> None:
    with pytest.raises(HostSyncError, match=rf"{why}") as raised, no_host_sync():
        call()
    assert "test_host_sync.py:" in str(raised.value)


def test_the_rest_is_let_through() -> None:
    with no_host_sync():
        y = torch.where(X > 1, X, 0.0)[:, :2].softmax(-1)
        y[torch.tensor([1, 0])].sum()
        torch.repeat_interleave(torch.tensor([1, 2]), output_size=3)
        X.to(torch.float64)


def warm_steps(plans: list[str]) -> list[str]:
    """The plans whose third training step waits for the host."""
    place, waiting = Place("cpu", 4), []
    x = place.randn(16, 6, 32)
    for name in plans:
        model = parallelize(model_of(place, 32, blocks=1), place.mesh(*PLANS[name]), name, x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(), step()
        try:
            with no_host_sync():
                step()
        except HostSyncError as error:
            waiting.append(f"{name}: {error}")
        # a graph that is captured of a step has to end with the streams of all communicators joined to its own
        waiting += [f"{name}: nobody has waited for {each.what}" for each in CURRENT.state.in_flight]
    return waiting


@pytest.mark.ranks
@pytest.mark.thorough
def test_a_warm_training_step_waits_for_the_host_zero_times() -> None:
    assert rank_pool(4, nccl_contract.BACKEND).run(warm_steps, list(PLANS), timeout=300) == [[]] * 4


def barrier_in_a_step() -> str:
    try:
        with no_host_sync():
            torch.distributed.barrier()
    except HostSyncError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.thorough
def test_a_barrier_makes_the_host_wait_under_the_contract() -> None:
    assert (
        rank_pool(4, nccl_contract.BACKEND).run(barrier_in_a_step)
        == ["the host has waited 1 times for a collective: a barrier, or a wait with a time limit"] * 4
    )
