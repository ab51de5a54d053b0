"""Rehearsed models in the loops that people write: what they cost, what they hold, and what is seen of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_in
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.debug import CommDebugMode
from dshard.rehearsal import record
from dshard.testing import RankPool

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
PLANS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "data": ((4,), ("dp",)),
    "megatron": ((4,), ("tp",)),
    "data x megatron": ((2, 2), ("dp", "tp")),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks, each within a checkpoint if asked, then a mean of all rows if asked."""

    def __init__(self, width: int = 16, layers: int = 4, again: bool = False, mixes: bool = False) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(layers)), nn.Linear(width, 8)
        self.again, self.mixes = again, mixes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        if self.mixes:
            x = x * x.mean(0)
        return self.head(x)  # type: ignore[no-any-return]


def parallel(plan: str, x: Tensor, fake: bool = False, **options: Any) -> Any:
    """The network under a plan; on a rank whose peers are not there, if asked."""
    if fake:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=4)
    shape, names = PLANS[plan]
    torch.manual_seed(0)
    net = Net(**options)
    return dshard.parallelize(net, dshard.init_device_mesh("cpu", shape, mesh_dim_names=names), plan, x)


# -- loops


def answered_by_loops(plan: str) -> list[str]:
    """What is wrong with a loop of accumulation, clipping, a schedule and an evaluation, beside the loop by Python."""
    losses: dict[bool, list[float]] = {}
    said = ""
    for on in (False, True):
        net, found = parallel(plan, torch.randn(8, 16)), list[float]()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        source = torch.Generator().manual_seed(0)
        with dshard.rehearsing(on):
            for _ in range(5):
                net.train()
                optimizer.zero_grad()
                for _ in range(3):
                    x, y = torch.randn(8, 16, generator=source), torch.randint(8, (8,), generator=source)
                    loss = F.cross_entropy(net(x), y) / 3
                    loss.backward()
                    found.append(loss.item())
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                net.eval()
                with torch.no_grad():
                    found += [F.cross_entropy(net(x), y).item() for _ in range(2)]
        losses[on] = found
        said = f"{net.rehearsed.answered} of {net.rehearsed.calls} calls"
    wrong = [] if losses[True] == losses[False] else [f"{losses[True]} instead of {losses[False]}"]
    return wrong + ([] if said == "21 of 25 calls" else [said])  # all but the first two of each kind


@pytest.mark.ranks
@pytest.mark.parametrize("plan", one_in(3, reversed(PLANS)))
def test_a_loop_is_answered_but_for_the_first_calls(ranks: RankPool, plan: str) -> None:
    assert ranks.run(answered_by_loops, plan) == [[]] * 4


# -- what is seen of steps


def seen_of_steps(look: str) -> list[str]:
    """What an observer sees of a step after others by Python, and after others that were rehearsed, if it differs."""
    found: dict[bool, object] = {}
    x = torch.ones(8, 16)
    for on in (False, True):
        net = parallel("data x megatron", x, mixes=True)

        def step(net: Any = net) -> Tensor:
            return net(x).logsumexp(-1).mean()  # type: ignore[no-any-return]

        with dshard.rehearsing(on):
            for _ in range(5):
                net.zero_grad()
                step().backward()
            net.zero_grad()
            found[on] = LOOKS[look](step)
            assert net.rehearsed.answered >= 3 * on
    return [] if found[True] == found[False] and found[True] else [f"{found[True]} instead of {found[False]}"]


def traced(step: Callable[[], Tensor]) -> object:
    with dshard.trace() as trace:
        step().backward()
    return [(event.collective, event.axis, event.nbytes) for event in trace.events]


def traced_backward(step: Callable[[], Tensor]) -> object:
    loss = step()
    with dshard.trace() as trace:
        loss.backward()
    return [(event.collective, event.axis, event.nbytes) for event in trace.events]


def counted(step: Callable[[], Tensor]) -> object:
    with CommDebugMode() as mode:
        step().backward()
    return mode.get_total_counts(), str(mode.get_comm_counts())


def refused(step: Callable[[], Tensor]) -> object:
    with pytest.raises(dshard.LayoutError) as error, dshard.strict():
        step().backward()
    return str(error.value)


