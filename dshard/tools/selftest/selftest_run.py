"""Run every check of the self-test on ranks started here or by a launcher."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeAlias

import torch

from dshard import launch
from dshard.errors import DShardError, RankError
from dshard.launch.group import RANKS
from dshard.notebook import Drawn
from dshard.testing.pool import RankPool
from dshard.tools.nccl_contract import BACKEND
from dshard.tools.selftest.selftest_checks import CHECKS, Place
from dshard.version import __version__

Progress: TypeAlias = Callable[[tuple[float, str]], None]
"""Called with the part that is done, and what is checked now."""
_SECONDS = 300.0  # of one check


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check on one backend: success, seconds on the slowest rank, and a line of details."""

    backend: str
    check: str
    passed: bool
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True, repr=False)
class SelfTest(Drawn):
    """The results of a self-test, and the `environment` it ran in.

    A notebook draws the table that `dshard selftest` prints.
    """

    results: tuple[Result, ...]
    machine: dict[str, str]

    def __repr__(self) -> str:
        failed = "".join(f", {each.check} over {each.backend} failed" for each in self.failed)
        return f"SelfTest({len(self.results) - len(self.failed)} of {len(self.results)} passed{failed})"

    @property
    def failed(self) -> tuple[Result, ...]:
        """The results of failed checks."""
        return tuple(result for result in self.results if not result.passed)


def run(device: str = "cpu", ranks: int = RANKS, progress: Progress | None = None) -> SelfTest:
    """Run all checks, on the CPU over gloo and under NCCL's contract, on CUDA over NCCL; `progress` reports each."""
    place, report = Place(device, ranks), progress or (lambda at: None)
    machine = {**environment(device), "ranks": str(ranks)}
    if launch.is_launched():
        return SelfTest(tuple(launch.run(partial(_all, place), report, ranks=ranks, device=device)), machine)
    backends = ("nccl",) if device == "cuda" else ("gloo", BACKEND)
    todo = [(backend, name) for backend in backends for name in CHECKS]
    parts_done = {each: (i / len(todo), ", ".join(each)) for i, each in enumerate(todo)}
    results = [
        result for backend in backends for result in _on_backend(place, backend, lambda each: report(parts_done[each]))
    ]
    return SelfTest(tuple(results), machine)


def environment(device: str) -> dict[str, str]:
    """Describe the machine for a report: versions, devices, libraries."""
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "dshard": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": device,
        "GPUs": f"{torch.cuda.device_count()} {', '.join(sorted(names))}".strip(),
        "NCCL": nccl,
    }


def one_check(name: str, place: Place) -> tuple[str, float]:
    """Run one check on this rank, and return its line of details and its seconds."""
    begin = perf_counter()
    detail = CHECKS[name](place)
    return detail, perf_counter() - begin


def _on_backend(place: Place, backend: str, report: Callable[[tuple[str, str]], None]) -> list[Result]:
    results = []
    with RankPool(place.ranks, backend, timeout=_SECONDS) as pool:
        for name in CHECKS:
            report((backend, name))
            begin = perf_counter()
            try:
                answers = pool.run(one_check, name, place)
            except RankError as error:
                results.append(Result(backend, name, False, perf_counter() - begin, str(error)))
            else:
                seconds = max(seconds for _, seconds in answers)
                results.append(Result(backend, name, True, seconds, answers[0][0]))
    return results


def _all(place: Place, report: Progress) -> list[Result]:
    """Run all checks on this rank of a launcher, until one fails: the ranks may then be out of step."""
    backend, results = "nccl" if place.device == "cuda" else "gloo", list[Result]()
    for i, name in enumerate(CHECKS):
        report((i / len(CHECKS), f"{backend}, {name}"))
        begin = perf_counter()
        try:
            detail, seconds = one_check(name, place)
        except (DShardError, RuntimeError, ValueError, TypeError, AssertionError) as error:
            detail = f"rank {os.environ.get('RANK')}: {type(error).__name__}: {error}"
            return [*results, Result(backend, name, False, perf_counter() - begin, detail)]
        results.append(Result(backend, name, True, seconds, detail))
    return results
