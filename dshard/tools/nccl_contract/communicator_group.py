"""The communicator of a process group under the contract: how it is made, and how operations on it begin.

NCCL makes a communicator in a call of all its ranks, for which the host of each waits. torch makes it with the first
operation of the group; or with the group itself, where the default group has a device. Then it is split from the
communicator of the default group, and all ranks of that make the call, also those outside of the new group.

The stream of a communicator is a thread that runs its operations in the order agreed by the ranks. Before an operation
moves anything the ranks that take part exchange what they are about to run, and what they had begun before. Where they
differ nothing is moved, and each of them raises.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from inspect import signature
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dshard.comm.user_code import user_line
from dshard.tools.nccl_contract import transfers
from dshard.tools.nccl_contract.contract_rules import refusal, refuse
from dshard.tools.nccl_contract.launch_order import Communicator, Launches, Ranks, disagreement, messages_between
from dshard.tools.nccl_contract.operation import Bytes, Digest, Entry, Message, Operation, as_tensor
from dshard.tools.nccl_contract.process_state import CURRENT, ProcessState

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


_NO_LIMIT = timedelta(0)


class ContractWork(dist.Work):
    """The handle of an operation in flight; a wait is one of the stream rather than the host.

    It is the host's for a barrier, and with a time limit (ProcessGroupNCCL.hpp, WorkNCCL::wait).
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation, self._outputs = operation, [x for part in operation.parts for x in part.outputs]

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Make the results visible; the host waits too, for a barrier or under a time limit."""
        usage, limited = CURRENT.state.usage, timeout > _NO_LIMIT
        if limited or self._operation.stops_host:
            usage.host_waits += 1
        else:
            usage.stream_waits += 1
        CURRENT.state.end(self._operation, timeout.total_seconds() if limited else None)
        return True

    def synchronize(self) -> None:
        """Make the results visible, as `wait` does."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Ask on the host whether the operation has run; if so, its results become visible."""
        CURRENT.state.usage.host_waits += 1
        if self._operation.done.is_set() and self._operation.error is None:
            CURRENT.state.end(self._operation)
        return self._operation.done.is_set()

    def is_success(self) -> bool:
        """Whether the operation has run without an error."""
        return self._operation.done.is_set() and self._operation.error is None

    def exception(self) -> BaseException | None:
        """The error of the operation, or None."""
        return self._operation.error

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def get_future(self) -> Any:
        """Return a future of the outputs, whose callbacks see the results."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def __del__(self) -> None:
        operation = getattr(self, "_operation", None)
        if operation is not None:
            operation.dropped = True


class GroupedWork(dist.Work):
    """The handle of a call within a group, which cannot be waited for; ending the group returns the usable one."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Refuse to wait for one call of a group."""
        refuse("coalescing", f"a wait for {self._what} by itself, within a group")


_SPLIT_NAMES_A_BACKEND = len(signature(distributed_c10d._get_split_source).parameters) > 1
"""Whether torch asks of which backend the new group is to be, as from 2.15 on."""
_ProcessGroup: Any = dist.ProcessGroup  # whose stubs name other arguments than torch calls it with


class CommunicatorGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group with one communicator for its operations, and one per pair of ranks for single messages."""

    supports_splitting = True  # torch's name

    def __init__(self, store: Any, rank: int, ranks: Ranks, name: str, timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        if not dist.is_initialized():  # the first group of a world
            CURRENT.state = ProcessState()
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
        # collectives in compiled graphs come from C++, which does not ask the methods below
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # which torch 2.15 asks for when it records calls
        self._ranks, self._begun = ranks, 0
        self._communicator = f"group {name!r} of ranks {', '.join(map(str, ranks))}"
        self._channels: dict[int | None, Channel] = {}
        self._group: list[Entry] | None = None
        self._is_made = False

    def getBackendName(self) -> str:  # torch's name
        """The name of the backend."""
        return "nccl_contract"

    _get_backend_name = getBackendName

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cuda" else super()._get_backend(device)

    def _get_sequence_number_for_group(self) -> int:
        CURRENT.state.check()
        return self._begun

    def _set_sequence_number_for_group(self) -> None:
        self._begun = 0

    def shutdown(self) -> None:
        """End the threads of all communicators."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    abort = shutdown

    # -- how the communicator is made

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make the communicator now, by itself or split from that of the default group."""
        world = dist.group.WORLD
        backend = [self.getBackendName()] if _SPLIT_NAMES_A_BACKEND else []
        parent = None if world is None else distributed_c10d._get_split_source(world, *backend)
        self.bound_device_id = device
        if isinstance(parent, CommunicatorGroup):
            parent.perform_nocolor_split(device)
            self._is_made = True
        else:
            self._make(f"connection at {user_line()}")

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in a split of this communicator, as all its ranks must, members of the new group or not."""
        part = Entry(Digest(("split",)), [], [], lambda read: [])
        self._begin("split of a group from this one", [part], stops_host=True, rule="split").wait()

    def _make(self, what: str, kind: str = "collective") -> None:
        """Make the group's communicator, waiting until all ranks begin their first operation with the same kind."""
        self._is_made = True
        part = Entry(Digest(("first", kind)), [], [], lambda read: [])
        before = CURRENT.state.launches.before()
        operation = Operation(what, self._communicator, self._ranks, 1, [part], before, rule="first_call")
        self._channel(None).submit(operation)
        CURRENT.state.wait_for(operation)

    # -- the begin of operations

    def _begin(
        self,
        what: str,
        parts: list[Entry],
        *,
        peer: int | None = None,
        stops_host: bool = False,
        rule: str = "one_call",
    ) -> dist.Work:
        """Begin an operation on the group's communicator, or that of this rank and `peer`; within a group, defer it."""
        if self._group is not None:
            CURRENT.state.check()
            self._group += parts
            return GroupedWork(what)
        state, communicator, ranks = CURRENT.state, self._communicator, self._ranks
        what, peers = f"{what} at {user_line()}", {part.message.peer for part in parts if part.message is not None}
        if peer is not None:
            communicator = self._between(peer, alone=True)
            ranks = tuple(sorted((self._ranks[self.rank()], self._ranks[peer])))
        elif not self._is_made:
            state.check()
            self._make(what, "group of messages" if peers else "collective")
        before = state.launches.before()
        number = 1 + (before[communicator].count if communicator in before else 0)
        operation = Operation(what, communicator, ranks, number, parts, before, stops_host, rule)
        state.begin(operation)
        self._begun += 1
        for each in (part.message.peer for part in parts if part.message is not None):
            name = self._between(each, alone=peer is not None)
            state.launches.add(name, tuple(sorted((self._ranks[self.rank()], self._ranks[each]))), operation.what)
        if not peers:
            state.launches.add(communicator, self._ranks, operation.what)
        self._channel(peer).submit(operation)
        return ContractWork(operation)

    def _between(self, peer: int, *, alone: bool) -> Communicator:
        return messages_between(self._communicator, self._ranks[self.rank()], self._ranks[peer], alone=alone)

    def _channel(self, peer: int | None) -> Channel:
        channel = self._channels.get(peer)
        if channel is None:
            channel = self._channels[peer] = Channel(
                self._communicator, self._gloo, self.rank(), self._ranks, alone=peer is not None
            )
        return channel
