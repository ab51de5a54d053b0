"""Weights used and gradients reduced in other dtypes than those that are stored: as written by hand on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.token_net import Net
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call

import dshard
from dshard import (
    ArgumentError,
    DTensor,
    DtypeError,
    Mesh,
    Partial,
    Replicate,
    Shard,
    accumulate,
    distribute_tensor,
    parallelize,
    plan_model,
    trace,
)
from dshard.parallel import Precision
from dshard.placements import Placement
from dshard.testing import simulated, whole

IDS = torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(1))


def by_hand(parts: int, reduce_dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of a batch in parts, and the gradients of weights used in half precision, summed in another."""
    stored, losses, grads = dict(Net().named_parameters()), [], {}
    for ids in IDS.chunk(parts):
        used = {name: p.detach().bfloat16().requires_grad_() for name, p in stored.items()}
        losses.append(loss_of(functional_call(Net(), used, ids).float(), ids) / parts)
        losses[-1].backward()
        for name, p in used.items():
            assert p.grad is not None
            sent = p.grad.to(reduce_dtype)
            grads[name] = sent if name not in grads else grads[name] + sent
    return torch.stack(losses).sum(), {name: grad.float() for name, grad in grads.items()}


def loss_of(out: Any, targets: Any) -> Any:
    return F.cross_entropy(out.flatten(0, 1), targets.flatten(0, 1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    for p in model.parameters():
        assert p.dtype is torch.float32
        assert p.grad is not None
        assert p.grad.dtype is torch.float32
        assert p.grad.placements == p.placements  # type: ignore[attr-defined]
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("strategy", "shape", "reduce_dtype", "tolerance"),
    [
        pytest.param("data", (4,), torch.float32, 1e-6, marks=pytest.mark.thorough),
        ("data", (4,), None, 0.02),
        ("fsdp", (4,), torch.float32, 1e-6),
        pytest.param("fsdp", (4,), None, 0.02, marks=pytest.mark.thorough),
        pytest.param("data x fsdp", (2, 2), torch.float32, 1e-6, marks=pytest.mark.thorough),
        pytest.param("megatron", (4,), torch.float32, 0.02, marks=pytest.mark.thorough),
        pytest.param("megatron-sp", (4,), torch.float32, 0.04, marks=pytest.mark.thorough),
        pytest.param("optimus", (2, 2), torch.float32, 0.04, marks=pytest.mark.thorough),
        pytest.param("fsdp x megatron", (2, 2), torch.float32, 0.04, marks=pytest.mark.thorough),
    ],
)
def test_it_is_what_one_writes_by_hand(
    strategy: str, shape: tuple[int, ...], reduce_dtype: torch.dtype | None, tolerance: float
):
    mesh = Mesh(shape, ("a", "b")[: len(shape)])
    precision = Precision(torch.bfloat16, reduce_dtype, torch.float32)
    plan = plan_model(Net(), mesh, strategy, IDS, precision=precision)
    placements = [p if p == Shard(0) else Replicate() for p in plan.batch]
    parts = 1
    for placement, n in zip(placements, shape, strict=True):
        parts *= n if placement == Shard(0) else 1
    expected, grads = by_hand(parts, reduce_dtype or torch.bfloat16)
    with simulated(mesh):
        model = parallelize(Net(), mesh, plan)
        for _ in range(2):
            model.zero_grad()
            with trace() as sent:
                out = model(IDS)
                assert out.dtype is torch.float32
                out.backward(torch.zeros_like(out))
        assert plan.cost is not None
        assert sent.nbytes == plan.cost.nbytes
        targets = distribute_tensor(IDS, mesh, placements, src_data_rank=None)
        model.zero_grad()
        loss = loss_of(model(IDS), targets)
        loss.backward()
        torch.testing.assert_close(whole(loss), expected.detach(), rtol=tolerance, atol=0.0)
        compare(gradients(model), grads, tolerance)
        with accumulate():
            loss_of(model(IDS), targets).backward()
        loss_of(model(IDS), targets).backward()
        compare(gradients(model), {name: 3 * grad for name, grad in grads.items()}, tolerance)


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= tolerance * grad.abs().max(), name


def test_half_the_bytes_are_gathered():
    def gathered(precision: object) -> int:
        plan = plan_model(Net(), Mesh((4,), ("d",)), "fsdp", IDS, precision=precision)
        assert plan.cost is not None
        return sum(move.nbytes for move in plan.cost.moves if move.collective == "all_gather")

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert 2 * gathered(policy) == gathered(None)


def test_other_values_are_refused():
    with pytest.raises(ArgumentError, match=r"precision: torch.bfloat16 is a dtype: give dshard.parallel.Precision"):
        parallelize(Net(), Mesh((4,), ("d",)), "fsdp", IDS, precision=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"precision: reduce_dtype is 'fp32': give a dtype such as torch.bfloat16"):
        Precision(torch.bfloat16, "fp32")  # type: ignore[arg-type]


EIGHT = torch.float8_e4m3fn
TERMS = torch.ones(4, dtype=EIGHT)
SUMMED_IN_EIGHT: dict[str, Callable[[Mesh], object]] = {
    "precision": lambda mesh: Precision(reduce_dtype=EIGHT),
    "precision of parameters": lambda mesh: Precision(EIGHT),
    "torch's precision": lambda mesh: plan_model(
        Net(), mesh, "fsdp", IDS, precision=MixedPrecisionPolicy(torch.bfloat16, torch.float8_e5m2)
    ),
    "redistribute": lambda mesh: of_ones(mesh, Partial()).redistribute(placements=[Replicate()], forward_dtype=EIGHT),
    "its gradient": lambda mesh: of_ones(mesh, Shard(0)).redistribute(placements=[Replicate()], backward_dtype=EIGHT),
    "to terms": lambda mesh: of_ones(mesh, Replicate()).to(EIGHT).redistribute(placements=[Partial()]),
    "from_local": lambda mesh: DTensor.from_local(TERMS, mesh, [Partial()]),
    "of the largest": lambda mesh: DTensor.from_local(TERMS, mesh, [Partial("max")]),
    "distribute_tensor": lambda mesh: distribute_tensor(TERMS, mesh, [Partial()], src_data_rank=None),
    "a factory": lambda mesh: dshard.ones(4, dtype=EIGHT, device_mesh=mesh, placements=[Partial()]),
}


def of_ones(mesh: Mesh, placement: Placement) -> DTensor:
    return dshard.ones(4, device_mesh=mesh, placements=[placement])


@pytest.mark.parametrize("where", SUMMED_IN_EIGHT)
def test_reductions_in_a_dtype_without_sums_are_refused(where: str) -> None:
    mesh = Mesh((2,), ("x",))
    with simulated(mesh), pytest.raises(DtypeError, match=r"in torch.float8_e\dm\w+: torch has no sums in this dtype"):
        SUMMED_IN_EIGHT[where](mesh)


def test_values_of_a_dtype_without_sums_are_moved_and_cast() -> None:
    mesh = Mesh((2,), ("x",))
    with simulated(mesh):
        for placement in (Shard(0), Replicate()):
            moved = of_ones(mesh, placement).redistribute(placements=[Replicate()], forward_dtype=EIGHT)
            assert whole(moved).equal(TERMS)
        assert whole(of_ones(mesh, Partial()).to(EIGHT)).equal(TERMS)  # the sum is cast, not the terms