def explained(step: Callable[[], Tensor]) -> object:
    return re.sub(r"[\d.]+ [mun]?s", "", str(dshard.explain(step)))


LOOKS: dict[str, Callable[[Callable[[], Tensor]], object]] = {
    "trace": traced,
    "trace of the backward pass": traced_backward,
    "CommDebugMode": counted,
    "strict": refused,
    "explain": explained,
}


@pytest.mark.ranks
@pytest.mark.parametrize("look", one_in(6, LOOKS))
def test_observers_see_of_a_rehearsed_model_what_they_see_by_python(ranks: RankPool, look: str) -> None:
    assert ranks.run(seen_of_steps, look) == [[]] * 4


# -- costs


def peaks_of_steps(again: bool) -> tuple[dict[str, int], dict[bool, int]]:
    """The most bytes held in each of the first steps rehearsed, and in warm steps by Python and rehearsed."""
    sys.path.insert(0, BENCHMARKS)
    from allocator import peaks  # noqa: PLC0415  # found beside the benchmarks

    warm: dict[bool, int] = {}
    for on in (False, True):
        x = torch.randn(512, 64)
        net = parallel("megatron", x, fake=True, width=64, layers=8, again=again)

        def step(net: Any = net, x: Tensor = x, on: bool = on) -> None:
            with dshard.rehearsing(on):
                net.zero_grad()
                net(x).square().mean().backward()

        step()
        first = peaks({"recorded": step, "derived": step, "by program": step})
        warm[on] = min(peaks({"once": step, "twice": step}).values())
    return first, warm


class Attending(nn.Module):
    """Layers of attention, each within a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        def attend(layer: nn.Module, x: Tensor) -> Tensor:
            y = layer(x)[:, None]
            return x + F.scaled_dot_product_attention(y, y, y)[:, 0]

        for layer in self.layers:
            x = checkpoint(attend, layer, x, use_reentrant=False)
        return x


def peaks_of_attention() -> dict[bool, int]:
    """The most bytes held in a step, by Python and rehearsed."""
    sys.path.insert(0, BENCHMARKS)
    from allocator import peaks  # noqa: PLC0415  # found beside the benchmarks

    found, x = dict[bool, int](), torch.randn(8, 64, 64)
    mesh = dshard.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    for on in (False, True):
        net: Any = dshard.parallelize(Attending(), mesh, "data", x)
        with dshard.rehearsing(on):
            for _ in range(4):
                net(x).sum().backward()
            found[on] = min(peaks({name: lambda net=net: net(x).sum().backward() for name in "ab"}).values())
    return found


@pytest.mark.ranks
def test_attention_without_dropout_is_computed_again_in_a_checkpoint() -> None:
    with RankPool(1) as pool:
        (found,) = pool.run(peaks_of_attention)

    assert found[True] <= 1.02 * found[False]


@pytest.mark.ranks
@pytest.mark.parametrize("again", one_in(2, [True, False]), ids=["checkpoint", ""])
def test_a_step_holds_no_more_than_by_python(again: bool) -> None:
    """Where a pass is derived from values that a checkpoint made again, those of one block and of its graph at once."""
    with RankPool(1) as pool:
        ((first, warm),) = pool.run(peaks_of_steps, again)

    assert warm[True] <= (1.05 if again else 1.02) * warm[False]
    assert first["recorded"] <= 1.02 * warm[False]
    assert first["derived"] <= (1.5 if again else 1.15) * warm[False]
    assert first["by program"] <= 1.05 * warm[False]


def seconds_of_calls(program: str) -> tuple[float, bool]:
    """Seconds of warm calls, rehearsed over by Python, and whether all their results are equal."""
    x = torch.randn(8, 16)
    nets = {on: parallel("megatron", x, fake=not on) for on in (False, True)}
    calls = {"evaluation": evaluated, "growing": growing, "single": single}[program]
    for on, net in nets.items():
        with dshard.rehearsing(on):
            for _ in range(4):
                calls(net)
    times: dict[bool, list[float]] = {False: [], True: []}
    same = True
    for _ in range(7):
        outs = {}
        for on, net in nets.items():
            with dshard.rehearsing(on):
                begin = process_time()
                outs[on] = calls(net)
                times[on].append(process_time() - begin)
        same = same and torch.equal(outs[False], outs[True])
    return median(times[True]) / median(times[False]), same


@torch.inference_mode()
def evaluated(net: Any) -> Tensor:
    return torch.stack([net(torch.full((8, 16), 0.1 * i)).to_local().sum() for i in range(10)])


@torch.no_grad()
def growing(net: Any) -> Tensor:
    """Each call has another shape, as a prompt that grows."""
    return torch.stack([net(torch.full((8 + i, 16), 0.1)).to_local().sum() for i in range(70)])


def single(net: Any) -> Tensor:
    """Nothing matches: the model is another one each time, at its first call."""
    return torch.stack([deepcopy(net)(torch.full((8, 16), 0.1 * i)).to_local().detach().sum() for i in range(3)])


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("program", ["evaluation", "growing", "single"])
def test_calls_cost_no_more_than_by_python(program: str) -> None:
    with RankPool(1) as pool:
        ((ratio, same),) = pool.run(seconds_of_calls, program)

    assert same
    assert ratio <= 1.1


def seconds_of_first_steps() -> tuple[float, list[str]]:
    """Seconds from the first step to the third's end, and what the fourth and later say."""
    x = torch.randn(8, 64)
    net, said = parallel("data x megatron", x, fake=True, width=64), list[str]()
    begin = process_time()
    with dshard.rehearsing():
        for i in range(8):
            net(x).square().mean().backward()
            if i == 2:
                seconds = process_time() - begin
            said.append(f"{net.rehearsed.why_not} {net.rehearsed.records[0].passes.derived if i else ''}")
    return seconds, said[3:]


