"""Random values are those of one rank: on every mesh, in every layout, in a recomputed checkpoint, after a restart."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import DeviceMesh, DTensor, Layout, Mesh, Partial, Replicate, Shard, init_device_mesh
from dshard.ops.random import draw
from dshard.ops.registry import known
from dshard.testing import RankPool, distribute, dtensors, layouts, meshes, shapes, simulated, whole

aten = torch.ops.aten
ONE = Mesh((1,), ("x",))
MESHES = (ONE, Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y")), Mesh((2, 2, 2), ("x", "y", "z")))
SHAPE = (5, 7, 6)
Make = Callable[[Any], Any]


def sampled_layouts() -> list[Layout]:
    """All layouts on one axis, and as many from the other meshes, both orders of nested shards."""
    found: list[Layout] = []
    for mesh in MESHES:
        every = []
        for chosen in product([Replicate(), *map(Shard, range(len(SHAPE)))], repeat=mesh.ndim):
            plain = Layout(mesh, chosen)
            turned = tuple((dim, plain.axes_of(dim)[::-1]) for dim in plain.sharded_dims())
            every += {plain, Layout(mesh, chosen, turned)}
        every.sort(key=str)
        found += every if len(every) <= 7 else Random(0).sample(every, 7)
    return found


LAYOUTS = sampled_layouts()


def test_there_are_enough_layouts() -> None:
    assert len(set(LAYOUTS)) >= 20
    assert {layout.mesh for layout in LAYOUTS} == set(MESHES)
    assert any(layout.order for layout in LAYOUTS)


def chances(x: Any) -> Any:
    return (x.abs() + 0.1).clamp(max=1.0)


def after_training(x: Any) -> Any:
    """The in-place forms of dropout, one after the other."""
    x = F.dropout(x, 0.3, inplace=True)
    return F.alpha_dropout(x, 0.2, training=True)


OPERATORS: dict[str, Make] = {
    "normal_": lambda x: x.normal_(0.5, 2.0),
    "uniform_": lambda x: x.uniform_(-1.0, 3.0),
    "exponential_": lambda x: x.exponential_(0.7),
    "geometric_": lambda x: x.geometric_(0.3),
    "cauchy_": lambda x: x.cauchy_(1.0, 2.0),
    "log_normal_": lambda x: x.log_normal_(0.1, 0.5),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of tensor": lambda x: x.bernoulli_(chances(x[0])),
    "bernoulli": lambda x: torch.bernoulli(chances(x)),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.4),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(10),
    "random_ from to": lambda x: x.random_(-10, 1 << 40),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal of mean": lambda x: torch.normal(x, 2.0),
    "normal of std": lambda x: torch.normal(1.0, x.abs()[0]),
    "rand_like": torch.rand_like,
    "rand_like bf16": lambda x: torch.rand_like(x, dtype=torch.bfloat16).float(),
    "rand_like complex": lambda x: torch.view_as_real(torch.rand_like(x, dtype=torch.complex64)),
    "randn_like": torch.randn_like,
    "randn_like double": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randn_like half": lambda x: torch.randn_like(x, dtype=torch.float16).float(),
    "randn_like complex": lambda x: torch.view_as_real(torch.randn_like(x, dtype=torch.complex128)),
    "randint_like": lambda x: torch.randint_like(x, 3, 99, dtype=torch.int32),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": after_training,
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "native_dropout mask": lambda x: torch.native_dropout(x, 0.3, True)[1],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.5),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None], 0.5),
    "rrelu": lambda x: F.rrelu(x - 1.0, training=True),
    "rrelu_": lambda x: F.rrelu_(x - 1.0, training=True),
    "multinomial": lambda x: torch.multinomial(chances(x[0]), 4),
    "multinomial with replacement": lambda x: torch.multinomial(chances(x[:, 0]), 9, replacement=True),
    "poisson": lambda x: torch.poisson(x.abs() * 3),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x[:, :6], x[:, :6], dropout_p=0.4, is_causal=True),
    "nn.Dropout": nn.Dropout(0.4),
    "trunc_normal_": nn.init.trunc_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "init.normal_": nn.init.normal_,
    "init.uniform_": nn.init.uniform_,
    "orthogonal_": nn.init.orthogonal_,
    "view": lambda x: x[1:4].normal_() if x.requires_grad else x.clone()[1:4].normal_(),
}
CLOSE = {"attention", "causal attention", "orthogonal_"}
"""What multiplies matrices, and so is equal within rounding only."""
GIVEN = torch.arange(210.0).view(SHAPE).remainder(11.0) / 8


def result(make: Make, layout: Layout, seed: int = 7) -> Tensor:
    """What `make` makes of the same tensor, laid out so."""
    with simulated(layout.mesh):
        x = distribute(GIVEN.clone(), layout)
        dshard.manual_seed(seed)
        return whole(make(x))


@cache
def alone(name: str) -> Tensor:
    return result(OPERATORS[name], Layout(ONE, (Replicate(),)))


MADE_OF_OTHERS = [name for name in OPERATORS if any(part in name for part in ("dropout", "rrelu", "attention", "init"))]


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in MADE_OF_OTHERS])
def test_values_are_those_of_one_rank(name: str) -> None:
    same_in(name, LAYOUTS)


@pytest.mark.parametrize("name", MADE_OF_OTHERS)
def test_values_of_operators_made_of_others_are_those_of_one_rank(name: str) -> None:
    same_in(name, LAYOUTS[4::6])


@pytest.mark.thorough
@pytest.mark.parametrize("name", MADE_OF_OTHERS)
def test_values_of_operators_made_of_others_in_all_layouts(name: str) -> None:
    same_in(name, LAYOUTS)


def same_in(name: str, layouts: list[Layout]) -> None:
    expected = alone(name)
    for layout in layouts:
        found = result(OPERATORS[name], layout)
        if name in CLOSE:
            torch.testing.assert_close(found, expected, msg=str(layout))
        else:
            assert torch.equal(found, expected), layout


@pytest.mark.parametrize("name", OPERATORS)
def test_values_follow_the_seed_and_nothing_else(name: str) -> None:
    layout = Layout(ONE, (Replicate(),))
    torch.manual_seed(99)
    before = torch.random.get_rng_state()[8:].clone()
    again = result(OPERATORS[name], layout)

    assert torch.equal(again, alone(name))
    assert torch.equal(torch.random.get_rng_state()[8:], before), "torch's own numbers go on as if nothing was drawn"
    assert not torch.equal(result(OPERATORS[name], layout, seed=8), alone(name))


FACTORIES: dict[str, Callable[..., DTensor]] = {
    "rand": dshard.rand,
    "randn": dshard.randn,
    "randn double": lambda *size, **laid: dshard.randn(*size, dtype=torch.float64, **laid),
    "randn complex": lambda *size, **laid: dshard.randn(*size, dtype=torch.complex64, **laid),
    "rand half": lambda *size, **laid: dshard.rand(*size, dtype=torch.float16, **laid),
    "randint": lambda *size, **laid: dshard.randint(-5, 1 << 45, size, **laid),
}


@pytest.mark.parametrize("name", FACTORIES)
@given(meshes(max_axes=3, max_ranks=8), shapes(max_dims=3, max_size=6), st.data())
def test_factories_make_the_values_of_one_rank(name: str, mesh: Mesh, shape: tuple[int, ...], data: Any) -> None:
    """Two draws, in any layout, by tiles of a few blocks."""
    made, placements = [], data.draw(layouts(mesh, len(shape), pending=())).placements
    blocks, draw.CPU_BLOCKS = draw.CPU_BLOCKS, data.draw(st.sampled_from([3, 1 << 15]))
    try:
        for where, laid in ((ONE, None), (mesh, placements)):
            with simulated(where):
                dshard.manual_seed(7)
                made.append([whole(FACTORIES[name](*shape, device_mesh=where, placements=laid)) for _ in range(2)])
    finally:
        draw.CPU_BLOCKS = blocks

    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    if made[0][0].numel() > 8:
        assert not torch.equal(*made[0])


@given(dtensors(meshes(max_axes=2, max_ranks=8), shapes(max_size=5), pending=["sum", "avg", "max"]))
def test_a_pending_tensor_is_overwritten_like_any_other(x: DTensor) -> None:
    with simulated(x.layout.mesh):
        dshard.manual_seed(3)
        written = whole(x.uniform_())
    with simulated(ONE):
        dshard.manual_seed(3)
        expected = whole(dshard.zeros(*x.shape, dtype=x.dtype, device_mesh=ONE).uniform_())

    torch.testing.assert_close(written, expected, rtol=1e-14, atol=1e-14)


def test_every_random_operator_on_one_tensor_is_drawn_here_or_known_to_be_whole() -> None:
    """An operator that torch adds must not go unnoticed."""
    at_once = {"_standard_gamma", "_sample_dirichlet", "binomial", "poisson", "_fused_dropout", "_philox_normal_"}
    left = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(aten, base), overload or "default") if name.startswith("aten::") else None
        if func is None or torch.Tag.nondeterministic_seeded not in func.tags or "out" in overload:
            continue
        first = func._schema.arguments[0]
        kernels = ("attention", "cudnn", "miopen", "_sdp_choice", "_dropout_mask", "_for_mps", "_lstm_mps", "nested")
        if str(first.type) != "Tensor" or func._can_decompose() or any(kernel in base for kernel in kernels):
            continue
        if known(func).instead is None and base not in at_once:
            left.add(name)
    assert not left


def test_permutations() -> None:
    found = []
    for mesh, placements in ((ONE, None), (MESHES[1], [Shard(0)]), (MESHES[2], [Shard(0), Shard(0)])):
        with simulated(mesh):
            dshard.manual_seed(1)
            laid: Any = {"device_mesh": mesh, "placements": placements, "dtype": torch.int32}
            found.append([whole(dshard.randperm(101, **laid)) for _ in range(2)])

    first, second = found[0]
    assert first.dtype == torch.int32
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(101))
    assert not torch.equal(first, second)
    for other in found[1:]:
        assert torch.equal(other[0], first)
        assert torch.equal(other[1], second)


# -- the sequence


def drawn() -> Tensor:
    return whole(dshard.rand(6, device_mesh=ONE))


def test_a_seed_begins_the_sequence_and_its_state_goes_on_with_it() -> None:
    with simulated(ONE):
        dshard.manual_seed(5)
        first, state, second = drawn(), dshard.get_rng_state(), drawn()
        dshard.manual_seed(6)
        other = drawn()
        dshard.set_rng_state(state)
        assert torch.equal(drawn(), second)
        dshard.manual_seed(5 + (1 << 64))
        assert torch.equal(drawn(), first)
        dshard.manual_seed(-1)
        assert dshard.get_rng_state().tolist() == [-1, 0]

    assert state.tolist() == [5, 1]
    assert len({tuple(x.tolist()) for x in (first, second, other)}) == 3


@pytest.mark.parametrize(
    "state", [torch.zeros(3), torch.tensor([1, -1]), torch.tensor([1, 1 << 50]), torch.get_rng_state()]
)
def test_what_is_no_state_is_refused(state: Tensor) -> None:
    with pytest.raises(ValueError, match=r"pass what dshard\.get_rng_state"):
        dshard.set_rng_state(state)


def test_neither_sequence_moves_the_other() -> None:
    with simulated(ONE):
        dshard.manual_seed(5)
        torch.manual_seed(1)
        expected = drawn(), drawn(), torch.rand(3)
        dshard.manual_seed(5)
        torch.manual_seed(1)
        first = drawn()
        numbers = torch.rand(3)
        torch.manual_seed(1)
        assert torch.equal(first, expected[0])
        assert torch.equal(drawn(), expected[1])
        assert torch.equal(torch.as_tensor(numbers), torch.as_tensor(expected[2]))


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


@pytest.mark.parametrize(("begin", "between"), CASES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_replays_the_masks(use_reentrant: bool, begin: str, between: str) -> None:
    laid = WHOLE if use_reentrant else SPLIT
    without = trained(lambda block, *args: block(*args), BEGIN[begin], BETWEEN[between], laid)
    with_it = trained(recomputed(use_reentrant), BEGIN[begin], BETWEEN[between], laid)

    for found, expected in zip(with_it, without, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.mesh == MESHES[2]], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
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


def test_pending_reductions_stay_pending_when_written_to() -> None:
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
