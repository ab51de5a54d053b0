"""The state of all communicators of one process: launches, operations in flight, counts and failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import torch.distributed as dist

from dshard.comm import peek, put
from dshard.tools.nccl_contract.contract_rules import meet, refusal, refuse
from dshard.tools.nccl_contract.launch_order import Communicator, Launches, LaunchLog, Ranks
from dshard.tools.nccl_contract.operation import Operation

_KEY = "dshard/nccl_contract/waiting"


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """An operation in which a rank waits, the `number`th on its communicator, and all operations the rank has begun."""

    what: str
    communicator: Communicator
    ranks: Ranks
    number: int
    begun: Launches


def publish(waiting: WaitRecord | None) -> None:
    """Publish the operation in which this rank waits, or None when it continues."""
    put(f"{_KEY}/{dist.get_rank()}", waiting)


def deadlock(here: WaitRecord) -> str:
    """Describe a rank that waits for this one in an operation, while this one waits for it in another; else ""."""
    for rank in here.ranks:
        there: WaitRecord | None = None if rank == dist.get_rank() else peek(f"{_KEY}/{rank}")
        if there is None or dist.get_rank() not in there.ranks or there.communicator == here.communicator:
            continue
        if not _has_begun(there.begun, here) and not _has_begun(here.begun, there):
            return f"rank {rank} waits in {there.what}, on {there.communicator}, which this rank has not begun"
    return ""


def _has_begun(begun: Mapping[Communicator, object], waiting: WaitRecord) -> bool:
    count = getattr(begun.get(waiting.communicator), "count", 0)
    return bool(count >= waiting.number)


_FAILED = "dshard/nccl_contract/failed"
_LOOK = 0.2  # seconds between two looks whether another rank has failed


@dataclass(slots=True)
class Usage:
    """Counts of a program's operations, bytes and waits on its communicators.

    Attributes:
        kernels: Operations begun; a group of them is one.
        nbytes: Bytes of their inputs, or of what they receive where they send nothing.
        stream_waits: Waits that stop the stream, and would let the host go on.
        host_waits: Waits that stop the host: barriers, waits with a time limit, questions whether something has ended.
    """

    kernels: int = 0
    nbytes: int = 0
    stream_waits: int = 0
    host_waits: int = 0


@dataclass(slots=True)
class ProcessState:
    """The launches, operations in flight, counts and first failure of one process."""

    launches: LaunchLog = field(default_factory=LaunchLog)
    usage: Usage = field(default_factory=Usage)
    in_flight: list[Operation] = field(default_factory=list)
    error: str | None = None
    listeners: list[Callable[[Operation], object]] = field(default_factory=list)

    def begin(self, operation: Operation) -> None:
        """Begin an operation, unless its memory is in use by another communicator's operation in flight."""
        self.check()
        self.in_flight = [x for x in self.in_flight if not (x.dropped and x.done.is_set())]
        reads, writes = operation.reads(), operation.writes()
        for other in tuple(self.in_flight):
            theirs = other.writes()
            clash = any(meet(a, b) for a in reads for b in theirs)
            if clash or any(meet(a, b) for a in writes for b in (*theirs, *other.reads())):
                if other.communicator != operation.communicator:
                    refuse("buffer", f"{operation.what} uses memory of {other.what}, not waited for")
                self.end(other)  # one stream runs both, one after the other
        self.in_flight.append(operation)
        self.usage.kernels += 1
        for listener in self.listeners:
            listener(operation)
        for part in operation.parts:
            part.begin()
        self.usage.nbytes += operation.nbytes

    def check(self) -> None:
        """Raise the error of an earlier operation, if any."""
        if self.error is not None:
            raise dist.DistBackendError(f"an earlier operation has failed, and its communicator with it: {self.error}")

    def end(self, operation: Operation, limit: float | None = None) -> None:
        """Wait until an operation has run, and write its outputs."""
        if operation.delivered:
            return
        self.wait_for(operation, limit)
        operation.delivered = True
        self.in_flight.remove(operation)
        for part in operation.parts:
            if part.overwritten():
                refuse("buffer", f"the input of {operation.what} was written before it was waited for")
            part.deliver()
        operation.parts.clear()  # whose tensors the program may be rid of

    def wait_for(self, operation: Operation, limit: float | None = None) -> None:
        """Wait until an operation has run."""
        if not operation.done.wait(_LOOK):
            self._wait_long(operation, None if limit is None else monotonic() + limit)
        if operation.error is not None:
            raise dist.DistBackendError(str(operation.error)) from operation.error

    def _wait_long(self, operation: Operation, end: float | None) -> None:
        """Wait for an operation while checking for failures and deadlocks."""
        messages = any(part.message is not None for part in operation.parts)  # of which not all ranks have as many
        here = WaitRecord(
            operation.what, operation.communicator, operation.ranks, operation.number, self.launches.begun
        )
        publish(None if messages else here)
        try:
            while not operation.done.wait(_LOOK):
                text: str | None = peek(_FAILED) if dist.is_initialized() else None
                if text is not None:
                    self.error = text
                    raise dist.DistBackendError(f"{operation.what}: another rank has failed: {text}")
                stuck = "" if messages else deadlock(here)
                if stuck:
                    self.fail(operation, RuntimeError(refusal("order", f"{operation.what}: {stuck}")))
                    raise dist.DistBackendError(str(operation.error))
                if end is not None and monotonic() > end:
                    raise dist.DistBackendError(f"{operation.what}: not ended within the time limit of this wait")
        finally:
            publish(None)

    def fail(self, operation: Operation, error: BaseException) -> None:
        """Record the failure of an operation, and publish it to the waiting ranks."""
        operation.error = error
        if self.error is None:
            self.error = str(error)
            if dist.is_initialized() and CURRENT.state is self:
                with suppress(RuntimeError):  # the store ends with the process that has it
                    put(_FAILED, f"rank {dist.get_rank()}: {error}")


class _Current:
    """The state of this process; a new one for each world."""

    def __init__(self) -> None:
        self.state = ProcessState()


CURRENT = _Current()
