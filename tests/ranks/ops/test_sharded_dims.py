"""Operators along a sharded dim equal one device, and send summaries instead of gathering it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from hypothesis import settings
from torch import Tensor

from dshard import Layout, Mesh, Replicate, Shard, trace, use_topology
from dshard.comm import bind, init_device_mesh
from dshard.testing import RankPool, RuleError, check_call, distribute, simulated, whole
from dshard.testing.rule_rows import layouts_of
from dshard.topology import default_topology

Sample: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
THOROUGH = settings().max_examples > 100
BYTES = default_topology("cpu").bytes_only()
pytestmark = [pytest.mark.thorough] if THOROUGH else []
_GENERATOR = torch.Generator().manual_seed(0)


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_GENERATOR)


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_GENERATOR)


x, far, ties, long = reals(5, 7), reals(5, 7) + 1e4, ids(3, 5, 7), reals(64, 6)
gaps = torch.where(reals(5, 7) > 1, torch.nan, x)
weight, bias = reals(7), reals(7)
logits, target, classes = reals(6, 7), torch.tensor([0, 6, 3, -100, 5, 2]), reals(7).abs() + 0.1
pixels, labels = reals(2, 5, 3), ids(5, 2, 3)
image, channels = reals(3, 6, 4, 4) + 1e4, reals(6)
at, some = torch.tensor([4, 0, -1, 2, 2]), torch.tensor([3, 1, 4])
part, many = reals(3, 7), ids(5, 3, 7)
rows = torch.stack([torch.randperm(5, generator=_GENERATOR)[:3] for _ in range(7)], 1)

CASES: dict[str, Sample] = {
    "softmax": (torch.softmax, (x, 0)),
    "softmax last": (torch.softmax, (x, -1)),
    "log_softmax": (torch.log_softmax, (x, 1)),
    "logsumexp": (torch.logsumexp, (x, 1)),
    "layer_norm": (F.layer_norm, (far, (7,), weight, bias)),
    "layer_norm of two dims": (F.layer_norm, (x, (5, 7))),
    "rms_norm": (F.rms_norm, (x, (7,), weight)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (image, channels, channels + 1)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b), (image, channels, channels + 1)),
    "instance_norm": (F.instance_norm, (image,)),
    "cumsum": (torch.cumsum, (x, 0)),
    "cumsum last": (torch.cumsum, (x, -1)),
    "pad": (lambda x: F.pad(x, (2, 1, 0, 3)), (x,)),
    "pad with a value": (lambda x: F.pad(x, (1, 2), value=1.5), (x,)),
    "pad less": (lambda x: F.pad(x, (-2, 3, 1, -1)), (x,)),
    "repeat": (lambda x: x.repeat(3, 2), (x,)),
    "repeat in a new dim": (lambda x: x.repeat(2, 1, 2), (x,)),
    "slice_scatter": (lambda x, part: torch.slice_scatter(x, part, 0, 1, 4), (x, reals(3, 7))),
    "slice_scatter to the end": (lambda x, part: torch.slice_scatter(x, part, 1, -3), (x, reals(5, 3))),
    "sort": (lambda x: x.sort(0), (long,)),
    "sort backwards": (lambda x: x.sort(1, True), (x,)),
    "median": (lambda x: x.median(0), (long,)),
    "nanmedian": (lambda x: x.nanmedian(0), (gaps,)),
    "kthvalue": (lambda x: x.kthvalue(3, 0), (long,)),
    "topk of half": (lambda x: x.topk(40, 0), (long,)),
    "cumsum of whole numbers": (torch.cumsum, (ties, 1)),
    "cumsum of another dtype": (torch.cumsum, (ties, 1, {"dtype": torch.float64})),
    "cumprod": (torch.cumprod, (x, 0)),
    "logcumsumexp": (torch.logcumsumexp, (x, 1)),
    "cummax": (torch.cummax, (x, 0)),
    "cummax of ties": (torch.cummax, (ties, 1)),
    "cummin": (torch.cummin, (x, 1)),
    "cummin with gaps": (torch.cummin, (gaps, 0)),
    "argmax": (torch.argmax, (ties,)),
    "argmax of a dim": (torch.argmax, (ties, 0)),
    "argmax with gaps": (torch.argmax, (gaps, 1)),
    "argmin": (torch.argmin, (ties, 1, True)),
    "max": (torch.max, (ties, 0)),
    "max last": (torch.max, (x, 1)),
    "min": (torch.min, (x, 0, True)),
    "topk": (torch.topk, (long, 2, 0)),
    "topk of all": (torch.topk, (long, 64, 0)),
    "max of one": (torch.max, (reals(1, 7), 0, True)),
    "topk smallest": (torch.topk, (long, 3, 0, False)),
    "select": (lambda x: x[3] * 2, (x,)),
    "slice": (lambda x: x[1:4], (x,)),
    "slice with steps": (lambda x: x[:, 1:6:2] * 1, (x,)),
    "slice of two dims": (lambda x: x[-2:, 3:], (x,)),
    "narrow": (lambda x: x.narrow(1, 2, 3).exp(), (x,)),
    "flip": (lambda x: x.flip(0), (x,)),
    "flip of two dims": (lambda x: x.flip(0, -1), (x,)),
    "roll": (lambda x: x.roll(2, 0), (x,)),
    "roll of two dims": (lambda x: x.roll((-3, 4), (1, 0)), (x,)),
    "cat": (lambda x, y: torch.cat([x, y]), (x, part)),
    "cat of three": (lambda x, y: torch.cat([x, y, x], -1), (x, reals(5, 2))),
    "cat of dtypes": (lambda x, y: torch.cat([x, y]), (x, ties)),
    "gather": (torch.gather, (x, 0, many)),
    "index_select": (torch.index_select, (x, 0, at[[0, 1, 3]])),
    "index": (lambda x, i: x[i], (x, at)),
    "index of two dims": (lambda x, i, j: x[i, j], (x, at, at + 1)),
    "scatter": (
        lambda x, i, s: x.scatter(0, i, s),
        (x, rows, part),
    ),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), (x, many, part)),
    "scatter a number": (lambda x, i: x.scatter(0, i, 2.5), (x, many)),
    "scatter_reduce": (lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), (x, many, part)),
    "scatter_reduce alone": (lambda x, i, s: x.scatter_reduce(0, i, s, "mean", include_self=False), (x, many, part)),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), (x, torch.tensor([0, 4, 4]), part)),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s), (x, some, part)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 3.0), (x, some)),
    "index_put": (lambda x, i, s: x.index_put((i,), s), (x, some, part)),
    "index_put adds": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        (x, torch.tensor([1, 1, -1]), part),
    ),
    "index_put of two dims": (
        lambda x, i, j, s: x.index_put((i, j), s),
        (x, some, torch.tensor([0, 6, -2]), reals(3)),
    ),
    "in place": (lambda x, i, s: x.clone().scatter_add_(0, i, s) * 1, (x, many, part)),
    "cross_entropy": (F.cross_entropy, (logits, target)),
    "cross_entropy weighted": (F.cross_entropy, (logits, target, classes)),
    "cross_entropy smoothed": (
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1),
        (logits, target, classes),
    ),
    "cross_entropy of each": (lambda x, t, w: F.cross_entropy(x, t, w, reduction="none"), (logits, target, classes)),
    "cross_entropy ignoring": (
        lambda x, t: F.cross_entropy(x, t, reduction="sum", ignore_index=3, label_smoothing=0.2),
        (logits, target.clamp(min=0)),
    ),
    "cross_entropy of pixels": (F.cross_entropy, (pixels, labels)),
    "cross_entropy of chances": (F.cross_entropy, (logits, reals(6, 7).softmax(1))),
    "nll_loss of one": (F.nll_loss, (logits[0], torch.tensor(6))),
    "embedding": (F.embedding, (ids(5, 4, 2), x)),
}


@pytest.mark.parametrize(("name", "shape"), one_way_each(CASES, [(4,), (3, 2)]))
def test_an_operator_along_a_split_dim_is_that_of_one_device(name: str, shape: tuple[int, ...]) -> None:
    function, sample = CASES[name]
    tensors = [t for t in sample if isinstance(t, Tensor)]
    choices = list(product(*(layouts_of(t, Mesh(shape)) for t in tensors)))
    if sum(t.isnan().any() for t in tensors):
        choices = [c for c in choices if not any(layout.partial_axes() for layout in c)]
    Random(0).shuffle(choices)

    for chosen in choices[: 60 if THOROUGH else 1]:
        with use_topology(BYTES):
            check_call(function, sample, chosen)


WIDE = {  # operator -> the bytes that the busiest rank receives, of 64 x 4096 floats of which it lacks 786,432 bytes
    "softmax": (lambda x: x.softmax(1), 768),
    "log_softmax": (lambda x: x.log_softmax(1), 768),
    "logsumexp": (lambda x: x.logsumexp(1) + 0, 768),
    "layer_norm": (lambda x: F.layer_norm(x, (4096,)), 768),
    "cumsum": (lambda x: x.cumsum(1), 768),
    "argmax": (lambda x: x.argmax(1), 768 * 3),
    "argmax of all": (lambda x: x.argmax(), 12 * 3),
    "max": (lambda x: x.max(1), 768 * 3),
    "topk": (lambda x: x.topk(5, 1), 5 * 768 * 3),
    "select": (lambda x: x[:, 7], 0),
    "slice": (lambda x: x[:, :4000], 72 * 64 * 4),
    "flip": (lambda x: x.flip(1), 262144),
    "rot90": (lambda x: x.rot90(), 262144),
    "rot90 back": (lambda x: x.rot90(-1), 0),
    "roll": (lambda x: x.roll(3, 1), 768),
    "cat": (lambda x: torch.cat([x, x], 1), 524288),
    "pad": (lambda x: F.pad(x, (4, 0)), 768),
    "repeat": (lambda x: x.repeat(1, 2), 524288),
    "slice_scatter": (lambda x: torch.slice_scatter(x, x[:, :4000] + 0, 1, 0, 4000), 2 * 72 * 64 * 4),
    "view": (lambda x: x.view(-1), 196608),
    "view in parts": (lambda x: x.view(64, 2, 2048), 196608),
    "sort": (lambda x: x.sort(1), 196608),
    "median": (lambda x: x.median(1), 196608),
    "kthvalue": (lambda x: x.kthvalue(9, 1), 196608),
    "mode": (lambda x: x.mode(1), 196608),
    "topk of half": (lambda x: x.topk(2048, 1), 196608),
}


@pytest.mark.parametrize("name", WIDE)
def test_what_is_sent_does_not_grow_with_the_split_dim(name: str) -> None:
    function, nbytes = WIDE[name]
    mesh = Mesh((4,))
    with simulated(mesh), use_topology(BYTES), trace() as t:
        function(distribute(torch.randn(64, 4096), Layout(mesh, (Shard(1),))))

    assert t.nbytes == nbytes


def test_cross_entropy_over_split_classes_sends_three_numbers_for_each_row() -> None:
    mesh, rows = Mesh((4,)), 64
    with simulated(mesh), use_topology(BYTES), trace() as t:
        scores = distribute(torch.randn(rows, 4096), Layout(mesh, (Shard(1),)))
        wanted = distribute(torch.randint(4096, (rows,)), Layout(mesh, (Replicate(),)))
        loss = F.cross_entropy(scores, wanted, reduction="none")
        loss.full_tensor()

    one = rows * 4 * 3 // 4 * 2  # an all_reduce of a number for each row
    assert t.nbytes == 3 * one


@pytest.mark.parametrize("target", [-1, 4096])
def test_cross_entropy_over_split_classes_refuses_targets_that_are_no_class(target: int) -> None:
    mesh = Mesh((4,))
    with simulated(mesh), use_topology(BYTES):
        scores = distribute(torch.randn(8, 4096), Layout(mesh, (Shard(1),)))
        wanted = distribute(torch.full((8,), target), Layout(mesh, (Replicate(),)))
        with pytest.raises(IndexError, match=f"index {target} is out of bounds for dimension 1 with size 4096"):
            F.cross_entropy(scores, wanted)


def check_on_ranks(names: list[str]) -> list[str]:
    """Each case on this rank, its operands laid out at random: what went wrong."""
    draw, wrong = Random(0), []
    mesh = bind(init_device_mesh("cpu", (4,), mesh_dim_names=("x",)))
    for name in names:
        function, sample = CASES[name]
        laid = [draw.choice(layouts_of(t, mesh)) for t in sample if isinstance(t, Tensor) and not t.isnan().any()]
        try:
            if laid:
                with use_topology(BYTES):
                    check_call(function, sample, laid)
        except RuleError as error:
            wrong.append(f"{name}: {error}")
    return wrong


@pytest.mark.ranks
def test_operators_along_split_dims_on_real_ranks(ranks: RankPool) -> None:
    names = list(CASES)[:: 1 if THOROUGH else 3]

    assert ranks.run(check_on_ranks, names, timeout=600.0) == [[]] * 4


def test_norms_far_from_zero_keep_their_digits() -> None:
    mesh = Mesh((4,))
    for function in (lambda x: F.layer_norm(x, (64,)), lambda x: F.group_norm(x.view(8, 8, 8), 2)):
        values = reals(8, 64) + 1e4
        with simulated(mesh), use_topology(BYTES):
            found = whole(function(distribute(values, Layout(mesh, (Shard(1),)))))

        torch.testing.assert_close(found, function(values), rtol=0, atol=1e-9)


def test_an_index_beyond_a_split_dim_is_refused() -> None:
    mesh = Mesh((4,))
    with simulated(mesh), use_topology(BYTES):
        table = distribute(x, Layout(mesh, (Shard(0),)))
        for read in (lambda i: table[i], lambda i: F.embedding(i, table), lambda i: table.index_select(0, i)):
            with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 5"):
                read(distribute(torch.tensor([1, 5]), Layout(mesh, (Replicate(),))))