@pytest.mark.ranks
@pytest.mark.thorough
def test_the_third_step_is_done_soon_and_the_fourth_records_nothing() -> None:
    with RankPool(1) as pool:
        ((seconds, said),) = pool.run(seconds_of_first_steps)

    assert seconds < 2.0
    assert said == [" 1"] * 5


def seconds_of_shapes() -> tuple[float, int]:
    """Seconds of 12 turns of 50 shapes, rehearsed over by Python, and the kinds of inputs that are known."""
    x = torch.randn(8, 16)
    nets, times = {on: parallel("data", x, fake=not on) for on in (False, True)}, {False: 0.0, True: 0.0}
    for turn in range(13):
        for on, net in nets.items():
            with dshard.rehearsing(on):
                begin = process_time()
                for rows in range(4, 54):
                    net(torch.ones(rows, 16)).square().mean().backward()
                times[on] += (process_time() - begin) * bool(turn)  # the first plans each shape
    return times[True] / times[False], len(nets[True].rehearsed._known)


@pytest.mark.ranks
@pytest.mark.thorough
def test_fifty_shapes_in_turn_cost_no_more_than_by_python() -> None:
    with RankPool(1) as pool:
        ((ratio, known),) = pool.run(seconds_of_shapes)

    assert ratio <= 1.1
    assert known == 50


