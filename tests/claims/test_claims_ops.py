"""Claims on what surrounds the products of Megatron, Optimus and Colossal: embedding, cross entropy, norms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.measured_matmuls import collectives, reals
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dshard import Layout, Mesh, Partial, Replicate, Shard, trace, use_topology
from dshard.layout import parse_layout
from dshard.testing import distribute, parts, simulated, whole
from dshard.topology import BYTES
from dshard.trace import Trace

TOKENS, CLASSES, ITEMSIZE = 12, 103, 8
LINE, GRID = Mesh((4,), ("tp",)), Mesh((2, 2), ("row", "col"))
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignored": {"ignore_index": 7},
    "smoothed": {"label_smoothing": 0.1},
    "both": {"ignore_index": 7, "label_smoothing": 0.1},
    "weighted": {"weight": reals(CLASSES).abs() + 0.1, "label_smoothing": 0.1},
}


def targets() -> Tensor:
    found = torch.arange(TOKENS) * 37 % CLASSES
    found[5] = 7
    return found


def entropy(mesh: Mesh, logits: str, way: str, reduction: str) -> tuple[list[Tensor], list[Tensor], Trace, Trace]:
    """Loss and gradient on ranks, those of one device, and what was sent each way."""
    values, target, options = reals(TOKENS, CLASSES), targets(), dict(WAYS[way])
    leaf = values.clone().requires_grad_()
    expected = F.cross_entropy(leaf, target, reduction=reduction, **options)
    incoming = reals(*expected.shape)
    expected.backward(incoming)
    laid = parse_layout(logits, mesh)
    rows = Layout(mesh, tuple(p if p == Shard(0) else Replicate() for p in laid.placements))
    everywhere = Layout(mesh, (Replicate(),) * mesh.ndim)
    with simulated(mesh), use_topology(BYTES):
        x, t = distribute(values, laid).requires_grad_(), distribute(target, rows)
        if "weight" in options:
            options["weight"] = distribute(options["weight"], everywhere)
        with trace() as forward:
            loss = F.cross_entropy(x, t, reduction=reduction, **options)
            done = [Replicate() if isinstance(p, Partial) else p for p in loss.placements]
            loss = loss.redistribute(placements=done)
        given = distribute(incoming, loss.layout)
        with trace() as backward:
            loss.backward(given)
        assert x.grad.layout == laid
        return [whole(loss.detach()), whole(x.grad)], [expected.detach(), leaf.grad], forward, backward


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("mesh", "logits", "axis", "rows"),
    [(LINE, "tp:S(1)", "tp", TOKENS), (GRID, "row:S(0) col:S(1)", "col", TOKENS // 2)],
    ids=["M3: a line", "S8: rows of a grid"],
)
def test_cross_entropy_over_split_classes_is_three_sums(
    mesh: Mesh, logits: str, axis: str, rows: int, way: str
) -> None:
    """Claims M3 and S8 (Megatron-LM; Optimus, section 3.2.1): three all_reduces of a number for each row, none back."""
    found, expected, forward, backward = entropy(mesh, logits, way, "none")

    n = dict(zip(mesh.names, mesh.shape, strict=True))[axis]
    assert collectives(forward) == Counter({f"all_reduce {axis}": 3})
    assert [event.nbytes for event in forward.events] == [2 * (n - 1) * rows * ITEMSIZE // n] * 3
    assert not backward.events
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_the_mean_of_cross_entropy_adds_scalars_over_the_rows(way: str) -> None:
    """Claim S8: over a batch that is split, too, only the loss and its weight are added up."""
    found, expected, forward, backward = entropy(GRID, "row:S(0) col:S(1)", way, "mean")

    assert collectives(forward)["all_reduce col"] == 3
    assert all(event.nbytes <= ITEMSIZE for event in (*forward.events, *backward.events) if event.axis == "row")
    assert all(event.axis == "row" for event in backward.events)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [13, 3], ids=["uneven", "an empty part"])
@pytest.mark.parametrize("padding", [None, 2, -1])
def test_a_split_vocabulary_looks_up_what_it_has_and_keeps_the_gradient_of_its_rows(
    size: int, padding: int | None
) -> None:
    """Claim M3: one sum of [T, h] forward, nothing back; no rank makes a gradient of more than its own rows.

    A vocabulary smaller than the tokens would be cheaper to gather.
    """
    tokens = min(TOKENS, size)
    values, ids = reals(size, 6), torch.arange(tokens) * 5 % size
    leaf = values.clone().requires_grad_()
    expected = F.embedding(ids, leaf, padding)
    incoming = reals(tokens, 6)
    expected.backward(incoming)
    with simulated(LINE):
        table = distribute(values, Layout(LINE, (Shard(0),))).requires_grad_()
        with trace() as sent:
            rows = F.embedding(distribute(ids, Layout(LINE, (Replicate(),))), table, padding)
            largest = Largest()
            with largest:
                rows.backward(distribute(incoming, rows.layout.cotangent()))
        assert rows.layout == Layout(LINE, (Partial(),))
        assert not sent.events
        torch.testing.assert_close(whole(rows.detach()), expected.detach())
        torch.testing.assert_close(whole(table.grad), leaf.grad)
        assert {len(part) for part in parts(table.grad).values()} == {len(p) for p in parts(table.detach()).values()}
    assert 0 < largest.rows <= -(-size // 4), "of the table's gradient"


class Largest(TorchDispatchMode):
    """Notes the most rows of a gradient of a table that any rank makes."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.rows = max(self.rows, out.shape[0])
        return out


