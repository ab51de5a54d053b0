"""Programs with rehearsed modules give what they give by Python, to the bit."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.default_cases import one_in, one_way_each
from helpers.looking_soon import looking_soon
from helpers.rehearsed_programs import PROGRAMS, ROWS, WIDTH, Keeping, run_program, squares
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import dshard
from dshard import init_device_mesh, parallelize
from dshard.rehearsal import region_backward
from dshard.testing import RankPool, rank_pool

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "data": ((4,), ("dp",)),
    "fsdp": ((4,), ("dp",)),
    "fsdp in a block": ((4,), ("dp",)),
    "megatron": ((4,), ("tp",)),
    "data x megatron": ((2, 2), ("dp", "tp")),
}
FEW = (
    *("loss_outside", "kept_every_other_step", "dropout"),
    *("checkpoints_in_a_checkpoint", "checkpointed", "one_rank_makes_an_extra_local_call"),
    *("a_checkpoint_ends_with_what_it_saves", "checkpointed_calls_change", "checkpointed_as_a_whole"),
    *("a_record_ends_within_a_checkpoint", "bags_of_rows", "gradients_of_an_input_once"),
    *("created_graph_of_attention", "writes_to_a_plain_sum_in_turn", "gradient_for_an_activation"),
    *("gradient_for_the_edge_to_an_activation", "weights_are_thawed", "hook_on_the_node_of_an_activation"),
)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "plan"), one_way_each(FEW, list(MESHES), every=3))
def test_a_program_gives_what_it_gives_by_python(ranks: RankPool, name: str, plan: str) -> None:
    check(ranks, name, plan)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for name in sorted({*PROGRAMS} - {*FEW}) for plan in MESHES],
)
def test_every_program_does_so(ranks: RankPool, name: str, plan: str) -> None:
    check(ranks, name, plan)


def check(ranks: RankPool, name: str, plan: str, mixed: bool = False) -> None:
    outcomes = ranks.run(run_program, name, plan, *MESHES[plan], mixed, timeout=20.0)

    assert [outcome.wrong for outcome in outcomes] == [[]] * 4


@pytest.mark.ranks
@pytest.mark.parametrize("plan", ["data", pytest.param("megatron", marks=pytest.mark.thorough)])
def test_hooks_of_a_leaf_see_its_gradient(ranks: RankPool, plan: str) -> None:
    check(ranks, "hooks_of_accumulation", plan)


SHARED = (
    *("real_and_made", "a_weight_used_before", "a_function_of_a_leaf", "hooks_beside_several_runs", "created_graph"),
    *("input_needs_gradient", "one_rank_makes_calls_everywhere"),
)
"""Programs in which several nodes give gradients of a leaf, or in which ranks send more or less by a hair."""


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "plan"), one_way_each(SHARED, ["data x megatron", "data"], every=4))
def test_ranks_that_run_by_python_go_with_ranks_that_rehearse(ranks: RankPool, name: str, plan: str) -> None:
    check(ranks, name, plan, mixed=True)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["data", "megatron", "data x megatron"])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_such_ranks_go_together_in_every_program(ranks: RankPool, name: str, plan: str) -> None:
    check(ranks, name, plan, mixed=True)


# -- invariants


@pytest.fixture
def pair() -> RankPool:
    """Two ranks, where two are as good as four."""
    return rank_pool(2)


def steps_of(mode: str) -> Any:
    """A small parallelized model on all ranks, and its steps."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    return parallelize(Keeping(), mesh, mode, torch.randn(ROWS, WIDTH))


