"""Pipelines on real ranks: losses and gradients are those of one device, whatever the schedule and the layouts."""

from __future__ import annotations

import os
import re
import time
from copy import deepcopy
from math import inf

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from helpers.pipeline_models import LOSS, Where, errors, mesh_of, staged
from torch import nn

from dshard import Shard, distribute_module, parallelize
from dshard.errors import DShardError, PipelineError, RankError, ScheduleError, ShapeError
from dshard.pipeline import SCHEDULES, Pipeline, Stage
from dshard.pipeline.runner import cut_batch
from dshard.testing import RankPool, rank_pool

TWO = (Where((0, 1), (2,), "data"), Where((2, 3), (2,), "tensor"))
UNEVEN = (Where((3,), (1,), "replicated"), Where((2, 0, 1), (3,), "data"))
FOUR = tuple(Where((rank,), (1,), "replicated") for rank in range(4))
EIGHT = {
    "two": (Where((0, 1, 2, 3), (2, 2), "both"), Where((4, 5, 6, 7), (4,), "data")),
    "grid": (Where((7, 6, 5, 4), (4,), "data"), Where((0, 1, 2, 3), (2, 2), "both")),
    "four": tuple(Where((2 * i, 2 * i + 1), (2,), s) for i, s in enumerate(["data", "tensor", "replicated", "data"])),
    "steps": (
        Where((0,), (1,), "replicated"),
        Where((1, 2), (2,), "tensor"),
        Where((3, 4, 5, 6), (2, 2), "both"),
        Where((7,), (1,), "data"),
    ),
}
SOME = [
    ("1f1b", None, True),
    ("eager-1f1b", 0, True),
    ("gpipe", None, False),
]
ALL = [(name, delay, overlap) for name in SCHEDULES for delay in (None, 0, 1) for overlap in (True, False)]


def trained(model, wheres, options, n_microbatches):
    """The largest errors of the second of two steps, for each way of running: the first step tells shapes."""
    found = []
    for schedule, delay, overlap in options:
        stages = staged(model, wheres)
        pipeline = Pipeline(
            stages, n_microbatches=n_microbatches, schedule=schedule, loss=LOSS[model], delay=delay, overlap=overlap
        )
        found += [*errors(pipeline, model), *errors(pipeline, model)]
    return max(found)


@pytest.mark.ranks
@pytest.mark.parametrize(("wheres", "model"), one_way_each([UNEVEN, TWO, FOUR], ["u", "gpt"], every=2))
def test_losses_and_gradients_are_those_of_one_device(ranks, model, wheres):
    assert max(ranks.run(trained, model, wheres, SOME, 3)) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["u", "gpt"])
@pytest.mark.parametrize("wheres", EIGHT.values(), ids=EIGHT)
@pytest.mark.parametrize("n_microbatches", [1, 2, 6])
def test_every_schedule_on_eight_ranks(model, wheres, n_microbatches):
    assert max(rank_pool(8).run(trained, model, wheres, ALL, n_microbatches, timeout=500)) < 1e-12


WIDTH = 8


