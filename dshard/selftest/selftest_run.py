"""Run the self-test: every check on ranks started here, or on those of a launcher."""

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
from dshard.selftest.selftest_checks import CHECKS, Place
from dshard.testing.nccl_contract import BACKEND
from dshard.testing.pool import RankPool

Tell: TypeAlias = Callable[[tuple[float, str]], None]
"""Hears which part is done, and what is checked now."""
_SECONDS = 300.0  # of one check


@dataclass(frozen=True, slots=True)
class Result:
    """One check: on which backend, whether it passed, its seconds on the slowest rank, and what it says."""

    backend: str
    check: str
    passed: bool
    seconds: float
    detail: str


def run(device: str, ranks: int, tell: Tell) -> list[Result]:
    """Run all checks, on the CPU over gloo and under NCCL's contract, on CUDA over NCCL; `tell` hears of each."""
    place = Place(device, ranks)
    if launch.is_launched():
        return launch.run(partial(_all, place), tell, ranks=ranks, device=device)
    backends = backends_of(device)
    todo = [(backend, name) for backend in backends for name in CHECKS]
    told = {each: (i / len(todo), ", ".join(each)) for i, each in enumerate(todo)}
    return [result for backend in backends for result in _on_backend(place, backend, lambda at: tell(told[at]))]


def backends_of(device: str) -> tuple[str, ...]:
    """The backends that a self-test on this type of device uses."""
    return ("nccl",) if device == "cuda" else ("gloo", BACKEND)


def environment(device: str) -> dict[str, str]:
    """Describe the machine for a report: versions, devices, libraries."""
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": device,
        "GPUs": f"{torch.cuda.device_count()} {', '.join(sorted(names))}".strip(),
        "NCCL": nccl,
    }


def one_check(name: str, place: Place) -> tuple[str, float]:
    """Run one check on this rank; return what it says, and its seconds."""
    begin = perf_counter()
    detail = CHECKS[name](place)
    return detail, perf_counter() - begin


def _on_backend(place: Place, backend: str, tell: Callable[[tuple[str, str]], None]) -> list[Result]:
    results = []
    with RankPool(place.ranks, backend, timeout=_SECONDS) as pool:
        for name in CHECKS:
            tell((backend, name))
            begin = perf_counter()
            try:
                answers = pool.run(one_check, name, place)
            except RankError as error:
                results.append(Result(backend, name, False, perf_counter() - begin, str(error)))
            else:
                seconds = max(seconds for _, seconds in answers)
                results.append(Result(backend, name, True, seconds, answers[0][0]))
    return results


def _all(place: Place, tell: Tell) -> list[Result]:
    """All checks on this rank of a launcher; after one that fails its ranks may be out of step, and no more run."""
    backend, results = "nccl" if place.device == "cuda" else "gloo", list[Result]()
    for i, name in enumerate(CHECKS):
        tell((i / len(CHECKS), f"{backend}, {name}"))
        begin = perf_counter()
        try:
            detail, seconds = one_check(name, place)
        except (DShardError, RuntimeError, ValueError, TypeError, AssertionError) as error:
            detail = f"rank {os.environ.get('RANK')}: {type(error).__name__}: {error}"
            return [*results, Result(backend, name, False, perf_counter() - begin, detail)]
        results.append(Result(backend, name, True, seconds, detail))
    return results
