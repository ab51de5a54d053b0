"""Losses and metrics outside a parallelized model, of plain targets and masks that are alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dshard
from dshard import Mesh, MixedError, Replicate, Shard, parallelize
from dshard.comm.rank_tensors import of_first_rank, per_rank
from dshard.testing import simulated, whole

ROWS, CLASSES = 7, 5
Y, MASK = torch.arange(ROWS) * 3 % CLASSES, torch.arange(ROWS) % 3 > 0
X = torch.randn(ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LOSSES: dict[str, Callable[[Any], Any]] = {
    "cross_entropy": lambda out: F.cross_entropy(out, Y),
    "smoothed": lambda out: F.cross_entropy(out, Y, label_smoothing=0.1, ignore_index=2),
    "masked mean": lambda out: (F.cross_entropy(out, Y, reduction="none") * MASK).sum() / MASK.sum(),
    "masked rows": lambda out: F.cross_entropy(out, Y, reduction="none")[MASK].mean(),
    "nll_loss": lambda out: F.nll_loss(out.log_softmax(-1), Y),
    "mse_loss": lambda out: F.mse_loss(out, X[:, :CLASSES]),
    "with_logits": lambda out: F.binary_cross_entropy_with_logits(out, (X[:, :CLASSES] > 0).to(out.dtype)),
    "kl_div": lambda out: F.kl_div(out.log_softmax(-1), X[:, :CLASSES].softmax(-1), reduction="batchmean"),
    "smooth_l1": lambda out: F.smooth_l1_loss(out, X[:, :CLASSES]),
    "masked_fill": lambda out: out.masked_fill(~MASK[:, None], 0).square().mean(),
    "where": lambda out: torch.where(MASK[:, None], out, 0.0).square().mean(),
    "gather": lambda out: out.gather(1, Y[:, None]).mean(),
    "one_hot": lambda out: (out * F.one_hot(Y, CLASSES)).sum(),
    "accuracy": lambda out: (out.argmax(-1) == Y).double().mean(),
    "best two": lambda out: (out.topk(2).indices == Y[:, None]).any(-1).double().mean(),
    "indexed": lambda out: out[torch.arange(ROWS), Y].mean(),
    "rows": lambda out: out[MASK].square().mean(),
    "cosine": lambda out: F.cosine_similarity(out, X[:, :CLASSES]).mean(),
    "joined": lambda out: torch.cat([out, X[:, :CLASSES]]).square().mean(),
}
MESHES = {"data": Mesh((4,), ("a",)), "megatron": Mesh((2, 2), ("a", "b")), "optimus": Mesh((2, 2), ("a", "b"))}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES)).double()


def gradient(loss: Tensor, model: nn.Module) -> Tensor | None:
    if not loss.requires_grad:
        return None
    (found,) = torch.autograd.grad(loss, [model.get_parameter("2.weight")], retain_graph=True)
    return whole(found) if isinstance(found, dshard.DTensor) else found


@pytest.mark.parametrize("strategy", MESHES)
def test_losses_of_plain_targets_are_those_of_one_device(strategy: str) -> None:
    model, alone = net(), net()
    expected = {name: loss(alone(X)) for name, loss in LOSSES.items()}
    with simulated(MESHES[strategy]):
        parallelize(model, MESHES[strategy], strategy, X)
        with dshard.implicit_replication():
            out = model(X)
            for name, loss in LOSSES.items():
                found, right = loss(out), expected[name]
                torch.testing.assert_close(found.item(), right.item(), rtol=0, atol=1e-12, msg=name)
                mine, other = gradient(found, model), gradient(right, alone)
                assert (mine is None) == (other is None), name
                if mine is not None:
                    torch.testing.assert_close(mine, other, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("strategy", ["data", "fsdp", "data x megatron", "fsdp x megatron"])
@pytest.mark.parametrize("rows", [X[0], X[:1], X], ids=["one row", "a batch of one", "a batch"])
def test_an_input_without_a_batch_dim_is_whole(rows: Tensor, strategy: str) -> None:
    """No axis of the batch has a share of it, however the rows of a batch are split."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES)).double()
    expected = model(rows)
    mesh = Mesh((2, 2), ("dp", "tp")) if " x " in strategy else Mesh((4,), ("dp",))
    with simulated(mesh):
        parallelize(model, mesh, strategy, X)
        taken: list[Any] = []
        model[0].register_forward_pre_hook(lambda module, args: taken.extend(args))

        torch.testing.assert_close(whole(model(rows)), expected)
        assert taken[0].placements[0] == (Replicate() if rows.dim() == 1 else Shard(0))


