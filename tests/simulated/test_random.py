"""Random values are those of one rank: on every mesh, in every layout, in a recomputed checkpoint, after a restart."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import THOROUGH, one_in
from helpers.random_layouts import GIVEN, LAYOUTS, MESHES, ONE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard import DTensor, Layout, Mesh, Replicate, Shard
from dshard.dispatch.registry import known
from dshard.ops.random import draw
from dshard.testing import distribute, dtensors, layouts, meshes, shapes, simulated, whole

aten = torch.ops.aten
Make = Callable[[Any], Any]


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


@pytest.mark.parametrize("name", one_in(2, (name for name in OPERATORS if name not in MADE_OF_OTHERS)))
def test_values_are_those_of_one_rank(name: str) -> None:
    same_in(name, LAYOUTS if THOROUGH else LAYOUTS[::3])


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
    made, placements = [], data.draw(layouts(mesh, len(shape), partial=())).placements
    blocks, draw.CPU_WORDS = draw.CPU_WORDS, data.draw(st.sampled_from([3, 1 << 15]))
    try:
        for where, laid in ((ONE, None), (mesh, placements)):
            with simulated(where):
                dshard.manual_seed(7)
                made.append([whole(FACTORIES[name](*shape, device_mesh=where, placements=laid)) for _ in range(2)])
    finally:
        draw.CPU_WORDS = blocks

    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    if made[0][0].numel() > 8:
        assert not torch.equal(*made[0])


@given(dtensors(meshes(max_axes=2, max_ranks=8), shapes(max_size=5), partial=["sum", "avg", "max"]))
def test_a_partial_tensor_is_overwritten_like_any_other(x: DTensor) -> None:
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
        if known(func).composed is None and base not in at_once:
            left.add(name)
    assert not left


def test_permutations_are_equal_on_every_mesh() -> None:
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
