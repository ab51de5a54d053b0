"""Inputs and outputs of a parallelized module: rows of each data rank, plain outputs, gradients of plain tensors."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dshard
from dshard import ArgumentError, Layout, LayoutError, Mesh, Partial, Replicate, Shard, StrategyError, parallelize
from dshard.comm import as_mesh
from dshard.distribute import cut
from dshard.testing import RankPool, simulated
from dshard.torch_private import is_alias_of

WIDTH, CLASSES = 8, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).relu()
        logits = self.head(x)
        return logits if y is None else F.cross_entropy(logits, y)


@cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    return dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def data(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, dtype=torch.float64, generator=generator).to(dtype)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def nets(dtype: torch.dtype = torch.float64) -> tuple[Net, Net]:
    return Net().to(dtype), Net().to(dtype)


def assert_gradients_equal(model: nn.Module, alone: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = mine.grad.full_tensor() if isinstance(mine.grad, dshard.DTensor) else mine.grad
        torch.testing.assert_close(grad, theirs.grad, rtol=tolerance, atol=tolerance, msg=name)


def written_in_place(logits: Tensor, loss: Tensor, targets: Tensor) -> Tensor:
    """A loss of what a model returned, once the program has written to it."""
    logits[:, 0] = 0
    logits *= 0.5
    loss /= 2
    loss += F.cross_entropy(logits, targets)
    return loss


def rows_of_data_ranks(strategy: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
    """Steps on rows of each data rank, even and not, equal one device on all of them."""
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    model, alone = nets(dtype)
    parallelize(model, mesh_of(shape), strategy, *data(4, dtype), inputs="per-data-rank")
    local = copy.deepcopy(alone)
    parallelize(local, mesh_of(shape), strategy, data(4, dtype)[0], inputs="per-data-rank", outputs="plain")
    n, mine = dshard.data_ranks(model)
    for counts in ([3] * n, [5, 1, 2, 4][:n], [2] * (n - 1) + [1], [1] * n):
        x, y = data(sum(counts), dtype)
        with dshard.trace() as sent:
            dshard.distribute_batch(model, x.split(counts)[mine])
        assert [event.collective for event in sent.events[:1]] == ["all_gather"]
        assert (len(sent.events) == 1) == (n == 1 or counts[0] != 5), (
            "uneven rows alone are sent, but where they are chunks"
        )
        x_rows, y_rows = x.split(counts)[mine].clone().requires_grad_(), y.split(counts)[mine]
        x.requires_grad_()
        for each in (model, alone, local):
            each.zero_grad()
        expected = alone(x, y)
        expected.backward()
        loss = model(x_rows, y_rows)
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=tolerance, atol=tolerance)
        assert_gradients_equal(model, alone, tolerance)
        torch.testing.assert_close(x_rows.grad, x.grad.split(counts)[mine], rtol=tolerance, atol=tolerance)

        logits = local(x_rows.detach())  # the same rows, plain, and a loss of each rank's own
        assert type(logits) is Tensor
        torch.testing.assert_close(logits, alone(x).split(counts)[mine], rtol=tolerance, atol=tolerance)
        F.cross_entropy(logits, y_rows).backward()
        assert_gradients_equal(local, alone, tolerance)
        for net, rows, targets in ((local, x_rows.detach(), y_rows), (alone, x.detach(), y)):
            net.zero_grad()
            written_in_place(net(rows), net(rows, targets), targets).backward()
        assert_gradients_equal(local, alone, tolerance)

        totals = []
        for net, rows, targets in ((local, x_rows.detach(), y_rows), (alone, x.detach(), y)):
            net.zero_grad()
            weight = net.first.bias.sum()  # of a number that is not alike on all ranks, its gradient would not be
            totals.append(F.cross_entropy(net(rows), targets) * weight.exp() + weight)
            totals[-1].backward()
        torch.testing.assert_close(totals[0].full_tensor(), totals[1], rtol=tolerance, atol=tolerance)
        assert_gradients_equal(local, alone, tolerance)

        outside = F.cross_entropy(model(x_rows.detach()), dshard.distribute_batch(model, y_rows))
        torch.testing.assert_close(outside.full_tensor(), expected, rtol=tolerance, atol=tolerance)
    parallelize(nets(dtype)[0], mesh_of(shape), strategy, *data(4, dtype))  # of whole batches: numbers are alike
    with dshard.trace() as sent:
        assert torch.ones((), dtype=dtype).requires_grad_().mul(3) + totals[0].detach() > totals[0]
    assert not sent.events


ROWS = [("data", (4,)), ("megatron", (2, 2)), ("fsdp", (4,)), ("fsdp x megatron-sp", (2, 2)), ("optimus", (2, 2))]


def each_strategy(cases: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    for strategy, shape in cases:
        rows_of_data_ranks(strategy, shape, dtype)


@pytest.mark.ranks
def test_rows_of_each_data_rank_equal_one_device(ranks: RankPool) -> None:
    ranks.run(each_strategy, ROWS[1:2], torch.float64)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_each_data_rank_under_all_strategies(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(each_strategy, [*ROWS, ("atp", (2, 2)), ("fsdp x data", (2, 2))], dtype, timeout=300.0)


def whole_batches() -> None:
    """Plain outputs and placements of whole batches, inputs that need gradients, and parameters added later."""
    torch.set_num_threads(1)
    x, y = data(7, torch.float64)
    for strategy, shape in (("megatron", (2, 2)), ("fsdp", (4,))):
        mesh = mesh_of(shape)
        model, alone = nets()
        parallelize(model, mesh, strategy, x, outputs="plain")
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        logits = model(mine * 2)
        assert type(logits) is Tensor
        F.cross_entropy(logits, y).backward()
        F.cross_entropy(alone(theirs * 2), y).backward()
        assert_gradients_equal(model, alone)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)

        model.head, alone.head = (nn.Sequential(net.head, nn.Linear(CLASSES, 3).double()) for net in (model, alone))
        for net in (model, alone):
            nn.init.constant_(net.head[1].weight, 0.5)
            net.head[1].bias.data.zero_()
            net.zero_grad()
            net(x).square().mean().backward()
        assert_gradients_equal(model, alone)

        model, alone = nets()
        parallelize(model, mesh, strategy, x, outputs=[Shard(0)] + [Replicate()] * (len(shape) - 1))
        assert model(x).placements[0] == Shard(0)


@pytest.mark.ranks
def test_whole_batches_and_plain_outputs(ranks: RankPool) -> None:
    ranks.run(whole_batches)


def alike(x: Tensor, y: Tensor) -> bool:
    """Whether two local tensors have the same values, or are both those of ranks outside a mesh."""
    return x.shape == y.shape if x.is_meta else torch.equal(x, y)


def cut_inputs() -> list[str]:
    """The plain tensors that `cut` lays out unlike `distribute_tensor`, at first or warm, or does not copy."""
    wrong = []
    many = [torch.arange(42.0).view(7, 6), torch.arange(42).view(6, 7).t(), torch.arange(3), torch.zeros(0, 6)]
    many += [torch.arange(6.0).expand(7, 6), torch.randn(7, 6, dtype=torch.complex64).conj(), torch.ones(())]
    many += [torch.randn(7, 6, requires_grad=True), nn.Parameter(torch.randn(7, 6)), torch.randn(7, 6)[1:, ::2]]
    for (i, x), placement, shape in itertools.product(
        enumerate(many), (Shard(0), Replicate(), Partial()), ((4,), (2,))
    ):
        layout = Layout(as_mesh(mesh_of(shape)), (placement,))
        if placement == Shard(0) and not x.dim():
            continue
        expected: Any = dshard.distribute_tensor(x, layout.mesh, layout.placements, src_data_rank=None)
        for turn in ("first", "warm"):
            result: Any = cut(x, layout)
            facts = [type(result), result._spec, result.requires_grad, result._local_tensor.stride()]
            facts += [result._local_tensor.is_conj(), result.is_leaf]
            reference = [type(expected), expected._spec, expected.requires_grad, expected._local_tensor.stride()]
            reference += [expected._local_tensor.is_conj(), expected.is_leaf]
            is_copy = result._local_tensor.is_meta or not x.numel() or not is_alias_of(result._local_tensor, x.detach())
            if facts != reference or not is_copy or not alike(result._local_tensor, expected._local_tensor):
                wrong.append(f"tensor {i}, {placement}, {shape}, {turn}: {facts}, {reference}, {is_copy=}")
    with pytest.raises(LayoutError, match="strided"):
        cut(torch.eye(7).to_sparse(), layout)
    return wrong


@pytest.mark.ranks
def test_inputs_are_cut_as_distribute_tensor_does(ranks: RankPool) -> None:
    assert ranks.run(cut_inputs) == [[]] * 4


def given_different_data() -> str:
    mesh, rank = mesh_of((2, 2)), torch.distributed.get_rank()
    x, y = data(4, torch.float64)
    model, rows = nets()
    parallelize(model, mesh, "megatron", x)
    parallelize(rows, mesh, "megatron", x, inputs="per-data-rank")
    with pytest.raises(
        LayoutError, match=r"different data, y, on ranks \[0, 1, 2\] and ranks \[3\]: each is given the"
    ):
        model(x, y=y + (rank == 3))
    with pytest.raises(LayoutError, match=r"other tensors, or tensors of other dtypes or sizes, on ranks \[0, 2, 3\]"):
        model(x[:, : 6 - (rank == 1)])
    with pytest.raises(
        LayoutError, match=r"different data, x, on ranks \[2\] and ranks \[3\]: with inputs='per-data-rank'"
    ):
        rows(x + (rank == 3), y)
    with pytest.raises(LayoutError, match=r"or sizes, as .*padding='max_length' pads alike, on ranks \[0, 1, 3\]"):
        rows(x[:, : 6 - (rank == 2)])
    with pytest.raises(LayoutError, match=r"different data, x, on ranks \[0\] and ranks \[1\]"):
        rows(x[: 4 - (rank == 1)])
    with pytest.raises(LayoutError, match=r"the input x is of layout torch.sparse_coo: .* by to_dense\(\)"):
        model(x.to_sparse(), y)
    model(x, y)  # raised on all ranks: they are still in step
    torch.manual_seed(rank)
    model.head = nn.Linear(WIDTH, CLASSES).double()
    with pytest.raises(LayoutError, match=r"a plain parameter of shape \(5, 8\) .* the ranks have other values"):
        model(x, y)
    return "raised"


@pytest.mark.ranks
def test_different_data_on_the_ranks_is_refused(ranks: RankPool) -> None:
    assert ranks.run(given_different_data) == ["raised"] * 4


def test_operators_that_take_functions_are_refused_with_the_way_out() -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, super().forward, torch.tanh, (x,))

    with pytest.raises(StrategyError, match=r"operator cond takes functions, .* write branches and loops in Python"):
        parallelize(Branches(4, 4), Mesh((2,), ("x",)), "data", torch.ones(2, 4, device="meta"))


class TakesMasks(Net):
    def forward(self, x: Tensor, masks: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(x * masks["far"] * masks["near"][:, :1])


def given_other_orders(inputs: str) -> None:
    """Dicts made of a set of names, as transformers makes masks, have another order in each process."""
    mesh, x = mesh_of((2, 2)), data(4, torch.float64)[0]
    near, far = torch.full((4, 3), 0.5, dtype=torch.float64), torch.full((6,), 3.0, dtype=torch.float64)
    masks = {"near": near, "far": far} if torch.distributed.get_rank() % 2 else {"far": far, "near": near}
    model = parallelize(TakesMasks().double(), mesh, "megatron", x, masks=masks, inputs=inputs)
    expected = TakesMasks().double()(x, masks)
    if inputs == "per-data-rank":
        x, masks["near"] = dshard.distribute_tensor(x, mesh, [Shard(0), Replicate()]).to_local(), near[:2]
    for _ in range(2):
        torch.testing.assert_close(model(x, masks=masks).full_tensor(), expected)


@pytest.mark.ranks
@pytest.mark.parametrize("inputs", ["global", "per-data-rank"])
def test_ranks_give_tensors_of_a_dict_in_any_order(ranks: RankPool, inputs: str) -> None:
    ranks.run(given_other_orders, inputs)


def test_what_parallelize_is_asked_for() -> None:
    mesh, x = Mesh((2,), ("tp",)), torch.randn(4, 6)
    with simulated(mesh):
        with pytest.raises(LayoutError, match="inputs: 'per_data_rank' is none: use global, per-data-rank"):
            parallelize(Net(), mesh, "megatron", x, inputs="per_data_rank")
        with pytest.raises(LayoutError, match="outputs='whole': give 'distributed', 'plain' or placements"):
            parallelize(Net(), mesh, "megatron", x, outputs="whole")
        with pytest.raises(LayoutError, match=r"2 placements .* give 1"):
            parallelize(Net(), mesh, "megatron", x, outputs=[Shard(0), Shard(0)])
        assert dshard.data_ranks(parallelize(Net(), mesh, "data", x)) == (2, 0)
        assert dshard.data_ranks(nn.Sequential(parallelize(Net(), mesh, "megatron", x))) == (1, 0)
    with pytest.raises(dshard.ArgumentError, match="Net is not laid out by parallelize"):
        dshard.data_ranks(Net())


ModelOutput: Any = type("ModelOutput", (OrderedDict,), {"__module__": "transformers.utils.generic"})
CALLERS = {name: {"__name__": name} for name in ("transformers.generation", "peft.model", "mine")}
for caller in CALLERS.values():
    exec("def call(model, *args, **kwargs): return model(*args, **kwargs)", caller)


class LikeHuggingFace(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = super().forward(x)
        out = ModelOutput(logits=logits, others=(logits, None))
        return out if y is None else ModelOutput(loss=F.cross_entropy(logits, y), **out)


def test_outputs_are_plain_where_a_library_calls() -> None:
    mesh, (x, y) = Mesh((2, 2), ("a", "b")), data(5, torch.float32)
    with simulated(mesh):
        model = parallelize(LikeHuggingFace(), mesh, "megatron", x, y)
        mine, handed_on, library = (CALLERS[name]["call"] for name in ("mine", "peft.model", "transformers.generation"))
        for call in (mine, handed_on):  # `peft` hands on to this test
            assert isinstance(call(model, x)["logits"], dshard.DTensor)
        with torch.no_grad():
            out = library(model, x, y=y)
        assert type(out) is ModelOutput
        assert not any(isinstance(t, dshard.DTensor) for t in (out["loss"], out["logits"], out["others"][0]))
        trained = library(model, x, y=y)  # of a step the loss alone is wanted
        assert not isinstance(trained["loss"], dshard.DTensor)
        assert isinstance(trained["logits"], dshard.DTensor)
        trained["loss"].backward()
        assert model.head.weight.grad is not None
        assert not isinstance(library(model, x)["logits"], dshard.DTensor)


Trainer: Any = type("Trainer", (), {"__module__": "transformers.trainer", "compute_loss": lambda *given: None})


class OwnTrainer(Trainer):  # type: ignore[misc]
    def compute_loss(this, model: nn.Module, *given: Tensor) -> Any:
        return model(*given)

    def other(self, model: nn.Module, *given: Tensor) -> Any:
        return model(*given)


def test_outputs_are_plain_where_a_method_of_a_library_is_overridden() -> None:
    mesh, given = Mesh((2, 2), ("a", "b")), data(5, torch.float32)
    with simulated(mesh):
        model = parallelize(LikeHuggingFace(), mesh, "megatron", *given)
        out = OwnTrainer().compute_loss(model, *given)
        assert not any(isinstance(t, dshard.DTensor) for t in (out["loss"], out["logits"], out["others"][0]))
        (out["loss"] + F.cross_entropy(out["logits"], given[1])).backward()
        assert model.head.weight.grad is not None
        assert isinstance(OwnTrainer().other(model, *given)["logits"], dshard.DTensor)


class TakesInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(inputs)


def test_a_model_whose_parameter_is_called_inputs() -> None:
    mesh, x = Mesh((2,), ("dp",)), torch.randn(4, 6)
    with simulated(mesh):
        assert parallelize(TakesInputs(), mesh, "data", inputs=x)(inputs=x).placements == (Shard(0),)


@dataclass(frozen=True)
class Features:
    scale: Tensor
    name: str = "scale"


class Pair(NamedTuple):
    x: Tensor
    features: Features


class TakesContainers(Net):
    def forward(self, pair: Pair, given: Any) -> Any:  # type: ignore[override]
        assert pair.features.name == "scale"
        return Pair(super().forward(pair.x * pair.features.scale) + given["shift"], pair.features)


def given_containers(inputs: str) -> None:
    """Named tuples, dataclasses and mappings keep their classes, and what they hold is laid out."""
    mesh, x = mesh_of((2, 2)), data(4, torch.float64)[0]
    given = UserDict(shift=torch.arange(4.0)[:, None])
    pair = Pair(x, Features(x.sum(1, keepdim=True)))
    expected = TakesContainers().double()(pair, given)
    model = parallelize(TakesContainers().double(), mesh, "data x megatron", pair, given, inputs=inputs)
    if inputs == "per-data-rank":
        first = 2 * dshard.data_ranks(model)[1]
        pair = Pair(x[first : first + 2], Features(pair.features.scale[first : first + 2]))
        given = UserDict(shift=given["shift"][first : first + 2])
    found = model(pair, given)
    torch.testing.assert_close(found.x.full_tensor(), expected.x)
    assert found.features.scale.placements == (Shard(0), Replicate())
    batch = dshard.distribute_batch(model, given)
    assert batch["shift"].placements == (Shard(0), Replicate())
    assert isinstance(given["shift"], Tensor)
    assert not isinstance(given["shift"], dshard.DTensor)


@pytest.mark.ranks
@pytest.mark.parametrize("inputs", ["global", "per-data-rank"])
def test_inputs_in_containers_of_any_class(ranks: RankPool, inputs: str) -> None:
    ranks.run(given_containers, inputs)


class AddsFeatures(Net):
    def forward(self, x: Tensor, features: list[Tensor], names: dict[str, Any]) -> Any:  # type: ignore[override]
        features.append(x * 2)
        names["last"] = len(features)
        return super().forward(x)


@pytest.mark.parametrize("plan", ["data", "auto"])
def test_what_a_model_adds_to_a_list_is_in_the_list_of_the_caller(plan: str) -> None:
    mesh, x = Mesh((2,), ("a",)), data(4, torch.float64)[0]
    features, names = list[Any](), dict[str, Any]()
    model = parallelize(AddsFeatures().double(), mesh, plan, x, features, names)
    assert (features, names) == ([], {}), "planning adds nothing"
    model(x.to("meta"), features, names)
    assert (len(features), names) == (1, {"last": 1})
    assert isinstance(features[0], dshard.DTensor)


class ChangesContainers(Net):
    def forward(self, batch: dict[str, Any], features: list[Any], again: int = 0) -> Any:  # type: ignore[override]
        if again:
            self(batch, features, again - 1)
        batch["rows"], batch["kept"] = batch["x"] * 2, batch.pop("gone")
        features[1:1] = [batch["rows"].sum(), batch["x"]]
        return super().forward(batch["x"])


@pytest.mark.parametrize("options", [{}, {"outputs": "plain"}, {"precision": dshard.parallel.Precision(torch.float32)}])
@pytest.mark.parametrize("plan", ["data", "fsdp"])
def test_what_a_model_does_to_containers_with_tensors_is_done_to_those_of_the_caller(plan: str, options: Any) -> None:
    x, mesh = data(4, torch.float64)[0], Mesh((2,), ("a",))
    y = x + 1
    with simulated(mesh):
        model = parallelize(ChangesContainers().double(), mesh, plan, {"x": x, "gone": y}, [x], **options)
        for _ in range(2):
            batch: dict[str, Any] = {"x": x, "gone": y}
            features = [x, y, 3]
            model(batch, features)
            assert list(batch) == ["x", "rows", "kept"]
            total = features.pop(1)
            assert [*map(id, (*features, batch["x"], batch["kept"]))] == [*map(id, (x, x, y, 3, x, y))]
            for found, expected in ((batch["rows"], x * 2), (total, (x * 2).sum())):
                assert isinstance(found, dshard.DTensor) is (options.get("outputs") != "plain")
                whole = found.full_tensor() if isinstance(found, dshard.DTensor) else found
                torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=1e-6)
        batch, features = {"x": x, "gone": y}, [x]
        with pytest.raises(KeyError):  # of the second call within; that which fails gives nothing back
            model(batch, features, 1)
        assert ([*batch], len(features)) == (["x", "gone"], 1)
        model(batch, features)


def test_a_model_is_copied_and_its_pickle_refused() -> None:
    x = data(4, torch.float64)[0]
    model = parallelize(Net().double(), Mesh((2,), ("a",)), "megatron", x)
    for copied in (copy.copy(model), copy.deepcopy(model)):
        assert copied(x.to("meta")).layout == model(x.to("meta")).layout
    for save in (pickle.dumps, lambda whole: torch.save({"model": whole}, io.BytesIO())):
        with pytest.raises(ArgumentError, match=r"'megatron'\) cannot be pickled, .*model.state_dict\(\)"):
            save(model)
