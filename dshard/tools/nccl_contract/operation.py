"""One operation on a communicator: its inputs and outputs, and the memory's content before it is waited for.

An operation works on copies. Its input is copied when it begins; that the memory is still the same is checked when it
is waited for, since NCCL might have read it at any moment between. Its output is poisoned when it begins, and written
when it is waited for. So a program that is wrong for some timing of NCCL is wrong here always.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import TypeAlias

import torch
from torch import Tensor

from dshard.tools.nccl_contract.contract_rules import meet, memory
from dshard.tools.nccl_contract.launch_order import Launches, Ranks

Bytes: TypeAlias = Tensor
"""A flat tensor of uint8."""
_NOT_A_NUMBER, _EXTREME, _TRUE = 0xFF, 0x80, 0x01


@dataclass(frozen=True, slots=True)
class Digest:
    """A collective as the ranks compare it: values equal on all of them, and the bytes for and from each rank."""

    same: tuple[object, ...]
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """A send or receive: the peer and size of its group, and the bytes and dtype that must be equal there."""

    sends: bool
    ranks: int
    peer: int
    nbytes: int
    dtype: str


@dataclass(slots=True, eq=False)
class Entry:
    """A collective or message, alone or in a group: the tensors it reads and writes, and how it runs.

    A collective has a `call`, and `run`, which gets the bytes of the inputs and returns those of the outputs; a message
    is sent by the channel.
    """

    call: Digest | None
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    run: Callable[[list[Bytes]], list[Bytes]] | None = None
    message: Message | None = None
    read: list[bytes] = field(default_factory=list)
    results: list[Bytes] = field(default_factory=list)

    def begin(self) -> None:
        """Copy the inputs, and poison the outputs."""
        self.read = [_bytes_of(x) for x in self.inputs]
        for out in self.outputs:
            poison(out)

    def copies(self) -> list[Bytes]:
        """Return the inputs' bytes as of the beginning."""
        return [as_tensor(data) for data in self.read]

    def overwritten(self) -> bool:
        """Whether an input has changed since the operation began."""
        outs = [memory(out) for out in self.outputs]
        return any(
            _bytes_of(x) != data
            for x, data in zip(self.inputs, self.read, strict=True)
            if not any(meet(memory(x), out) for out in outs)
        )

    def deliver(self) -> None:
        """Write the results to the outputs."""
        for out, result in zip(self.outputs, self.results, strict=True):
            if result.numel():
                ctypes.memmove(out.data_ptr(), result.data_ptr(), result.numel())


@dataclass(slots=True, eq=False)
class Operation:
    """One call, or one group of calls, on a communicator; `before` is what this process had begun earlier.

    It is the `number`th on its communicator, which has these `ranks`, and breaks the `rule` where they differ in it.
    """

    what: str
    communicator: str
    ranks: Ranks
    number: int
    parts: list[Entry]
    before: Launches
    stops_host: bool = False
    rule: str = "one_call"
    done: Event = field(default_factory=Event)
    error: BaseException | None = None
    delivered: bool = False
    dropped: bool = False

    def reads(self) -> list[range]:
        """The memory ranges of the inputs."""
        return [memory(x) for part in self.parts for x in part.inputs]

    def writes(self) -> list[range]:
        """The memory ranges of the outputs."""
        return [memory(x) for part in self.parts for x in part.outputs]

    @property
    def nbytes(self) -> int:
        """The bytes of all inputs, or of the outputs of an operation that only receives."""
        read = sum(len(data) for part in self.parts for data in part.read)
        return read or sum(map(len, self.writes()))


def poison(x: Tensor) -> None:
    """Fill memory with values unlike any result: NaN, or an extreme number for dtypes without NaN."""
    if x.numel():
        value = _NOT_A_NUMBER if x.dtype.is_floating_point or x.dtype.is_complex else _EXTREME
        ctypes.memset(x.data_ptr(), _TRUE if x.dtype == torch.bool else value, x.numel() * x.element_size())


def as_tensor(data: bytes) -> Bytes:
    """A tensor of these bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes_of(x: Tensor) -> bytes:
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""
