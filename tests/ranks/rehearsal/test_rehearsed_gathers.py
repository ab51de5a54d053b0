"""Models whose weights are gathered for a block at a time, of which each rank rehearses the blocks, or does not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.transformer_blocks import TOKENS, WIDTH, Llama
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import init_device_mesh, parallelize
from dshard.testing import RankPool

PLANS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "fsdp": ((4,), ("dp",)),
    "fsdp x megatron-sp": ((2, 2), ("dp", "tp")),
}
MIXED = (0, 3)
"""The ranks that rehearse: on a mesh of two by two, one of each pair on each axis."""
STEPS, BLOCKS = 4, 2


class Net(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12, bias=False)
        self.blocks = nn.ModuleList(Llama() for _ in range(BLOCKS))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def trained(plan: str, rehearses: Sequence[int], accumulates: bool, checkpointed: bool) -> tuple[list[Tensor], int]:
    """The losses, the gradients and the weights of a few steps, and how many calls of blocks were answered."""
    shape, names = PLANS[plan]
    torch.manual_seed(0)
    words = torch.randint(0, 12, (8, TOKENS))
    model: Any = parallelize(Net(checkpointed), init_device_mesh("cpu", shape, mesh_dim_names=names), plan, words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values: list[Any] = []
    with dshard.rehearsing(dist.get_rank() in rehearses):
        for step in range(STEPS):
            words = torch.randint(0, 12, (8, TOKENS), generator=torch.Generator().manual_seed(step))
            for micro in range(1 + accumulates):
                with dshard.accumulate() if micro < accumulates else nullcontext():
                    loss = model(words).logsumexp(-1).square().mean()
                    loss.backward()
            values += [loss, *(p.grad for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                values.append(model(words))
    values += model.parameters()
    return [x.to_local().detach().clone() for x in values], model.rehearsed.answered


def check(ranks: RankPool, plan: str, accumulates: bool, checkpointed: bool) -> None:
    """What ranks send to gather weights, and to reduce their gradients, does not depend on what each has answered."""
    eager = ranks.run(trained, plan, (), accumulates, checkpointed, timeout=60)
    mixed = ranks.run(trained, plan, MIXED, accumulates, checkpointed, timeout=60)
    every = ranks.run(trained, plan, range(4), accumulates, checkpointed, timeout=60)

    least = BLOCKS * (STEPS - 2) * (1 if checkpointed else 2)  # of blocks within checkpoints those without gradients
    for rank, (expected, _) in enumerate(eager):
        assert all(map(torch.equal, expected, mixed[rank][0]))
        assert all(map(torch.equal, expected, every[rank][0]))
        assert every[rank][1] >= least
        assert (mixed[rank][1] >= least) == (rank in MIXED)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("plan", "accumulates"), [("fsdp", False), pytest.param("fsdp x megatron-sp", True, marks=pytest.mark.thorough)]
)
def test_ranks_may_rehearse_or_not(ranks: RankPool, plan: str, accumulates: bool) -> None:
    check(ranks, plan, accumulates, False)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_may(ranks: RankPool, plan: str, accumulates: bool, checkpointed: bool) -> None:
    check(ranks, plan, accumulates, checkpointed)


def gathered_weights_held() -> dict[bool, list[tuple[int, int]]]:
    """By Python and rehearsed: gathered weights whose memory is there after a forward pass, and after backward."""
    held: dict[bool, list[tuple[int, int]]] = {}
    for rehearsed in (False, True):
        torch.manual_seed(0)
        words = torch.randint(0, 12, (8, TOKENS))
        model: Any = parallelize(Net(False), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), "fsdp", words)
        memories: list[StorageWeakRef] = []

        def note(module: Any, args: Any, memories: list[StorageWeakRef] = memories) -> None:
            weights = [x for each in module.modules() for x in each._parameters.values() if x is not None]
            memories += [StorageWeakRef(x.to_local().untyped_storage()) for x in weights]

        for block in model.blocks:
            block.register_forward_pre_hook(note)
        with dshard.rehearsing(rehearsed):
            for _ in range(STEPS):
                memories.clear()
                loss = model(words).logsumexp(-1).square().mean()
                after_forward = sum(not memory.expired() for memory in memories)
                loss.backward()
                held.setdefault(rehearsed, []).append((after_forward, sum(not memory.expired() for memory in memories)))
        stretches = 2  # of calls before and behind the blocks
        assert model.rehearsed.answered == ((BLOCKS + stretches) * (STEPS - 2) if rehearsed else 0)
    return held


@pytest.mark.ranks
def test_gathered_weights_are_freed_as_by_python(ranks: RankPool) -> None:
    """Those of the last block stay until its backward pass, which comes next; of others no step holds any."""
    for held in ranks.run(gathered_weights_held):
        assert held[True] == held[False]
        assert held[True][-1] == (9, 0)


class Part(nn.Module):
    """Calls around a module within, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.within, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.within(self.norm(x)).tanh())


