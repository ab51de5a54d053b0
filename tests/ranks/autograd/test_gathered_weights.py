"""Weights gathered a module at a time: few collectives, freed after use, and the results of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch
from weakref import WeakSet, ref

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from dshard import (
    DShardError,
    DTensor,
    Layout,
    LayoutError,
    Mesh,
    Shard,
    init_device_mesh,
    parallelize,
    plan_model,
    trace,
)
from dshard.autograd.gathered_weights import GatheredWeights, versions_of
from dshard.dispatch import torch_calls
from dshard.parallel.gather_groups import blocks_of
from dshard.simulate import record
from dshard.testing import RankPool, distribute, simulated, whole


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.float64)
        self.up, self.down = nn.Linear(width, 3 * width).double(), nn.Linear(3 * width, width).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """Blocks between an embedding and a head that may be its own table; the blocks run `times` times each."""

    def __init__(self, depth: int = 3, width: int = 7, tied: bool = False, times: int = 1, recompute: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, width, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 11, bias=False, dtype=torch.float64)
        self.times, self.recompute = times, recompute
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            for _ in range(self.times):
                if self.recompute:
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


NETS: dict[str, Any] = {"plain": {}, "tied": {"tied": True}, "twice": {"times": 2}, "recomputed": {"recompute": True}}
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "fsdp": ((4,), ("d",)),
    "data x fsdp": ((2, 2), ("r", "d")),
    "fsdp x fsdp": ((2, 2), ("c", "d")),
    "fsdp x megatron": ((2, 2), ("d", "t")),
}


def trained(strategy: str, options: dict[str, Any]) -> None:
    """Steps of AdamW that are those of one device, without and with frozen weights, and an evaluation."""
    shape, names = MESHES[strategy]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, reference = Net(**options), Net(**options)
    ids = torch.randint(11, (8, 3), generator=torch.Generator().manual_seed(1))
    parallelize(model, mesh, strategy, ids)
    stored = dict(model.named_parameters())
    optimisers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference)]
    for step in range(4):
        for each, optimiser in zip((model, reference), optimisers, strict=True):
            each.blocks[0].requires_grad_(step != 2)
            each(ids).square().mean().backward()
            optimiser.step()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p is stored[name], "the stored weights are back in their places"
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                assert p.grad.placements == p.placements
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12)
        for optimiser in optimisers:
            optimiser.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).full_tensor(), reference(ids), rtol=1e-9, atol=1e-12)
    second_order(model, reference, ids)


def second_order(model: nn.Module, reference: nn.Module, ids: Tensor) -> None:
    found = []
    for each in (model, reference):
        each.requires_grad_()
        grads = torch.autograd.grad(each(ids).square().mean(), list(each.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]
        found.append([p.grad for p in each.parameters()])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected, rtol=1e-8, atol=1e-11)


QUICK = {("fsdp x megatron", "tied")}


@pytest.mark.parametrize(
    ("strategy", "net"),
    [
        pytest.param(strategy, net, marks=[] if (strategy, net) in QUICK else pytest.mark.thorough)
        for strategy in MESHES
        for net in NETS
    ],
)
def test_training_is_that_of_one_device(ranks: RankPool, strategy: str, net: str):
    ranks.run(trained, strategy, NETS[net])


def few_collectives(depth: int, shape: tuple[int, ...] = (4,)) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("c", "d")[-len(shape) :])
    model = Net(depth, width=8)
    ids = torch.zeros(8, 3, dtype=torch.long)
    parallelize(model, mesh, " x ".join(len(shape) * ["fsdp"]), ids)
    for _ in range(3):
        with trace() as found:
            model(ids).square().sum().backward()
    return len(found.events), found.nbytes


def test_three_collectives_for_each_block(ranks: RankPool):
    (some, received), (more, received_by_more) = ranks.run(few_collectives, 2)[0], ranks.run(few_collectives, 5)[0]
    assert more - some == 3 * 3, "two gathers and a reduction"
    numel = sum(p.numel() for p in Block(8).parameters())
    assert received_by_more - received == 3 * 3 * 8 * numel * 3 // 4, "3 (n - 1) / n of the weights"


def test_a_finer_mesh_has_no_more_collectives(ranks: RankPool):
    """Both axes of a mesh together shard what one axis of a coarser one does."""
    assert ranks.run(few_collectives, 3, (2, 2)) == ranks.run(few_collectives, 3)


class Operators(TorchDispatchMode):
    """Counts the operators on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def operators_for_each_weight(width: int) -> list[float]:
    """The operators that a forward and a backward pass take more where weights are gathered, for each weight."""
    counts = []
    for strategy in ("data", "fsdp"):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
        model, ids = Net(width=width), torch.randint(11, (8, 5))
        parallelize(model, mesh, strategy, ids)
        for _ in range(3):
            with Operators() as forward:
                loss = model(ids).square().sum()
            with Operators() as backward:
                loss.backward()
            model.zero_grad()
        counts.append((forward.count, backward.count))
    n = len(list(model.parameters()))
    return [(gathered - stored) / n for stored, gathered in zip(*counts, strict=True)]


