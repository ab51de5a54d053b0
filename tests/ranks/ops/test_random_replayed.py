"""Random values again: from generators, in checkpoints, on real ranks; and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from helpers.random_layouts import GIVEN, LAYOUTS, MESHES, ONE, SHAPE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import DeviceMesh, Layout, Mesh, Partial, Replicate, Shard, init_device_mesh
from dshard.testing import RankPool, distribute, simulated, whole


def test_a_generator_given_is_stepped_and_the_sequence_is_not() -> None:
    with simulated(ONE):
        state = dshard.get_rng_state()
        generator = torch.Generator().manual_seed(3)
        first, second = (dshard.randn(9, device_mesh=ONE, generator=generator) for _ in range(2))
        again = dshard.zeros(9, device_mesh=ONE).normal_(generator=generator.manual_seed(3))

        assert torch.equal(whole(again), whole(first))
        assert not torch.equal(whole(second), whole(first))
        assert torch.equal(dshard.get_rng_state(), state)


def test_torch_refuses_what_it_refuses_on_one_device() -> None:
    with simulated(ONE):
        x, state = dshard.zeros(3, device_mesh=ONE), dshard.get_rng_state()
        for call, message in (
            (lambda: x.normal_(0.0, -1.0), "std"),
            (lambda: x.bernoulli_(1.5), "p to be in"),
            (lambda: x.uniform_(2.0, 1.0), "expects"),
            (lambda: dshard.randint(5, 5, (3,), device_mesh=ONE), "from"),
            (lambda: dshard.rand(3, dtype=torch.int64, device_mesh=ONE), "not implemented"),
            (lambda: torch.multinomial(x, 9), "cannot sample"),
            (lambda: F.dropout(x, 2.0), "dropout probability"),
        ):
            with pytest.raises((RuntimeError, ValueError), match=message):
                call()
        assert torch.equal(dshard.get_rng_state(), state), "nothing was drawn"


# -- checkpoints


class Block(nn.Module):
    """Dropout in every form."""

    def __init__(self, mesh: Mesh, placements: list[Any]) -> None:
        super().__init__()
        value = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)
        self.weight = nn.Parameter(distribute(value, Layout(mesh, tuple(placements))))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Any, reseed: bool = False) -> Any:
        if reseed:
            torch.manual_seed(12)
        x = self.dropout(F.linear(x, self.weight))
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        return torch.native_dropout(F.rrelu(x, training=True), 0.1, True)[0] + torch.rand_like(x)


Step = Callable[[Block, Any], Any]


def recomputed(use_reentrant: bool) -> Callable[..., Any]:
    return lambda block, *args: checkpoint(block, *args, use_reentrant=use_reentrant)


SPLIT = (Replicate(), Shard(1)), (Shard(0), Replicate()), (Replicate(), Shard(1))
WHOLE = ((Replicate(), Replicate()),) * 3
"""Layouts of the input and two weights. A reentrant checkpoint runs forward without recording, for which products may
be laid out otherwise, and so round otherwise, with dropout or without."""


def trained(
    run: Callable[..., Any], begin: Callable[[], object], between: Callable[[], object], laid: Any = SPLIT
) -> list[Tensor]:
    """Loss, gradients and the next random values, of two blocks after one another."""
    mesh = MESHES[2]
    with simulated(mesh):
        blocks = Block(mesh, laid[1]), Block(mesh, laid[2])
        x = distribute(torch.linspace(0, 1, 48, dtype=torch.float64).view(2, 4, 6), Layout(mesh, laid[0]))
        x.requires_grad_()
        begin()
        y = run(blocks[0], x)
        y = run(blocks[1], y + torch.rand_like(y), True)
        loss = y.square().sum()
        between()
        loss.backward()
        return [whole(t.detach()) for t in (loss, x.grad, *(b.weight.grad for b in blocks), torch.rand_like(y))]


BEGIN: dict[str, Callable[[], object]] = {
    "seeded": lambda: dshard.manual_seed(4),
    "torch seeded later": lambda: (dshard.manual_seed(4), torch.manual_seed(0)),
    "torch seeded by chance": lambda: (dshard.manual_seed(4), torch.manual_seed(torch.seed())),
    "in the middle": lambda: (dshard.manual_seed(4), drawn_on(MESHES[2]), torch.rand(3)),
}
BETWEEN: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "other draws": lambda: drawn_on(MESHES[2]),
    "torch seeded": lambda: torch.manual_seed(31),
    "another seed": lambda: dshard.manual_seed(77),
}


def drawn_on(mesh: Mesh) -> Tensor:
    return whole(dshard.rand(5, device_mesh=mesh))


CASES = [(begin, "nothing") for begin in BEGIN] + [("seeded", between) for between in BETWEEN if between != "nothing"]


@pytest.mark.parametrize(("case", "use_reentrant"), one_way_each(CASES, [False, True]))
def test_a_checkpoint_replays_the_masks(case: tuple[str, str], use_reentrant: bool) -> None:
    begin, between = case
    laid = WHOLE if use_reentrant else SPLIT
    without = trained(lambda block, *args: block(*args), BEGIN[begin], BETWEEN[between], laid)
    with_it = trained(recomputed(use_reentrant), BEGIN[begin], BETWEEN[between], laid)

    for found, expected in zip(with_it, without, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("layout", "use_reentrant"),
    one_way_each([layout for layout in LAYOUTS if layout.mesh == MESHES[2]], [False, True]),
    ids=str,
)
def test_a_checkpoint_replays_the_masks_in_any_layout(use_reentrant: bool, layout: Layout) -> None:
    """Of what is drawn element by element, bit for bit."""

    def noisy(x: Any) -> Any:
        return F.dropout(F.alpha_dropout(x, 0.2, training=True) * torch.rand_like(x), 0.3).exp()

    found = []
    for run in (noisy, lambda x: checkpoint(noisy, x, use_reentrant=use_reentrant)):
        with simulated(layout.mesh):
            dshard.manual_seed(11)
            x = distribute(GIVEN, layout).requires_grad_()
            y = run(run(x))
            y.backward(y.detach())
            found.append([whole(y.detach()), whole(x.grad)])

    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_nested_checkpoints_replay_the_masks() -> None:
    def nested(block: Block, *args: Any) -> Any:
        def inner(*args: Any) -> Any:
            return checkpoint(block, *args, use_reentrant=False)

        return checkpoint(lambda *args: inner(*args), *args, use_reentrant=False)

    without = trained(lambda block, *args: block(*args), BEGIN["seeded"], BETWEEN["nothing"])
    for found, expected in zip(trained(nested, BEGIN["seeded"], BETWEEN["nothing"]), without, strict=True):
        assert torch.equal(found, expected)


def test_the_gradient_of_dropout_goes_through_its_mask() -> None:
    for layout in LAYOUTS[::4]:
        with simulated(layout.mesh):
            x = distribute(GIVEN + 1, layout).requires_grad_()
            y = F.dropout(x, 0.5)
            y.sum().backward()
            assert torch.equal(whole(x.grad), whole(y.detach() / x.detach()))


# -- real ranks


@cache
def real(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def on_real_ranks() -> list[Tensor]:
    """Whole results, after each rank has seeded torch as it likes and drawn as often as it likes."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.rand(rank)
    out = []
    for shape, placements in (((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Shard(2), Replicate()])):
        laid: Any = {"device_mesh": real(shape), "placements": placements}
        dshard.manual_seed(7)
        x = dshard.randn(*SHAPE, dtype=torch.float64, **laid).requires_grad_()
        if rank % 2:
            torch.manual_seed(0)
        y = checkpoint(lambda x: F.dropout(x, 0.3) * F.dropout(x, 0.2), x, use_reentrant=shape == (4,))
        if rank % 2:
            torch.manual_seed(0)
        y.sum().backward()
        out += [whole(t.detach()) for t in (x, y, x.grad, dshard.randint(9, (7,), **laid | {"placements": None}))]
    return out


