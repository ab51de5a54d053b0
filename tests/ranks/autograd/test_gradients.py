"""Gradients across layouts, local tensors and ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard import DeviceMesh, DTensor, Layout, Mesh, Partial, Replicate, Shard, distribute_tensor, parallelize
from dshard.testing import RankPool, distribute, dtensors, layouts, simulated, whole

GRID = Mesh((2, 2), ("dp", "tp"))
X = torch.arange(15.0).view(5, 3)


def placed(x: Tensor, *placements: Any) -> DTensor:
    return distribute(x, Layout(GRID, placements))


@given(dtensors(), st.data())
def test_gradients_of_leaves_lie_like_the_leaves(x: DTensor, data: st.DataObject) -> None:
    other = data.draw(layouts(x.layout.mesh, x.ndim))
    value = whole(x)
    with simulated(x.layout.mesh):
        x.requires_grad_()
        y = dshard.autograd.crossing.redistribute(x, other)
        (x * x + 3 * y).backward(distribute(torch.ones(x.shape, dtype=x.dtype), x.layout.cotangent()))

        assert x.grad is not None
        assert x.grad.layout == x.layout.cotangent()
        torch.testing.assert_close(whole(x.grad), 2 * value + 3)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 1, 2)])
def test_gradients_on_meshes_with_axes_of_one_rank_lie_like_the_leaves(shape: tuple[int, ...]) -> None:
    mesh, x, w = Mesh(shape, ("a", "b", "c")[: len(shape)]), torch.randn(6, 4, 3).double(), torch.ones(4, 3).double()
    expected = torch.autograd.grad(F.layer_norm(x, (4, 3), w.requires_grad_()).square().sum(), w)[0]
    pairs = [*product(product([Replicate(), Shard(0), Shard(1)], repeat=len(shape)), repeat=2)]
    for one, other in pairs[:: 5 if len(shape) == 3 else 1]:  # each placement stands beside each other one
        with simulated(mesh):
            leaf = distribute(w, Layout(mesh, one)).requires_grad_()
            F.layer_norm(distribute(x, Layout(mesh, other)), (4, 3), leaf).square().sum().backward()

        torch.testing.assert_close(whole(leaf.grad), expected)


def test_gradients_accumulate_in_place() -> None:
    with simulated(GRID):
        x = placed(X, Shard(0), Shard(1)).requires_grad_()
        for _ in range(2):
            (x * 2).sum().backward()

        assert x.grad.layout == x.layout
        assert whole(x.grad).equal(torch.full_like(X, 4.0))


def test_to_local_takes_its_gradient_as_said() -> None:
    """By default the local gradient lies like the tensor; as a partial sum, the ranks' terms add up."""
    with simulated(GRID):
        for laid, expected in (((Replicate(),) * 2, 1.0), ((Partial(), Replicate()), 2.0), ((Partial(),) * 2, 4.0)):
            x = placed(X, Replicate(), Replicate()).requires_grad_()
            x.to_local(grad_placements=laid).sum().backward()

            assert whole(x.grad).equal(torch.full_like(X, expected))


def test_full_tensor_takes_its_gradient_as_said() -> None:
    with simulated(GRID):
        x = placed(X, Shard(0), Replicate()).requires_grad_()
        x.full_tensor(grad_placements=[Partial(), Replicate()]).sum().backward()

        assert x.grad.layout == x.layout
        assert whole(x.grad).equal(torch.full_like(X, 2.0))


def test_from_local_gives_its_gradient_as_said() -> None:
    with simulated(GRID):
        for laid, expected in ((None, [1.0] * 4), ([Replicate(), Partial()], [0.5] * 4)):
            local = dshard.comm.stack({rank: torch.ones(2) for rank in range(4)}).requires_grad_()
            x = DTensor.from_local(local, GRID, [Replicate(), Replicate()], grad_placements=laid)
            x.sum().backward()

            assert [grad[0].item() for grad in dshard.comm.rank_tensors.unstack(local.grad).values()] == expected


def test_hooks_and_retained_gradients_see_dtensors() -> None:
    with simulated(GRID):
        seen = []
        x = placed(X, Shard(0), Replicate()).requires_grad_()
        y = x * 2
        y.retain_grad()
        y.register_hook(lambda grad: seen.append(type(grad)))
        y.sum().backward()

        assert seen == [DTensor]
        assert isinstance(y.grad, DTensor)


# -- real ranks


@cache
def real_mesh() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def second_derivatives() -> list[float]:
    """The largest differences of first and second derivatives of linear and matmul from single-device."""
    torch.manual_seed(0)
    values = [torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)]
    found = []
    for function in (F.linear, lambda a, b: a @ b.t()):
        ours = [
            distribute_tensor(x, real_mesh(), laid).requires_grad_()
            for x, laid in zip(values, ([Shard(0), Shard(1)], [Replicate(), Shard(0)]), strict=True)
        ]
        theirs = [x.clone().requires_grad_() for x in values]
        for a, b in zip(penalty(function, *ours), penalty(function, *theirs), strict=True):
            found.append((a.full_tensor() - b).abs().max().item())
    return found


def penalty(function: Any, a: Tensor, b: Tensor) -> list[Tensor]:
    """The gradients of a norm of gradients."""
    out = function(a, b).tanh().sum()
    grads = torch.autograd.grad(out, [a, b], create_graph=True)
    sum((grad * grad).sum() for grad in grads).backward()
    return [grads[0].detach(), grads[1].detach(), a.grad, b.grad]


