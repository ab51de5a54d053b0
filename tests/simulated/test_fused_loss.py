"""A chunked cross entropy of a linear layer: that of whole logits, in any layouts, and priced as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard import (
    ArgumentError,
    DShardError,
    DtypeError,
    Layout,
    Mesh,
    Replicate,
    ShapeError,
    Shard,
    Topology,
    linear_cross_entropy,
    trace,
)
from dshard.comm import CommEvent, listen
from dshard.core.observe import Decision, observing
from dshard.ops.fused_loss.chunked_loss import rows_of_chunk
from dshard.ops.fused_loss.fused_choice import FusedCandidates
from dshard.parallel.trace_step import record_step
from dshard.rules.expand import Expansion
from dshard.simulate import Recorded, record
from dshard.testing import distribute, simulated, whole
from dshard.testing.generators import layouts, meshes

MESH = Mesh((2, 2), ("a", "b"))
REDUCTIONS = ("mean", "sum", "none")


def of_whole_logits(x: Tensor, weight: Tensor, target: Tensor, bias: Any, class_weight: Any, **options: Any) -> Tensor:
    """The loss by its definition."""
    logits = F.linear(x, weight, bias)
    logits = logits.movedim(-1, 1) if logits.dim() > 2 else logits
    return F.cross_entropy(logits, target, class_weight, **options)


@contextmanager
def by_rows(*rows: str | None) -> Iterator[None]:
    """Let each mesh axis shard this factor, whatever it costs."""
    expansions = FusedCandidates._expansions

    def only(candidates: FusedCandidates) -> Iterator[Expansion]:
        return (each for each in expansions(candidates) if each.rows == rows)

    dshard.clear_caches()
    try:
        with patch.object(FusedCandidates, "_expansions", only):
            yield
    finally:
        dshard.clear_caches()


class Case:
    """A loss with its operands, of which x, weight and bias need gradients."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, seed: int, extra: tuple[bool, bool], ignored: bool
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, dtype=torch.float64, generator=generator)

        x, weight, target = drawn(*shape), drawn(classes, shape[-1]), torch.zeros(shape[:-1], dtype=torch.int64)
        target.random_(classes, generator=generator)
        if ignored and target.numel():
            target.view(-1)[:: 2 + seed % 3] = 1
        bias = drawn(classes) if extra[0] else None
        class_weight = drawn(classes).abs() + 0.1 if extra[1] else None
        self.tensors = [x, weight, target, bias, class_weight]
        self.ignored = 1 if ignored else -100

    def gradients(self, tensors: list[Any], loss: Tensor, grad: Tensor) -> list[Tensor]:
        loss.backward(grad)
        return [tensors[i].grad for i in (0, 1, 3) if tensors[i] is not None]

    def expected(self, options: dict[str, Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
        tensors = [None if t is None else t.clone() for t in self.tensors]
        for i in (0, 1, 3):
            if tensors[i] is not None:
                tensors[i].requires_grad_()
        loss = of_whole_logits(*tensors, **options, ignore_index=self.ignored)
        grad = torch.linspace(0.5, 2.0, max(1, loss.numel()), dtype=torch.float64)[: loss.numel()].view(loss.shape)
        return loss.detach(), grad, self.gradients(tensors, loss, grad)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


@settings(max_examples=max(12, settings().max_examples // 5), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_loss_is_that_of_whole_logits_in_any_layouts(data: st.DataObject) -> None:
    mesh = data.draw(meshes(max_axes=2, max_size=3, max_ranks=6))
    shape = (*data.draw(st.lists(st.integers(0, 5), max_size=2)), data.draw(st.integers(1, 5)))
    extra, ignored = data.draw(st.tuples(st.booleans(), st.booleans())), data.draw(st.booleans())
    case = Case(shape, data.draw(st.integers(2, 7)), data.draw(st.integers(0, 99)), extra, ignored)
    smoothing = data.draw(st.sampled_from([0.0, 0.25]))
    options = {"reduction": data.draw(st.sampled_from(REDUCTIONS)), "label_smoothing": smoothing}
    factors = (None, *(f"_{i}" for i in range(len(shape) - 1)), "v", "d")
    rows = data.draw(st.tuples(*(st.sampled_from(factors) for _ in mesh.shape)))
    loss, grad, gradients = case.expected(options)
    with simulated(mesh), by_rows(*rows):
        laid: list[Any] = []
        for i, t in enumerate(case.tensors):
            partial = ("sum",) if i in (0, 1, 3) else ()
            laid.append(None if t is None else distribute(t, data.draw(layouts(mesh, t.dim(), partial=partial))))
        for i in (0, 1, 3):
            if laid[i] is not None:
                laid[i].requires_grad_()
        x, weight, target, bias, class_weight = laid
        chunk = data.draw(st.sampled_from([None, 1, 2]))
        more = {"class_weight": class_weight, "ignore_index": case.ignored, "rows": chunk}
        found = linear_cross_entropy(x, weight, target, bias, **more, **options)
        same(whole(found), loss)
        whole_grad = distribute(grad, Layout(mesh, (Replicate(),) * mesh.ndim))
        for mine, other in zip(case.gradients(laid, found, whole_grad), gradients, strict=True):
            same(whole(mine), other)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "reduction"), one_way_each([("d", "d"), ("d", "v"), ("_0", "d")], REDUCTIONS))
def test_sharded_features_with_a_bias(rows: tuple[str, ...], reduction: str) -> None:
    """Each rank of the features has all logits, and one of them the gradient of the bias."""
    case = Case((7, 5), 6, 2, (True, True), True)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
    loss, grad, gradients = case.expected(options)
    whole_layout = Layout(MESH, (Replicate(), Replicate()))
    with simulated(MESH), by_rows(*rows):
        laid: list[Any] = [distribute(t, whole_layout) for t in case.tensors if t is not None]
        for i in (0, 1, 3):
            laid[i].requires_grad_()
        found = linear_cross_entropy(*laid[:4], class_weight=laid[4], ignore_index=case.ignored, rows=3, **options)
        same(whole(found), loss)
        for mine, other in zip(case.gradients(laid, found, distribute(grad, whole_layout)), gradients, strict=True):
            same(whole(mine), other)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(3, 4, 5), (7, 5), (5,), (0, 5)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_plain_tensors(shape: tuple[int, ...], reduction: str, smoothing: float) -> None:
    for extra in ((False, False), (True, True)):
        case = Case(shape, 6, 3, extra, True)
        loss, grad, gradients = case.expected(options := {"reduction": reduction, "label_smoothing": smoothing})
        for i in (0, 1, 3):
            if case.tensors[i] is not None:
                case.tensors[i].requires_grad_()
        x, weight, target, bias, class_weight = case.tensors
        more = {"class_weight": class_weight, "ignore_index": case.ignored, "rows": 2}
        found = linear_cross_entropy(x, weight, target, bias, **more, **options)
        same(found.detach(), loss)
        for mine, other in zip(case.gradients(case.tensors, found, grad), gradients, strict=True):
            same(mine, other)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_have_gradients(reduction: str) -> None:
    case = Case((6, 4), 5, 0, (True, False), True)
    x, weight, target, bias, _ = case.tensors
    operands = [t.requires_grad_() for t in (x, weight, bias)]

    def loss(*tensors: Tensor) -> Tensor:
        return linear_cross_entropy(tensors[0], tensors[1], target, tensors[2], reduction=reduction, rows=4)

    assert torch.autograd.gradcheck(loss, operands)
    assert torch.autograd.gradgradcheck(loss, operands)


@pytest.mark.parametrize("rows", [("_0", "v"), ("v", "d"), (None, "v")])
def test_gradients_of_distributed_tensors_have_gradients(rows: tuple[str | None, ...]) -> None:
    def second(loss: Any, x: Any, weight: Any) -> tuple[Any, Any]:
        (gradient,) = torch.autograd.grad(loss(x, weight), x, create_graph=True)
        (gradient * gradient).sum().backward()
        return x.grad, weight.grad

    x, weight, target, *_ = Case((6, 4), 5, 1, (False, False), False).tensors
    alone = [t.clone().requires_grad_() for t in (x, weight)]
    expected = second(lambda x, weight: F.cross_entropy(F.linear(x, weight), target), *alone)
    with simulated(MESH), by_rows(*rows):
        laid = [distribute(t, Layout(MESH, (Shard(0), Replicate()))).requires_grad_() for t in (x, weight)]
        placed = distribute(target, Layout(MESH, (Shard(0), Replicate())))
        for mine, other in zip(second(lambda *xs: linear_cross_entropy(*xs, placed), *laid), expected, strict=True):
            same(whole(mine), other)


def test_a_graph_is_used_twice() -> None:
    x, weight, target, *_ = Case((6, 4), 5, 1, (False, False), False).tensors
    loss = linear_cross_entropy(x.requires_grad_(), weight, target)
    first, again = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_the_loss_of_ignored_rows_is_nan_and_its_gradients_are_zero() -> None:
    x, weight, *_ = Case((6, 4), 5, 1, (False, False), False).tensors
    target = torch.full((6,), -100)
    loss = linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), target)
    loss.backward()
    assert loss.isnan()
    assert not x.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("rows", "dtype"),
    one_way_each([("_0", "_0"), ("v", "_0"), ("v", "v"), ("d", "v")], [torch.bfloat16, torch.float16]),
)
def test_half_precision_is_summed_in_single(rows: tuple[str, ...], dtype: torch.dtype) -> None:
    """The loss and gradients are as near to those of double precision as rounded logits allow."""
    x, weight, target, *_ = Case((64, 16), 37, 1, (False, False), False).tensors
    narrow = [t.to(dtype) for t in (x, weight)]
    wide = [t.double().requires_grad_() for t in narrow]
    expected = F.cross_entropy(F.linear(*wide), target)
    expected.backward()
    with simulated(MESH), by_rows(*rows):
        laid = [distribute(t, Layout(MESH, (Replicate(), Replicate()))).requires_grad_() for t in narrow]
        loss = linear_cross_entropy(*laid, distribute(target, Layout(MESH, (Shard(0), Replicate()))), rows=8)
        loss.backward()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(whole(loss).double(), expected, rtol=2 * eps, atol=0)
        for mine, other in zip(laid, wide, strict=True):
            error = (whole(mine.grad).double() - other.grad).abs().max()
            assert error <= 4 * eps * other.grad.abs().max(), (error, eps)


