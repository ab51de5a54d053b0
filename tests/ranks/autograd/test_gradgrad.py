"""Gradients of gradients equal those of one device, however the operands and the gradients that come in lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in
from helpers.operator_samples import SAMPLES
from hypothesis import settings
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import DTensor, Layout, Mesh, Partial, Replicate, Shard
from dshard.comm import bind, plain
from dshard.core.trees import leaves, replace_leaves
from dshard.placements import Placement
from dshard.testing import RankPool, distribute, simulated, whole
from dshard.testing.rule_rows import has_gradient, layouts_of

THOROUGH = settings().max_examples > 100
RTOL = 1e-6
"""Terms of a partial sum are random, those of samples in single precision exact to this."""
Lay = Callable[[Tensor], Tensor]
"""Where a tensor lies: on one device, as it is."""


def as_is(x: Tensor) -> Tensor:
    return x


def squares(tensors: Sequence[Any]) -> Tensor:
    """Their sum, real where the tensors are complex."""
    return sum((torch.view_as_real(t) if t.is_complex() else t).pow(2).sum() for t in tensors)  # type: ignore[return-value]


def derivatives(function: Callable[..., Any], args: Any, wanted: Sequence[bool], lay: Lay) -> list[Tensor | None]:
    """The gradients of `function`, and those of the sum of their squares, also in what came in for the outputs."""
    rest, inputs = iter(wanted), []

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        laid = lay(x.detach().clone())
        if next(rest):
            inputs.append(laid.requires_grad_())
        return laid

    args, kwargs = split(replace_leaves(args, leaf))
    outputs = [x for x in leaves(function(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    incoming = [lay(number(x, i)).requires_grad_() for i, x in enumerate(outputs)]
    first = torch.autograd.grad(outputs, inputs, incoming, create_graph=True, allow_unused=True)
    recorded = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    if not recorded:
        return list(first)
    total = squares(recorded)
    return [*first, *torch.autograd.grad(total, [*inputs, *incoming], allow_unused=True)]


def split(sample: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (sample[:-1], sample[-1]) if sample and isinstance(sample[-1], dict) else (sample, {})


def number(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)


def on_one_device(name: str) -> tuple[list[bool], list[Tensor | None]] | None:
    """Which operands have gradients, and all derivatives; None where torch has no second ones."""
    function, sample = SAMPLES[name]
    if isinstance(function, OpOverload) and function._schema.is_mutable:
        return None
    operands = [x for x in leaves(sample) if isinstance(x, Tensor)]
    choices = [[has_gradient(x) for x in operands]]
    choices += [[i == j and is_wanted for j, is_wanted in enumerate(choices[0])] for i in range(len(operands))]
    for wanted in choices:
        try:
            found = derivatives(function, sample, wanted, as_is) if any(wanted) else []
        except (RuntimeError, NotImplementedError):
            continue
        if len(found) > sum(wanted):
            return wanted, found
    return None


def differences(names: Sequence[str], mesh: Mesh, seed: int, draws: int = 1) -> list[str]:
    """Where a derivative on `mesh` is not that of one device; ("", the number of cases) at the end."""
    wrong, cases = [], 0
    for name in names:
        with plain():  # where ranks are simulated
            expected = on_one_device(name)
        draw = Random(f"{name} {seed}")
        for i in range(draws if expected is not None else 0):
            wanted, right = expected
            laid: list[str] = []

            def lay(x: Tensor, draw: Random = draw, laid: list[str] = laid, seed: int = i) -> Tensor:
                layout = draw.choice(layouts_of(x, mesh))
                laid.append(str(layout))
                return distribute(x, layout, seed=seed)

            cases += 1
            try:
                found = derivatives(*SAMPLES[name], wanted, lay)
                told = [f"derivative {k}" for k, pair in enumerate(zip(found, right, strict=True)) if not same(*pair)]
            except Exception as error:
                told = [f"{type(error).__name__}: {error}"]
            wrong += [f"{name} of {laid}: {what}" for what in told[:1]]
    return [*wrong, f"{cases} cases"]


def same(found: Any, right: Tensor | None) -> bool:
    if found is None or right is None:
        return all(x is None or not bool((whole(x) if isinstance(x, DTensor) else x).any()) for x in (found, right))
    with plain():
        return torch.allclose(whole(found), right, rtol=RTOL, atol=RTOL / 100, equal_nan=True)


def on_ranks(names: list[str], shape: tuple[int, ...], seed: int, draws: int) -> list[str]:
    return differences(names, bind(dshard.init_device_mesh("cpu", shape)), seed, draws)


@pytest.mark.ranks
def test_second_derivatives_of_operators_on_real_ranks(ranks: RankPool) -> None:
    check_operators(ranks, list(SAMPLES)[::35], (2, 2), 0)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_second_derivatives_of_every_operator(ranks: RankPool, shape: tuple[int, ...], seed: int) -> None:
    check_operators(ranks, list(SAMPLES), shape, seed)


def check_operators(ranks: RankPool, names: list[str], shape: tuple[int, ...], seed: int) -> None:
    first, *others = ranks.run(on_ranks, names, shape, seed, 1, timeout=1800)

    assert len(first) == 1, first
    assert int(first[0].split()[0]) > len(names) // 2
    assert all(other == first for other in others)


CHOSEN: tuple[tuple[str, tuple[Placement, ...]], ...] = (
    ("network: embedding", (Shard(0), Shard(0), Replicate())),  # the last rank has no indices
    ("pointwise: complex mul", (Replicate(), Partial(), Shard(1))),  # a conjugate is sent
)


def in_chosen_layouts() -> list[str]:
    mesh, wrong = bind(dshard.init_device_mesh("cpu", (4,))), []
    for name, placements in CHOSEN:
        found, rest = on_one_device(name), iter(placements)
        assert found is not None
        lay = partial(lambda x, rest: distribute(x, Layout(mesh, (next(rest),)), seed=0), rest=rest)
        pairs = zip(derivatives(*SAMPLES[name], found[0], lay), found[1], strict=True)
        wrong += [f"{name}: derivative {k}" for k, pair in enumerate(pairs) if not same(*pair)]
    return wrong


@pytest.mark.ranks
def test_second_derivatives_in_chosen_layouts(ranks: RankPool) -> None:
    assert ranks.run(in_chosen_layouts) == [[]] * 4


def attention_with_a_rank_without_batch_entries() -> list[float]:
    """How far the gradients, and those of the last gradient, are from those of one device."""
    mesh, generator = bind(dshard.init_device_mesh("cpu", (4,))), torch.Generator().manual_seed(0)
    values = [torch.randn(3, 2, 3, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
    far = []
    for asked, needed in ((None, (True, True, True)), (None, (True, False, False)), ("ring", (True, True, True))):
        found = []
        for laid in (as_is, lambda x: distribute(x, Layout(mesh, (Shard(0),)))):
            operands = [laid(x.clone()).requires_grad_(each) for x, each in zip(values, needed, strict=True)]
            leaves = [x for x in operands if x.requires_grad]
            with dshard.use_strategy(attention=asked), sdpa_kernel(SDPBackend.MATH):
                out = F.scaled_dot_product_attention(*operands)
            first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
            second = torch.autograd.grad(first[-1].square().sum(), leaves, allow_unused=True)
            found.append([*first, *(x for x in second if x is not None)])
        far += [(whole(x) - right).abs().max().item() for right, x in zip(*found, strict=True)]
    return far


@pytest.mark.ranks
def test_second_derivatives_of_attention_where_a_rank_has_no_batch_entries(ranks: RankPool) -> None:
    assert max(map(max, ranks.run(attention_with_a_rank_without_batch_entries))) < 1e-11


RELATED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "one tensor": lambda x: (x, x, x),
    "values are keys": lambda x: (x.detach(), x, x),
    "keys of queries, values of keys": lambda x: (x, x.sin(), x.sin().square()),
    "queries of keys": lambda x: ((y := x * 2).cos(), y, x),
}
LOOPS_OF_QUERIES = (None, "context", "ring", "balanced ring", "split-keys")


def attention_of_related_operands(names: Sequence[str]) -> list[str]:
    """Where recorded gradients, or those of the last gradient, are not those of one device; queries are sharded."""
    mesh, wrong = bind(dshard.init_device_mesh("cpu", (4,))), []
    value = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, loops, causal in product(names, LOOPS_OF_QUERIES, (False, True)):
        if loops == "balanced ring" and not causal:
            continue
        found = []
        for laid in (as_is, lambda x: distribute(x, Layout(mesh, (Shard(1),)))):
            x = laid(value.clone()).requires_grad_()
            with dshard.use_strategy(attention=loops), sdpa_kernel(SDPBackend.MATH):
                operands = RELATED[name](x)
                out = F.scaled_dot_product_attention(*operands, is_causal=causal)
                inputs = [x, *{id(each): each for each in operands if each is not x and each.requires_grad}.values()]
                first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
                second = torch.autograd.grad(first[0].square().sum(), inputs, allow_unused=True)
            found.append([*first, *second])
        if not all(same(mine, right) for right, mine in zip(*found, strict=True)):
            wrong.append(f"{name}, {loops}, causal {causal}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("name", one_in(4, RELATED))
def test_recorded_gradients_of_attention_whose_operands_are_made_of_each_other(ranks: RankPool, name: str) -> None:
    assert ranks.run(attention_of_related_operands, [name], timeout=120) == [[]] * 4


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_second_derivatives_of_operators_on_simulated_ranks(shape: tuple[int, ...]) -> None:
    mesh, start = Mesh(shape), len(shape)
    with simulated(mesh):
        found = differences(list(SAMPLES)[start :: 1 if THOROUGH else 32], mesh, 1)
    assert len(found) == 1, found


# -- programs


def mlp(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ a) @ b


def total(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return mlp(x, a, b).pow(2).mean()


def third_order(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients, those of the sum of their squares, and those of the sum of the cubes of these."""
    found, power = [], 2
    for order in range(3):
        options = {"create_graph": order < 2, "allow_unused": True, "materialize_grads": True}
        found.append(torch.autograd.grad(value, inputs, **options))
        value, power = sum(g.pow(power).sum() for g in found[-1]), power + 1  # type: ignore[assignment]
    return [g for gradients in found for g in gradients]