class Residual(nn.Module):
    """A module, the gradient of whose input is the last to be known."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def parallelized(strategy, delay):
    """The largest error of losses, norms of gradients, and final weights, of stages that `parallelize` lays out."""
    torch.manual_seed(0)
    last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))  # it writes to what it takes
    parts = [nn.Linear(WIDTH, WIDTH).double(), Residual().double(), last.double()]
    one_device = nn.Sequential(*map(deepcopy, parts))
    meshes = [mesh_of((0,), (1,)), mesh_of((1, 2), (2,)), mesh_of((3,), (1,))]
    for part, mesh in zip(parts, meshes, strict=True):
        if mesh.get_coordinate() is not None:
            parallelize(part, mesh, strategy, torch.randn(4, WIDTH).double())
    stages = [Stage(part, mesh, placements={"x": [Shard(0)]}) for part, mesh in zip(parts, meshes, strict=True)]
    pipeline = Pipeline(stages, n_microbatches=2, loss=F.mse_loss, delay=delay)
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (pipeline.parameters(), one_device.parameters())]
    errors = []
    for norm_type in (2.0, 2.0, inf, 1.0, 3.0):
        x, target = torch.randn(2, 6, WIDTH).double()
        loss = F.mse_loss(one_device(x), target)
        loss.backward()
        errors.append(abs(loss.item() - pipeline.step(x, target).item()))
        norm = nn.utils.clip_grad_norm_(one_device.parameters(), 0.5, norm_type)
        errors.append(abs(norm.item() - pipeline.clip_grad_norm_(0.5, norm_type).item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = one_device[pipeline.number].state_dict()
    state = pipeline.module.state_dict()
    return max([*errors, *((state[name].full_tensor() - x).abs().max().item() for name, x in expected.items())])


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "delay"), one_way_each(["data", "megatron", "fsdp"], [0, 1, None], every=3))
def test_stages_that_are_rehearsed_learn_what_one_device_does(ranks, strategy, delay):
    assert max(ranks.run(parallelized, strategy, delay)) < 1e-12


def scaled(fused):
    """The largest error of weights and scales, where gradients of one stage are infinite in the second step."""
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH), Residual()]
    one_device, meshes = nn.Sequential(*map(deepcopy, parts)), [mesh_of((0, 1), (2,)), mesh_of((2, 3), (2,))]
    for part, mesh in zip(parts, meshes, strict=True):
        if mesh.get_coordinate() is not None:
            parallelize(part, mesh, "fsdp", torch.randn(4, WIDTH))
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    stages = [Stage(part, mesh, placements={"x": [Shard(0)]}) for part, mesh in zip(parts, meshes, strict=True)]
    pipeline = Pipeline(stages, n_microbatches=2, loss=lambda out, y: scalers[0].scale(F.mse_loss(out, y)))
    trained = [pipeline.parameters(), [*one_device.parameters()]]
    optimizers = [torch.optim.AdamW(each, lr=0.1, fused=fused) for each in trained]
    for step in range(4):
        x, target = torch.randn(2, 6, WIDTH)
        scalers[1].scale(F.mse_loss(one_device(x), target)).backward()
        pipeline.step(x, target)
        if step == 0:
            with pytest.raises((ScheduleError, AssertionError), match=r"pipeline\.unscale_|_scale is None"):
                scalers[0].unscale_(optimizers[0])
        if step == 1:
            one_device[1].up.bias.grad *= inf
            if pipeline.number == 1:
                pipeline.module.up.bias.grad.mul_(inf)
        pipeline.unscale_(scalers[0], optimizers[0])
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    state = pipeline.module.state_dict()
    errors = [
        (state[name].full_tensor() - x).abs().max() for name, x in one_device[pipeline.number].state_dict().items()
    ]
    return max([*map(float, errors), abs(scalers[0].get_scale() - scalers[1].get_scale())])


@pytest.mark.ranks
@pytest.mark.parametrize("fused", [False, True])
def test_all_stages_skip_a_step_in_which_gradients_of_one_are_infinite(ranks, fused):
    assert max(ranks.run(scaled, fused)) < 1e-5


def frozen_between_steps():
    """The errors of a step after the first stage was frozen, and the loss of a pipeline that is made anew."""
    modules, meshes = [nn.Linear(3, 3), nn.Linear(3, 3)], [mesh_of((0, 1), (2,)), mesh_of((2, 3), (2,))]
    for module, mesh in zip(modules, meshes, strict=True):
        if mesh.get_coordinate() is not None:
            distribute_module(module, mesh)
    x, stages = torch.ones(4, 3), [Stage(*each) for each in zip(modules, meshes, strict=True)]
    pipeline = Pipeline(stages, n_microbatches=2, loss=F.mse_loss)
    before = pipeline.step(x, x).item()
    modules[0].requires_grad_(False)
    text = message(lambda: pipeline.step(x, x))
    torch.distributed.barrier()
    again = Pipeline(stages, n_microbatches=2, loss=F.mse_loss)
    return text, before == again.step(x, x).item()


@pytest.mark.ranks
def test_stages_that_are_frozen_between_steps_are_refused(ranks):
    found = ranks.run(frozen_between_steps)

    assert all("without gradient for a batch of the same shape" in text for text, _ in found)
    assert all("were frozen or thawed, or their dtype or layout was changed, make the" in text for text, _ in found[:2])
    assert all(is_same for _, is_same in found)


def message(call):
    """The error of a call, with its kind."""
    try:
        call()
    except DShardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def refusals():
    first, second, both = mesh_of((0, 1), (2,)), mesh_of((2, 3), (2,)), mesh_of((1, 2), (2,))
    here = first.get_coordinate() is not None
    linear = nn.Linear(2, 2)
    laid = distribute_module(nn.Linear(2, 2), first if here else second)
    other = Stage(laid if not here else None, second)
    mine = Stage(laid if here else None, first)
    calls = [
        lambda: Pipeline([Stage(linear, first), Stage(linear, second)], n_microbatches=2),
        lambda: Pipeline([mine, Stage(None, both)], n_microbatches=2),
        lambda: Pipeline([mine], n_microbatches=2) if not here else Pipeline([other], n_microbatches=2),
        lambda: Pipeline([Stage(nn.Linear(2, 2), first), Stage(nn.Linear(2, 2), second)], n_microbatches=2),
        lambda: Pipeline([mine, other], n_microbatches=2, schedule="auto"),
        lambda: Pipeline([mine, other], n_microbatches=2, batch=["y"]),
        lambda: Pipeline([Stage(None, first), Stage(None, second)], n_microbatches=2),
    ]
    return [message(call) for call in calls]


@pytest.mark.ranks
def test_stages_that_cannot_be_are_refused_on_all_ranks(ranks):
    wanted = [
        r"ScheduleError: the parameter weight of stage 0 is also weight of stage 1: each stage would train a copy",
        r"MeshError: rank 1 is in stages 0 and 1: give each stage ranks of its own",
        r"MeshError: rank \d is in no stage, and takes no part",
        r"MixedError: the parameter weight of stage \d is a plain tensor: lay the module out with distribute_module",
        r'ScheduleError: schedule="auto" chooses by the costs of the stages: give costs=Costs',
        r"ScheduleError: stage 0 takes 'x', which neither an earlier stage gives \(nothing\) nor the batch has \(y\)",
        r"ScheduleError: stage \d has no module on a rank of its mesh",
    ]

    for found in ranks.run(refusals):
        for pattern, text in zip(wanted, found, strict=True):
            assert re.match(pattern, text), text


@pytest.mark.parametrize(
    ("values", "n", "message"),
    [
        ({"x": torch.zeros(5, 2)}, 4, r"5 samples in 4 microbatches.* without any: use a multiple of 4 samples"),
        ({"x": torch.zeros(4), "y": torch.zeros(3)}, 2, r"x \(4,\), y \(3,\): give tensors with as many samples each"),
        ({"x": torch.zeros(())}, 2, r"x \(\): give tensors with as many samples"),
        ({}, 2, r"the batch has nothing"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(values, n, message):
    with pytest.raises(ShapeError, match=message):
        cut_batch(values, n, "mean")


def test_a_batch_that_needs_a_gradient_is_refused():
    with pytest.raises(ScheduleError, match=r"x of the batch needs a gradient.*; pass x.detach\(\)"):
        cut_batch({"x": torch.zeros(4, requires_grad=True)}, 2, "mean")


@pytest.mark.parametrize(("size", "n"), [(6, 3), (10, 4), (7, 3), (1, 1)])
def test_the_losses_of_microbatches_add_up_to_that_of_the_batch(size, n):
    x = torch.randn(size, 3, dtype=torch.float64)

    for reduction in ("mean", "sum"):
        cut = cut_batch({"x": x}, n, reduction)
        found = sum(getattr(part.values["x"].sum(1), reduction)() * part.weight for part in cut)
        torch.testing.assert_close(found, getattr(x.sum(1), reduction)())


class Failing(nn.Module):
    """From its third forward on it ends its process, or only its part in the step."""

    def __init__(self, fail):
        super().__init__()
        self.linear, self.count, self.fail = nn.Linear(3, 3), 0, fail

    def forward(self, x):
        self.count += 1
        if self.count > 3:
            self.fail()
        return self.linear(x)


class Silent(BaseException):
    pass


def fall_silent():
    raise Silent


def die():
    time.sleep(3.0)  # the pool gives the others as long again to answer
    os._exit(7)


def failing(fail, timeout):
    """A pipeline of which stage 2 fails in its second step; what the others raise."""
    meshes = [mesh_of((rank,), (1,)) for rank in range(4)]
    stages = []
    for rank, mesh in enumerate(meshes):
        module = Failing(fail if rank == 2 else int)
        stages.append(Stage(distribute_module(module, mesh) if mesh.get_coordinate() is not None else None, mesh))
    pipeline = Pipeline(stages, n_microbatches=3, schedule="eager-1f1b", loss=F.mse_loss)
    x = torch.ones(6, 3)
    pipeline.step(x, x)
    pipeline.timeout = timeout
    begin = time.monotonic()
    try:
        pipeline.step(x, x)
    except Silent:
        time.sleep(2 * timeout)
        return "silent", 0.0
    except PipelineError as error:
        if fail is die:
            raise
        return str(error), time.monotonic() - begin
    return "nothing raised", 0.0


@pytest.mark.ranks
@pytest.mark.thorough  # its time limits pass
def test_when_a_rank_is_silent_all_others_name_the_peer_and_the_action_within_the_time_limit():
    with RankPool(4, timeout=100) as pool:
        found = pool.run(failing, fall_silent, 2.0)

    assert found[2][0] == "silent"
    for rank in (0, 1, 3):
        message, seconds = found[rank]
        assert re.search(
            rf"^rank {rank}, stage {rank}, at receive .* of microbatch \d, with stage \d on ranks", message
        )
        assert re.search(r"rank \d did not send what was expected from it", message)
        assert "the first to fail was rank 2, stage 2, at F0: Silent" in message
        assert seconds < 30


@pytest.mark.thorough
@pytest.mark.ranks
def test_when_a_rank_dies_its_neighbours_name_it_and_the_action():
    with RankPool(4, timeout=100) as pool, pytest.raises(RankError) as raised:
        pool.run(failing, die, 60.0)

    assert "rank 2 exited with code 7" in str(raised.value)
    pattern = r"PipelineError: rank [13], stage [13], at (receive|send) .* of microbatch \d, .*stage 2 on ranks 2"
    assert re.search(pattern, str(raised.value)), str(raised.value)


def refuse():
    raise ValueError("no such thing")


def again(parts, bad):
    """The errors of two steps, in the first of which the rank `bad` fails, with their seconds; new losses."""

    def made(fail):
        meshes = [mesh_of(ranks, (len(ranks),)) for ranks in parts]
        modules = [distribute_module(Failing(fail), m) if m.get_coordinate() is not None else None for m in meshes]
        stages = [Stage(module, mesh) for module, mesh in zip(modules, meshes, strict=True)]
        return Pipeline(stages, n_microbatches=3, loss=F.mse_loss)

    x, found = torch.ones(6, 3), []
    pipeline = made(refuse if torch.distributed.get_rank() == bad else int)
    pipeline.step(x, x)
    for _ in range(2):
        begin = time.monotonic()
        try:
            pipeline.step(x, x)
        except (PipelineError, ValueError) as error:
            found.append((f"{type(error).__name__}: {error}", time.monotonic() - begin))
    torch.distributed.barrier()
    pipeline = made(int)
    return found, [pipeline.step(x, x).item() for _ in range(2)]


@pytest.mark.ranks
def test_when_a_module_fails_all_stages_fail_at_once_and_so_does_the_next_step():
    with RankPool(4, timeout=100) as pool:
        chain = pool.run(again, ((0,), (1,), (2,), (3,)), 2)
        wide = pool.run(again, ((0, 1), (2, 3)), 3)

    for found, bad in ((chain, 2), (wide, 3)):
        first = rf"the first to fail was rank {bad}, stage \d, at F0: ValueError: no such thing"
        for rank, (errors_of, losses) in enumerate(found):
            *now, (later, seconds) = errors_of
            earlier = rf"rank {rank}, stage \d: an earlier step .* has failed, {first}"
            assert re.match(rf"PipelineError: {earlier if now else ''}", later), later
            assert re.search(first, later), later
            assert seconds < 5
            for text, seconds in now:  # none of a rank that had all it waits for: it ended that step
                assert (text == "ValueError: no such thing") if rank == bad else re.search(first, text), text
                assert seconds < 20
            assert now or (found is wide and rank != bad)
            assert losses[0] == losses[1] == found[0][1][0]