@pytest.mark.parametrize(("width", "most"), [(7, 10), pytest.param(8, 7, marks=pytest.mark.thorough)])
def test_weights_are_gathered_and_reduced_by_few_operators(ranks: RankPool, width: int, most: int):
    for found in ranks.run(operators_for_each_weight, width):
        assert max(found) <= most, found


def peak_of(depth: int) -> float:
    """The most bytes that a step takes, in whole blocks."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model = Net(depth, width=64)
    ids = torch.zeros(4, 1, dtype=torch.long)
    parallelize(model, mesh, "fsdp", ids)
    for _ in range(2):
        model(ids).square().sum().backward()
        model.zero_grad()
    step = record(lambda: model(ids).square().sum().backward(), warm=True)
    return step.peak / (8 * sum(p.numel() for p in Block(64).parameters()))


def test_few_blocks_are_whole_at_once(ranks: RankPool):
    few, many = ranks.run(peak_of, 4)[0], ranks.run(peak_of, 8)[0]
    assert (many - few) / 4 < 0.3, "a block more is a quarter of its gradients more"
    assert few < 1 + 5, (
        "its gradients; two whole blocks, and of a reduction the gradients or what arrives, and what is sent"
    )


def kept_by_hooks() -> list[bool]:
    """Whether a hook of a whole weight may keep its gradient, whose memory the reduction would free."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, ids, kept = Net(), torch.arange(8).view(8, 1), []
    parallelize(model, mesh, "fsdp", ids)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: module.up.weight.register_hook(kept.append) and None)
    model(ids).square().sum().backward()
    grads = [block.up.weight.grad.full_tensor() for block in reversed(model.blocks)]
    return [torch.allclose(mine.full_tensor(), grad) for mine, grad in zip(kept, grads, strict=True)]


def test_a_hook_may_keep_the_gradient_of_a_whole_weight(ranks: RankPool):
    assert ranks.run(kept_by_hooks) == [[True] * 3] * 4


