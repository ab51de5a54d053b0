"""The schedule of a linear module is pinned to its weight: as with the block that it replaces, but nothing entered."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in
from torch import Tensor, nn

from dshard import distribute_tensor, init_device_mesh, parallelize, trace
from dshard.ops.matmul.options import use_strategy
from dshard.testing import RankPool


class Net(nn.Module):
    """Three linear modules, of which `last` may have the weight of `first`."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu())  # type: ignore[no-any-return]


def calls_of(run: Callable[[], Any]) -> Counter[str]:
    """How often each function of Python is called in a run, by its name."""
    counts: Counter[str] = Counter()

    def profile(frame: Any, event: str, arg: object) -> None:
        if event == "call":
            counts[frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts


def compare(model: nn.Module, reference: nn.Module, x: Tensor) -> Counter[str]:
    """A step of both, equal; the bytes that each kind of collective sends in the first."""
    for each in (model, reference):
        each.zero_grad()
    with trace() as sent:
        out: Any = model(x)
        out.square().sum().backward()
    expected = reference(x)
    expected.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), expected)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    nbytes: Counter[str] = Counter()
    for event in sent.events:
        nbytes[event.collective] += event.nbytes * (event.op != "number")
    return nbytes


def pinned(strategy: str, tied: bool) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = Net(tied).double(), Net(tied).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    parallelize(model, mesh, strategy, x)
    for _ in range(3):
        sent = compare(model, reference, x)
    entered = calls_of(lambda: model(x))["enter_options"]
    assert entered == 2 * tied, "a weight that two modules multiply by has a block around each"
    if tied:
        return
    with use_strategy(saved="stored"):  # the pin is within the blocks around the call
        assert compare(model, reference, x) == sent
    for module in (model.second, model.last):  # a weight that has no pin: its module enters the block
        old: Any = module.weight
        module.weight = nn.Parameter(distribute_tensor(old.full_tensor().detach(), old.device_mesh, old.placements))
    sends = strategy != "data"
    assert calls_of(lambda: model(x))["enter_options"] == 2 * sends, "products that send nothing need no block"
    for _ in range(3):
        assert compare(model, reference, x) == sent, "the same collectives, pinned or in a block"
    model(x[:3])
    assert compare(model.eval(), reference.eval(), x[:5]), "other sizes"


@pytest.mark.parametrize("strategy", one_in(3, ["megatron", "data", "fsdp"]))
def test_a_pinned_schedule_runs_as_a_block_does(ranks: RankPool, strategy: str):
    ranks.run(pinned, strategy, False)


def test_weights_with_two_products_are_not_pinned(ranks: RankPool):
    ranks.run(pinned, "data", True)


class Shared(nn.Module):
    """Three linear modules that multiply the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.last = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate, *others = (part(x) for part in self.parts)
        return self.last(gate.sigmoid() * sum(others))  # type: ignore[no-any-return]


def shared(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = Shared().double(), Shared().double()
    x = torch.randn(7, 6, dtype=torch.float64)
    plan = parallelize(model, mesh, strategy, x)._dshard_boundary.plan
    assert plan.shared == {f"parts.{i}" for i in range(3)}
    hooked = [name for name in sorted(plan.shared) if model.get_submodule(name)._forward_pre_hooks]
    assert hooked == ([] if strategy == "data" else sorted(plan.shared)), "rows that meet whole weights need no hooks"
    sent = compare(model, reference, x)
    assert compare(model, reference, x) == sent
    weights = sum(p.numel() * p.element_size() for p in reference.parameters())
    if strategy == "data":
        assert sent == {"all_reduce": weights * 2 * 3 // 4}, "each gradient once, and nothing else"


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_modules_that_share_an_operand_have_hooks_only_where_something_is_sent(ranks: RankPool, strategy: str):
    ranks.run(shared, strategy)
