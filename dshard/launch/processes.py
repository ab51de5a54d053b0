"""Processes of one rank each, and the messages between them and their parent.

A process answers requests, one after the other: each is a pickled call of a function, and has one outcome, the value or
a failure. While a call runs it may send messages. All are plain pickles, so that tensors arrive as copies and leave no
shared memory or file descriptor behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dshard.errors import RankError


class FailureKind(IntEnum):
    """Kinds of failure of a rank, the likelier cause first: the others often follow from it."""

    EXITED = 0
    RAISED = 1
    WAITING = 2


@dataclass(frozen=True, slots=True)
class ReturnValue:
    """The value that the function returned on a rank."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank, in words, its place, and its time by the clock in seconds.

    `where` is a traceback or a stack, or "" if unknown.
    """

    kind: FailureKind
    what: str
    where: str
    when: float


Outcome: TypeAlias = ReturnValue | Failure


def failures_of(outcomes: Sequence[Outcome]) -> dict[int, Failure]:
    """The failures among the outcomes, by rank."""
    return {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}


def raised(error: BaseException) -> Failure:
    """The failure of a rank that raised an error; its traceback begins below the frame that caught it."""
    what = "".join(traceback.format_exception_only(error)).strip()
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    where = "".join(traceback.format_exception(type(error), error, trace))
    return Failure(FailureKind.RAISED, f"raised {what}", where, time.time())


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_cuda:
            return value.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _dumps(value: object) -> bytes:
    """Pickle, with CUDA tensors moved to the CPU."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def request(fn: Callable[..., object], *args: object) -> bytes:
    """The pickled call `fn(*args)`."""
    try:
        return _dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", fn)
        way_out = "define the function at module level (no lambda, no closure) and pass what it needs as arguments"
        raise RankError(f"cannot send {name} to the ranks: {error}; {way_out}") from error


# -- in the process of a rank

_PARENT: list[Connection] = []


def send(message: object) -> None:
    """Send a message to the parent, from the process of a rank."""
    _PARENT[0].send_bytes(_dumps(message))


def _answer(call: bytes) -> bytes:
    try:
        fn, args = pickle.loads(call)
        return _dumps(ReturnValue(fn(*args)))
    except BaseException as error:
        return _dumps(raised(error))


def _serve(pipe: Connection, stack: str, environment: dict[str, str]) -> None:
    """Run a rank in this environment: answer calls until the parent is gone.

    The signal SIGUSR1, or a crash, writes the Python stack to the file `stack`.
    """
    gc.freeze()  # both: what the server has imported becomes old, and no collection walks it soon
    gc.unfreeze()
    os.environ.clear()  # of the server, which was forked from the parent at another time
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the parent ends us
    _unblock_interrupts()
    _PARENT[:] = [pipe]
    threading.Thread(target=_exit_with_parent, args=(os.path.dirname(stack),), daemon=True).start()
    with open(stack, "w", encoding="utf-8") as file:
        faulthandler.enable(file, all_threads=False)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        try:
            while True:
                pipe.send_bytes(_answer(pipe.recv_bytes()))
        except (EOFError, OSError):
            _exit_with_parent(os.path.dirname(stack))