def written_between() -> None:
    """A weight that is written to while the next module's are gathered ahead is gathered again."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, reference = Net(), Net()
    ids = torch.arange(8).view(8, 1)
    parallelize(model, mesh, "fsdp", ids)

    def write(module: nn.Module, args: Any, out: Any) -> None:
        for p in each.blocks[1].parameters():
            p.data.mul_(1.5)

    for each in (model, reference):
        for _ in range(2):
            each(ids)
        handle = each.blocks[0].register_forward_hook(write)
        out = each(ids)
        handle.remove()
        found = out.full_tensor() if each is model else out
    torch.testing.assert_close(found, reference(ids))


def test_a_write_after_the_gather_began_is_seen(ranks: RankPool):
    ranks.run(written_between)


def raised() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model = Net()
    ids = torch.arange(8).view(8, 1)
    parallelize(model, mesh, "fsdp", ids)
    stored = list(model.parameters())
    with pytest.raises((IndexError, RuntimeError)):
        model(ids + 100)
    assert all(p is q for p, q in zip(model.parameters(), stored, strict=True))
    model(ids).sum().backward()
    assert all(p.grad.placements == p.placements for p in stored)


def test_a_model_that_raises_has_its_stored_weights_back(ranks: RankPool):
    ranks.run(raised)


def test_versions_are_read_without_dispatch() -> None:
    """They are read several times for each weight and step, and by dispatch take longer than an operator."""
    mesh = Mesh((4,), ("x",))
    with simulated(mesh):
        x = distribute(torch.ones(4), Layout(mesh, [Shard(0)]))
        x.mul_(2)
        with patch.object(torch_calls, "call", side_effect=AssertionError):
            ((_, _, version, _),) = versions_of([x])
    assert version == x._version > 0


def test_blocks_are_the_entries_of_the_outermost_lists():
    assert list(blocks_of(Net(2))) == ["blocks.0", "blocks.1"]
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ReLU())
    assert list(blocks_of(nested)) == ["0", "1"]
    assert list(blocks_of(nn.Linear(2, 2))) == []


def test_a_plan_counts_what_is_gathered_together():
    plan = plan_model(Net(4, width=8), Mesh((4,), ("d",)), "fsdp", torch.zeros(8, 3, dtype=torch.long))
    assert plan.gathered == ("d",)
    assert plan.cost is not None
    gathers = [move for move in plan.cost.moves if move.collective == "all_gather"]
    assert sum(move.count for move in gathers) == 1 + 2 * 4 - 1, "the model's own and the last block's once"


def whole_after() -> list[int]:
    """The sets of whole weights that are there once the result of a forward pass is gone, without and with autograd."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    model, ids = Net(), torch.arange(8).view(8, 1)
    parallelize(model, mesh, "fsdp", ids)
    seen: WeakSet[GatheredWeights] = WeakSet()
    make, counts = GatheredWeights.__init__, []

    def watched(self: GatheredWeights, *args: Any) -> None:
        seen.add(self)
        make(self, *args)

    with patch.object(GatheredWeights, "__init__", watched):
        for recorded in (False, True):
            with torch.set_grad_enabled(recorded):
                model(ids)
            counts.append(len(seen))
    return counts


def test_no_weights_stay_whole_after_a_forward_pass(ranks: RankPool):
    assert ranks.run(whole_after) == [[0, 0]] * 4


def gathers_of(**options: Any) -> list[int]:
    """How many collectives gather in a plan, forward and backward."""
    plan = plan_model(Net(3, width=8), Mesh((4,), ("d",)), "fsdp", torch.zeros(8, 3, dtype=torch.long), **options)
    assert plan.cost is not None
    moves = [move for move in plan.cost.moves if move.collective == "all_gather"]
    return [sum(m.count for m in moves if m.direction == way) for way in ("forward", "backward")]


