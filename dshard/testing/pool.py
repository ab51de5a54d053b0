"""Pools of rank processes for tests: started once, then milliseconds per call.

    pool = rank_pool(4)                      # shared by all who ask for four ranks
    pool.run(sum_of_ranks) == [6.0, 6.0, 6.0, 6.0]

The function is defined at module level, because only its name travels; it runs on every rank, with torch.distributed
initialised. A rank that raises, exits or hangs is a `RankError` within the time limit, and the next call finds healthy
ranks. Process groups cost about 10 ms and some file descriptors each, so cache your meshes:

    @functools.cache
    def mesh(shape): return init_device_mesh("cpu", shape)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from torch.distributed import Backend, TCPStore  # type: ignore[attr-defined]

from dshard.errors import RankError
from dshard.testing.rank import Answer, Failure, Kind, Outcome, collectives_begun, dumps, join, serve
from dshard.validate import as_int, as_number, check_callable, check_one_of

__all__ = ["RankPool", "rank_pool"]

_T = TypeVar("_T")
_START_LIMIT = 120.0  # seconds: n processes import torch, maybe on two cores
_GRACE = {Kind.EXITED: 0.5, Kind.RAISED: 2.0}  # seconds, at least, for the other ranks once one has failed
_PROBE_LIMIT = 2.0  # seconds for idle ranks to answer how many collectives they have begun
_MAX_SHARED = 2  # shared pools alive: a rank that has imported torch holds about 200 MB


class RankPool:
    """`n_ranks` processes that stay alive between calls, with one process group over all of them.

    The first call starts them (seconds: each imports torch), and so does the first after a failure that left a rank
    dead, stuck or out of step. `timeout` is the limit in seconds of one call. One call at a time.
    """

    def __init__(self, n_ranks: int, backend: str = "gloo", timeout: float = 60.0) -> None:
        n_ranks = as_int(n_ranks, "n_ranks", RankError)
        if n_ranks < 1:
            raise RankError(f"a pool of {n_ranks} ranks: it needs at least one")
        as_number(timeout, "timeout", RankError, infinite=True)
        check_one_of(backend, sorted({*Backend.backend_list, *Backend.backend_type_map}), "backend", RankError)
        self.n_ranks = n_ranks
        self.backend = backend
        self.timeout = timeout
        self._workers: tuple[_Worker, ...] = ()
        self._end: Callable[[], object] = _end_nothing

    def run(self, fn: Callable[..., _T], *args: object, timeout: float | None = None) -> list[_T]:
        """Call `fn(*args)` on every rank; return the results in rank order, with tensors on the CPU."""
        check_callable(fn, "what ranks run", "give a function that is defined at module level")
        request = _request(fn, args)
        try:
            if not self._workers:
                self._start()
            outcomes = self._exchange(request, self.timeout if timeout is None else timeout)
            failures = _failures(outcomes)
            if failures and not self._in_step(failures):
                self.close()
        except BaseException:
            self.close()
            raise
        if failures:
            raise RankError(_report(failures))
        return [outcome.value for outcome in outcomes if isinstance(outcome, Answer)]

    def close(self) -> None:
        """End the processes; the next call of `run` starts new ones."""
        self._workers = ()
        self._end()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RankPool({self.n_ranks}, backend={self.backend!r}, timeout={self.timeout})"

    def _start(self) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        directory = tempfile.TemporaryDirectory(prefix="dshard-ranks-")
        workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, workers, directory, store)
        for rank in range(self.n_ranks):
            stack = Path(directory.name, f"{rank}.txt")
            workers.append(_launch(partial(join, rank, self.n_ranks, self.backend, store.port), stack))
        self._workers = tuple(workers)
        failures = _failures(_collect(self._workers, _START_LIMIT))
        if failures:
            hint = 'a script that starts a pool must be a file with `if __name__ == "__main__":`'
            raise RankError(f"cannot start {self!r} ({hint}): {_report(failures)}")

    def _exchange(self, request: bytes, limit: float) -> list[Outcome]:
        for worker in self._workers:
            worker.send(request)
        return _collect(self._workers, limit)

    def _in_step(self, failures: dict[int, Failure]) -> bool:
        """Whether the ranks are all alive and have begun equally many collectives, so that the next will match."""
        if any(failure.kind is not Kind.RAISED for failure in failures.values()):
            return False
        outcomes = self._exchange(_request(collectives_begun, ()), _PROBE_LIMIT)
        counts = [outcome.value for outcome in outcomes if isinstance(outcome, Answer)]
        begun = {pair for count in counts for pair in count.items()}
        return len(counts) == self.n_ranks and len(begun) == len({group for group, _ in begun})


_shared: dict[int, RankPool] = {}


def rank_pool(n_ranks: int) -> RankPool:
    """The pool of `n_ranks` gloo ranks that all callers share; the least recently asked for is closed beyond two."""
    pool = _shared.pop(n_ranks, None) or RankPool(n_ranks)
    _shared[n_ranks] = pool
    if len(_shared) > _MAX_SHARED:
        _shared.pop(next(iter(_shared))).close()
    return pool


@dataclass(frozen=True, slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    stack: Path

    def send(self, request: bytes) -> None:
        with contextlib.suppress(OSError):  # dead: receive() reports it
            self.pipe.send_bytes(request)

    def receive(self) -> Outcome:
        try:
            reply = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.process.join(timeout=1.0)
            return Failure(Kind.EXITED, f"exited with {_code(self.process.exitcode)}", self.where())
        outcome: Outcome = pickle.loads(reply)
        return outcome

    def where(self) -> str:
        """The stack that the rank has dumped, without dshard's frames below the function."""
        return self.stack.read_text().partition(f'  File "{serve.__code__.co_filename}"')[0]


