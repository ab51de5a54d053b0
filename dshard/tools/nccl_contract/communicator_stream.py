"""The stream of one communicator: a thread that runs its operations in the order agreed by the ranks.

Before an operation moves anything the ranks that take part exchange what they are about to run, and what they had begun
before. Where they differ nothing is moved, and each of them raises.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from dshard.tools.nccl_contract import transfers
from dshard.tools.nccl_contract.contract_rules import refusal
from dshard.tools.nccl_contract.launch_order import Communicator, Launches, disagreement, messages_between
from dshard.tools.nccl_contract.operation import Bytes, Digest, Entry, Message, Operation, as_tensor
from dshard.tools.nccl_contract.process_state import CURRENT

_WIDTH = 8192  # bytes of what a rank tells of an operation
_TAGS = {
    "alone": (1, 2),
    "up": (3, 4),
    "down": (5, 6),
}  # of what ranks tell, and of data: to higher ranks, to lower ones


class Channel:
    """A queue and thread that run the operations of one communicator of this process, in the order they begin."""

    def __init__(
        self, name: Communicator, gloo: transfers.Gloo, rank: int, ranks: Sequence[int], *, alone: bool
    ) -> None:
        self._name, self._gloo, self._rank, self._ranks, self._alone = name, gloo, rank, tuple(ranks), alone
        self._state = CURRENT.state
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, operation: Operation) -> None:
        """Queue an operation after all submitted before."""
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="nccl-contract", daemon=True)
            self._thread.start()
        self._queue.put(operation)

    def close(self) -> None:
        """End the thread after the submitted operations."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (operation := self._queue.get()) is not None:
            try:
                self._state.check()
                self._run(operation)
            except Exception as error:  # whatever it is, those who wait must hear of it
                self._state.fail(operation, error)
            operation.done.set()
            del operation  # and its tensors, for as long as there is no other

    def _run(self, operation: Operation) -> None:
        messages = [(part, part.message) for part in operation.parts if part.message is not None]
        if messages:
            self._run_messages(operation, messages)
        collectives = [(part, part.call) for part in operation.parts if part.call is not None]
        if collectives:
            self._compare(operation, [call for _, call in collectives])
        for part, _ in collectives:
            assert part.run is not None
            part.results = part.run(part.copies())

    def _compare(self, operation: Operation, calls: Sequence[Digest]) -> None:
        """Exchange every rank's report of an operation, and refuse calls that differ."""
        try:
            rows = transfers.gather(self._gloo, _row(operation, calls), len(self._ranks))
        except RuntimeError as error:
            self._late(operation, f"ranks {', '.join(map(str, self._ranks))}", error)
        here = self._ranks[self._rank]
        for index, (there, row) in enumerate(zip(self._ranks, rows, strict=True)):
            record = _read(row)
            if [call.same for call in record.calls] != [call.same for call in calls]:
                differs = f"rank {here} calls {operation.what} {calls}, rank {there} calls {record.what} {record.calls}"
                raise dist.DistBackendError(refusal(operation.rule, differs))
            for mine, theirs in zip(calls, record.calls, strict=True):
                if mine.receive and mine.receive[index] != theirs.send[self._rank]:
                    sizes = (
                        f"expects {mine.receive[index]} bytes of rank {there}, which sends {theirs.send[self._rank]}"
                    )
                    raise dist.DistBackendError(refusal("message", f"rank {here} in {operation.what} {sizes}"))
            self._check_order(operation, there, record.before, operation.communicator)

    def _check_order(self, operation: Operation, there: int, before: Launches, but: Communicator) -> None:
        here = self._ranks[self._rank]
        differs = disagreement(here, operation.before, there, before, but)
        if differs:
            raise dist.DistBackendError(refusal("order", f"{operation.what} on ranks {here} and {there}: {differs}"))

    def _run_messages(self, operation: Operation, parts: Sequence[tuple[Entry, Message]]) -> None:
        rows: list[tuple[Message, Bytes, list[dist.Work]]] = []
        for _, message in parts:
            tag, theirs = self._tags(message)[0], torch.empty(_WIDTH, dtype=torch.uint8)
            receiving = self._gloo.recv([theirs], message.peer, tag)
            rows.append((message, theirs, [receiving, self._gloo.send([_row(operation, message)], message.peer, tag)]))
        for message, row, works in rows:
            self._wait(operation, message, works)
            self._check_message(operation, message, _read(row))
        moving = [(message, self._move(part, message)) for part, message in parts]
        for message, works in moving:
            self._wait(operation, message, works)

    def _check_message(self, operation: Operation, mine: Message, record: _Record) -> None:
        theirs, here, there = record.message, self._ranks[self._rank], self._ranks[mine.peer]
        assert theirs is not None
        if theirs.sends == mine.sends:
            verb = "send" if mine.sends else "receive"
            both = f"ranks {here} and {there} both {verb}, in {operation.what} and {record.what}"
            raise dist.DistBackendError(refusal("grouped", both))
        if (theirs.nbytes, theirs.dtype) != (mine.nbytes, mine.dtype):
            sizes = f"{mine.nbytes} bytes of {mine.dtype} in {operation.what}"
            sizes += f", {theirs.nbytes} of {theirs.dtype} in {record.what}"
            raise dist.DistBackendError(refusal("message", f"between ranks {here} and {there}: {sizes}"))
        self._check_order(operation, there, record.before, messages_between(self._name, here, there, alone=self._alone))

    def _move(self, part: Entry, message: Message) -> list[dist.Work]:
        tag = self._tags(message)[1]
        if message.sends:
            data = as_tensor(part.read[0])
            return [self._gloo.send([data], message.peer, tag)] if message.nbytes else []
        part.results = [torch.empty(message.nbytes, dtype=torch.uint8)]
        return [self._gloo.recv(part.results, message.peer, tag)] if message.nbytes else []

    def _tags(self, message: Message) -> tuple[int, int]:
        if self._alone:
            return _TAGS["alone"]
        return _TAGS["up" if message.sends == (message.peer > self._rank) else "down"]

    def _wait(self, operation: Operation, message: Message, works: Sequence[dist.Work]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._late(operation, f"rank {self._ranks[message.peer]}", error)

    def _late(self, operation: Operation, who: str, error: RuntimeError) -> NoReturn:
        late = (
            f"rank {self._ranks[self._rank]} waits in {operation.what} for {who}, and not all came within the time "
            f"limit, or one has ended ({str(error).splitlines()[0]})"
        )
        raise dist.DistBackendError(refusal(operation.rule, late)) from error


class _Record(NamedTuple):
    """An operation as a rank reports it to the others of its communicator."""

    what: str
    calls: Sequence[Digest]
    message: Message | None
    before: Launches


def _row(operation: Operation, what: Sequence[Digest] | Message) -> Bytes:
    """Encode a rank's report of an operation, or of one message in it, in `_WIDTH` bytes."""
    calls, message = ((), what) if isinstance(what, Message) else (tuple(what), None)
    before = dict(operation.before)
    while len(data := pickle.dumps((operation.what, calls, message, before))) > _WIDTH and before:
        before.pop(next(iter(before)))
    if len(data) > _WIDTH:
        digest = Digest(("many calls", crc32(str(calls).encode())))
        data = pickle.dumps((operation.what[: _WIDTH // 2], (digest,), message, before))
    return as_tensor(data.ljust(_WIDTH, b"\0"))


def _read(row: Bytes) -> _Record:
    return _Record(*pickle.loads(bytes(row.numpy())))