def test_groups_that_are_asked_for():
    mesh, ids = Mesh((4,), ("d",)), torch.arange(8).view(8, 1)
    assert gathers_of() == [1 + 3, 2]
    assert gathers_of(group=["blocks.[01]"]) == [1 + 2, 1], "the third block's are the model's own"
    assert gathers_of(group=["blocks.*", "blocks.*.up"])[0] == 1 + 2 * 3
    model, reference = Net(), Net()
    with simulated(mesh):
        parallelize(model, mesh, "fsdp", ids, group=[*model.blocks, model.blocks[1].up])
        for each in (model, reference):
            for _ in range(2):
                each(ids).square().mean().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            ["layers.*"],
            r"group: 'layers.\*' is no module of Net with parameters: give .* there are embed, blocks, blocks.0",
        ),
        ([nn.Linear(2, 2)], "group: a Linear is no module of Net with parameters"),
        ("blocks.*", "group: 'blocks.*' is no sequence: give patterns of their paths"),
        ([3], "group: 3 is an int: give patterns of their paths"),
    ],
)
def test_groups_that_are_none(group: Any, message: str):
    with pytest.raises(DShardError, match=message):
        parallelize(Net(), Mesh((4,), ("d",)), "fsdp", torch.zeros(8, 3, dtype=torch.long), group=group)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def changes_parameters_later() -> None:
    x = torch.ones(4, 6, dtype=torch.float64)
    found = []
    for mesh in (None, init_device_mesh("cpu", (4,))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 5)).double()
        if mesh is not None:
            parallelize(model, mesh, "fsdp", x)
        nn.utils.remove_weight_norm(model[0])
        register_parametrization(model[2], "weight", Doubled())
        model[2].bias = None
        model(x).square().sum().backward()
        values = [model(x), *(p.grad for p in model.parameters())]
        found.append([value.full_tensor() if isinstance(value, DTensor) else value for value in values])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_parameters_that_are_taken_out_of_modules_are_no_longer_gathered(ranks: RankPool) -> None:
    ranks.run(changes_parameters_later)


class ChangedWithin(nn.Module):
    """A model that changes its parameters in the forward passes of some steps, by functions of their numbers."""

    def __init__(self, changes: Mapping[int, Callable[[ChangedWithin], object]]) -> None:
        super().__init__()
        self.changes, self.step = changes, 0
        self.up, self.body, self.down = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.changes.get(self.step, lambda model: None)(self)
        self.step += 1
        return self.down(self.body(self.up(x)))  # type: ignore[no-any-return]


def doubles(model: ChangedWithin) -> None:
    for module in (model.up, model.body[0]):
        register_parametrization(module, "weight", Doubled())


def doubles_no_more(model: ChangedWithin) -> None:
    for module in (model.up, model.body[0]):
        remove_parametrizations(module, "weight", leave_parametrized=False)


def replaces(model: ChangedWithin) -> None:
    model.up.weight, model.down.bias = nn.Parameter(2 * model.up.weight.detach()), None


@pytest.mark.parametrize(
    ("first", "changes"),
    [
        (None, {0: doubles}),
        (None, {1: doubles, 3: doubles_no_more}),
        (None, {2: replaces}),
        (doubles, {1: doubles_no_more}),
    ],
)
def test_parameters_may_be_changed_within_a_forward_pass(first: Any, changes: Any) -> None:
    mesh, x = Mesh((2,), ("x",)), torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    found: list[list[Tensor]] = []
    with simulated(mesh):
        for is_distributed in (False, True):
            torch.manual_seed(0)
            model = ChangedWithin(changes).double()
            if first is not None:
                first(model)
            if is_distributed:
                parallelize(model, mesh, "fsdp", x)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for _ in range(5):
                loss = model(x).square().sum()
                loss.backward()
                losses.append(loss.detach())
                del loss  # whose graph would not let torch exchange the content of its weights
                optimizer.step()
                optimizer.zero_grad()
            found.append([*losses, *(value for _, value in sorted(model.state_dict().items()))])
        for plain, distributed in zip(*found, strict=True):
            torch.testing.assert_close(whole(distributed), plain)


def converts(model: ChangedWithin) -> None:
    model.down.to(torch.float64)  # which it has


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_a_module_may_be_converted_to_what_it_is_within_a_forward_pass(strategy: str) -> None:
    """Its parameters stay those of the graph, and may have weak references."""
    mesh, x = Mesh((2,), ("x",)), torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    torch.manual_seed(0)
    alone = ChangedWithin(dict.fromkeys(range(4), converts)).double()
    alone(x).square().sum().backward()
    with simulated(mesh):
        model = copy.deepcopy(alone)
        parallelize(model, mesh, strategy, x)
        model.zero_grad()
        held = [ref(parameter) for parameter in model.parameters()]
        model(x).square().sum().backward()

        for each, expected in zip(held, alone.parameters(), strict=True):
            torch.testing.assert_close(whole(each().grad), expected.grad)