@pytest.mark.ranks
def test_on_real_ranks_whatever_each_does_to_the_generators_of_torch(ranks: RankPool) -> None:
    with simulated(ONE):
        dshard.manual_seed(7)
        x = dshard.randn(*SHAPE, dtype=torch.float64, device_mesh=ONE).requires_grad_()
        y = F.dropout(x, 0.3) * F.dropout(x, 0.2)
        y.sum().backward()
        expected = [whole(t.detach()) for t in (x, y, x.grad, dshard.randint(9, (7,), device_mesh=ONE))]

    for found in ranks.run(on_real_ranks):
        for value, right in zip(found, expected * 3, strict=True):
            assert torch.equal(value, right)


def differently_seeded() -> str:
    os.environ["DSHARD_DEBUG"] = "1"
    try:
        dshard.manual_seed(dist.get_rank() // 2)
        dshard.rand(4, device_mesh=real((4,)))
    except dshard.MeshError as error:
        return str(error)
    finally:
        del os.environ["DSHARD_DEBUG"]
        dshard.manual_seed(0)
    return ""


@pytest.mark.ranks
def test_in_debug_mode_ranks_that_were_seeded_differently_are_told_so(ranks: RankPool) -> None:
    told = ranks.run(differently_seeded)

    assert len(set(told)) == 1
    assert "ranks [0, 1] make draw 0 of seed 0" in told[0]
    assert "ranks [2, 3] make draw 0 of seed 1" in told[0]
    assert "call dshard.manual_seed with one seed" in told[0]


def test_partial_tensors_stay_partial_when_written_to() -> None:
    with simulated(MESHES[1]):
        x = distribute(torch.zeros(4), Layout(MESHES[1], (Partial(),)))
        assert x.normal_().placements == (Partial(),)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_by_which_nothing_can_be_drawn_are_refused_as_by_torch(weights: list[float]) -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.tensor(weights).multinomial(1)
    mesh = Mesh((2,), ("x",))

    with simulated(mesh), pytest.raises(RuntimeError, match=re.escape(str(torchs.value).splitlines()[0])):
        distribute(torch.tensor(weights), Layout(mesh, (Shard(0),))).multinomial(1)
