"""Dims that are sharded in blocks: redistributions, and operators on them, give the values of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor, nn
from torch.optim import AdamW

from dshard import (
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    parallelize,
    plan_model,
    trace,
)
from dshard.autograd.crossing import redistribute
from dshard.core.context import planning_context
from dshard.layout import Shape
from dshard.redistribute import Exchange, plan
from dshard.redistribute.layout_state import Load, load_of
from dshard.redistribute.space import Space
from dshard.redistribute.step import sizes_received
from dshard.rules.strategy import completed_layout
from dshard.testing import check_call, distribute, simulated, whole
from dshard.testing.generators import layouts, meshes, whole_numbers

LINE = Mesh((4,), ("tp",))
GATE_UP, QKV = Shard(0, blocks=2), Shard(0, blocks=3)


@st.composite
def blocked_layouts(draw: DrawFn, mesh: Mesh, shape: Shape) -> Layout:
    """Layouts of tensors of this shape, of which each sharded dim is in any number of blocks."""
    layout = draw(layouts(mesh, len(shape)))
    blocks = {
        dim: draw(st.sampled_from([n for n in (1, 2, 3, 4) if shape[dim] % n == 0])) for dim in layout.sharded_dims()
    }
    placements = [Shard(p.dim, blocks=blocks[p.dim]) if isinstance(p, Shard) else p for p in layout.placements]
    return Layout(mesh, tuple(placements), layout.order)


@st.composite
def redistributions(draw: DrawFn) -> tuple[Layout, Layout, Shape]:
    mesh = draw(meshes(max_size=3, max_ranks=12))
    shape = draw(st.lists(st.sampled_from((0, 5, 6, 8, 12)), min_size=1, max_size=3).map(tuple))
    src, dst = (draw(blocked_layouts(mesh, shape)) for _ in range(2))
    return src, dst, shape


@given(redistributions())
def test_the_load_of_an_exchange_of_blocks_is_that_of_the_rank_which_receives_most(
    case: tuple[Layout, Layout, Shape],
) -> None:
    src, dst, shape = case
    step, first = Exchange(src.mesh.names, dst), (0,) * src.mesh.ndim
    received = [sizes_received(step, src, shape, at) for at in src.mesh.peers(step.axes, first)]

    load = load_of(step, src, shape)

    assert not (src.blocks or dst.blocks) or load == Load(
        max(map(sum, received)),
        2 * dst.local_numel(shape),
        max(sum(map(bool, sizes)) for sizes in received),
        -(-sum(map(sum, received)) // len(received)),
    )


@given(redistributions())
@example((Layout(LINE, (GATE_UP,)), Layout(LINE, (QKV,)), (18, 2)))
@example((Layout(LINE, (Partial(),)), Layout(LINE, (QKV,)), (18, 2)))
@example((Layout(LINE, (Shard(1, blocks=2),)), Layout(LINE, (Shard(1),)), (3, 10)))
def test_a_redistribution_keeps_the_tensor_and_moves_what_is_planned(case: tuple[Layout, Layout, Shape]) -> None:
    src, dst, shape = case
    given_tensor = whole_numbers(shape)
    with simulated(src.mesh):
        x = distribute(given_tensor, src)
        assert whole(x).equal(given_tensor)

        with trace() as traced:
            moved = redistribute(x, dst)

        assert whole(moved).equal(given_tensor)
    topology = planning_context().topology_of(src.mesh)
    found, space = plan(src, dst, shape, 8, topology), Space(src.mesh, topology, shape, 8)
    assert sum(event.nbytes for event in traced.events) == found.busiest() * 8
    assert space.least(space.state_of(src), space.state_of(dst)) <= found.seconds * (1 + 1e-9)


def test_a_rank_holds_its_part_of_each_block() -> None:
    layout = Layout(LINE, (GATE_UP,))

    assert layout.regions((10, 3), (1,)) == ((range(2, 4), range(3)), (range(7, 9), range(3)))
    assert layout.local_shape((10, 3), (2,)) == (2, 3)
    assert [layout.local_shape((10, 3), (i,))[0] for i in range(4)] == [4, 4, 2, 0]


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gelu": (F.gelu, (reals(8, 12),)),
    "add": (torch.add, (reals(8, 12), reals(12))),
    "where": (torch.where, (reals(8, 12) > 0, reals(8, 12), reals(8, 1))),
    "sum": (torch.sum, (reals(8, 12), 0)),
    "mean": (torch.mean, (reals(8, 12), 1)),
    "amax": (torch.amax, (reals(8, 12), (0, 1))),
    "softmax": (torch.softmax, (reals(8, 12), 1)),
    "layer norm": (F.layer_norm, (reals(8, 12), (12,), reals(12), reals(12))),
    "cumsum": (torch.cumsum, (reals(8, 12), 1)),
    "argmax": (torch.argmax, (reals(8, 12), 1)),
    "tril": (torch.tril, (reals(8, 12),)),
    "embedding": (F.embedding, (torch.tensor([3, 0, 7]), reals(8, 12))),
    "index": (lambda x: x[:, [0, 5, 3]], (reals(8, 12),)),
    "slice": (lambda x: x[:, 3:9], (reals(8, 12),)),
    "transpose": (torch.t, (reals(8, 12),)),
    "unflatten": (lambda x: x.unflatten(1, (3, 4)), (reals(8, 12),)),
    "flatten": (torch.flatten, (reals(4, 2, 12), 0, 1)),
    "split in two": (lambda x: torch.stack(x.split(6, 1)), (reals(8, 12),)),
    "chunk in three": (lambda x: torch.stack(x.chunk(3, 1)), (reals(8, 12),)),
    "unequal pieces": (lambda x: torch.cat(x.split((6, 3, 3), 1)[:2], 1), (reals(8, 12),)),
    "cat": (lambda x, y: torch.cat((x, y), 1), (reals(8, 12), reals(8, 12))),
    "linear": (F.linear, (reals(4, 12), reals(8, 12), reals(8))),
    "addmm": (torch.addmm, (reals(8), reals(4, 12), reals(12, 8))),
    "bmm": (torch.bmm, (reals(2, 4, 12), reals(2, 12, 8))),
    "einsum": (partial(torch.einsum, "bk,nk->bn"), (reals(4, 12), reals(8, 12))),
    "zeros": (torch.zeros_like, (reals(8, 12),)),
    "written": (lambda x: x.clone().mul_(2).add_(x), (reals(8, 12),)),
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_operators_give_the_values_and_gradients_of_one_device(name: str, data: st.DataObject) -> None:
    function, sample = CALLS[name]
    mesh = data.draw(st.sampled_from([Mesh((2,), ("x",)), Mesh((3,), ("x",)), Mesh((2, 2), ("x", "y"))]))
    tensors = [x for x in sample if isinstance(x, Tensor)]
    drawn = [data.draw(blocked_layouts(mesh, tuple(x.shape))) for x in tensors]
    terms = [
        layout if x.is_floating_point() else completed_layout(layout) for x, layout in zip(tensors, drawn, strict=True)
    ]

    check_call(function, sample, terms)


class Packed(nn.Module):
    """Attention of packed projections, as GPT-2 has it, and a gated block of packed ones."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Shape] = {
            "qkv": (8, 24),
            "qkv_bias": (24,),
            "out": (8, 8),
            "gate_up": (12, 8),
            "gate_up_bias": (12,),
            "down": (8, 6),
        }
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(reals(*size) / 4))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        packed = torch.addmm(self.qkv_bias, x.view(-1, width), self.qkv).view(rows, tokens, 3 * width)
        q, k, v = (part.view(rows, tokens, 4, 2).transpose(1, 2) for part in packed.split(width, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width)
        gate, up = F.linear(attended @ self.out, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


LAID_OUT = {
    "qkv": Shard(1, blocks=3),
    "qkv_bias": QKV,
    "out": Shard(0),
    "gate_up": GATE_UP,
    "gate_up_bias": GATE_UP,
    "down": Shard(1),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_packed_projections_send_what_separate_ones_send(ranks: int) -> None:
    model, x, mesh = Packed(), reals(2, 5, 8), Mesh((ranks,), ("tp",))
    expected = model(x.requires_grad_())
    expected.square().sum().backward()
    with simulated(mesh):
        laid_out = Packed()
        for name, parameter in laid_out.named_parameters():
            laid_out.register_parameter(
                name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [LAID_OUT[name]]))
            )
        rows = distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_()
        with trace() as traced:
            out = laid_out(rows)
            out.redistribute(placements=[Replicate()]).square().sum().backward()

        if ranks != 3:  # which do not divide the heads
            assert [event.collective for event in traced.events] == ["all_reduce"] * 4
        torch.testing.assert_close(whole(out.detach()), expected.detach())
        torch.testing.assert_close(whole(rows.grad), x.grad)
        for name, parameter in laid_out.named_parameters():
            assert parameter.grad.layout == parameter.layout == Layout(mesh, (LAID_OUT[name],))
            torch.testing.assert_close(whole(parameter.grad), model.get_parameter(name).grad)
        AdamW(laid_out.parameters(), lr=0.1).step()
        AdamW(model.parameters(), lr=0.1).step()
        for name, parameter in laid_out.named_parameters():
            torch.testing.assert_close(whole(parameter.detach()), model.get_parameter(name).detach())


def test_what_needs_ranges_says_so() -> None:
    layout = Layout(LINE, (GATE_UP,))

    with pytest.raises(LayoutError, match=r"dim 0 of \[tp:S\(0,blocks=2\)\] is sharded in blocks: redistribute it to"):
        layout.region((8, 3), (0,))
    with pytest.raises(LayoutError, match=r"Shard\(0, blocks=2\) of a dim of size 5: blocks are of one size"):
        layout.local_shape((5,), (0,))


class PackedLayer(nn.Module):
    """A pre-normalised layer with packed projections, of which each one's result is split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm2, self.gate_up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(8, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("megatron", Mesh((2,), ("tp",))),
        ("fsdp x megatron", Mesh((2, 2), ("dp", "tp"))),
        ("atp", Mesh((2, 2), ("a", "b"))),
    ],
    ids=str,
)
def test_a_plan_lays_packed_projections_out_in_blocks(strategy: str, mesh: Mesh) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(PackedLayer(), PackedLayer()).double(), reals(2, 5, 8)
    plan = plan_model(model, mesh, strategy, x)

    for name, n in (("0.qkv.weight", 3), ("0.gate_up.weight", 2), ("1.qkv.bias", 3), ("1.gate_up.bias", 2)):
        assert n in [placement.blocks for placement in plan.parameters[name] if isinstance(placement, Shard)]
    assert "all_to_all" not in {move.collective for move in plan.cost.moves}
    expected = model(x)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with simulated(mesh):
        laid_out = parallelize(model, mesh, plan, outputs="distributed")
        out = laid_out(x)
        out.square().sum().backward()
        torch.testing.assert_close(whole(out.detach()), expected.detach())
        for name, p in laid_out.named_parameters():
            torch.testing.assert_close(whole(p.grad), gradients[name], msg=name)