def _launch(join: Callable[[], None], stack: Path) -> _Worker:
    stack.touch()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(join, theirs, str(stack)), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, stack)


def _collect(workers: Sequence[_Worker], limit: float) -> list[Outcome]:
    """Wait up to `limit` seconds for one outcome of each rank; once a rank has failed, only a short time longer."""
    start = time.monotonic()
    deadline = start + limit
    outcomes: dict[int, Outcome] = {}
    ranks = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while ranks and (ready := wait(list(ranks), max(0.0, deadline - time.monotonic()))):
        for pipe in [pipe for pipe in ranks if pipe in ready]:
            rank = ranks.pop(pipe)
            outcomes[rank] = outcome = workers[rank].receive()
            if isinstance(outcome, Failure):
                now = time.monotonic()
                deadline = min(deadline, now + max(_GRACE[outcome.kind], now - start))
    what = f"had not answered after {time.monotonic() - start:.1f} s"
    stacks = _stacks([workers[rank] for rank in ranks.values()])
    outcomes |= {rank: Failure(Kind.WAITING, what, stack) for rank, stack in zip(ranks.values(), stacks, strict=True)}
    return [outcomes[rank] for rank in range(len(workers))]


def _stacks(workers: Sequence[_Worker]) -> list[str]:
    """The current Python stack of each worker; "" where the platform cannot dump it."""
    if not hasattr(signal, "SIGUSR1"):
        return ["" for _ in workers]
    for worker in workers:
        if worker.process.pid is not None:
            os.kill(worker.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 1.0
    while not all(worker.where() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [worker.where() for worker in workers]


def _end(workers: Iterable[_Worker], directory: tempfile.TemporaryDirectory[str], store: TCPStore) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.process.close()
        worker.pipe.close()
    directory.cleanup()
    del store  # held until the ranks that use it are gone


def _end_nothing() -> None: ...


def _failures(outcomes: Sequence[Outcome]) -> dict[int, Failure]:
    return {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}


def _report(failures: dict[int, Failure]) -> str:
    first, *others = sorted(failures, key=lambda rank: (failures[rank].kind, rank))
    lines = [f"rank {first} {failures[first].what}"]
    alike: dict[str, list[int]] = {}
    for rank in others:
        alike.setdefault(failures[rank].what, []).append(rank)
    lines += [f"{_names(ranks)} {what}" for what, ranks in alike.items()]
    places: dict[str, list[int]] = {failures[first].where: [first]}
    for rank in others:
        if failures[rank].kind is Kind.WAITING:
            places.setdefault(failures[rank].where, []).append(rank)
    lines += [f"\n--- {_names(ranks)} ---\n{where.rstrip()}" for where, ranks in places.items() if where]
    return "\n".join(lines)


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _code(code: int | None) -> str:
    return f"code {code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"code {code}"


def _request(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    try:
        return dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", fn)
        way_out = "define the function at module level (no lambda, no closure) and pass what it needs as arguments"
        raise RankError(f"cannot send {name} to the ranks: {error}; {way_out}") from error