@pytest.mark.ranks
def test_second_derivatives_are_those_of_one_device(ranks: RankPool) -> None:
    for differences in ranks.run(second_derivatives):
        assert max(differences) < 1e-12


def empty_shards() -> list[Any]:
    """Attention whose batch leaves a rank without work: its backward pass meets the others nevertheless."""
    mesh = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    query, mask = torch.ones(2, 1, 3, 4, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    q = distribute_tensor(query, mesh, [Shard(0)]).requires_grad_()
    m = distribute_tensor(mask, mesh, [Replicate()]).requires_grad_()
    F.scaled_dot_product_attention(q, q, q * q, m).sum().backward()
    return [q.grad.full_tensor().sum().item(), m.grad.full_tensor().abs().sum().item()]


@pytest.mark.ranks
def test_a_rank_without_work_takes_part(ranks: RankPool) -> None:
    for total, masked in ranks.run(empty_shards):
        assert total == pytest.approx(48.0)
        assert masked == pytest.approx(0.0)


def with_a_partial_scale() -> float:
    """How far the gradient of a normalised tensor is from that of one device, where its scale is a partial sum."""
    mesh = dshard.init_device_mesh("cpu", (4,))
    torch.manual_seed(1)
    far: list[float] = []
    given, scale = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    right: Any = given.clone().requires_grad_()
    F.rms_norm(right, (4,), scale).sum().backward()
    for _ in range(2):
        x: Any = distribute_tensor(given, mesh, [Replicate()]).requires_grad_()
        terms = DTensor.from_local(scale * (mesh.get_rank() - 1) / 2, mesh, [Partial()])
        F.rms_norm(x, (4,), terms).sum().backward()
        far.append((x.grad.full_tensor() - right.grad).abs().max().item())
    return max(far)


@pytest.mark.ranks
def test_gradients_between_the_operators_of_a_norm_are_reduced(ranks: RankPool) -> None:
    assert max(ranks.run(with_a_partial_scale)) < 1e-12


def lookup_errors(every: int) -> float:
    """How far first and second derivatives of lookups in a table are from those of one device, warm ones too."""
    mesh = dshard.init_device_mesh("cpu", (4,))
    torch.manual_seed(2)
    values, terms = torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 8, 3, dtype=torch.float64)
    far: list[float] = []
    kinds: list[dict[str, Any]] = [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}]
    layouts = product((8, 3), (Shard(0), Replicate()), (Replicate(), Shard(1), Shard(0)))
    for rows, of_indices, of_table in [*layouts][::every]:
        indices = torch.tensor([0, 3, 2, 1, 1, 3, 1, 3])[:rows]
        for options, _ in product(kinds, range(3)):
            results = []
            for is_distributed in (False, True):
                table: Any = values.clone()
                weights, i = terms[:, :rows], indices
                if is_distributed:
                    table = distribute_tensor(table, mesh, [of_table])
                    weights = distribute_tensor(weights, mesh, [Replicate()])
                    i = distribute_tensor(i, mesh, [of_indices])
                table.requires_grad_()
                first, second = (w.detach().requires_grad_() for w in (weights[0], weights[1]))
                picked = F.embedding(i, table, **options)
                ((picked * first).sum() + (picked * picked * second).sum()).backward(
                    create_graph="padding_idx" in options
                )
                if table.grad.requires_grad:
                    (table.grad * table.grad).sum().backward(inputs=[first, second])
                results.append([x.grad.full_tensor() if is_distributed else x.grad for x in (table, first, second)])
            far += [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]
    return max(far)


@pytest.mark.ranks
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_derivatives_lookup_errors_are_those_of_one_device(ranks: RankPool, every: int) -> None:
    assert max(ranks.run(lookup_errors, every)) < 1e-12


def hooks_after(convert: Callable[[nn.Module], object], freezes: bool) -> None:
    """Hooks registered before and after a conversion are called, as on one device; what is removed is not."""
    x, logs = torch.arange(32.0, dtype=torch.double).view(8, 4).sin(), list[list[Any]]()
    for plan in (None, "data"):
        torch.manual_seed(0)
        model, log = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double(), list[Any]()
        if plan is not None:
            parallelize(model, dshard.init_device_mesh("cpu", (4,)), plan, x)
        weight = model.get_parameter("0.weight")
        weight.register_hook(lambda grad: 2 * grad)
        handle = weight.register_hook(lambda grad: 5 * grad)
        weight.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.sum().item()))
        if freezes:
            model.requires_grad_(False)
        convert(model)
        model.requires_grad_(True)
        weight.register_hook(lambda grad: 3 * grad)
        for _ in range(2):
            model(x).square().sum().backward()
        handle.remove()
        for _ in range(2):
            model(x).square().sum().backward()
        if isinstance(weight.grad, DTensor):
            assert weight.grad.layout == weight.layout  # a sum that is no longer partial
        logs.append([*log, weight.grad.norm().item()])
    assert len(logs[0]) == 5
    assert logs[1] == pytest.approx(logs[0], rel=1e-6)


def to_the_device(model: nn.Module) -> object:
    return model.to("cpu")


def to_single_and_back(model: nn.Module) -> object:
    return model.float().double()


@pytest.mark.ranks
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("convert", [to_the_device, to_single_and_back])
def test_hooks_outlive_a_conversion(ranks: RankPool, convert: Callable[[nn.Module], object], freezes: bool) -> None:
    ranks.run(hooks_after, convert, freezes)