# -- the tied table of Optimus


@pytest.mark.parametrize(
    ("tokens", "size", "moved"), [(4, 400, "redistribute"), (400, 4, "embedding")], ids=["few tokens", "few words"]
)
def test_a_tied_table_in_blocks_has_the_sum_of_both_gradients(tokens: int, size: int, moved: str) -> None:
    """Claim S5 (Optimus, section 3.2.1): embedding and lm-head share one table in blocks of the grid.

    Optimus sends the table's blocks to the tokens; where there are fewer tokens than words, the rows that were looked
    up are sent instead, and neither way is asked for.
    """
    width = 8
    values, ids = reals(size, width), torch.arange(tokens) * 7 % size
    leaf = values.clone().requires_grad_()
    expected = F.linear(F.embedding(ids, leaf).tanh(), leaf)
    incoming = reals(tokens, size)
    expected.backward(incoming)
    blocks = parse_layout("row:S(0) col:S(1)", GRID)
    with simulated(GRID), use_topology(BYTES):
        table = distribute(values, blocks).requires_grad_()
        with trace() as lookup:
            hidden = F.embedding(distribute(ids, parse_layout("row:S(0) col:R", GRID)), table)
            hidden = hidden.redistribute(placements=blocks.placements)
        logits = F.linear(hidden.tanh(), table)
        logits.backward(distribute(incoming, logits.layout.cotangent()))
        found = [whole(logits.detach()), whole(table.grad)]

    assert table.grad.layout == blocks
    for mine, right in zip(found, (expected.detach(), leaf.grad), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-10, rtol=1e-10)
    blocks_sent, rows_sent = size * width // 4 * ITEMSIZE, tokens * (width // 2 // 2 + 1) * ITEMSIZE
    assert lookup.nbytes <= min(blocks_sent, rows_sent)
    assert max(lookup.events, key=lambda event: event.nbytes).op == moved


# -- norms

FAR = (reals(8, 64) * 1024).round() / 1024 + 1e4
"""Sums of these are exact."""


