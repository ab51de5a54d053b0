"""docs/reports.md: each row of the page holds on four ranks."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import dshard
from dshard import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize,
    strict,
    trace,
)
from dshard.experimental import local_map
from dshard.testing import RankPool

PAGE = (Path(__file__).parents[3] / "docs" / "reports.md").read_text()


def grid() -> dshard.DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def line() -> dshard.DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, wanted)


class Rotated(nn.Module):
    """Attention whose forward pass makes a table and a mask of plain tensors."""

    def __init__(self, heads: int = 4, groups: int = 4) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 8 * groups), nn.Linear(16, 16)
        self.heads, self.groups = heads, groups

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (self.groups, 8)).transpose(1, 2).chunk(2, -1)
        table = torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        o = F.scaled_dot_product_attention(q * table, k * table, v, attn_mask=mask, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


def same_step(model: nn.Module, strategy: str, x: Tensor, mesh: dshard.DeviceMesh) -> nn.Module:
    """A forward and backward pass, compared with one device."""
    alone = copy.deepcopy(model)
    parallelize(model, mesh, strategy, x)
    found, wanted = model(x), alone(x)
    close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        close(p.grad, q.grad)
    return model


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model().double()


def plain_tensors_in_a_forward_pass() -> None:
    same_step(seeded(Rotated), "data x megatron", drawn(4, 6, 16), grid())


def fewer_key_heads_than_ranks() -> None:
    same_step(seeded(lambda: Rotated(4, 2)), "megatron", drawn(4, 6, 16), line())


def a_bias_is_added_once() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))
    same_step(model, "megatron", drawn(4, 16), line())


def batch_norm_sees_all_rows() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6)))
    alone, x = copy.deepcopy(model), drawn(10, 16)
    same_step(model, "data", x, line())
    alone(x)
    close(model[1].running_var, alone[1].running_var)


def tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids).tanh())

    model = same_step(seeded(Tied), "fsdp", torch.arange(8).view(4, 2), line())
    assert model.head.weight is model.table.weight


def a_last_batch_of_another_size() -> None:
    x, y = drawn(7, 16), torch.arange(7) % 3
    model = seeded(lambda: nn.Linear(16, 3))
    alone = copy.deepcopy(model)
    parallelize(model, line(), "data", x, inputs="per-data-rank")
    n, i = dshard.data_ranks(model)
    rows, targets = dshard.distribute_batch(model, (x.tensor_split(n)[i], y.tensor_split(n)[i]))  # 2, 2, 2, 1
    loss, wanted = F.cross_entropy(model(rows), targets), F.cross_entropy(alone(x), y)
    loss.backward()
    wanted.backward()
    close(loss, wanted)
    close(model.weight.grad, alone.weight.grad)


def a_loss_is_one_number() -> None:
    x = distribute_tensor(torch.arange(8.0), line(), [Shard(0)])
    assert x.sum().item() == 28.0
    assert float(x.mean()) == 3.5


def reductions_at_local_boundaries() -> None:
    x, w = drawn(8, 4), drawn(3, 4)
    data, weight = distribute_tensor(x, line(), [Shard(0)]), distribute_tensor(w, line(), [Replicate()])
    weight.requires_grad_()
    local_map(lambda a, b: a @ b.t(), out_placements=[Shard(0)])(data, weight).square().sum().backward()
    alone = w.clone().requires_grad_()
    (x @ alone.t()).square().sum().backward()
    close(weight.grad, alone.grad)


def one_norm_over_several_meshes() -> None:
    a = nn.Parameter(distribute_tensor(drawn(8, 8), grid(), [Shard(0), Replicate()]))
    b = nn.Parameter(distribute_tensor(drawn(6, 6), line(), [Shard(0)]))
    c = nn.Parameter(drawn(5))
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    norm = nn.utils.clip_grad_norm_([a, b, c], 1.0)
    assert norm.item() == pytest.approx((64 + 36 + 5) ** 0.5)


def whole_state_dicts() -> None:
    model = seeded(lambda: nn.Linear(16, 6))
    weight = model.weight.detach().clone()
    parallelize(model, line(), "fsdp", drawn(4, 16))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert type(state["weight"]) is Tensor
    close(state["weight"], weight)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    close(torch.load(buffer)["weight"], weight)


def matrix_optimisers() -> None:
    w, g = drawn(12, 10).float(), drawn(10, 12).t().float()
    alone, found = nn.Parameter(w.clone()), nn.Parameter(distribute_tensor(w, grid(), [Shard(0), Shard(1)]))
    alone.grad, found.grad = g.clone(), distribute_tensor(g, grid(), [Shard(0), Shard(1)])
    for p in (alone, found):
        torch.optim.Muon([p], lr=0.1).step()
    torch.testing.assert_close(found.full_tensor(), alone.detach(), rtol=2e-2, atol=2e-2)  # it computes in bfloat16


def uneven_parts_on_two_axes() -> None:
    x = torch.arange(15.0).view(5, 3)
    parts = distribute_tensor(x, grid(), [Shard(0), Shard(0)])
    assert parts.full_tensor().equal(x)
    assert parts.redistribute(placements=[Shard(1), Shard(0)]).full_tensor().equal(x)


def no_way_through_replication() -> None:
    x = distribute_tensor(drawn(8, 8, 8), grid(), [Shard(2), Shard(0)])
    with trace() as sent:
        x.redistribute(placements=[Shard(1), Shard(1)])
    assert {event.collective for event in sent.events} == {"all_to_all"}
    assert sum(event.nbytes for event in sent.events) < 8**3 * 8 * 3 // 4


def random_values_of_any_mesh() -> None:
    drawn_values = []
    for mesh, placements in (
        (line(), [Shard(0)]),
        (grid(), [Shard(1), Shard(0)]),
        (grid(), [Replicate(), Replicate()]),
    ):
        dshard.manual_seed(1)
        drawn_values.append(F.dropout(dshard.ones(6, 5, device_mesh=mesh, placements=placements)).full_tensor())
    assert all(each.equal(drawn_values[0]) for each in drawn_values)


def operators_without_a_strategy() -> None:
    x = distribute_tensor(drawn(8, 4), grid(), [Shard(0), Shard(1)])
    close(torch.linalg.svdvals(x), torch.linalg.svdvals(drawn(8, 4)))
    close(torch.cummax(x, 0).values, torch.cummax(drawn(8, 4), 0).values)
    assert x[0].tolist() == drawn(8, 4)[0].tolist()


def a_step_without_implicit_communication() -> None:
    x = distribute_tensor(drawn(8, 4), line(), [Shard(0)])
    w = distribute_tensor(drawn(3, 4), line(), [Replicate()]).requires_grad_()
    with strict():
        F.linear(x, w).square().mean().backward()
    assert w.grad is not None
    assert w.grad.placements == (Replicate(),)


def vocabulary_in_parts() -> None:
    logits, target = drawn(64, 16384), torch.arange(64)
    parts = distribute_tensor(logits, line(), [Shard(1)])
    with trace() as sent:
        loss = F.cross_entropy(parts, distribute_tensor(target, line(), [Replicate()]))
    close(loss, F.cross_entropy(logits, target))
    assert sum(event.nbytes for event in sent.events) < logits.nbytes // 8


def a_pending_sum_goes_on() -> None:
    x = DTensor.from_local(torch.ones(4), line(), [Partial()])
    assert (2 * x).placements == (Partial(),)
    assert x.relu().full_tensor().equal(torch.full((4,), 4.0))


REPORTS = [value for value in list(globals().values()) if getattr(value, "__annotations__", None) == {"return": "None"}]


@pytest.mark.ranks
@pytest.mark.parametrize("report", one_in(2, REPORTS), ids=lambda report: report.__name__)
def test_what_was_reported_elsewhere_holds(ranks: RankPool, report: Callable[[], None]) -> None:
    ranks.run(report)


def test_the_page_has_a_row_for_each() -> None:
    assert sorted(re.findall(r"<!-- (\w+) -->", PAGE)) == sorted(report.__name__ for report in REPORTS)
