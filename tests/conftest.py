"""Profiles for generated tests, and the ranks that tests share.

`default` is quick and always the same. `pytest -m thorough` (or HYPOTHESIS_PROFILE=thorough) runs every generated test
on many more cases, new ones each time.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from dshard.core import comparisons, plain_tensors
from dshard.launch.processes import PRELOADED
from dshard.testing import RankPool, nccl_contract, rank_pool
from dshard.testing.pool import shared_pools

settings.register_profile("default", max_examples=10, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "thorough",
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
NOT_UNDER_THE_CONTRACT = {
    "test_failing_ranks.py": "errors of one rank are heard by the others over gloo alone",
    "test_ranks_that_do_not_come_to_compare_are_named_soon": "a rank that leaves out a call is found over gloo alone",
    "test_compile": "torch calls the collectives of compiled graphs from C++, past the contract group",
    "test_distributed_data_parallel_over_other_ranks": "refused where torch's own process groups call the subclass",
    "test_programs_for_torchs_distributed_tensors_run[counted]": "counts the operators of torch's process groups",
    "test_when_a_module_fails_all_stages_fail": "errors of one rank are heard by the others over gloo alone",
    "test_when_a_rank_is_silent_all_others_name": "waits have a time limit over gloo alone",
    "test_when_a_rank_dies_its_neighbours_name_it": "waits have a time limit over gloo alone",
    "test_several_tensors_are_under_way_at_once": "begins them in two orders, which NCCL refuses: test_nccl_orders.py",
    "test_an_index_out_of_range_on_one_rank_is_refused_on_all[left_waiting": "errors are heard over gloo alone",
    "test_errors_are_raised_at_once_or_at_the_first_use": "errors of one rank are heard over gloo alone",
    "of a shape that one rank has taken before": "a rank that has taken it too waits for nobody on NCCL",
    "test_threads_use_meshes_of_their_own_at_once": "NCCL wants one order of all communicators",
    "test_a_collective_that_is_not_known_is_no_zero": "about the operators of torch's own process groups",
    "test_a_warm_step_calls_few_functions": "counts functions of Python, of which the contract group itself is made",
    "test_a_step_leaves_no_memory_behind": "the contract group holds the tensors of its last operations",
    "test_threads_run_while_a_graph_waits": "about the waits of torch's own process groups, which let go of the GIL",
}
"""Tests that say nothing under `DSHARD_TEST_BACKEND=nccl_contract`, by a part of their names, and why."""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of programs that tests start: there are as many processes as cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each rank and each command would compile dshard anew
sys.dont_write_bytecode = False
torch.set_num_threads(1)
PRELOADED += ["pytest", "hypothesis", "dshard.parallel"]  # which files of tests import, each rank anew
gc.disable()  # until all is collected: what is imported and collected stays, and each collection would walk it again
CASES: Counter[str] = Counter()
COUNTED: set[int] = set()


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(profile_of(config))


def profile_of(config: pytest.Config) -> str:
    selected = config.getoption("-m") or ""
    chosen = "thorough" if "thorough" in selected and "not thorough" not in selected else "default"
    return os.environ.get("HYPOTHESIS_PROFILE", chosen)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if os.environ.get("DSHARD_TEST_BACKEND") == nccl_contract.BACKEND:
            for part, why in NOT_UNDER_THE_CONTRACT.items():
                if part in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason=why))
        generated = getattr(getattr(item, "obj", None), "hypothesis", None)
        if generated is not None:
            count_cases(generated, item.nodeid.partition("[")[0])
            if profile_of(config) == "thorough":
                item.add_marker("thorough")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported and collected out of all later collections, of which tests ask for many."""
    gc.freeze()
    gc.set_threshold(20_000, *gc.get_threshold()[1:])  # the default looks through young objects every few calls
    gc.enable()


def count_cases(generated: Any, name: str) -> None:
    """Count the examples of a generated test."""
    inner: Callable[..., object] = generated.inner_test
    if id(generated) in COUNTED:
        return
    COUNTED.add(id(generated))

    @wraps(inner)
    def counted(*args: object, **kwargs: object) -> object:
        CASES[name] += 1
        return inner(*args, **kwargs)

    generated.inner_test = counted


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of a process that ran a part of the tests: report to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cases"] = dict(CASES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    CASES.update(getattr(node, "workeroutput", {}).get("cases", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if CASES:
        terminalreporter.write_line(f"{sum(CASES.values()):,} generated cases in {len(CASES)} laws")
        if terminalreporter.verbosity > 0:
            for name, count in sorted(CASES.items()):
                terminalreporter.write_line(f"  {count:6,}  {name}")


@pytest.fixture(scope="session")
def cases_run() -> Counter[str]:
    """How many generated cases each test has run: for tests that run several at once."""
    return CASES


@pytest.fixture(autouse=True)
def as_wide_as_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line prints is as wide as without a terminal, whatever started the tests says."""
    monkeypatch.delenv("COLUMNS", raising=False)


MAX_THREADS = 18
"""Of a rank: gloo has two for each process group, asleep, and a socket for each peer, as long as the group lives."""


def threads() -> int:
    return threading.active_count() if not os.path.isdir("/proc/self/task") else len(os.listdir("/proc/self/task"))


def forget_models() -> None:
    """Let each file find meshes on which nothing was parallelized."""
    plain_tensors._MODELS.clear()
    comparisons._ALL.clear()


@pytest.fixture(scope="module", autouse=True)
def few_process_groups() -> Iterator[None]:
    """After the tests of a file: no world in this process, and ranks that have many process groups start anew."""
    yield
    forget_models()
    if dist.is_initialized():  # a mesh of one rank has made a world of one in this process
        dist.destroy_process_group()
    for pool in shared_pools():
        pool.run(forget_models)
        if max(pool.run(threads)) > MAX_THREADS:
            pool.close()


@pytest.fixture(scope="module")  # another file may have closed the pool by asking for ranks of other numbers
def ranks() -> RankPool:
    """Four ranks, shared by all tests; over gloo, unless DSHARD_TEST_BACKEND names another backend."""
    return rank_pool(4)