@pytest.mark.parametrize(("mesh", "laid"), [(LINE, "tp:S(1)"), (GRID, "row:S(0) col:S(1)")], ids=["line", "grid"])
def test_layer_norm_by_two_sums_keeps_its_digits_far_from_zero(mesh: Mesh, laid: str) -> None:
    """Claim S7: two sums of a number for each row each way; the mean of squares less the square of the mean fails."""
    incoming = reals(8, 64)
    expected, gradient = layer_norm(FAR, incoming)
    with simulated(mesh), use_topology(BYTES):
        x = distribute(FAR, parse_layout(laid, mesh)).requires_grad_()
        with trace() as forward:
            y = F.layer_norm(x, (64,))
        with trace() as backward:
            y.backward(distribute(incoming, y.layout))
        found = [whole(y.detach()), whole(x.grad)]

    axis, n = mesh.names[-1], mesh.shape[-1]
    rows = 8 if mesh is LINE else 4
    assert collectives(forward) == collectives(backward) == Counter({f"all_reduce {axis}": 2})
    assert {event.nbytes for event in (*forward.events, *backward.events)} == {2 * (n - 1) * rows * ITEMSIZE // n}
    for mine, right in zip(found, (expected, gradient), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-12, rtol=0)
    hasty = FAR.square().mean(1, keepdim=True) - FAR.mean(1, keepdim=True).square()
    assert ((FAR - FAR.mean(1, keepdim=True)) * (hasty + 1e-5).rsqrt() - expected).abs().max() > 1e-10


def layer_norm(x: Tensor, incoming: Tensor) -> tuple[Tensor, Tensor]:
    """The norm and its gradient by distances to the mean."""
    centred = x - x.mean(1, keepdim=True)
    scale = (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    out = centred * scale
    own = incoming - incoming.mean(1, keepdim=True) - out * (incoming * out).mean(1, keepdim=True)
    return out, own * scale


@pytest.mark.parametrize(("mesh", "laid"), [(LINE, "tp:S(1)"), (GRID, "row:S(0) col:S(1)")], ids=["line", "grid"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rms_norm_is_one_sum_each_way(mesh: Mesh, laid: str, dtype: torch.dtype) -> None:
    """Claim S7: one number for each row each way."""
    values, incoming, weight = (t.to(dtype) for t in (FAR, reals(8, 64), reals(64)))
    leaf = values.clone().requires_grad_()
    expected = F.rms_norm(leaf, (64,), weight)
    expected.backward(incoming)
    with simulated(mesh), use_topology(BYTES):
        x = distribute(values, parse_layout(laid, mesh)).requires_grad_()
        w = distribute(weight, Layout(mesh, tuple(Shard(0) if p == Shard(1) else Replicate() for p in x.placements)))
        with trace() as forward:
            y = F.rms_norm(x, (64,), w)
        with trace() as backward:
            y.backward(distribute(incoming, y.layout))
        found = [whole(y.detach()), whole(x.grad)]

    axis = mesh.names[-1]
    assert collectives(forward) == collectives(backward) == Counter({f"all_reduce {axis}": 1})
    tight: dict[str, float] = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {}
    for mine, right in zip(found, (expected.detach(), leaf.grad), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, right, **tight)


# -- sums that wait


@pytest.mark.parametrize("name", ["abs", "erf", "exp", "sigmoid", "sin", "square"])
def test_a_nonlinear_function_completes_a_sum_once_for_both_passes(name: str) -> None:
    """Its rule says that it is nonlinear; a sum completed below autograd would be completed for the gradient anew."""
    values, function = reals(6, 5), getattr(torch, name)
    leaf = values.clone().requires_grad_()
    function(leaf).sum().backward()
    with simulated(LINE):
        x = distribute(values, Layout(LINE, (Partial("sum"),))).requires_grad_()
        with trace() as sent:
            function(x).sum().backward()

        torch.testing.assert_close(whole(x.grad), leaf.grad, rtol=1e-12, atol=1e-12)
    assert collectives(sent) == {"all_reduce tp": 1}
