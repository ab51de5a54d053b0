"""The pool of real ranks: answers in rank order, and no way to hang it."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dshard.errors import RankError
from dshard.launch.processes import Processes, ReturnValue, request
from dshard.testing import pool as pool_module
from dshard.testing.pool import RankPool, rank_pool

pytestmark = pytest.mark.ranks

N_RANKS = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(N_RANKS) as pool:
        yield pool


def first_values(text: str) -> list[object]:
    """What an expression gives on ranks that have run nothing yet."""
    processes = Processes(2)
    try:
        outcomes = processes.call([request(eval, text)] * 2, 60.0)
    finally:
        processes.close()
    return [outcome.value for outcome in outcomes if isinstance(outcome, ReturnValue)]


def test_ranks_begin_with_what_all_of_them_import() -> None:
    needed = ("dshard.testing.pool", "torch._dynamo", "pytest", "hypothesis")

    assert first_values(f"{{*{needed}}} <= {{*__import__('sys').modules}}") == [True, True]


def test_ranks_share_compiled_modules() -> None:
    assert first_values("'PYTHONDONTWRITEBYTECODE' in __import__('os').environ") == [False, False]


def test_ranks_begin_without_garbage_to_look_for_in_what_was_imported() -> None:
    """A collection of all takes 0.2 s of each rank; nothing is set aside for good either."""
    (_, *counts), (_, *others) = first_values("__import__('gc').get_count()")

    assert counts == others == [0, 0]
    assert first_values("__import__('gc').get_freeze_count()") == [0, 0]


def rank_plus(n: int) -> int:
    return dist.get_rank() + n


def process_id() -> int:
    return os.getpid()


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def views_of_rank() -> dict[str, Tensor]:
    base = torch.full((2, 3), float(dist.get_rank()), requires_grad=True)
    return {"column": (base * 2)[:, 1], "leaf": base, "empty": base[:0]}


def fail_everywhere() -> None:
    raise ValueError(f"bad value on {dist.get_rank()}")


def fail_after_a_collective(rank: int) -> None:
    sum_of_ranks()
    if dist.get_rank() == rank:
        raise ValueError("only me")


def fail_before_a_collective(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("only me")
    sum_of_ranks()


def fail_with_a_collective_in_flight(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("only me")
    dist.all_reduce(torch.zeros(()), async_op=True)


def fail_because_of_another_failure() -> None:
    try:
        fail_everywhere()
    except ValueError as error:
        raise KeyError("outer") from error


def exit_before_a_collective(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    sum_of_ranks()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def unpicklable_result() -> object:
    return lambda: None


def test_values_come_in_rank_order(pool: RankPool) -> None:
    assert pool.run(rank_plus, 10) == [10, 11, 12]
    assert pool.run(functools.partial(rank_plus, 20)) == [20, 21, 22]


def test_ranks_stay_alive_between_calls(pool: RankPool) -> None:
    processes = pool.run(process_id)

    assert len(set(processes)) == N_RANKS
    assert all(pool.run(process_id) == processes for _ in range(200))


def test_ranks_have_the_environment_as_it_is_when_they_start(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.run(process_id)  # the process that they are forked from is older
    monkeypatch.setenv("DSHARD_STARTED_LATER", "yes")

    with RankPool(1) as later:
        assert later.run(os.getenv, "DSHARD_STARTED_LATER") == ["yes"]


def threads_of_many_groups() -> list[str]:
    """The names of the threads of this rank after ten more process groups were used."""
    for _ in range(10):
        dist.all_reduce(torch.ones(1), group=dist.new_group())
    return [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="names of threads are told by Linux alone")
def test_process_groups_share_the_thread_that_wakes_without_work() -> None:
    with RankPool(2, "gloo") as pool:
        for names in pool.run(threads_of_many_groups):
            assert names.count("gloo_tcp_loop") == (torch.__version__ >= "2.12")  # before, it has no name


def group_that_later_torch_makes() -> float:
    make: Any = dist.ProcessGroupGloo
    group = make(dist.HashStore(), 0, 1, timeout=timedelta(seconds=9), of_later_torch=False)
    group.allreduce([x := torch.ones(())]).wait()
    return x.item() * group.options._timeout.total_seconds()


def test_arguments_of_later_torch_that_ask_for_nothing_are_taken(pool: RankPool) -> None:
    assert pool.run(group_that_later_torch_makes) == [9.0] * N_RANKS


def loaded(module: str) -> bool:
    return module in sys.modules


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_ranks_start_with_what_their_first_operator_imports(pool: RankPool) -> None:
    assert pool.run(loaded, "torch._dynamo") == [True] * N_RANKS


def test_every_rank_sees_the_sum(pool: RankPool) -> None:
    assert pool.run(sum_of_ranks) == [3.0, 3.0, 3.0]


def test_tensors_travel_both_ways_and_leave_no_descriptor(pool: RankPool) -> None:
    total = pool.run(torch.sum, torch.arange(6.0).reshape(2, 3))
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0

    for _ in range(20):
        results = pool.run(views_of_rank)

    assert all(value.equal(torch.tensor(15.0)) for value in total)
    for rank, result in enumerate(results):
        assert result["column"].tolist() == [2.0 * rank, 2.0 * rank]
        assert result["leaf"].requires_grad
        assert result["empty"].shape == (0, 3)
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_a_lambda_is_refused_with_the_way_out(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"cannot send .*<lambda> to the ranks.*at module level"):
        pool.run(lambda: 1)


def test_a_pool_needs_a_rank() -> None:
    with pytest.raises(RankError, match="a pool of 0 ranks: it needs at least one"):
        RankPool(0)


def test_all_raise_and_the_ranks_survive(pool: RankPool) -> None:
    processes = pool.run(process_id)

    with pytest.raises(RankError) as caught:
        pool.run(fail_everywhere)

    text = str(caught.value)
    assert text.startswith("rank 0 raised ValueError: bad value on 0\nrank 1 raised ValueError: bad value on 1\n")
    assert "in fail_everywhere" in text
    assert pool.run(process_id) == processes


def test_one_raises_in_step_and_the_ranks_survive(pool: RankPool) -> None:
    processes = pool.run(process_id)

    with pytest.raises(RankError, match=r"^rank 2 raised ValueError: only me\n\n--- rank 2 ---\nTraceback"):
        pool.run(fail_after_a_collective, 2)

    assert pool.run(process_id) == processes
    assert pool.run(sum_of_ranks) == [3.0, 3.0, 3.0]


def test_a_chain_of_exceptions_keeps_its_text(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fail_because_of_another_failure)

    text = str(caught.value)
    assert text.startswith("rank 0 raised KeyError: 'outer'")
    assert text.index("ValueError: bad value on 0") < text.index("direct cause") < text.rindex("KeyError: 'outer'")


def test_a_result_that_does_not_pickle_names_its_rank(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"^rank 0 raised .*(AttributeError|PicklingError)"):
        pool.run(unpicklable_result)


def test_one_raises_while_the_others_wait(pool: RankPool) -> None:
    start = time.monotonic()

    with pytest.raises(RankError) as caught:
        pool.run(fail_before_a_collective, 1)

    assert time.monotonic() - start < 15
    text = str(caught.value)
    assert text.startswith("rank 1 raised ValueError: only me\nranks 0, 2 had not answered after ")
    assert "in sum_of_ranks" in text
    assert pool.run(sum_of_ranks) == [3.0, 3.0, 3.0]


def test_ranks_out_of_step_are_replaced(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 raised ValueError: only me"):
        pool.run(fail_with_a_collective_in_flight, 0)

    assert pool.run(sum_of_ranks) == [3.0, 3.0, 3.0]


def test_a_rank_that_exits_is_reported_with_its_code(pool: RankPool) -> None:
    start = time.monotonic()

    with pytest.raises(RankError, match=r"^rank 2 exited with code 7"):
        pool.run(exit_before_a_collective, 2, 7)

    assert time.monotonic() - start < 15
    assert pool.run(rank_plus, 0) == [0, 1, 2]


def test_a_hung_rank_is_an_error_within_its_limit(pool: RankPool) -> None:
    pool.run(rank_plus, 0)
    start = time.monotonic()

    with pytest.raises(RankError, match=r"^rank 1 had not answered after 0\.\d s") as caught:
        pool.run(sleep_on, 1, timeout=0.5)

    assert time.monotonic() - start < 15
    assert "in sleep_on" in str(caught.value)
    assert pool.run(rank_plus, 0) == [0, 1, 2]


def test_shared_pools_are_cached_and_the_least_recent_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr("dshard.testing.pool._shared", {})
    monkeypatch.setattr(RankPool, "close", lambda self: closed.append(self.n_ranks))

    one, two = rank_pool(1), rank_pool(2)

    assert rank_pool(1) is one
    assert rank_pool(3) is not two
    assert closed == [2]


@pytest.mark.parametrize(("gpus", "shares"), [(1, True), (2, False)])
def test_ranks_that_share_a_gpu_are_of_a_host_each_to_nccl(
    gpus: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, environment = list[int](), dict[str, str]()
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    for name in ("share_cores", "TCPStore"):
        monkeypatch.setattr(pool_module, name, lambda *args, **options: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)

    pool_module._join(1, 2, "nccl", 0)

    assert devices == [1 % gpus]
    assert ("NCCL_HOSTID" in environment) == shares