class Cached(nn.Module):
    """Layers that attend to all tokens so far, which a cache keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: SimpleNamespace) -> Tensor:
        for i, (keys, values) in enumerate(cache.layers):
            k, v = self.kv(x).chunk(2, -1)
            cache.layers[i] = keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
            weights = (self.q(x) @ keys.transpose(1, 2)).softmax(-1)
            x = x + self.out(weights @ values)
        return x


def answered_with_a_cache() -> tuple[bool, int, int, int, str]:
    """Whether 12 tokens with a growing cache are those by Python, and what is answered of them."""
    mesh, x = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), torch.randn(8, 1, 16)
    torch.manual_seed(0)
    net: Any = dshard.parallelize(Cached(), mesh, "data", x, SimpleNamespace(layers=[]))
    outs: dict[bool, list[Tensor]] = {False: [], True: []}
    for on, found in outs.items():
        with dshard.rehearsing(on), torch.no_grad():
            token = dshard.distribute_batch(net, torch.ones(8, 1, 16))
            cache = SimpleNamespace(layers=[(token, -token)] * 3)
            for i in range(12):
                found.append(net(x + 0.1 * i, cache).full_tensor())
    (record,) = net.rehearsed.records
    same = all(map(torch.equal, outs[False], outs[True]))
    return same, net.rehearsed.calls, net.rehearsed.answered, len(record.contents.calls), net.rehearsed.why_not


@pytest.mark.ranks
def test_calls_on_a_growing_cache_run_between_those_that_are_answered(ranks: RankPool) -> None:
    for same, calls, answered, n, why_not in ranks.run(answered_with_a_cache):
        assert same
        assert (calls, answered, why_not) == (24, 7, "")
        assert n > 12


def penalised() -> list[tuple[str, list[Tensor]]]:
    """Why each step of a loop was not answered, and its gradients, by Python and as it comes."""
    mesh, x = dshard.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(4, 8).double()
    steps = list[tuple[str, list[Tensor]]]()
    for on in (False, True):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        dshard.parallelize(net, mesh, "megatron", x)
        for with_penalty in (False, False, False, True, True, False, False):
            net.zero_grad()
            with dshard.rehearsing(on):
                loss = net(x).square().sum()
                if with_penalty:
                    grads = torch.autograd.grad(loss, [*net.parameters()], create_graph=True)
                    loss = loss + sum(grad.square().sum() for grad in grads)
                loss.backward()
            steps.append((net.rehearsed.why_not, [p.grad.full_tensor() for p in net.parameters()]))
    return steps


@pytest.mark.ranks
def test_after_gradients_were_differentiated_again_a_module_runs_by_python() -> None:
    with RankPool(2) as pool:
        steps = pool.run(penalised)[0]

    again = "gradients of its last call were differentiated again"
    assert [why for why, _ in steps[9:]] == ["", "", again, again, ""]
    for (_, eager), (_, rehearsed) in zip(steps[:7], steps[7:], strict=True):
        for x, y in zip(eager, rehearsed, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10)


def written_by_a_hook() -> list[str]:
    """What a backward pass says where the hook of one leaf writes to another, which is read after it, by step."""
    mesh, x = dshard.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), torch.randn(4, 8)
    said = list[str]()
    for on in (False, True):
        net: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        dshard.parallelize(net, mesh, "data", x)

        def write(p: Tensor, net: Any = net) -> None:
            if len(said) % 5 == 4:
                with torch.no_grad():
                    net[1].weight.mul_(2)

        net[2].weight.register_post_accumulate_grad_hook(write)
        for _ in range(5):
            with dshard.rehearsing(on):
                try:
                    net(x).square().sum().backward()
                    said.append(net.rehearsed.why_not)
                except RuntimeError as error:
                    said.append(str(error)[:64])
    return said


@pytest.mark.ranks
def test_a_hook_that_writes_to_what_is_read_after_it_is_an_error() -> None:
    with RankPool(2) as pool:
        said = pool.run(written_by_a_hook)[0]

    assert said[9] == said[4] == "one of the variables needed for gradient computation has been mo"
    assert said[7:9] == ["", ""]


class Walked(dict[Any, int]):
    """A dict that counts how often it is walked over."""

    walks = 0

    def items(self) -> Any:
        self.walks += 1
        return super().items()


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.up(x)
        for i in range(30):
            out = out + i
        return out.square().mean()


def walks_of_a_long_record() -> list[int]:
    last, lifetimes_of = list[Walked](), record.lifetimes_of

    def walked(*args: Any) -> Any:
        lifetimes = lifetimes_of(*args)
        last.append(Walked(lifetimes.last))
        return replace(lifetimes, last=last[-1])

    mesh, x = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), torch.ones(4, 6)
    model = dshard.parallelize(Summed(), mesh, "data", x)
    with patch.object(record, "lifetimes_of", walked):
        for _ in range(3):
            model(x).backward()
    return [each.walks for each in last if len(each) > 30]


def test_a_record_of_many_calls_is_not_walked_over_for_each(ranks: RankPool) -> None:
    """A loop over the positions of a sequence makes tens of thousands."""
    for walks in ranks.run(walks_of_a_long_record):
        assert walks
        assert max(walks) < 10