def test_autocast_is_that_of_a_linear_layer_and_a_loss() -> None:
    x, weight, target, *_ = (t if t is None else t.float() for t in Case((8, 4), 5, 1, (False, False), False).tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(x, weight, target.long())
        expected = F.cross_entropy(F.linear(x, weight), target.long())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has the function since 2.13")
def test_the_function_of_torch_is_the_same_operator() -> None:
    x, weight, target, bias, class_weight = Case((6, 4), 5, 1, (True, True), True).tensors
    options: dict[str, Any] = {"ignore_index": 1, "label_smoothing": 0.1}
    expected = F.linear_cross_entropy(x, weight, target, linear_bias=bias, weight=class_weight, **options)
    with simulated(MESH):
        split, replicated = Layout(MESH, (Shard(0), Replicate())), Layout(MESH, (Replicate(), Replicate()))
        laid = [distribute(t, split) for t in (x, weight, target)]
        vectors = {"linear_bias": distribute(bias, replicated), "weight": distribute(class_weight, replicated)}
        with trace() as traced:
            found = F.linear_cross_entropy(*laid, **vectors, **options)
        same(whole(found), expected)
        assert traced.operators[0] == "linear_cross_entropy"
        probabilities = torch.full((6, 5), 0.2, dtype=torch.float64)
        by_probabilities = F.linear_cross_entropy(laid[0], laid[1], distribute(probabilities, split))
        same(whole(by_probabilities), F.linear_cross_entropy(x, weight, probabilities))


# -- memory and prices


SIZES = [(3, 512, 8192), (4, 1024, 32000), (3, 2048, 128256), (4, 512, 8192), (6, 512, 50257), (6, 4096, 128256)]
"""Rows for each feature, features and classes."""


def chunked_and_whole(dtype: torch.dtype, size: tuple[int, int, int], topology: Topology) -> list[Recorded]:
    """A step of the loss by chunks, and one by whole logits."""
    times, features, classes = size
    x = torch.empty(times * features, features, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(classes, features, dtype=dtype, device="meta", requires_grad=True)
    target = torch.empty(times * features, dtype=torch.int64, device="meta")

    def step(loss: Any) -> None:
        x.grad = weight.grad = None
        loss().backward()

    ways = (
        lambda: linear_cross_entropy(x, weight, target),
        lambda: F.cross_entropy(F.linear(x, weight), target),
    )
    return [record(lambda: step(way), topology) for way in ways]  # noqa: B023


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_a_third_of_that_of_whole_logits(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    """Rows are at least three times the features."""
    topology = Topology.preset("cpu")
    chunked, by_whole_logits = chunked_and_whole(dtype, size, topology)
    assert chunked.peak <= by_whole_logits.peak / 3
    assert chunked.flops == by_whole_logits.flops
    assert work(chunked, topology) <= 1.1 * work(by_whole_logits, topology)


@pytest.mark.parametrize("size", [size for size in SIZES if size[1] > 512], ids=str)
@pytest.mark.parametrize(
    ("preset", "dtype"), one_way_each(["dgx-h100", "dgx-a100"], [torch.float32, torch.bfloat16], every=1)
)
def test_the_work_is_that_of_whole_logits_on_gpus_too(
    preset: str, dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    topology = Topology.preset(preset)
    chunked, by_whole_logits = chunked_and_whole(dtype, size, topology)
    assert work(chunked, topology) <= 1.1 * work(by_whole_logits, topology)


WAYS: list[tuple[str | None, ...]] = [("_0", "_0"), ("v", "v"), ("_0", "v"), ("v", "_0"), ("_0", "d")]


@pytest.mark.parametrize(("rows", "reduction"), one_way_each(WAYS, ["mean", "none"]))
def test_planned_bytes_are_those_that_run(rows: tuple[str, ...], reduction: str) -> None:
    x, weight, target, *_ = Case((21, 4), 7, 1, (False, False), False).tensors
    events: list[CommEvent] = []
    with simulated(MESH), by_rows(*rows):
        split = Layout(MESH, (Shard(0), Replicate()))
        laid = [distribute(t, split) for t in (x, weight, target)]
        decisions: list[Decision] = []
        with listen(events.append), observing(decisions.append):
            linear_cross_entropy(*laid, reduction=reduction, rows=2)
    planned = [(each.collective, each.axis, each.nbytes) for each in decisions[0].collectives()]
    assert sum(nbytes for _, _, nbytes in planned)
    assert planned == [(each.collective, each.axis, each.nbytes) for each in events]


@pytest.mark.parametrize(
    ("rows", "way"),
    one_way_each(
        [("_0", "_0"), ("v", "v"), ("_0", "v")], [*product([torch.float32, torch.bfloat16], ["dgx-h100", "cpu"])]
    ),
)
def test_prices_are_those_of_the_recorded_step(rows: tuple[str, ...], way: tuple[torch.dtype, str]) -> None:
    dtype, preset = way
    topology = Topology.preset(preset)
    placements = {"_0": (Shard(0), Replicate()), "v": (Replicate(), Shard(0))}
    of_x, of_weight = (Layout(MESH, tuple(placements[row][i] for row in rows)) for i in range(2))  # type: ignore[index]
    with dshard.use_topology(topology), by_rows(*rows):
        x = distributed_shape((4099, 512), dtype, of_x)
        weight = distributed_shape((8001, 512), dtype, of_weight)
        target = distributed_shape((4099,), torch.int64, of_x)
        decisions: list[Decision] = []
        with observing(decisions.append):
            linear_cross_entropy(x, weight, target)
        strategy = decisions[0].strategy
        forward = record(lambda: linear_cross_entropy(x, weight, target), topology)

        def step() -> None:
            x.grad = weight.grad = None
            linear_cross_entropy(x, weight, target).backward()

        both = record(step, topology)
    assert strategy is not None
    assert sent(forward) == pytest.approx(strategy.gather, rel=1e-9)
    assert work(forward, topology) == pytest.approx(strategy.compute, rel=0.02)
    total = strategy.compute + strategy.backward + strategy.gather
    assert work(both, topology) + sent(both) == pytest.approx(total, rel=0.02)


def sent(recorded: Recorded) -> float:
    """Seconds of the collectives of a step."""
    return sum(slot.event.seconds for slot in recorded.slots if slot.event.queue == "network")


def work(recorded: Recorded, topology: Topology) -> float:
    """Seconds of the local work of a step, without the host's time for the operator itself."""
    seconds = [slot.event.seconds for slot in recorded.slots if slot.event.queue == "compute"]
    return sum(seconds) - topology.dispatch * sum("cross_entropy" in slot.event.name for slot in recorded.slots)


def distributed_shape(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> Any:
    """A distributed tensor without data."""
    local = torch.empty(layout.local_shape(shape, (0,) * layout.mesh.ndim), dtype=dtype, device="meta")
    out = dshard.DTensor.from_local(local, layout.mesh, layout.placements, shape=shape)
    return out.detach().requires_grad_(dtype.is_floating_point)


# -- chunks and errors


def test_chunks() -> None:
    for rows, classes, features in [(65536, 128256, 4096), (8192, 1000, 2048), (10, 100, 10), (0, 5, 3), (1, 5, 0)]:
        size = rows_of_chunk(rows, classes, features)
        assert 1 <= size <= max(rows, 1)
        assert size <= max(-(-rows // 8), 128)
        on_host = rows_of_chunk(rows, classes, features, "cpu")
        assert min(size, 128) <= on_host <= size
        assert on_host <= max(2**22 // classes, features // 4, 128)
        of_half = rows_of_chunk(rows, classes, features, dtype=torch.bfloat16)
        assert of_half <= max(-(-rows // 4), 128)


ROWS, WEIGHT, TARGET = torch.zeros(6, 4), torch.zeros(5, 4), torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"x": torch.zeros(6, 3)}, ShapeError, r"give x as \(..., d\) and weight as \(classes, d\)"),
        ({"weight": torch.zeros(5, 2, 4)}, ShapeError, r"give x as \(..., d\) and weight as \(classes, d\)"),
        ({"target": TARGET[:5]}, ShapeError, r"give target the shape \(6,\)"),
        ({"bias": torch.zeros(4)}, ShapeError, r"bias has shape \(4,\); give \(5,\)"),
        ({"target": torch.zeros(6)}, DtypeError, r"it takes class indices, whole numbers: for probabilities write"),
        ({"reduction": "max"}, ArgumentError, "use 'mean', 'sum' or 'none'"),
        ({"label_smoothing": 2.0}, ArgumentError, "give a number from 0 to 1"),
        ({"rows": 0}, ArgumentError, "a chunk has at least one row"),
        ({"x": 3}, ArgumentError, "x is 3; give a tensor"),
        ({"class_weight": torch.ones(5, requires_grad=True)}, ArgumentError, "give it detached"),
        ({"target": TARGET + 5}, IndexError, "index 5 is out of bounds"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = {"x": ROWS, "weight": WEIGHT, "target": TARGET} | changes
    with pytest.raises(kind, match=message) as raised:
        linear_cross_entropy(**arguments)
    assert isinstance(raised.value, DShardError | IndexError)


# -- in models


class Labeller(nn.Module):
    """A model that computes its loss itself, of its head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 12), nn.Linear(12, 10, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return linear_cross_entropy(self.up(x).relu(), self.head.weight, target)


@pytest.mark.parametrize("strategy", ["data", "fsdp", "megatron", "auto"])
def test_models_that_compute_their_loss(strategy: str) -> None:
    torch.manual_seed(0)
    model, x, target = Labeller().double(), torch.randn(8, 8, dtype=torch.float64), torch.arange(8)
    expected = model(x, target)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    mesh = Mesh((4,), ("x",))
    with simulated(mesh):
        dshard.parallelize(model, mesh, strategy, x, target)
        loss = model(x, target)
        loss.backward()
        same(whole(loss) if isinstance(loss, dshard.DTensor) else loss, expected.detach())
        for name, parameter in model.named_parameters():
            same(whole(parameter.grad), gradients[name])


def test_a_traced_step_has_the_loss_as_one_call() -> None:
    graph = record_step(Labeller().double(), (torch.randn(8, 8, dtype=torch.float64), torch.arange(8)), {}).graph()
    loss = graph.calls[-1]
    assert loss.name == "linear_cross_entropy"
    assert str(loss.rule) == "_0 [d], [v] [d], _0 -> "
    (way,) = loss.alternatives
    assert str(way[1]) == "_0 [d], v [d], _0 -> "


def test_plain_tensors_beside_simulated_ranks_are_written_once() -> None:
    x, weight, target, *_ = Case((6, 4), 5, 1, (False, False), False).tensors
    with simulated(MESH):
        same(linear_cross_entropy(x, weight, target, rows=2), F.cross_entropy(F.linear(x, weight), target))