def test_the_loss_of_a_batch_without_rows_is_that_of_one_device() -> None:
    """As of the last microbatch, or of rows that a mask selects: plain targets without elements are no rank's part."""
    model, alone = net(), net()
    expected = F.cross_entropy(alone(X[:0]), Y[:0], reduction="sum")
    with simulated(MESHES["data"]):
        parallelize(model, MESHES["data"], "data", X)
        found = F.cross_entropy(model(X[:0]), Y[:0], reduction="sum")
        found.backward()

        assert found.item() == expected.item() == 0.0
        assert all(not whole(p.grad).any() for p in model.parameters())


def of_what_a_program_makes(model: nn.Module) -> tuple[Tensor, ...]:
    """A loss of targets, weights and rows that a program makes itself, and the gradients of all."""
    x = torch.linspace(-1, 1, ROWS * 6, dtype=torch.float64).view(ROWS, 6).requires_grad_()
    y, weights = torch.arange(ROWS) % CLASSES, torch.linspace(0, 1, ROWS, dtype=torch.float64).requires_grad_()
    out = model(x)
    loss = (F.cross_entropy(out, y, reduction="none") * weights).sum() + (out.argmax(-1) == y).double().mean()
    return loss, *torch.autograd.grad(loss, [x, weights, model.get_parameter("2.weight")])


@pytest.mark.parametrize("strategy", MESHES)
def test_tensors_made_beside_simulated_ranks_are_those_of_all(strategy: str) -> None:
    """A program is one program, whether it makes its targets before the block or in it."""
    expected, model = of_what_a_program_makes(net()), net()
    with simulated(MESHES[strategy]):
        parallelize(model, MESHES[strategy], strategy, X)
        for found, alone in zip(of_what_a_program_makes(model), expected, strict=True):
            of_all = whole(found) if isinstance(found, dshard.DTensor) else of_first_rank(found)
            torch.testing.assert_close(of_all, alone, rtol=0, atol=1e-12)


def test_what_simulated_ranks_do_not_share_is_refused_with_the_way_out() -> None:
    mesh, model = MESHES["data"], net()
    with simulated(mesh):
        out = parallelize(model, mesh, "data", X)(X)
        for operand, text in {
            per_rank(mesh, lambda rank: torch.full((ROWS,), rank % CLASSES)): "ranks have other values of it, .*alike",
            out.argmax(-1).to_local(): "it is what to_local gave, one rank's part; wrap it with",
            Y.to_sparse(): r"it is sparse_coo, and distributed ones are strided: take x.to_dense\(\)",
        }.items():
            with pytest.raises(MixedError, match=text):
                F.cross_entropy(out, operand)


@pytest.mark.filterwarnings("error:.*has no rule")
@pytest.mark.parametrize("are_joined", [False, True])
def test_rows_of_a_loss_over_alignments_stay_where_they_are(are_joined: bool) -> None:
    mesh, sizes, targets = MESHES["data"], torch.arange(ROWS) % 4, 1 + torch.arange(ROWS * 3).view(ROWS, 3) % 4
    y = torch.cat([row[:n] for row, n in zip(targets, sizes, strict=True)]) if are_joined else targets
    frames = torch.randn(9, ROWS, CLASSES, dtype=torch.float64).log_softmax(-1)
    with simulated(mesh), dshard.implicit_replication(), dshard.trace() as sent:
        x = dshard.distribute_tensor(frames, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        loss = F.ctc_loss(x, y, sizes + 5, sizes, zero_infinity=True)
        loss.backward()
    assert sum(event.nbytes for event in sent.events) <= 3 * 8, "one number, which is the loss"
    torch.testing.assert_close(loss.item(), F.ctc_loss(frames, y, sizes + 5, sizes, zero_infinity=True).item())


@pytest.mark.filterwarnings("error:.*has no rule")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_bags_of_a_sharded_table_gather_no_table(placement: Shard) -> None:
    mesh, table, indices = MESHES["data"], torch.randn(400, 8), torch.arange(60).view(12, 5) * 7 % 400
    with simulated(mesh), dshard.implicit_replication(), dshard.trace() as sent:
        laid = dshard.distribute_tensor(table, mesh, [placement], src_data_rank=None).requires_grad_()
        bags = F.embedding_bag(indices, laid, mode="mean")
        bags.redistribute(placements=[Shard(1)]).square().sum().backward()
        assert laid.grad.placements == (placement,)
    torch.testing.assert_close(whole(bags), F.embedding_bag(indices, table, mode="mean"))
    assert sum(event.nbytes for event in sent.events) < table.numel()
