"""torch.func, forward-mode derivatives and `x.data = ...` on real ranks: as on one device, or refused in our words."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.utils._pytree import tree_leaves

import dshard
from dshard import DTensor, MixedError, Partial, Placement, Replicate, Shard, distribute_tensor
from dshard.testing import RankPool

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Layouts: TypeAlias = list[tuple[list[Placement], list[Placement]]]
LAYOUTS: Layouts = [
    ([R, R], [R, R]),
    ([S0, S1], [R, S0]),
    ([S0, S0], [S1, R]),
    ([S1, R], [S0, S1]),
    ([R, S0], [S0, R]),
]
"""Of a tensor (5, 4) and of one (4, 3): sizes that do not divide, some shards of which are empty."""
Case = Callable[[Any, Any], Any]
Lay = Callable[[Tensor], Any]


@functools.cache
def grid() -> Any:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def loss(x: Any, w: Any) -> Any:
    return torch.tanh(x @ w).pow(2).sum()


def of_one(x: Any) -> Any:
    return (x.sin() * x).sum().pow(2)


def normed(x: Any) -> Any:
    return F.layer_norm(x, (x.shape[-1],)).pow(2).mean()


def softly(x: Any) -> Any:
    return F.softmax(x, -1)[..., 0].sum()


def products(x: Any, w: Any) -> Any:
    return F.gelu(F.linear(x, w.t())) + torch.einsum("ij,jk->ik", x, w)


def dual(f: Callable[[Any], Any], x: Any, tangent: Any) -> Any:
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(x, tangent))
        return tuple(forward_ad.unpack_dual(out))


def tangent_of(x: Any) -> Any:
    return (x * 3).cos()


def per_sample(x: Any, w: Any) -> Any:
    return vmap(grad(lambda w, row: torch.tanh(row @ w).sum()), in_dims=(None, 0))(w, x)


def ensemble(x: Any, w: Any) -> Any:
    """Two models at once, the weights of which are stacked."""
    models = [nn.Linear(4, 3, bias=False).double() for _ in range(2)]
    for i, model in enumerate(models):
        model.weight = nn.Parameter((w * (i + 1)).t().detach())
    params, buffers = stack_module_state(models)
    return vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(params, buffers)


def of_module(x: Any, w: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh()).double()
    params = {"0.weight": w.t()}
    return grad(lambda p: functional_call(model, p, (x,)).pow(2).sum())(params)


def batched(x: Any, w: Any) -> Any:
    leaf = x.detach().requires_grad_()
    out = (leaf @ w).sin().sum(0)
    several = torch.eye(3, dtype=x.dtype)
    several = several if type(x) is Tensor else distribute_tensor(several, grid(), [R, R])
    return torch.autograd.grad(out, leaf, several, is_grads_batched=True)


def trained_and_constant(x: Any, w: Any) -> Any:
    """A transform beside ordinary autograd: the weight is a leaf, the other operand is followed by the transform."""
    leaf = w.detach().requires_grad_()
    inner = grad(lambda x: loss(x, leaf) + (leaf * leaf).sum())(x)
    return inner, *torch.autograd.grad(inner.sum(), leaf)


def plain_constant(x: Any, w: Any) -> Any:
    plain = torch.ones(3, dtype=w.dtype)
    return grad(lambda x: (x @ torch.add(w, plain)).sum())(x)


def pulled_back(x: Any, w: Any) -> Any:
    found: Any = vjp(lambda x: torch.tanh(x @ w), x)
    return found[1](found[0])


def backward_within_vmap(x: Any, w: Any) -> Any:
    leaf = x.detach().requires_grad_()
    out = (leaf * 2).sum(0)
    return vmap(lambda g: torch.autograd.grad(out, leaf, g)[0])(torch.eye(4, dtype=x.dtype))


CASES: dict[str, Case] = {
    "grad": lambda x, w: grad(loss, argnums=(0, 1))(x, w),
    "grad of one operand": lambda x, w: grad(loss)(x, w),
    "grad of a sum": lambda x, w: grad(of_one)(x),
    "grad of norms": lambda x, w: (grad(normed)(x), grad(softly)(x)),
    "grad of grad": lambda x, w: grad(lambda x: grad(of_one)(x).pow(2).sum())(x),
    "grad_and_value": lambda x, w: grad_and_value(loss)(x, w),
    "grad of a closure": lambda x, w: grad(lambda x: loss(x, w))(x),
    "vjp": pulled_back,
    "vmap": lambda x, w: vmap(lambda row: row.sin() * row)(x),
    "vmap of products": lambda x, w: vmap(lambda row: row @ w)(x),
    "vmap along dim 1": lambda x, w: vmap(lambda column: column.sum(), in_dims=1)(x),
    "per-sample gradients": per_sample,
    "jacrev": lambda x, w: jacrev(lambda x: torch.tanh(x @ w).sum(0))(x),
    "jacfwd": lambda x, w: jacfwd(lambda x: torch.tanh(x @ w).sum(0))(x),
    "hessian": lambda x, w: hessian(lambda x: loss(x, w))(x),
    "jvp": lambda x, w: jvp(lambda x: products(x, w), (x,), (tangent_of(x),)),
    "jvp of a sum": lambda x, w: jvp(of_one, (x,), (tangent_of(x),)),
    "jvp of norms": lambda x, w: (jvp(normed, (x,), (tangent_of(x),)), jvp(softly, (x,), (tangent_of(x),))),
    "ensemble": ensemble,
    "functional_call": of_module,
    "beside autograd": trained_and_constant,
    "is_grads_batched": batched,
    "dual product": lambda x, w: dual(lambda x: x @ w, x, tangent_of(x)),
    "dual products": lambda x, w: dual(lambda x: products(x, w), x, tangent_of(x)),
    "dual norms": lambda x, w: (dual(normed, x, tangent_of(x)), dual(softly, x, tangent_of(x))),
    "dual sum": lambda x, w: dual(of_one, x, tangent_of(x)),
    "dual of a partial sum": lambda x, w: dual(lambda x: x.sum(0).relu(), x, tangent_of(x)),
    "dual views": lambda x, w: dual(lambda x: x.t()[0].unsqueeze(0).expand(2, 5), x, tangent_of(x)),
    "jacobian": lambda x, w: torch.autograd.functional.jacobian(lambda x: torch.tanh(x @ w).sum(0), x),
    "functional.vjp": lambda x, w: torch.autograd.functional.vjp(
        lambda x: torch.tanh(x @ w).sum(0), x, torch.ones_like(w[0])
    ),
}
CROSSINGS: dict[str, Case] = {
    "redistribute": lambda x, w: dual(lambda x: x.redistribute(placements=[R, S1]) * 2, x, tangent_of(x)),
    "to a partial sum": lambda x, w: dual(lambda x: x.redistribute(placements=[Partial(), R]) * 2, x, tangent_of(x)),
    "full_tensor": lambda x, w: dual(lambda x: x.full_tensor() * 2, x, tangent_of(x)),
    "to_local and back": lambda x, w: dual(
        lambda x: DTensor.from_local(x.to_local() * 2, grid(), x.placements, shape=x.shape), x, tangent_of(x)
    ),
    "a tangent laid out otherwise": lambda x, w: dual(
        lambda x: x.full_tensor() * 2, x, tangent_of(x).redistribute(placements=[S1, S0])
    ),
    "a tangent that is replicated": lambda x, w: dual(
        lambda x: (x.redistribute(placements=[S1, S0]) * 2)[1:], x, tangent_of(x).redistribute(placements=[R, R])
    ),
}
"""Where a dual tensor is moved: each doubles it."""
REFUSED: dict[str, tuple[Case, str]] = {
    "jacobian, forward-mode": (
        lambda x, w: torch.autograd.functional.jacobian(
            lambda x: torch.tanh(x @ w).sum(0), x, strategy="forward-mode", vectorize=True
        ),
        "batched by vmap or vectorize=True.*torch.func.jacrev",
    ),
    "grad within vmap": (
        backward_within_vmap,
        "takes one tensor at a time",
    ),
    "from_local": (
        lambda x, w: vmap(lambda row: DTensor.from_local(row, grid(), [R, R]))(x.to_local()),
        "from_local of a tensor that torch.func follows.*give the DTensor to the transformed function",
    ),
    "distribute_tensor": (
        lambda x, w: grad(lambda t: distribute_tensor(t, grid(), [R, R]).sum())(x.to_local()),
        "distribute_tensor of a tensor that torch.func follows",
    ),
    "distribute_tensor of a dual": (
        lambda x, w: dual(lambda t: distribute_tensor(t, grid(), [R, R]), x.full_tensor(), tangent_of(x.full_tensor())),
        "distribute_tensor of a tensor with a tangent.*DTensor.from_local",
    ),
    "a plain operand": (plain_constant, r"add: a plain torch.Tensor of shape \(3,\)"),
    "a tangent of a maximum": (
        lambda x, w: dual(lambda x: x.redistribute(placements=[R, R]), maximum(x), tangent_of(x)),
        "a tangent of a partial max.*only sums are linear",
    ),
}


def maximum(x: Any) -> Any:
    return DTensor.from_local(x.full_tensor(), grid(), [Partial("max"), R], shape=x.shape)


def outcome(case: Case, x: Any, w: Any, expected: Any) -> str:
    """What is wrong, or nothing."""
    try:
        leaves = tree_leaves(case(x, w))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for found, right in zip(leaves, tree_leaves(expected), strict=True):
        if found is None:
            return "a tangent was dropped"
        found = found.full_tensor() if isinstance(found, DTensor) else found
        if found.shape != right.shape or not torch.allclose(found, right):
            return f"{found} is not {right}"
    return ""


def refusal(case: Case, x: Any, w: Any, message: str) -> str:
    """What is wrong, or nothing."""
    try:
        case(x, w)
    except (dshard.MixedError, dshard.LayoutError) as error:
        return "" if re.search(message, str(error)) else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def followed(layouts: Layouts) -> dict[str, str]:
    torch.manual_seed(0)
    a, b = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    found = {}
    for p, q in layouts:
        x, w = distribute_tensor(a, grid(), p), distribute_tensor(b, grid(), q)
        for name, case in CASES.items():
            found[f"{name} {p} {q}"] = outcome(case, x, w, case(a, b))
        twice = dual(lambda x: x * 2, a, tangent_of(a))
        for name, case in CROSSINGS.items():
            expected = tuple(t[1:] for t in twice) if "replicated" in name else twice
            found[f"{name} {p} {q}"] = outcome(case, x, w, expected)
        for name, (case, message) in REFUSED.items():
            found[f"{name} {p} {q}"] = refusal(case, x, w, message)
    return found


MADE: dict[str, Callable[[Any, Tensor], Any]] = {
    "distribute_tensor": lambda c, plain: distribute_tensor(plain, grid(), [S0, R]),
    "distribute_tensor, sent by none": lambda c, plain: distribute_tensor(plain, grid(), [S0, R], src_data_rank=None),
    "from_local": lambda c, plain: DTensor.from_local(plain, grid(), [R, R], shape=plain.shape),
    "full": lambda c, plain: dshard.full((5, 4), 2.0, device_mesh=grid(), placements=[S1, S0], dtype=plain.dtype),
    "randn": lambda c, plain: dshard.randn(5, 4, device_mesh=grid(), placements=[S1, S0], dtype=plain.dtype),
    "redistribute": lambda c, plain: c.redistribute(placements=[S1, R]),
    "redistribute of what is made": lambda c, plain: distribute_tensor(plain, grid(), [R, S1]).redistribute(
        placements=[S0, R]
    ),
    "operators": lambda c, plain: (c * 2 + 1).relu(),
    "ones_like": lambda c, plain: torch.ones_like(c),
}
"""Distributed tensors that functions make, which transforms of these do not follow."""
WAYS: dict[str, Callable[[Case, Any], Any]] = {
    "grad": lambda f, x: grad(lambda x: f(x, None).sum())(x),
    "jvp": lambda f, x: jvp(lambda x: f(x, None), (x,), (tangent_of(x),)),
    "dual": lambda f, x: dual(lambda x: f(x, None), x, tangent_of(x)),
    "jacrev": lambda f, x: jacrev(lambda x: f(x, None).sum(1))(x),
    "jacfwd": lambda f, x: jacfwd(lambda x: f(x, None).sum(1), randomness="same")(x),
    "hessian": lambda f, x: hessian(lambda x: f(x, None).sum())(x),
    "vmap": lambda f, x: vmap(lambda y: f(x, y), randomness="same")(torch.stack([x, x])),
}


def scaled(by: Callable[[], Any]) -> Case:
    return lambda x, y: x * (x if y is None else y) * by()


def made_within(every: int) -> dict[str, str]:
    """What is wrong in every n-th way to differentiate, in turn: all of them, for a step of 1."""
    a, c = torch.arange(20.0, dtype=torch.float64).view(5, 4).sin(), torch.full((5, 4), 3.0, dtype=torch.float64)
    x, wrong = distribute_tensor(a, grid(), [S0, S1]), {}
    turns = itertools.count()
    for name, make in MADE.items():
        for recorded in (False, True):
            by = partial(make, distribute_tensor(c, grid(), [S0, R]).requires_grad_(recorded), c)
            dshard.manual_seed(0)
            right = by().full_tensor().detach()
            for way, derivative in list(WAYS.items())[next(turns) % every :: every]:
                expected = derivative(scaled(right.clone), a)
                dshard.manual_seed(0)
                found = outcome(lambda x, by: derivative(scaled(by), x), x, by, expected)  # noqa: B023
                wrong |= {f"{way} of {name}, {recorded}": found} if found else {}
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.thorough)])
def test_transforms_do_not_follow_what_a_function_makes(ranks: RankPool, every: int) -> None:
    assert ranks.run(made_within, every, timeout=120) == [{}] * 4


@pytest.mark.ranks
@pytest.mark.parametrize("layouts", [LAYOUTS[1:2], pytest.param(LAYOUTS, marks=pytest.mark.thorough)])
def test_transforms_and_tangents_follow_distributed_tensors(ranks: RankPool, layouts: Layouts) -> None:
    for found in ranks.run(followed, layouts, timeout=120):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
        assert len(found) == len(layouts) * (len(CASES) + len(CROSSINGS) + len(REFUSED))


# -- x.data = ...


def assigned() -> list[str]:
    wrong = []
    a, b = torch.arange(12.0).view(4, 3), torch.arange(12.0).view(4, 3).cos()
    targets: list[list[Placement]] = [[S0, R], [R, S1], [S1, S0], [R, R]]
    for source in targets:
        for target in targets:
            p: Any = nn.Parameter(distribute_tensor(a, grid(), source))
            q = distribute_tensor(b, grid(), target)
            for step in range(2):  # recorded before, and with a gradient
                (p * p).sum().backward()
                value: Any = q * (step + 1)
                p.data = value
                p.grad = None
                (p * p * p).sum().backward()
                full = b * (step + 1)
                right = isinstance(p, nn.Parameter) and p.layout == value.layout == p.grad.layout
                if not right or not torch.equal(p.full_tensor(), full):
                    wrong.append(f"{source} <- {target}: {p}")
                if not torch.allclose(p.grad.full_tensor(), 3 * full**2):
                    wrong.append(f"gradient of {source} <- {target}: {p.grad.full_tensor()}")
            value.zero_()  # it is the same memory, as in torch
            p.data.add_(1)
            if not torch.equal(p.full_tensor(), torch.ones(4, 3)) or not torch.equal(
                value.full_tensor(), p.full_tensor()
            ):
                wrong.append(f"memory of {source} <- {target}: {p}")
    return wrong


def assigned_plain() -> list[str]:
    """Plain values of the parameters of a model with whole batches, also of more rows, are laid out as these are."""
    wrong, x = [], torch.arange(24.0, dtype=torch.float64).view(6, 4).sin()
    alone, model = (nn.Linear(4, 3, dtype=torch.float64) for _ in range(2))
    mesh = dshard.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("of", "models")
    )  # on the other plain values are refused
    dshard.parallelize(model, mesh, {"weight": [R, S0], "bias": [R, S0]}, x)
    for rows in (3, 5):
        values = torch.arange(4.0 * rows, dtype=torch.float64).view(rows, 4).cos(), torch.ones(rows).double()
        for net in (alone, model):
            for p, value in zip(net.parameters(), values, strict=True):
                p.data, p.grad = value.clone(), None
            net(x).square().sum().backward()
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            grad: Any = p.grad
            if not isinstance(p, DTensor) or p.placements != (R, S0) or not p.full_tensor().equal(right.data):
                wrong.append(f"{rows} rows: {p}")
            elif not torch.allclose(grad.full_tensor(), right.grad):
                wrong.append(f"gradient of {rows} rows: {grad}")
    own = model.weight.to_local()
    with pytest.raises(MixedError, match=r"x\.data = a plain torch\.Tensor"):
        model.weight.data = own
    return wrong


def refused() -> None:
    p: Any = nn.Parameter(distribute_tensor(torch.ones(4, 3), grid(), [S0, R]))
    with pytest.raises(MixedError, match=r"x.data = a plain torch.Tensor of shape \(4, 3\).*distribute_tensor\(value"):
        p.data = torch.zeros(4, 3)
    assert torch.equal(p.full_tensor(), torch.ones(4, 3))


def network() -> tuple[nn.Sequential, nn.Sequential]:
    """The same network on one device, and distributed."""
    torch.manual_seed(1)
    mine, theirs = (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    layouts: list[tuple[int, list[Placement]]] = [(0, [S0, R]), (2, [R, S1])]
    for i, placements in layouts:
        layer: Any = theirs[i]
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), grid(), placements))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), grid(), [R, S0]))
    return mine, theirs


def values(model: nn.Module) -> list[Tensor]:
    found = []
    for p in model.parameters():
        assert p.grad is not None
        found += [t.full_tensor() if isinstance(t, DTensor) else t for t in (p.detach(), p.grad)]
    return found


def changed() -> list[str]:
    """What torch does to the parameters of modules, by `data` or in its stead."""
    wrong = []

    def through_vector(model: nn.Module) -> None:
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(vector.detach() * 2, model.parameters())

    def weight_normed(model: nn.Module) -> None:
        nn.utils.parametrizations.weight_norm(model[0])  # type: ignore[index]

    def weight_normed_before(model: nn.Module) -> None:
        nn.utils.weight_norm(model[2])  # type: ignore[index]

    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    def parametrized(model: nn.Module) -> None:
        parametrize.register_parametrization(model[0], "weight", Doubled())  # type: ignore[index]

    def parametrized_for_good(model: nn.Module) -> None:
        parametrized(model)
        parametrize.remove_parametrizations(model[0], "weight")  # type: ignore[index]

    def halved(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = p.data * 0.5

    ways: list[Callable[[nn.Module], Any]] = [
        through_vector,
        weight_normed,
        weight_normed_before,
        parametrized,
        parametrized_for_good,
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16).float(),
        halved,
    ]
    for i, way in enumerate(ways):
        results = []
        for model in network():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                way(model)
            first = next(model.parameters())
            x = torch.linspace(0, 1, 12, dtype=first.dtype).view(4, 3)
            x = distribute_tensor(x, grid(), [S0, R]) if isinstance(first, DTensor) else x
            model(x).pow(2).sum().backward()
            results.append(values(model))
        for mine, theirs in zip(*results, strict=True):
            if mine.dtype != theirs.dtype or not torch.allclose(mine, theirs, atol=1e-6):
                wrong.append(f"{getattr(way, '__name__', i)} {i}: {theirs} is not {mine}")
    return wrong


def of_data() -> list[str]:
    refused()
    return assigned() + assigned_plain() + changed()


@pytest.mark.ranks
def test_data_takes_the_layout_and_memory_of_what_it_is_given(ranks: RankPool) -> None:
    assert ranks.run(of_data, timeout=120) == [[]] * 4


# -- through a parallelized model


def of_inputs() -> list[str]:
    """Derivatives by what a parallelized model is given, beside those of one device."""
    wrong, x = [], torch.arange(24.0, dtype=torch.float64).view(6, 4).sin()
    made = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double() for _ in "ab"]
    made[1].load_state_dict(made[0].state_dict())
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "features"))
    dshard.parallelize(made[1], mesh, "data x megatron", x)
    derivatives: dict[str, Case] = {
        "gradient": lambda net, x: grad(lambda z: net(z).square().sum())(x),
        "pulled back": lambda net, x: vjp(net, x)[1](torch.ones_like(net(x)))[0],
        "tangent": lambda net, x: jvp(net, (x,), (x.cos(),))[1],
        "of each row": lambda net, x: vmap(jacrev(lambda z: net(z[None])[0]))(x),
        "curvature": lambda net, x: vmap(hessian(lambda z: net(z[None]).sum()))(x),
    }
    for name, derivative in derivatives.items():
        right: Tensor = derivative(made[0], x)
        found: Tensor = derivative(made[1], dshard.distribute_batch(made[1], x)).full_tensor()
        if not torch.allclose(found, right):
            wrong.append(f"{name}: {found} is not {right}")
    return wrong


@pytest.mark.ranks
def test_transforms_follow_the_inputs_of_a_parallelized_model(ranks: RankPool) -> None:
    assert ranks.run(of_inputs, timeout=120) == [[]] * 4


def of_parameters(plan: str) -> list[str]:
    """Derivatives by the parameters of a parallelized model that is given plain batches, beside those of one device."""
    wrong, x = [], torch.arange(24.0, dtype=torch.float64).view(6, 4).sin()
    made = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double() for _ in "ab"]
    made[1].load_state_dict(made[0].state_dict())
    shape, names = ((2, 2), ("rows", "features")) if " x " in plan else ((4,), ("rows",))
    dshard.parallelize(made[1], dshard.init_device_mesh("cpu", shape, mesh_dim_names=names), plan, x)

    def loss(net: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(net, params, (x,)), y * 1.0)

    def of_bias(net: nn.Module, params: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda bias: functional_call(net, params | {"0.bias": bias}, (x,))

    def of_duals(net: nn.Module, params: dict[str, Tensor]) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in params.items()}
            return tuple(forward_ad.unpack_dual(functional_call(net, duals, (x,))))

    def tangent_of_gradient(net: nn.Module, params: dict[str, Tensor]) -> tuple[Any, ...]:
        with forward_ad.dual_level():
            leaf = forward_ad.make_dual(x.clone().requires_grad_(), x.cos())
            value = functional_call(net, params, (leaf,)).square().sum()
            return tuple(forward_ad.unpack_dual(torch.autograd.grad(value, leaf, create_graph=True)[0]))

    def by_cotangent(net: nn.Module, params: dict[str, Tensor]) -> tuple[Tensor, ...]:
        leaf, given = x.clone().requires_grad_(), x[:, :2].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(net(leaf), leaf, given, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [given, leaf])

    derivatives: dict[str, Case] = {
        "gradient": lambda net, p: grad(partial(loss, net))(p, x, x[:, :2]),
        "gradient and value": lambda net, p: grad_and_value(partial(loss, net))(p, x, x[:, :2]),
        "pulled back": lambda net, p: vjp(lambda q: functional_call(net, q, (x,)), p)[1](torch.ones_like(net(x))),
        "tangent": lambda net, p: jvp(of_bias(net, p), (p["0.bias"],), (torch.ones_like(p["0.bias"]),)),
        "jacobian": lambda net, p: (jacrev(of_bias(net, p))(p["0.bias"]), jacfwd(of_bias(net, p))(p["0.bias"])),
        "curvature": lambda net, p: hessian(lambda bias: of_bias(net, p)(bias).square().sum())(p["0.bias"]),
        "dual input": lambda net, p: dual(net, x, x.cos()),
        "dual parameters": of_duals,
        "tangent of a gradient": tangent_of_gradient,
        "gradient by what a pass is given": by_cotangent,
    }
    for name, derivative in derivatives.items():
        right, found = (derivative(net, {n: p.detach() for n, p in net.named_parameters()}) for net in made)
        problem = outcome(lambda x, w: found, None, None, right)  # noqa: B023
        wrong += [f"{name}: {problem}"] if problem else []
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("plan", ["data x megatron", "fsdp"])
def test_transforms_follow_the_parameters_of_a_parallelized_model(ranks: RankPool, plan: str) -> None:
    assert ranks.run(of_parameters, plan, timeout=120) == [[]] * 4


def batched_tangents() -> None:
    net, x = nn.Linear(4, 2).double(), torch.ones(6, 4, dtype=torch.float64)
    dshard.parallelize(net, grid(), "data x megatron", x)
    with pytest.raises(MixedError, match=r"a forward-mode derivative .* use vectorize=False"):
        torch.autograd.functional.jacobian(net, x, vectorize=True, strategy="forward-mode")


@pytest.mark.ranks
def test_batched_tangents_are_refused_with_the_way_out(ranks: RankPool) -> None:
    ranks.run(batched_tangents)


# -- within the forward pass of a model


class Energy(nn.Module):
    """An energy of each row, and its derivatives by the row."""

    def __init__(self, derivative: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.derivative = derivative
        self.inner, self.outer = nn.Linear(4, 8).double(), nn.Linear(8, 1).double()
        self.stacked = nn.Parameter(torch.arange(24.0, dtype=torch.float64).view(3, 8, 1).cos())

    def energy(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        return self.outer(hidden).squeeze(-1) + vmap(lambda w: hidden @ w)(self.stacked).sum(0).squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.derivative(self.energy, x)


def by_autograd(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "by autograd": by_autograd,
    "gradient": lambda energy, x: grad(lambda z: energy(z).sum())(x),
    "of each row": lambda energy, x: vmap(grad(energy))(x),
    "tangent": lambda energy, x: jvp(energy, (x,), (torch.ones_like(x),))[1],
    "curvature": lambda energy, x: vmap(hessian(energy))(x).diagonal(0, 1, 2).sum(-1),
}


def derivatives_within(plan: str | dshard.parallel.Auto) -> list[str]:
    wrong = []
    for name, derivative in DERIVATIVES.items():
        made, found = [Energy(derivative) for _ in "ab"], []
        made[1].load_state_dict(made[0].state_dict())
        x = torch.arange(24.0, dtype=torch.float64).view(6, 4).sin()
        dshard.parallelize(made[1], grid(), plan, x)
        for net in made:
            net(x * 2).square().sum().backward()
            found.append([p.grad for p in net.parameters()])
        for right, own in zip(*found, strict=True):
            if right is None or own is None or not torch.allclose(own.full_tensor(), right):  # type: ignore[attr-defined]
                wrong += [] if right is own else [f"{name}: {own} is not {right}"]
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("plan", ["data x megatron", dshard.parallel.Auto(seconds=0.3)], ids=["named", "auto"])
def test_models_take_derivatives_in_their_forward_pass(ranks: RankPool, plan: str | dshard.parallel.Auto) -> None:
    assert ranks.run(derivatives_within, plan, timeout=120) == [[]] * 4


def test_a_distributed_tensor_is_not_the_data_of_a_plain_one() -> None:
    """It would have no memory, and end the process that uses it."""
    mesh, weight = dshard.Mesh((2,), ("x",)), nn.Parameter(torch.ones(2, 3))
    value = dshard.DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)], shape=(2, 3))

    with pytest.raises(MixedError, match="of a plain x, which then had no memory"):
        weight.data = value
    weight.data = torch.zeros(3)
