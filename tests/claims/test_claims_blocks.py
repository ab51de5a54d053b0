"""Claims of the papers about biases, blocks and buffers, each under its number in their order."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_in
from helpers.transformer_layers import SHAPES
from helpers.vision_transformer import batch, vision
from torch import Tensor, nn
from torch.func import functional_call

import dshard
from dshard import Mesh, Placement, Replicate, Shard, distribute_tensor, parallelize, use_strategy
from dshard.comm import Program, Session, as_mesh, plain, run_without_data
from dshard.comm.rank_tensors import unstack
from dshard.comm.workspace import WORKSPACE
from dshard.mesh import Coordinate
from dshard.ops.matmul.panel_executor import PanelExecutor
from dshard.simulate import record
from dshard.testing import RankPool, simulated, whole


def test_a10_a_model_is_laid_out_by_one_line() -> None:
    mesh = Mesh((2, 2), ("d1", "d2"))
    model, (images, _) = vision(), batch()
    expected = model(images)
    with simulated(mesh):
        parallelize(model, mesh, "atp", images)

        torch.testing.assert_close(whole(model(images).detach()), expected.detach())


@pytest.mark.parametrize("strategy", one_in(4, ["megatron-sp", "megatron", "optimus", "atp"]))
def test_s13_the_last_product_of_a_checkpointed_block_is_not_repeated(strategy: str) -> None:
    mesh, found, gradients = SHAPES[strategy], {}, {}
    for keeps in ("all", "inputs"):
        with simulated(mesh):
            torch.manual_seed(0)
            with plain():
                block, given = MLP(), torch.randn(4, 6, 8, dtype=torch.float64)
            parallelize(block, mesh, strategy, given)
            x = distribute_tensor(given, mesh, [Replicate()] * mesh.ndim, src_data_rank=None).requires_grad_()

            def step(x: Tensor = x, block: nn.Module = block, keeps: str = keeps) -> None:
                out = block(x) if keeps == "all" else dshard.parallel.checkpoint(block, x)
                out.square().sum().backward()

            step()
            for t in (x, *block.parameters()):
                t.grad = None
            found[keeps] = record(step, warm=True).flops
            found["up"] = record(lambda x=x, block=block: block.up(x), warm=True).flops
            gradients[keeps] = [whole(t.grad) for t in (x, *block.parameters())]

    assert found["inputs"] == found["all"] + found["up"]  # and not those of both products
    assert all(torch.equal(a, b) for a, b in zip(gradients["all"], gradients["inputs"], strict=True))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32).double(), nn.Linear(32, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("bias", [[Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)]], ids=str)
def test_s6_biases_replicated_or_with_one_owner_have_the_same_gradients(bias: list[Placement]) -> None:
    mesh = SHAPES["optimus"]
    with plain():
        torch.manual_seed(0)
        alone, given = MLP(), torch.randn(4, 6, 8, dtype=torch.float64)
        block = deepcopy(alone)
    with simulated(mesh):
        parallelize(block, mesh, {"*.weight": [Shard(1), Shard(0)], "*.bias": bias})
        for model, x in ((alone, given), (block, distribute_tensor(given, mesh, [Shard(0), Shard(2)]))):
            optimiser = torch.optim.AdamW(model.parameters())
            model(x).square().sum().backward()
            optimiser.step()

        for mine, theirs in zip(block.parameters(), alone.parameters(), strict=True):
            assert mine.grad.placements == mine.placements
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(whole(mine.detach()), theirs.detach(), rtol=1e-9, atol=1e-11)  # replicas alike


def test_s6_biases_hosted_once_are_updated_by_their_owners_alone() -> None:
    """They lie on row 0 alone: sent down the columns in the forward pass, their gradients reduced to where they lie."""
    mesh = SHAPES["optimus"]
    row = Mesh((2,), ("c",), mesh.ranks[:2])
    with plain():
        torch.manual_seed(0)
        alone, given = MLP(), torch.randn(4, 6, 8, dtype=torch.float64)
        block = deepcopy(alone)
    with simulated(mesh):
        parallelize(block, mesh, {"*.weight": [Shard(1), Shard(0)]})
        biases = {name: p for name, p in alone.named_parameters() if name.endswith("bias")}
        hosted = {name: nn.Parameter(distribute_tensor(p.detach(), row, [Shard(0)])) for name, p in biases.items()}
        sent = {name: p.redistribute(mesh, [Replicate(), Shard(0)]) for name, p in hosted.items()}
        functional_call(block, sent, distribute_tensor(given, mesh, [Shard(0), Shard(2)])).square().sum().backward()
        alone(given).square().sum().backward()
        for parameters in (hosted.values(), biases.values()):
            torch.optim.AdamW(parameters).step()

        for name, mine in hosted.items():
            assert mine.grad.layout == mine.layout
            assert [part.numel() for part in unstack(mine.grad._local_tensor).values()] == [
                len(biases[name]) // 2
            ] * 2 + [0] * 2
            torch.testing.assert_close(whole(mine.grad), biases[name].grad, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(whole(mine.detach()), biases[name].detach(), rtol=1e-9, atol=1e-11)


def rehearsed(products: Sequence[PanelExecutor], at: Coordinate) -> int:
    """The most bytes in buffers of one product, or of two of which the second is computed as the first is reduced."""
    plans = [plan for product in products for plan in product.plans[:2]]
    tensors = [torch.empty(p.src.local_shape(p.shape, at), dtype=torch.float64, device="meta") for p in plans]

    def program(at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Program[tuple[Tensor, ...]]:
        rests = [(yield from products[0].program(at, space, tensors[:2]))]
        rests.append((yield from products[1].program(at, space, tensors[2:])))
        last = yield from rests.pop()
        return last, (yield from rests.pop())

    return products[0].transient_bytes(at) if len(products) == 1 else run_without_data(program, tensors, at)[1]


def stepped_in_panels() -> tuple[int, int, int, int]:
    """Buffers that an Optimus step in panels makes at first and later, the most bytes lent, what was promised."""
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "c"))
    model, original = parallelize(vision(layers=1), mesh, "optimus", batch()[0]), PanelExecutor.program
    ran: list[tuple[Session, list[PanelExecutor]]] = []  # by the loan of buffers that they share

    def program(self: PanelExecutor, at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Any:
        if not ran or ran[-1][0] is not space:
            ran.append((space, []))
        ran[-1][1].append(self)
        return original(self, at, space, tensors)

    def step() -> int:
        before = WORKSPACE.allocations
        with use_strategy(panels=2):
            model(batch()[0]).square().sum().backward()
        return WORKSPACE.allocations - before

    WORKSPACE.clear()
    WORKSPACE.peak = 0
    PanelExecutor.program = program  # type: ignore[method-assign]
    try:
        first = step()
    finally:
        PanelExecutor.program = original  # type: ignore[method-assign]
    later = sum(step() for _ in range(3))
    at = as_mesh(mesh).coordinate(dist.get_rank())
    return first, later, WORKSPACE.peak, max(rehearsed(products, at) for _, products in ran)


@pytest.mark.ranks
@pytest.mark.thorough
def test_s11_a_step_in_panels_takes_all_its_buffers_from_those_of_the_first(ranks: RankPool) -> None:
    for made, more, peak, promised in ranks.run(stepped_in_panels):
        assert made > 0
        assert more == 0
        assert peak == promised
