"""Pools of rank processes for tests: started once, then milliseconds per call.

    pool = rank_pool(4)                      # shared by all who ask for four ranks
    pool.run(sum_of_ranks) == [6.0, 6.0, 6.0, 6.0]

The function must be defined at module level, as it is pickled by name; it runs on every rank, with torch.distributed
initialised. A rank that raises, exits or hangs causes a `RankError` within the time limit, and the next call has
healthy ranks. Process groups cost about 10 ms and some file descriptors each, so cache your meshes:

    @functools.cache
    def mesh(shape): return init_device_mesh("cpu", shape)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Backend, Store, TCPStore  # type: ignore[attr-defined]

from dshard.errors import RankError
from dshard.launch.processes import (
    PRELOADED,
    Failure,
    FailureKind,
    Processes,
    ReturnValue,
    failures_of,
    request,
    share_cores,
)
from dshard.tools import nccl_contract
from dshard.torch_private import c10d_world
from dshard.validate import as_int, as_number, check_callable, check_one_of

__all__ = ["RankPool", "rank_pool"]

PRELOADED.append(__name__)  # or each rank imports it, with its backends, to join the others
_T = TypeVar("_T")
_GLOO: Any = dist.ProcessGroupGloo
_MAKE_GROUP = _GLOO.__init__
_START_LIMIT = 120.0  # seconds: n processes import torch, maybe on two cores
_PROBE_LIMIT = 2.0  # seconds for idle ranks to answer how many collectives they have begun
_MAX_SHARED = 2  # shared pools alive: a rank that has imported torch holds about 200 MB


class RankPool:
    """`n_ranks` processes that stay alive between calls, with one process group over all of them.

    The first call starts them (seconds: each imports torch), and so does the first after a failure that left a rank
    dead, stuck or out of step. `backend` is torch's name of one, or "nccl_contract" (`dshard.testing.nccl_contract`);
    the default is that of DSHARD_TEST_BACKEND, or gloo. Over NCCL ranks share GPUs where there are fewer, as if each
    were on a host of its own. `timeout` is the limit in seconds of one call. One call at a time.
    """

    def __init__(self, n_ranks: int, backend: str | None = None, timeout: float = 60.0) -> None:
        backend = default_backend() if backend is None else backend
        n_ranks = as_int(n_ranks, "n_ranks", RankError)
        if n_ranks < 1:
            raise RankError(f"a pool of {n_ranks} ranks: it needs at least one")
        as_number(timeout, "timeout", RankError, infinite=True)
        check_one_of(
            backend,
            sorted({*Backend.backend_list, *Backend.backend_type_map, nccl_contract.BACKEND}),
            "backend",
            RankError,
        )
        self.n_ranks = n_ranks
        self.backend = backend
        self.timeout = timeout
        self._processes: Processes | None = None

    def run(self, fn: Callable[..., _T], *args: object, timeout: float | None = None) -> list[_T]:
        """Call `fn(*args)` on every rank; return the results in rank order, with tensors on the CPU."""
        check_callable(fn, "what ranks run", "give a function that is defined at module level")
        call = request(fn, *args)
        try:
            processes = self._processes or self._start()
            outcomes = processes.call([call] * self.n_ranks, self.timeout if timeout is None else timeout)
            failures = failures_of(outcomes)
            if failures and not self._in_step(processes, failures):
                self.close()
        except BaseException:
            self.close()
            raise
        if failures:
            raise RankError(_report(failures))
        return [outcome.value for outcome in outcomes if isinstance(outcome, ReturnValue)]

    def close(self) -> None:
        """End the processes; the next call of `run` starts new ones."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RankPool({self.n_ranks}, backend={self.backend!r}, timeout={self.timeout})"

    def _start(self) -> Processes:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes = processes = Processes(self.n_ranks, kept=store)
        calls = [request(_join, rank, self.n_ranks, self.backend, store.port) for rank in range(self.n_ranks)]
        failures = failures_of(processes.call(calls, _START_LIMIT))
        if failures:
            hint = 'a script that starts a pool must be a file with `if __name__ == "__main__":`'
            raise RankError(f"cannot start {self!r} ({hint}): {_report(failures)}")
        return processes

    def _in_step(self, processes: Processes, failures: dict[int, Failure]) -> bool:
        """Whether all ranks are alive and have begun equally many collectives, so that the next ones will match."""
        if any(failure.kind is not FailureKind.RAISED for failure in failures.values()):
            return False
        outcomes = processes.call([request(collectives_begun)] * self.n_ranks, _PROBE_LIMIT)
        counts = [outcome.value for outcome in outcomes if isinstance(outcome, ReturnValue)]
        begun = {pair for count in counts for pair in count.items()}
        return len(counts) == self.n_ranks and len(begun) == len({group for group, _ in begun})


