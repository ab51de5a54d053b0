"""Bytes that torch.distributed sends, counted below dshard from the arguments of its collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.core.call import arguments_by_name
from dshard.core.observe import OperatorMode
from dshard.tools.nccl_contract.operation import Entry, Operation
from dshard.tools.nccl_contract.process_state import CURRENT
from dshard.torch_private import resolve_process_group


@dataclass(frozen=True, slots=True)
class CountedCollective:
    """One collective that this rank ran: its name in torch, the size of its group, and what this rank received.

    `nbytes` and `messages` are received from peers; empty messages do not count. They follow the algorithms of
    `dshard.cost`: rings for all_gather, reduce_scatter and all_reduce, pairwise for all_to_all.
    """

    name: str
    ranks: int
    nbytes: int
    messages: int


@dataclass(slots=True)
class Traffic:
    """All collectives of a block, in order."""

    collectives: list[CountedCollective] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank received from its peers."""
        return sum(collective.nbytes for collective in self.collectives)

    @property
    def messages(self) -> int:
        """Messages that this rank received."""
        return sum(collective.messages for collective in self.collectives)


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the collectives of torch.distributed within the block, of any caller: dshard, torch's DTensor, your code.

    It shares no arithmetic with dshard, so plans and events can be tested against it. For real process groups only; an
    unknown collective raises an AssertionError.
    """
    traffic, within = Traffic(), list[Any]()

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace not in _NAMESPACES or func._schema.name in _SILENT:
            return func(*args, **kwargs)
        traffic.collectives.append(_collective(func, arguments_by_name(func, args, kwargs)))
        within.append(func)
        try:
            return func(*args, **kwargs)
        finally:
            within.pop()

    def note(operation: Operation) -> None:
        if within:
            return
        traffic.collectives += [_under_contract(part, operation.ranks) for part in operation.parts if _sends(part)]

    listeners = CURRENT.state.listeners
    listeners.append(note)  # the calls of that group, which is Python, are no operators
    try:
        with OperatorMode(run):
            yield traffic
    finally:
        listeners.remove(note)


Arguments = dict[str, Any]
Count = Callable[[Arguments, int, int], tuple[Sequence[int], int]]
"""A function of a collective's arguments, this rank's number and the group's size: the elements of each message that
this rank receives, and the bytes of an element."""


def _collective(func: Any, bound: Arguments) -> CountedCollective:
    name = func._schema.name
    count = _COUNTS.get(name)
    assert count is not None, f"{name} is a collective that count_traffic does not know"
    group = _group(bound)
    sizes, itemsize = count(bound, dist.get_rank(group), group.size())
    return CountedCollective(
        name.partition("::")[2], group.size(), sum(sizes) * itemsize, sum(size > 0 for size in sizes)
    )


def _group(bound: Arguments) -> dist.ProcessGroup:
    if "group_name" in bound:
        group: dist.ProcessGroup = resolve_process_group(bound["group_name"])
        return group
    return dist.ProcessGroup.unbox(bound["process_group"])


def _sends(part: Entry) -> bool:
    return part.call is None or part.call.same[0] != "barrier"


def _under_contract(part: Entry, ranks: Sequence[int]) -> CountedCollective:
    """Return a collective or message of `nccl_contract` as a `CountedCollective` with torch's name."""
    rank, n, bound = ranks.index(dist.get_rank()), len(ranks), Arguments()
    count: Count
    if part.message is not None:
        (name, count), n = ("send", _sent) if part.message.sends else ("recv_", _received), part.message.ranks
    else:
        assert part.call is not None
        kind, _, *others = part.call.same
        assert kind in _CONTRACT, f"{kind} is a collective that count_traffic does not know"
        name, count = _CONTRACT[str(kind)]
        bound["src"] = others[-1] if others else None
    x = bound["input"] = bound["tensors"] = (part.inputs or part.outputs)[0]
    if count is _pairwise and part.call is not None:
        bound["input"], bound["output_split_sizes"] = x.flatten(), [size // x.itemsize for size in part.call.receive]
    sizes, itemsize = count(bound, rank, n)
    return CountedCollective(name, n, sum(sizes) * itemsize, sum(size > 0 for size in sizes))


def _ring_gather(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    x = _one(bound, "input", "input_tensor")
    return [x.numel()] * (n - 1), x.itemsize


def _ring_reduce_scatter(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    x = _one(bound, "input", "input_tensor")
    assert x.numel() % n == 0
    return [x.numel() // n] * (n - 1), x.itemsize


def _ring_all_reduce(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    """Messages of a ring all_reduce: a rank receives n - 1 terms of its own chunk, then each other chunk once."""
    x = _one(bound, "input", "tensors")
    chunks = [part.numel() for part in torch.empty(x.numel(), device="meta").chunk(n)] if x.numel() else []
    chunks += [0] * (n - len(chunks))
    return [chunks[rank]] * (n - 1) + chunks[:rank] + chunks[rank + 1 :], x.itemsize


def _fused_gather(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    return [bound["A"].numel()] * (n - 1), bound["A"].itemsize


def _fused_reduce_scatter(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    a, b = bound["A"], bound["B"]
    return [a.shape[:-1].numel() * b.shape[1] // n] * (n - 1), a.itemsize


def _pairwise(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    x = _one(bound, "input")
    splits = list(bound.get("output_split_sizes") or [])
    if not splits:
        assert x.shape[0] % n == 0
        splits = [x.shape[0] // n] * n
    row = x.numel() // x.shape[0] if x.shape[0] else 0
    return [size * row if x.ndim > 1 else size for i, size in enumerate(splits) if i != rank], x.itemsize


def _pieces(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    tensors = bound["output_tensors"]
    return [x.numel() for i, x in enumerate(tensors) if i != rank], tensors[0].itemsize


def _broadcast(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    x, root = _one(bound, "input", "tensors"), bound["src"] if "src" in bound else bound["root_rank"]
    return [] if rank == root or n == 1 else [x.numel()], x.itemsize


def _received(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    x = _one(bound, "tensors")
    return [x.numel()], x.itemsize


def _sent(bound: Arguments, rank: int, n: int) -> tuple[Sequence[int], int]:
    return [], 0


def _one(bound: Arguments, *names: str) -> Tensor:
    """Return the argument with one of these names, unwrapped if it is a list of one tensor."""
    x = next(bound[name] for name in names if name in bound)
    while isinstance(x, list | tuple):
        assert len(x) == 1
        x = x[0]
    assert isinstance(x, Tensor)
    return x


_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
_SILENT = {
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "c10d::barrier",
    "c10d::monitored_barrier_",
}
_CONTRACT: dict[str, tuple[str, Count]] = {
    "all_gather_into_tensor": ("_allgather_base_", _ring_gather),
    "reduce_scatter_tensor": ("_reduce_scatter_base_", _ring_reduce_scatter),
    "all_reduce": ("allreduce_", _ring_all_reduce),
    "all_to_all_single": ("alltoall_base_", _pairwise),
    "all_to_all": ("alltoall_", _pairwise),
    "broadcast": ("broadcast_", _broadcast),
}
_COUNTS: dict[str, Count] = {
    "symm_mem::fused_all_gather_matmul": _fused_gather,
    "symm_mem::fused_matmul_reduce_scatter": _fused_reduce_scatter,
    "_c10d_functional::all_gather_into_tensor": _ring_gather,
    "_c10d_functional::reduce_scatter_tensor": _ring_reduce_scatter,
    "_c10d_functional::all_reduce": _ring_all_reduce,
    "_c10d_functional::all_reduce_": _ring_all_reduce,
    "_c10d_functional::all_to_all_single": _pairwise,
    "_c10d_functional::broadcast": _broadcast,
    "_c10d_functional::broadcast_": _broadcast,
    "c10d::broadcast_": _broadcast,
    "c10d::allreduce_": _ring_all_reduce,
    "c10d::_allgather_base_": _ring_gather,
    "c10d::_reduce_scatter_base_": _ring_reduce_scatter,
    "c10d::alltoall_base_": _pairwise,
    "c10d::alltoall_": _pieces,
    "c10d::send": _sent,
    "c10d::recv_": _received,
    "c10d::recv_any_source_": _received,
}