def test_a_gathered_weight_is_not_converted_within_a_forward_pass() -> None:
    mesh, x = Mesh((2,), ("x",)), torch.ones(4, 6)
    with simulated(mesh):
        model = ChangedWithin({1: lambda m: m.up.to(torch.float64)}).float()
        parallelize(model, mesh, "fsdp", x)
        model(x)
        with pytest.raises(LayoutError, match="convert the module before the step"):
            model(x)


def test_a_gathered_weight_gets_no_other_content() -> None:
    mesh, x = Mesh((2,), ("x",)), torch.ones(4, 6)
    with simulated(mesh):
        model = ChangedWithin({1: lambda m: remove_parametrizations(m.up, "weight")})
        register_parametrization(model.up, "weight", Doubled())
        parallelize(model, mesh, "fsdp", x)
        model(x)
        with pytest.raises(LayoutError, match="weight of a Linear, a gathered copy of a weight, got other content"):
            model(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)).relu())  # type: ignore[no-any-return]


def larger(model: Tied) -> int:
    model.embed = nn.Embedding(13, 8)
    model.head.weight = model.embed.weight
    return 13


def untied(model: Tied) -> int:
    model.head.weight = nn.Parameter(torch.linspace(-1, 1, 80).view(10, 8))
    return 10


def replaces_tied_weights() -> None:
    found = []
    for mesh in (None, init_device_mesh("cpu", (4,))):
        for change in (larger, untied):
            torch.manual_seed(0)
            model, ids = Tied(), torch.arange(8).view(4, 2)
            if mesh is not None:
                parallelize(model, mesh, "fsdp", ids)
            model(ids).square().sum().backward()
            model.zero_grad()
            size = change(model)
            head = model.head.weight
            out = model(ids + size - 8)
            out.square().sum().backward()
            assert model.head.weight is head
            assert out.shape[-1] == size
            found.append([out, *(p.grad for p in model.parameters())])
    for mine, theirs in zip(found[2:], found[:2], strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x.full_tensor() if isinstance(x, DTensor) else x, y)


@pytest.mark.ranks
def test_a_tied_weight_may_be_replaced_at_one_of_its_places(ranks: RankPool) -> None:
    """A larger vocabulary, or a head that is no longer the table: the hooks put no former weight in its place."""
    ranks.run(replaces_tied_weights)


class Interrupted(Net):
    """Is interrupted within a block, and between blocks, in calls of these numbers."""

    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        hook = self.blocks[1].up.register_forward_hook(self.interrupt) if self.calls in (2, 5) else None
        try:
            return super().forward(ids)
        finally:
            if hook is not None:
                hook.remove()

    @staticmethod
    def interrupt(*call: object) -> None:
        raise KeyboardInterrupt


def goes_on_after_interrupts() -> None:
    found: list[list[Any]] = []
    for mesh in (None, init_device_mesh("cpu", (4,))):
        model, ids = Interrupted(), torch.arange(8).view(4, 2)
        if mesh is not None:
            parallelize(model, mesh, "fsdp", ids)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        model.calls = 0
        for _ in range(7):
            optimizer.zero_grad()
            try:
                losses.append(model(ids).square().mean())
            except KeyboardInterrupt:
                continue
            losses[-1].backward()
            optimizer.step()
        found.append([*losses, *model.parameters(), *(p.grad for p in model.parameters())])
    assert len(found[0]) == len(found[1])
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


@pytest.mark.ranks
def test_training_goes_on_after_an_interrupt(ranks: RankPool) -> None:
    """Torch calls no hook then: the next call of a block puts its stored weights back."""
    ranks.run(goes_on_after_interrupts)