_shared: dict[tuple[int, str], RankPool] = {}


def shared_pools() -> list[RankPool]:
    """The shared pools whose ranks have been started."""
    return [pool for pool in _shared.values() if pool._processes is not None]


def rank_pool(n_ranks: int, backend: str | None = None) -> RankPool:
    """The pool of `n_ranks` ranks that all callers share; beyond two pools the least recently used is closed."""
    key = n_ranks, default_backend() if backend is None else backend
    pool = _shared.pop(key, None) or RankPool(*key)
    _shared[key] = pool
    if len(_shared) > _MAX_SHARED:
        _shared.pop(next(iter(_shared))).close()
    return pool


def default_backend() -> str:
    """Return the default backend of pools: the value of DSHARD_TEST_BACKEND, or gloo."""
    return os.environ.get("DSHARD_TEST_BACKEND") or "gloo"


def _join(rank: int, n_ranks: int, backend: str, port: int) -> None:
    """Initialise torch.distributed over the loopback interface through the store on `port`."""
    share_cores()
    if backend == nccl_contract.BACKEND:
        nccl_contract.register()
    elif "nccl" in backend:
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        if n_ranks > gpus:  # NCCL refuses two ranks of one host on one GPU, and these are of a host each
            os.environ.setdefault("NCCL_HOSTID", f"{os.getpid()}")
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    _share_gloo_device()
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n_ranks)


def _share_gloo_device() -> None:
    """Let all process groups of this process over gloo use one device, and so one thread that polls their sockets.

    torch makes a device for each group, whose thread wakes a hundred times a second as long as the process lives: ranks
    that have used a hundred meshes would do little else.
    """
    device = _GLOO.create_default_device()

    def make_on_device(
        self: object, store: Store, rank: int, size: int, timeout: timedelta, **of_other_torch: object
    ) -> None:
        if any(of_other_torch.values()):  # what options do not say
            _MAKE_GROUP(self, store, rank, size, timeout=timeout, **of_other_torch)
            return
        options = _GLOO._Options()
        options._devices, options._timeout = [device], timeout
        _MAKE_GROUP(self, store, rank, size, options)

    _GLOO.__init__ = make_on_device


def collectives_begun() -> dict[str, int]:
    """The number of collectives that this rank has begun on each of its process groups, by the group's name."""
    names: dict[Any, Any] = c10d_world.pg_names
    return {name: group._get_sequence_number_for_group() for group, name in names.items()}


def _report(failures: dict[int, Failure]) -> str:
    first, *others = sorted(failures, key=lambda rank: (failures[rank].kind, rank))
    lines = [f"rank {first} {failures[first].what}"]
    alike: dict[str, list[int]] = {}
    for rank in others:
        alike.setdefault(failures[rank].what, []).append(rank)
    lines += [f"{_names(ranks)} {what}" for what, ranks in alike.items()]
    places: dict[str, list[int]] = {failures[first].where: [first]}
    for rank in others:
        if failures[rank].kind is FailureKind.WAITING:
            places.setdefault(failures[rank].where, []).append(rank)
    lines += [f"\n--- {_names(ranks)} ---\n{where.rstrip()}" for where, ranks in places.items() if where]
    return "\n".join(lines)


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