def _exit_with_parent(directory: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


# -- in the parent


@dataclass(frozen=True, slots=True)
class _Rank:
    process: BaseProcess
    pipe: Connection
    stack: Path

    def receive(self) -> object:
        """The next message or outcome; a Failure if the process has ended."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(timeout=1.0)
            return Failure(FailureKind.EXITED, f"exited with {_code(self.process.exitcode)}", self.where(), time.time())

    def where(self) -> str:
        """The stack that the rank has dumped, without dshard's frames below the function."""
        return self.stack.read_text().partition(f'  File "{_serve.__code__.co_filename}"')[0]


_GRACE = {
    FailureKind.EXITED: 0.5,
    FailureKind.RAISED: 1.0,
}  # seconds, at least, for the other ranks once one has failed


class Processes:
    """`n` processes, one for each rank, which end when they are closed or when nothing refers to this object.

    On Linux a server imports torch and dshard once for all of them; each has the current environment, except for
    variables read at import, which keep the values of the first. `kept`, and `folder` for their files, are kept until
    they have ended.
    """

    def __init__(self, n: int, kept: object = None) -> None:
        directory = tempfile.TemporaryDirectory(prefix="dshard-ranks-")
        self.folder = Path(directory.name)
        self._ranks: list[_Rank] = []
        self.close = weakref.finalize(self, _end, self._ranks, directory, kept)
        with _one_hash_seed():
            server = _start_server()
            try:
                for rank in range(n):
                    self._ranks.append(_start(self.folder / f"{rank}.txt"))
            except BaseException:  # such as Ctrl-C: the server may have seconds of imports before it
                if server is not None:
                    os.kill(server, signal.SIGKILL)
                raise

    def call(
        self,
        requests: Iterable[bytes],
        limit: float,
        *,
        on_message: Callable[[Any], object] = lambda message: None,
        grace: float = inf,
    ) -> list[Outcome]:
        """Send each rank its request, and wait for the outcomes; `on_message` gets each message that they send.

        A rank that does not answer within `limit` seconds of the call, or of the last message of any rank, has failed.
        Once a rank has failed the others get as much more time as that one took, but at most `grace` seconds.
        """
        for rank, call in zip(self._ranks, requests, strict=True):
            with contextlib.suppress(OSError):  # dead: receive() reports it
                rank.pipe.send_bytes(call)
        start = time.monotonic()
        deadline = start + limit
        outcomes: dict[int, Outcome] = {}
        numbers = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        while numbers and (ready := wait(list(numbers), max(0.0, deadline - time.monotonic()))):
            for pipe in [pipe for pipe in numbers if pipe in ready]:
                received, now = self._ranks[numbers[pipe]].receive(), time.monotonic()
                match received:
                    case ReturnValue():
                        outcomes[numbers.pop(pipe)] = received
                    case Failure(kind):
                        outcomes[numbers.pop(pipe)] = received
                        deadline = min(deadline, now + max(_GRACE[kind], min(now - start, grace)))
                        limit = 0.0  # later messages do not extend it
                    case message:
                        on_message(message)
                        deadline = max(deadline, now + limit)
        what = f"had not answered after {time.monotonic() - start:.1f} s"
        for number, stack in zip(numbers.values(), self._stacks(numbers.values()), strict=True):
            outcomes[number] = Failure(FailureKind.WAITING, what, stack, time.time())
        return [outcomes[number] for number in range(len(self._ranks))]

    def _stacks(self, numbers: Iterable[int]) -> list[str]:
        """The current Python stack of each of these ranks; "" where the platform cannot dump it."""
        ranks = [self._ranks[number] for number in numbers]
        if not hasattr(signal, "SIGUSR1"):
            return ["" for _ in ranks]
        for rank in ranks:
            if rank.process.pid is not None:
                os.kill(rank.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while not all(rank.where() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
        return [rank.where() for rank in ranks]


@contextlib.contextmanager
def _one_hash_seed() -> Iterator[None]:
    """Within the block Python starts with one hash seed, so that a set of strings has one order in all ranks."""
    is_given = "PYTHONHASHSEED" in os.environ
    os.environ.setdefault("PYTHONHASHSEED", "0")
    try:
        yield
    finally:
        if not is_given:
            del os.environ["PYTHONHASHSEED"]


METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOADED = [__name__, "torch._dynamo"]  # torch imports the second at the first operator on meta tensors
"""The modules that the server imports, once for all ranks; more may be added before the first ranks start."""


def _start_server() -> int | None:
    """Start the server from which ranks are forked; its process id, or None if it runs already or there is none."""
    if METHOD != "forkserver":
        return None
    before = _server_process()
    forkserver.set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()  # before SIGINT is blocked: it unblocks it
    # Ctrl-C reaches every process of the terminal: a server that imports torch would print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        _unblock_interrupts()
    pid = _server_process()
    return None if pid == before else pid


def _server_process() -> int | None:
    """The process id of the server, which Python tells under private names alone; None if it has not been started."""
    pid: int | None = vars(vars(forkserver)["_forkserver"])["_forkserver_pid"]
    return pid


def _unblock_interrupts() -> None:
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _start(stack: Path) -> _Rank:
    stack.touch()
    context = multiprocessing.get_context(METHOD)
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(target=_serve, args=(theirs, str(stack), dict(os.environ)), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    return _Rank(process, ours, stack)


def _end(ranks: Iterable[_Rank], directory: tempfile.TemporaryDirectory[str], kept: object) -> None:
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.pipe.close()
    directory.cleanup()
    del kept  # such as a store, until the ranks that use it are gone


def _code(code: int | None) -> str:
    return f"code {code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"code {code}"


def share_cores() -> None:
    """Give this process one torch thread and, where the system has it, the batch scheduling policy.

    Batch work has longer time slices. With shorter ones, which ranks wait for each other differs from run to run, and
    seconds of a step by half. Another policy than the ordinary one was chosen by somebody, and stays.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
