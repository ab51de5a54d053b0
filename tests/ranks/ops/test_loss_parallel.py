"""Cross entropy of logits whose classes are split: the loss of one device, three numbers all-reduced for a token."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dshard import DTensor, Layout, Mesh, Replicate, Shard, distribute_tensor, init_device_mesh, strict, trace
from dshard.errors import LayoutError
from dshard.parallel import loss_parallel
from dshard.testing import RankPool, count_traffic, distribute, layouts, meshes, simulated, whole

GRID = Mesh((2, 2), ("dp", "tp"))


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3


def classes(*shape: int, n: int) -> Tensor:
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(1))


options = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.0, 0.1]),
        "ignore_index": st.sampled_from([-100, 2]),
    }
)


@given(meshes(max_axes=3, max_ranks=8), st.integers(1, 9), st.sampled_from([(), (5,), (3, 2)]), options, st.data())
def test_the_loss_and_its_gradient_are_those_of_one_device(
    mesh: Mesh, n: int, batch: tuple[int, ...], given_options: dict[str, Any], data: st.DataObject
) -> None:
    x, target = logits(*batch[:1], n, *batch[1:]), classes(*batch, n=n)
    weight = data.draw(st.sampled_from([None, torch.linspace(0.5, 2.0, n, dtype=torch.float64)]))
    layout = data.draw(layouts(mesh, x.ndim))
    alone = x.clone().requires_grad_()
    expected = F.cross_entropy(alone, target, weight, **given_options)
    expected.sum().backward()

    with simulated(mesh), loss_parallel():
        laid = distribute(x, layout).requires_grad_()
        whole_target = distribute(target, Layout(mesh, (Replicate(),) * mesh.ndim))
        whole_weight = None if weight is None else distribute(weight, Layout(mesh, (Replicate(),) * mesh.ndim))
        loss = F.cross_entropy(laid, whole_target, whole_weight, **given_options)
        loss.sum().backward()

        torch.testing.assert_close(whole(loss.detach()), expected.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(whole(laid.grad), alone.grad, rtol=1e-12, atol=1e-12, equal_nan=True)


@given(meshes(max_axes=2, max_ranks=8), st.integers(1, 9), st.data())
def test_log_softmax_and_nll_loss_are_those_of_one_device(mesh: Mesh, n: int, data: st.DataObject) -> None:
    x, target = logits(5, n), classes(5, n=n)
    layout = data.draw(layouts(mesh, 2, partial=()))
    alone = x.clone().requires_grad_()
    logs = F.log_softmax(alone, dim=-1)
    (F.nll_loss(logs, target) + logs[:, 0].sum()).backward()

    with simulated(mesh), loss_parallel():
        laid = distribute(x, layout).requires_grad_()
        ours = torch.log_softmax(laid, dim=-1)
        whole_target = distribute(target, Layout(mesh, (Replicate(),) * mesh.ndim))
        (F.nll_loss(ours, whole_target) + ours[:, 0].sum()).backward()

        torch.testing.assert_close(whole(ours.detach()), logs.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole(laid.grad), alone.grad, rtol=1e-12, atol=1e-12)


def test_a_plain_target_is_taken_as_replicated_where_the_batch_is_whole() -> None:
    x, target = logits(6, 8), classes(6, n=8)
    with simulated(GRID), loss_parallel():
        laid = distribute(x, Layout(GRID, (Replicate(), Shard(1))))

        torch.testing.assert_close(whole(F.cross_entropy(laid, target)), F.cross_entropy(x, target))
        with pytest.raises(LayoutError, match=r"a plain target of shape \(6,\) .* lay it out with distribute_tensor"):
            F.cross_entropy(distribute(x, Layout(GRID, (Shard(0), Shard(1)))), target)


def test_what_torch_refuses_is_refused() -> None:
    laid_out = Layout(GRID, (Replicate(), Shard(1)))
    with simulated(GRID), loss_parallel():
        laid = distribute(logits(6, 8), laid_out)
        with pytest.raises(IndexError, match="out of bounds"):
            F.cross_entropy(laid, torch.full((6,), 8))
        with pytest.raises((ValueError, RuntimeError), match=r"batch_size|batch size"):
            F.cross_entropy(laid, classes(5, n=8))
        with pytest.raises(ValueError, match="is not a valid value for reduction"):
            F.cross_entropy(laid, classes(6, n=8), reduction="median")


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss, lambda x, _: F.log_softmax(x, 1)])
def test_what_is_sent_counts_as_asked_for(loss: Any) -> None:
    with simulated(GRID), loss_parallel(), strict():
        loss(distribute(logits(6, 8), Layout(GRID, (Replicate(), Shard(1)))), classes(6, n=8))


def test_a_log_softmax_reduces_one_number_of_each_token_backward() -> None:
    with simulated(GRID), loss_parallel(), trace() as t:
        laid = distribute(logits(6, 8), Layout(GRID, (Replicate(), Shard(1)))).requires_grad_()
        F.log_softmax(laid, 1).square().sum().backward()

    events = [event for event in t.events if event.axis == "tp" and event.op != "number"]
    assert [(event.collective, event.nbytes) for event in events] == [("all_reduce", 6 * 8)] * 3


def test_half_precision_is_summed_in_single() -> None:
    x, target = logits(64, 512).to(torch.bfloat16), classes(64, n=512)
    with simulated(GRID), loss_parallel():
        loss = F.cross_entropy(distribute(x, Layout(GRID, (Replicate(), Shard(1)))), target)

    assert loss.dtype == torch.bfloat16
    with simulated(GRID):
        torch.testing.assert_close(whole(loss), F.cross_entropy(x.double(), target).bfloat16())


def test_outside_the_block_nothing_has_changed() -> None:
    x = logits(6, 8)
    with loss_parallel():
        torch.testing.assert_close(F.cross_entropy(x, classes(6, n=8)), F.cross_entropy(x, classes(6, n=8)))
    with pytest.raises(RuntimeError, match="plain"), simulated(GRID):
        F.cross_entropy(distribute(x, Layout(GRID, (Replicate(), Shard(1)))), classes(6, n=8))


@functools.cache
def mesh_of_four() -> Any:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


TOKENS, CLASSES = 96, 1000


def traffic_of_a_loss() -> tuple[list[str], int, int]:
    """The collectives of a loss, and the bytes that this rank received forward and backward."""
    mesh = mesh_of_four()
    x = distribute_tensor(logits(TOKENS, CLASSES).float(), mesh, [Shard(1)]).requires_grad_()
    target = classes(TOKENS, n=CLASSES)
    with loss_parallel():
        with trace() as t, count_traffic() as forward:
            loss = F.cross_entropy(x, target)
        with count_traffic() as backward:
            loss.backward()
    assert isinstance(x.grad, DTensor)
    assert x.grad.placements == (Shard(1),)
    return [event.collective for event in t.events], forward.nbytes, backward.nbytes


@pytest.mark.ranks
def test_three_numbers_of_each_token_are_reduced_and_none_backward(ranks: RankPool) -> None:
    for collectives, forward, backward in ranks.run(traffic_of_a_loss):
        assert collectives == ["all_reduce"] * 3
        # a ring all_reduce over p ranks brings each of them 2 (p - 1) / p of the bytes
        assert forward == 3 * TOKENS * 4 * 2 * 3 // 4
        assert backward == 0
