"""Batch norm of sharded batches: that of one device in two small messages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.default_cases import one_way_each
from torch import Tensor, nn

import dshard
from dshard import Layout, Mesh, Partial, Replicate, Shard, distribute_tensor, trace
from dshard.testing import RankPool, distribute, rank_pool, simulated, whole

NORMS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "rows": (nn.BatchNorm1d, (7, 3), {}),
    "few rows": (nn.BatchNorm1d, (2, 3), {}),
    "sequences": (nn.BatchNorm1d, (5, 3, 4), {"momentum": None}),
    "images": (nn.BatchNorm2d, (3, 6, 5, 2), {"affine": False}),
    "volumes": (nn.BatchNorm3d, (2, 3, 2, 5, 2), {"track_running_stats": False}),
    "no bias": (lambda n, **options: without_bias(nn.BatchNorm1d(n, **options)), (6, 3), {}),
}
LAST = Shard(9)
"""The last dim, of however many."""
LAYOUTS = [
    Layout(Mesh((4,), ("x",)), [Shard(0)]),
    Layout(Mesh((4,), ("x",)), [Shard(1)]),
    Layout(Mesh((4,), ("x",)), [Partial()]),
    Layout(Mesh((2, 2), ("x", "y")), [Shard(0), Shard(1)]),
    Layout(Mesh((2, 2), ("x", "y")), [Shard(0), LAST]),
    Layout(Mesh((2, 2), ("x", "y")), [Shard(0), Shard(0)]),
    Layout(Mesh((2, 2), ("x", "y")), [Shard(0), Shard(1, blocks=3)]),
]


def without_bias(norm: nn.Module) -> nn.Module:
    norm.bias = None
    return norm


def results(norm: nn.Module, x: Any) -> list[Any]:
    """Outputs, first and second gradients, and the buffers of two steps and an evaluation."""
    found: list[Any] = []
    for step in range(2):
        y = norm(x * (step + 1))
        leaves = [x, *norm.parameters()]
        grads = torch.autograd.grad((y * y.detach().sin()).sum(), leaves, create_graph=True)
        penalty: Any = sum((g * g.detach()).sum() for g in grads)
        found += [y, *grads, *torch.autograd.grad(penalty, leaves, allow_unused=True)]
    norm.eval()
    return [*found, norm(x), *norm.buffers()]


@pytest.mark.parametrize(("layout", "name"), one_way_each(LAYOUTS, list(NORMS)), ids=str)
def test_batch_norm_is_that_of_one_device(name: str, layout: Layout) -> None:
    make, shape, options = NORMS[name]
    norm = make(shape[1], **options).double()
    for p in norm.parameters():
        nn.init.uniform_(p, 0.5, 2)
    mine, x = copy.deepcopy(norm), torch.randn(shape, dtype=torch.float64) * 3 + 5
    everywhere = [Replicate()] * layout.mesh.ndim
    with simulated(layout.mesh):
        for key in ("_parameters", "_buffers"):
            held = getattr(mine, key)
            for each, t in held.items():
                own = None if t is None else distribute(t.detach(), Layout(layout.mesh, everywhere))
                held[each] = own if own is None or key == "_buffers" else nn.Parameter(own)
        placements = [Shard(len(shape) - 1) if p == LAST else p for p in layout.placements]
        found = results(mine, distribute(x, Layout(layout.mesh, placements)).requires_grad_())
        for own, right in zip(found, results(norm, x.requires_grad_()), strict=True):
            if own is None or right is None:  # a gradient that is not there is zero
                assert right is None
                assert own is None or not whole(own.redistribute(placements=everywhere)).any()
            else:
                torch.testing.assert_close(whole(own.redistribute(placements=everywhere)), right.detach())


def test_means_that_are_large_beside_distances_lose_no_digits() -> None:
    x = (torch.randn(64, 3) * 0.1 + 1000).float()
    right = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    layout = Layout(Mesh((4,), ("x",)), [Shard(0)])
    with simulated(layout.mesh):
        for dtype, most in (torch.float32, 2e-3), (torch.bfloat16, 2e-2):
            given = x.to(dtype) if dtype is torch.float32 else (x - 1000).to(dtype)
            found = torch.nn.functional.batch_norm(distribute(given, layout), None, None, training=True)
            assert found.dtype == dtype
            assert (whole(found).double() - right).abs().max() < most * right.abs().max()


def saved_bytes() -> int:
    """The bytes that the norm of a batch in half precision keeps for its backward pass, beside its input."""
    mesh, kept = dshard.init_device_mesh("cpu", (2,), mesh_dim_names=("d",)), dict[int, int]()
    norm, x = nn.BatchNorm1d(3), torch.randn(64, 3, dtype=torch.bfloat16)
    dshard.parallelize(norm, mesh, "data", x)
    given = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()

    def noted(t: Any) -> Any:
        local = t.to_local() if isinstance(t, dshard.DTensor) else t
        kept[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda t: t):
        norm(given)
    del kept[given.to_local().untyped_storage().data_ptr()]
    return max(kept.values())


@pytest.mark.ranks
def test_no_copy_in_a_wider_dtype_is_kept() -> None:
    for most in rank_pool(2).run(saved_bytes):
        assert most < 32 * 3 * 2  # of a rank's rows in half precision


def messages() -> list[list[str]]:
    """The collectives of warm steps, forward and backward, without those of the parameters' gradients."""
    mesh = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    norm = nn.BatchNorm1d(3)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    reference = copy.deepcopy(norm)
    dshard.parallelize(norm, mesh, "data", x)
    for _ in range(3):
        given = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        alone = x.clone().requires_grad_()
        with trace() as forward:
            out = norm(given)
        loss: Tensor = (out * out.detach().sin()).sum()
        with trace() as backward:
            (grad,) = torch.autograd.grad(loss, given)
        y = reference(alone)
        torch.testing.assert_close(out.full_tensor(), y)
        torch.testing.assert_close(grad.full_tensor(), torch.autograd.grad((y * y.detach().sin()).sum(), alone)[0])
        for own, right in zip(norm.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(own.full_tensor(), right)  # type: ignore[operator]
    return [[event.collective for event in found.events] for found in (forward, backward)]


@pytest.mark.ranks
def test_one_message_forward_and_one_backward(ranks: RankPool) -> None:
    assert ranks.run(messages) == [[["all_gather"], ["reduce_scatter"]]] * 4


def test_a_step_after_an_evaluation_leaves_its_graph_as_it_is() -> None:
    """A consistency loss of both passes: torch counts no writes to the statistics that the evaluation has saved."""
    layout, x = Layout(Mesh((4,), ("x",)), [Shard(0)]), torch.randn(6, 3)
    found = []
    with simulated(layout.mesh):
        for given in (x.clone(), distribute(x, layout)):
            norm = nn.BatchNorm1d(3, affine=False)
            if isinstance(given, dshard.DTensor):
                for name, t in list(norm.named_buffers()):
                    setattr(norm, name, distribute(t, Layout(layout.mesh, [Replicate()])))
            evaluated = norm.eval()(given.requires_grad_())
            (norm.train()(given) - evaluated).square().sum().backward()
            found.append(given.grad)
    torch.testing.assert_close(whole(found[1]), found[0])


def with_plain_statistics() -> None:
    """Statistics that a program sets are plain, and written to in each step."""
    mesh, x = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), torch.randn(8, 3, dtype=torch.float64)
    for plan in ("data", {"*": [Replicate()]}):
        norm = nn.BatchNorm1d(3).double()
        mine = dshard.parallelize(copy.deepcopy(norm), mesh, plan, x)
        for each in (norm, mine):
            each.running_mean, each.running_var = torch.ones(3).double(), torch.full((3,), 2.0).double()
            for step in range(3):
                (each(x * (step + 1)).exp().sum()).backward()
        torch.testing.assert_close(mine.weight.grad.full_tensor(), norm.weight.grad)
        for own, right in ((mine.running_mean, norm.running_mean), (mine.running_var, norm.running_var)):
            torch.testing.assert_close(whole(own) if isinstance(own, dshard.DTensor) else own, right)


@pytest.mark.ranks
def test_plain_statistics_are_those_of_one_device(ranks: RankPool) -> None:
    ranks.run(with_plain_statistics)