def squared_sum(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return third_order((x * x).sum().pow(2), [x])


def gram(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return third_order((x @ x.t()).sin().sum(), [x])


def two_layers(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return third_order(total(x, a, b), [x, a, b])


def sigmoid_of_sums(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return third_order(torch.sigmoid(x.sum(0) * a.sum()).sum() * x.norm(), [x, a])


def normalised(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return third_order(F.linear(F.layer_norm(x, (4,)), a.t(), a.sum(0)).softmax(1).pow(3).sum(), [x, a])


def classified(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return third_order(F.cross_entropy(mlp(x, a, b), x.detach().argmax(1) % 3), [x, a, b])


def attended(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    q, k = (t.view(2, 3, 4).unsqueeze(1) for t in (x, x.sin()))
    with sdpa_kernel(SDPBackend.MATH):
        return third_order(F.scaled_dot_product_attention(q, k, k * k, is_causal=True).pow(2).sum(), [x])


def looked_up(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return third_order((F.embedding(x.detach().argmax(1), a, padding_idx=1) * x.sum(1, True)).pow(3).sum(), [x, a])


def gradient_penalty(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    value = mlp(x, a, b).sum()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    (value + ((gradient.norm(2, dim=1) - 1) ** 2).mean()).backward()
    return [x.grad, a.grad, b.grad]  # type: ignore[list-item]


def hessian_times_vector(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    gradients = torch.autograd.grad(total(x, a, b), [a, b], create_graph=True)
    return list(torch.autograd.grad(gradients, [a, b, x], [a.detach().cos(), b.detach().cos()]))


def meta_learned(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """MAML: two steps of an inner loop, differentiated."""
    inner = [a, b]
    for _ in range(2):
        gradients = torch.autograd.grad(total(x, *inner), inner, create_graph=True)
        inner = [p - 0.1 * g for p, g in zip(inner, gradients, strict=True)]
    mlp(x.detach() * 2, *inner).tanh().sum().backward()
    return [x.grad, a.grad, b.grad]  # type: ignore[list-item]


def accumulated(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    total(x, a, b).backward(create_graph=True)
    ((x * x).sum() * a.sum()).backward(create_graph=True)
    gradients = [x.grad, a.grad, b.grad]
    return list(torch.autograd.grad(sum(g.pow(2).sum() for g in gradients), [x, a, b]))  # type: ignore[arg-type, union-attr]


def inner_gradients(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """In tensors in the middle of the graph, with hooks."""
    h = x @ a
    h.retain_grad()
    h.register_hook(lambda gradient: gradient * gradient * 2)
    z = h.tanh()
    found = torch.autograd.grad((z @ b).pow(2).sum() + h.sum().pow(2), [h, z, x], create_graph=True)
    return [*found, *torch.autograd.grad(sum(g.pow(2).sum() for g in found), [x, a, b])]  # type: ignore[arg-type]


def redistributed(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    h = (x * x).sum(0)
    if isinstance(h, DTensor):
        h = h.redistribute(placements=[Replicate()] * h.device_mesh.ndim)
    return third_order((h * h).sin().sum(), [x])


def gathered(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    h = (x * x).sum(0)
    h = h.full_tensor() if isinstance(h, DTensor) else h
    return third_order((h * h).sin().sum(), [x])


def recomputed(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    value = checkpoint(lambda t: mlp(t, a, b), x, use_reentrant=False).pow(2).sum()
    gradients = torch.autograd.grad(value, [x, a, b], create_graph=True)
    return list(torch.autograd.grad(sum(g.pow(2).sum() for g in gradients), [x, a, b]))  # type: ignore[arg-type]


def hessians(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    x, a, b = (t.detach() for t in (x, a, b))
    found = [functional.hessian(lambda a: total(x, a, b), a), functional.jacobian(lambda a: mlp(x, a, b), a)]
    return [
        *found,
        functional.hvp(lambda a: total(x, a, b), a, a.cos())[1],
        functional.vhp(lambda b: total(x, a, b), b, b.sin())[1],
    ]


def solved(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """Of matrices whose local parts lie in memory otherwise than torch says of the whole."""
    matrices = torch.linalg.svd((a @ b)[:3].sin().unsqueeze(0).expand(3, 3, 3)).Vh
    value = torch.linalg.solve(matrices, a[:3, :3]).pow(3).sum() + torch.linalg.slogdet(matrices)[1].sum()
    return list(torch.autograd.grad(value, [a, b]))


PROGRAMS = (
    squared_sum,
    gram,
    two_layers,
    sigmoid_of_sums,
    normalised,
    classified,
    attended,
    looked_up,
    gradient_penalty,
    hessian_times_vector,
    meta_learned,
    accumulated,
    inner_gradients,
    redistributed,
    gathered,
    recomputed,
    hessians,
    solved,
)


def wrong_programs(mesh: Mesh, seed: int, draws: int, first: int, every: int) -> list[str]:
    """Programs of which a derivative is not that of one device, each run cold and warm."""
    wrong, generator = [], torch.Generator().manual_seed(0)
    values = [torch.randn(shape, dtype=torch.float64, generator=generator) * 0.7 for shape in ((6, 4), (4, 8), (8, 3))]
    for program in PROGRAMS[first::every]:
        with plain():
            right = program(*[x.clone().requires_grad_() for x in values])
        draw = Random(f"{program.__name__} {seed}")
        for i in range(draws):
            laid = [draw.choice(layouts_of(x, mesh)) for x in values]
            for warm in (False, True):
                leafs = [distribute(x, at, seed=i).requires_grad_() for x, at in zip(values, laid, strict=True)]
                try:
                    found = program(*leafs)
                    told = [
                        f"derivative {k}" for k, pair in enumerate(zip(found, right, strict=True)) if not same(*pair)
                    ]
                except Exception as error:
                    told = [f"{type(error).__name__}: {error}"]
                how = "warm" if warm else "cold"
                wrong += [f"{program.__name__} of {list(map(str, laid))}, {how}: {what}" for what in told[:1]]
    return wrong


def programs_on_ranks(shape: tuple[int, ...], seed: int, draws: int, first: int = 0, every: int = 1) -> list[str]:
    return wrong_programs(bind(dshard.init_device_mesh("cpu", shape)), seed, draws, first, every)


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [pytest.param((4,), marks=pytest.mark.thorough), (2, 2)])
def test_programs_of_second_and_third_order(ranks: RankPool, shape: tuple[int, ...]) -> None:
    assert ranks.run(programs_on_ranks, shape, 0, 1, len(shape) - 1, 2 if THOROUGH else 8, timeout=300) == [[]] * 4


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_programs_of_second_and_third_order_in_many_layouts(ranks: RankPool, shape: tuple[int, ...]) -> None:
    assert ranks.run(programs_on_ranks, shape, 1, 20, timeout=1800) == [[]] * 4


@pytest.mark.parametrize("shape", [pytest.param((3,), marks=pytest.mark.thorough), (2, 2)])
def test_programs_of_second_and_third_order_on_simulated_ranks(shape: tuple[int, ...]) -> None:
    mesh = Mesh(shape)
    with simulated(mesh):
        assert wrong_programs(mesh, 2, 1, len(shape), 1 if THOROUGH else 8) == []
