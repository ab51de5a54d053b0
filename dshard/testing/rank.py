"""The process of one rank of a `RankPool`, and the messages between it and its parent.

Messages are plain pickles, so that tensors arrive as copies and leave no shared memory or file descriptor behind.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dshard.comm import share_cores


class Kind(IntEnum):
    """Kinds of failure of a rank, the likelier cause first: the others often follow from it."""

    EXITED = 0
    RAISED = 1
    WAITING = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """The value that the function returned on a rank."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank, in words, and its place: a traceback or a stack, or "" if unknown."""

    kind: Kind
    what: str
    where: str


Outcome: TypeAlias = Answer | Failure


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_cuda:
            return value.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def dumps(value: object) -> bytes:
    """Pickle, with CUDA tensors moved to the CPU."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def answer(request: bytes) -> bytes:
    """Run the pickled call `(fn, args)`; return its pickled outcome, an Answer or a Failure."""
    try:
        fn, args = pickle.loads(request)
        return dumps(Answer(fn(*args)))
    except BaseException as error:
        what = "".join(traceback.format_exception_only(error)).strip()
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        where = "".join(traceback.format_exception(type(error), error, trace))
        return dumps(Failure(Kind.RAISED, f"raised {what}", where))


def serve(join: Callable[[], None], pipe: Connection, stack: str) -> None:
    """Run a rank: join the process group, then answer calls until the parent is gone.

    The signal SIGUSR1, or a crash, writes the Python stack to the file `stack`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the parent ends us
    threading.Thread(target=_exit_with_parent, args=(os.path.dirname(stack),), daemon=True).start()
    with open(stack, "w") as file:
        faulthandler.enable(file, all_threads=False)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        try:
            pipe.send_bytes(answer(dumps((join, ()))))
            while True:
                pipe.send_bytes(answer(pipe.recv_bytes()))
        except (EOFError, OSError):
            _exit_with_parent(os.path.dirname(stack))


def _exit_with_parent(directory: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def join(rank: int, n_ranks: int, backend: str, port: int) -> None:
    """Initialise torch.distributed over the loopback, meeting the others at the store on `port`."""
    share_cores()
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n_ranks)


def collectives_begun() -> dict[str, int]:
    """The number of collectives that this rank has begun on each of its process groups, by the group's name."""
    names: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    return {name: group._get_sequence_number_for_group() for group, name in names.items()}