def results_are_distributed() -> list[tuple[str, ...]]:
    model = steps_of("data")
    seen = []
    with dshard.rehearsing():
        for _ in range(4):
            squares(model, torch.ones(ROWS, WIDTH))
            h = model.kept
            seen.append(
                (type(h).__name__, str(h.placements), str(tuple(h.shape)), str(h.requires_grad), str(h.is_leaf))
            )
            assert h.to_local().shape == (ROWS // 2, WIDTH)
    return seen


@pytest.mark.ranks
def test_results_are_distributed_tensors(pair: RankPool) -> None:
    for seen in pair.run(results_are_distributed):
        assert len({*seen}) == 1


def seen_by_a_late_hook() -> tuple[str, list[bool]]:
    model, seen = steps_of("data"), list[float]()
    with dshard.rehearsing(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(8):
            if step == 4:
                model.a.register_backward_hook(lambda m, into, grads: seen.append(grads[0].full_tensor().norm().item()))
            squares(model, torch.ones(ROWS, WIDTH))
    model.zero_grad()
    with dshard.rehearsing(False):
        squares(model, torch.ones(ROWS, WIDTH))
    return " ".join(str(each.message) for each in told), [abs(x - seen[-1]) < 1e-12 for x in seen[1:]]


@pytest.mark.ranks
def test_the_node_of_one_call_is_read_in_warm_calls_with_a_warning(pair: RankPool) -> None:
    for told, right in pair.run(seen_by_a_late_hook):
        assert "the node of autograd of a tensor within a rehearsed module was read" in told
        assert right == [True] * 4


def why_not() -> tuple[str, str, str]:
    model = steps_of("data")
    with dshard.rehearsing():
        for _ in range(3):
            squares(model, torch.ones(ROWS, WIDTH))
        answered = model.rehearsed.why_not
        model.b.forward = model.a.forward
        squares(model, torch.ones(ROWS, WIDTH))
        differed = model.rehearsed.why_not
    with dshard.rehearsing(False):
        squares(model, torch.ones(ROWS, WIDTH))
    return answered, differed, model.rehearsed.why_not


@pytest.mark.ranks
def test_it_says_what_differed(pair: RankPool) -> None:
    for answered, differed, off in pair.run(why_not):
        assert answered == ""
        assert differed.startswith("call 2 is linear, the record has linear at ")
        assert "rehearsed_programs.py" in differed
        assert off == "it is turned off"


@looking_soon()
def failing_on_one_rank(step: int) -> str:
    """How a backward pass ends in which the second rank alone fails: one that is derived, or run by a program."""
    model = steps_of("data")
    fails, check = False, region_backward._check_versions

    def failing(*args: Any) -> None:
        if fails:
            raise ValueError("broken")
        check(*args)

    with dshard.rehearsing(), patch.object(region_backward, "_check_versions", failing):
        for i in range(step + 1):
            loss = model(torch.ones(ROWS, WIDTH)).to_local().square().mean()
            fails = i == step and torch.distributed.get_rank() == 1
            try:
                loss.backward()
            except (ValueError, dshard.errors.PeerError) as error:
                return f"{i}: {error}"
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("step", one_in(2, [2, 4]))
def test_an_error_in_a_backward_pass_of_one_rank_is_raised_on_all(step: int) -> None:
    with RankPool(2) as pool:
        said = pool.run(failing_on_one_rank, step, timeout=20.0)
    assert said[1] == f"{step}: broken"
    assert all(each.startswith(f"{step}: ") and "broken" in each for each in said)


def late_write_to_a_base() -> tuple[int, str]:
    """A program that once keeps the base of what the model gives, and writes to it: autograd knows no base."""

    class Part(Keeping):
        def forward(self, x: Any) -> Any:
            h = self.a(x.view(torch.Size((*x.size()[:-1], 2, WIDTH // 2))).flatten(1))
            self.kept = h if self.keeps else None
            return h[:, :4]

    model = Part()
    model.keeps = False
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    parallelize(model, mesh, "data", torch.randn(ROWS, WIDTH))
    with dshard.rehearsing():
        for _ in range(4):
            squares(model, torch.ones(ROWS, WIDTH))
        model.keeps, answered = True, model.rehearsed.answered
        out = model(torch.ones(ROWS, WIDTH))
        model.kept.mul_(2)
        try:
            out.sum().backward()
        except RuntimeError as error:
            return answered, str(error)
    return answered, ""


@pytest.mark.ranks
def test_a_write_that_autograd_cannot_follow_is_an_error(pair: RankPool) -> None:
    for answered, said in pair.run(late_write_to_a_base):
        assert answered == 2
        assert "modified by an inplace operation: a tensor of shape" in said


def held_after_steps() -> list[str]:
    """What a record holds after a forward pass whose result is dropped, and after one with a backward pass."""
    model, held = steps_of("data"), []
    with dshard.rehearsing():
        for i in range(6):
            out = model(torch.ones(ROWS, WIDTH))
            if i % 2:
                out.sum().backward()
            model.kept = None
            del out
            for record in model.rehearsed.records:
                if record.last is not None and record.last() is not None:
                    held.append(f"step {i}: the run")
                held += [f"step {i}: result {n}" for n, x in enumerate(record.tensors) if x is not None and local(x)]
    return held


def local(x: Any) -> bool:
    return not isinstance(x, dshard.DTensor) or "_local_tensor" in x.__dict__


@pytest.mark.ranks
def test_nothing_stays_of_a_step_that_python_has_dropped(pair: RankPool) -> None:
    assert pair.run(held_after_steps) == [[]] * 2


def is_freed_without_the_collector() -> bool:
    """Whether the memory of a rehearsed model is freed when its last name goes, as that of any module."""
    model = steps_of("data")
    with dshard.rehearsing():
        for _ in range(5):
            squares(model, torch.ones(ROWS, WIDTH))
    assert model.rehearsed.answered == 3
    gc.collect()
    gc.disable()
    try:
        memory = StorageWeakRef(model.a.weight.to_local().untyped_storage())
        del model
        return bool(memory.expired())
    finally:
        gc.enable()


@pytest.mark.ranks
def test_a_rehearsed_model_is_freed_like_any(pair: RankPool) -> None:
    assert pair.run(is_freed_without_the_collector) == [True] * 2


def calls_after_an_interrupt() -> list[str]:
    """What two models say of their last steps, after an interrupt in each kind of step of the first."""
    said = []
    for step in range(4):
        models = [steps_of("data") for _ in range(2)]
        with dshard.rehearsing():
            for i in range(7):
                for n, model in enumerate(models):
                    model.interrupted = i == step and n == 0
                    try:
                        squares(model, torch.ones(ROWS, WIDTH))
                    except KeyboardInterrupt:  # for which torch runs no hooks
                        continue
        said += [model.rehearsed.why_not for model in models]
    return said


@pytest.mark.ranks
def test_an_interrupted_call_leaves_no_session(pair: RankPool) -> None:
    assert pair.run(calls_after_an_interrupt) == [[""] * 8] * 2


def frozen_after_steps() -> list[int]:
    """The objects that the collection of garbage leaves out after each step, of which one is interrupted."""
    model, frozen = steps_of("data"), []
    with dshard.rehearsing():
        for i in range(4):
            model.interrupted = i == 1
            try:
                squares(model, torch.ones(ROWS, WIDTH))
            except KeyboardInterrupt:
                model.interrupted = False
                model(torch.ones(ROWS + 1, WIDTH))  # closes the session
            frozen.append(gc.get_freeze_count())
    return frozen


@pytest.mark.ranks
def test_a_recording_sets_no_garbage_aside_for_good(pair: RankPool) -> None:
    assert pair.run(frozen_after_steps) == [[0] * 4] * 2


def _one_by_one(functions: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for function in functions:
        x = function(x)
    return x


def recordings_of_a_model_that_always_differs() -> tuple[int, list[str]]:
    """How many of 120 calls were recorded, and why the last were not answered."""
    functions = torch.sin, torch.cos, torch.tanh, torch.exp, torch.sigmoid
    model, said = steps_of("data"), []
    with dshard.rehearsing(), torch.no_grad():
        for i in range(120):
            model.a.forward = partial(_one_by_one, [functions[n] for n in (i % 5, i // 5 % 5, i // 25)])
            model(torch.ones(ROWS, WIDTH))
            said.append(model.rehearsed.why_not)
    return sum("recorded" in why for why in said), said[-3:]


@pytest.mark.ranks
def test_a_model_that_always_differs_is_left_alone(pair: RankPool) -> None:
    for recorded, said in pair.run(recordings_of_a_model_that_always_differs):
        assert recorded == 3
        assert said == ["its calls differ each time"] * 3


def records_of_shapes() -> tuple[int, int]:
    model = steps_of("data")
    with dshard.rehearsing():
        for _ in range(4):
            for rows in range(4, 24):
                squares(model, torch.ones(rows, WIDTH))
    return len(model.rehearsed.records), model.rehearsed.calls


@pytest.mark.ranks
def test_records_of_many_shapes_are_bounded(pair: RankPool) -> None:
    for records, calls in pair.run(records_of_shapes):
        assert records <= 16
        assert calls == 80


def threads_at_once() -> list[bool]:
    model = steps_of("data")
    x = torch.randn(ROWS, WIDTH)
    same: list[bool] = []
    with dshard.rehearsing():
        for _ in range(4):
            expected = model(x).to_local().detach().clone()

    def run() -> None:
        with dshard.rehearsing():
            same.extend([torch.equal(model(x).to_local().detach(), expected) for _ in range(20)])

    both = [Thread(target=run) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    return same


@pytest.mark.ranks
def test_threads_run_one_module_at_once(pair: RankPool) -> None:
    for same in pair.run(threads_at_once):
        assert same == [True] * 40