class Around(nn.Module):
    """Calls between blocks: some in a checkpoint, in which a block runs or not, and some of which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12, bias=False)
        self.blocks = nn.ModuleList(Part() for _ in range(3))
        self.runs_within = True

    def forward(self, words: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(words)).relu() * 2
        block = self.blocks[1] if self.runs_within else nn.Identity()
        x = self.blocks[2](checkpoint(lambda x: block(x.sin()).cos(), x, use_reentrant=False))
        with torch.no_grad():
            scale = x.amax()
        return self.head((x * scale).sigmoid())


def trained_around(rehearsed: bool, group: list[str] | None) -> tuple[list[Tensor], list[int]]:
    """Losses, gradients and weights of a few steps, and how many calls were answered of the model and its parts."""
    torch.manual_seed(0)
    words = torch.randint(0, 12, (8, TOKENS))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model: Any = parallelize(Around(), mesh, "fsdp", words, group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values: list[Any] = []
    with dshard.rehearsing(rehearsed):
        for step in range(6):
            model.runs_within = step > 3
            words = torch.randint(0, 12, (8, TOKENS), generator=torch.Generator().manual_seed(step))
            loss = model(words).logsumexp(-1).square().mean()
            loss.backward()
            values += [loss, *(p.grad if p.grad is not None else p for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    values += model.parameters()
    return [x.to_local().detach().clone() for x in values], [part.answered for part in model.rehearsed.parts]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("group", "answered"),
    [
        (None, [2 * 3 + 2, 4, 0, 4]),  # before, between and behind blocks, but for the checkpoint around one
        (["blocks.*", "blocks.*.within"], [2 * 3 + 2, *(4 * 2, 4), *(0, 0), *(4 * 2, 4)]),
    ],
)
def test_calls_around_blocks_are_answered(ranks: RankPool, group: list[str] | None, answered: list[int]) -> None:
    by_python, rehearsed = (ranks.run(trained_around, on, group) for on in (False, True))
    for (expected, none), (values, counts) in zip(by_python, rehearsed, strict=True):
        torch.testing.assert_close(values, expected)
        assert counts == answered
        assert not any(none)


def results_held() -> dict[bool, list[int]]:
    """By Python and rehearsed: results of blocks whose memory is there after a forward pass."""
    held: dict[bool, list[int]] = {}
    for rehearsed in (False, True):
        words = torch.randint(0, 12, (8, TOKENS))
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model: Any = parallelize(Around(), mesh, "fsdp", words)
        memories: list[StorageWeakRef] = []

        def note(module: Any, args: Any, out: Any, memories: list[StorageWeakRef] = memories) -> None:
            memories.append(StorageWeakRef(out.to_local().untyped_storage()))

        model.blocks[0].register_forward_hook(note)
        with dshard.rehearsing(rehearsed):
            for _ in range(STEPS):
                memories.clear()
                loss = model(words).sum()
                held.setdefault(rehearsed, []).append(sum(not memory.expired() for memory in memories))
                loss.backward()
    return held


@pytest.mark.ranks
def test_what_a_stretch_begins_with_is_freed_as_by_python(ranks: RankPool) -> None:
    for held in ranks.run(results_held):
        assert held[True][-1] == held[False][-1] == 0


class Gaps(nn.Module):
    """Calls before, between and behind many blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x).sin()
        return x


def gaps_answered() -> list[int]:
    """How many stretches each step of a loop has answered."""
    words = torch.randint(0, 12, (8, TOKENS))
    model: Any = parallelize(Gaps(), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), "fsdp", words)
    answered = [0]
    for _ in range(STEPS):
        model(words).sum().backward()
        answered.append(model.rehearsed.parts[0].answered)
    return [after - before for before, after in pairwise(answered)]


@pytest.mark.ranks
def test_all_stretches_are_recorded_at_once(ranks: RankPool) -> None:
    assert ranks.run(gaps_answered) == [[0, 0, 7, 7]] * 4


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Parametrizing(Gaps):
    """The last call parametrizes a weight between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(WIDTH, 2), 0

    def forward(self, words: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(words)).sin()
        self.calls += 1
        if self.calls == STEPS:
            parametrize.register_parametrization(self.head, "weight", Doubled())
        return self.head(self.blocks[1](x).sin())


def sums_of_parametrized() -> list[list[Tensor]]:
    """By Python and rehearsed: the sums of a few steps."""
    sums: list[list[Tensor]] = []
    words = torch.randint(0, 12, (8, TOKENS), generator=torch.Generator().manual_seed(0))
    for rehearsed in (False, True):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model: Any = parallelize(Parametrizing(), mesh, "fsdp", words)
        with dshard.rehearsing(rehearsed):
            sums.append([model(words).sum().detach().to_local() for _ in range(STEPS)])
    return sums


@pytest.mark.ranks
def test_a_weight_may_be_taken_away_between_stretches(ranks: RankPool) -> None:
    for by_python, rehearsed in ranks.run(sums_of_parametrized):
        assert rehearsed == by_python
