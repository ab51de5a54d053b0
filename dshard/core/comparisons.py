"""Comparisons between ranks of what must be alike on all of them, beside backward passes, and almost free.

docs/design/0024-the-loop-as-it-stands.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from threading import local
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dshard.comm import (
    RECORDERS,
    are_alike,
    begin_rows,
    device_of,
    digest,
    group_with_data,
    has_data,
    is_captured,
    runtime_of,
    simulated_ranks,
)
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.trees import tensors_in
from dshard.core.wrapper import Wrapper
from dshard.errors import LayoutError
from dshard.mesh import Coordinate, Mesh
from dshard.torch_private import autograd_engine, graph_task_id

T = TypeVar("T")
EVERY = 50
"""One backward pass of so many compares all; of those before, the first, second, fourth, eighth and so on."""
MAX_ENTRIES, _WIDTH = 32, 5
"""The most tensors that are compared at once, and the numbers of each: its place, shape and dtype, and digest."""
MAX_PLACES = 4096
_LIMIT = 0.03  # what was computed in half precision, and rounds otherwise on each GPU, is alike
_SEQUENCE_NUMBER: Callable[[Any], int] = methodcaller("_get_sequence_number_for_group")

ALIKE = (
    "each is given the whole batch, so load and seed alike on all ranks; where each loads rows of its own, "
    "parallelize(..., inputs='per-data-rank') takes them"
)
"""The way out where ranks that are given whole batches differ."""


class _Entry(NamedTuple):
    """A tensor that was put down: what it is, which visit to its place, the number of those, its kind and digest."""

    what: str
    visit: str
    visits: list[int]
    kind: int
    dtype: torch.dtype
    digest: Tensor


class Comparisons:
    """The tensors on a mesh that must be alike on all ranks, put down until the ranks meet.

    They meet in backward passes that all ranks run, as those do that send something, or follow a forward pass that has,
    `has_sent`: `passes` counts them, so that all know alike in which they meet. What a rank alone has put down is
    dropped there. Later passes do not wait for the answer, which the next one reads. `are_due` says that they meet in
    the next pass.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.group: Any = None
        self.restart()

    def restart(self) -> None:
        """Forget all, but for an answer to read; when a model is laid out, which all ranks do at once."""
        unread = None if self.group is None or self.group is not group_with_data(self.mesh) else self._unread
        self.passes, self.has_sent, self.are_due = 0, False, True
        self.group, self._runtime = group_with_data(self.mesh), runtime_of(self.mesh)
        self._groups: list[Any] = []
        self._task = -1
        self._known: set[Hashable] = set()
        self._visits: dict[Hashable, list[int]] = {}
        self._entries: list[_Entry] = []
        self._unread: Callable[[], None] | None = None
        if unread is not None:
            unread()

    def put_down(self, x: Tensor, place: Hashable, what: Callable[[], str]) -> None:
        """Put down a tensor, if it is new at this `place`, or the ranks meet next; `what` it is tells the error."""
        if _is_apart(self.mesh) or not has_data(x):
            return
        visits = self._visits.setdefault(place, [0])
        visits[0] += 1
        is_new = (place, x.shape, x.dtype) not in self._known
        if not (is_new or self.are_due) or len(self._entries) == MAX_ENTRIES:
            return
        if len(self._known) < MAX_PLACES:
            self._known.add((place, x.shape, x.dtype))
        text, kind = what(), crc32(f"{tuple(x.shape)} {x.dtype}".encode())
        visit = f"{text}, {self.passes}, {visits[0]}"
        self._entries.append(_Entry(f"{text} of shape {tuple(x.shape)}", visit, visits, kind, x.dtype, digest(x)))

    def sent(self) -> int:
        """The number of collectives that this rank has begun on the groups of the mesh."""
        if self.group is None or self._runtime is None:
            return 0
        if len(self._groups) != len(self._runtime.groups):  # which are made at their first use
            self._groups = [group.process_group for group in self._runtime.groups.values()]
        return sum(map(_SEQUENCE_NUMBER, self._groups))

    def watch(self, outputs: Iterable[Tensor], has_sent: bool) -> None:
        """Watch backward passes through outputs of a forward pass, which may have sent something.

        Those that begin at distributed tensors are counted where they do, through plain ones here.
        """
        for x in outputs:
            if x.grad_fn is not None and (has_sent or not isinstance(x, Wrapper)):
                x.grad_fn.register_prehook(partial(self._enter, has_sent, isinstance(x, Wrapper)))

    def _enter(self, has_sent: bool, is_distributed: bool, grads: object) -> None:
        if _is_apart(self.mesh):
            return
        self.has_sent |= has_sent
        if not is_distributed and self._task != graph_task_id():
            self._task = graph_task_id()
            autograd_engine.queue_callback(partial(self.has_passed, self.sent()))

    def has_passed(self, sent_before: int) -> None:
        """A backward pass has ended: if it has sent anything, compare what is due."""
        has_sent, self.has_sent = self.has_sent, False
        if self.group is None or _is_apart(self.mesh) or not (has_sent or self.sent() != sent_before):
            return
        if self._unread is not None:
            unread, self._unread = self._unread, None
            unread()
        self.passes += 1
        self._visits = {}
        is_due, n = self.are_due, self.passes + 1
        self.are_due = n % EVERY == 0 or (n < EVERY and n & (n - 1) == 0)
        if not is_due:
            return
        # a rank that has been there before need not put down what is new to others: so all visits are counted
        entries = {crc32(f"{each.visit} of {each.visits}".encode()): each for each in self._entries}
        self._entries = []
        heads = [(len(entries), 0), *((place, each.kind) for place, each in entries.items())]
        heads += [(0, 0)] * (1 + MAX_ENTRIES - len(heads))
        row = torch.tensor([(*head, 0, 0, 0) for head in heads], device=device_of(self.mesh))
        for i, each in enumerate(entries.values()):
            row[1 + i, 2:] = each.digest
        compare = partial(self._compare, begin_rows(row.view(-1), self.mesh, self.group), entries)
        if self.passes < EVERY:
            compare()
        else:
            self._unread = partial(compare, f"in backward pass {self.passes} since the last model was laid out: ")

    def _compare(
        self, rows: Callable[[], Mapping[Coordinate, Sequence[int]]], entries: Mapping[int, _Entry], when: str = ""
    ) -> None:
        of_rank = {at: _by_place(row) for at, row in rows().items()}
        for place, entry in entries.items():
            numbers = {at: places[place] for at, places in of_rank.items() if place in places}
            if len(numbers) < len(of_rank):
                continue  # a line that not all ranks run
            kinds = {kind for kind, *_ in numbers.values()}
            if len(kinds) > 1 or not are_alike([rest for _, *rest in numbers.values()], entry.dtype, _LIMIT):
                raise LayoutError(
                    f"{when}a parallelized module is given different data, {entry.what}, on "
                    f"{self._ranks(numbers, entry.dtype)}: {ALIKE}"
                )

    def _ranks(self, numbers: Mapping[Coordinate, Sequence[int]], dtype: torch.dtype) -> str:
        """The ranks, by what they have: "ranks [0, 2] and ranks [1]"."""
        alike: list[tuple[Sequence[int], list[int]]] = []
        for at, own in numbers.items():
            known = next(
                (ranks for each, ranks in alike if each[0] == own[0] and are_alike([each[1:], own[1:]], dtype, _LIMIT)),
                None,
            )
            if known is None:
                alike.append((own, known := []))
            known.append(self.mesh.rank(at))
        return " and ".join(f"ranks {ranks}" for _, ranks in alike)


def _by_place(row: Sequence[int]) -> dict[int, Sequence[int]]:
    """The kind and digest of each tensor that a rank has put down, by places and visits."""
    return {row[i]: row[i + 1 : i + _WIDTH] for i in range(_WIDTH, _WIDTH * (1 + row[0]), _WIDTH)}


class _Quiet(local):
    on = False


_QUIET = _Quiet()


@contextmanager
def nothing_compared() -> Iterator[None]:
    """Compare nothing within the block, of which other ranks may run no Python."""
    before, _QUIET.on = _QUIET.on, True
    try:
        yield
    finally:
        _QUIET.on = before


def is_quiet() -> bool:
    """Whether this is within a block in which nothing is compared."""
    return _QUIET.on


def _is_apart(mesh: Mesh) -> bool:
    """Whether nothing may be compared now: in recordings, graphs, captures and plans, and on simulated ranks."""
    if RECORDERS or _QUIET.on or is_compiling() or is_captured(mesh):
        return True
    return runtime_of(mesh) is None or simulated_ranks() is not None  # so is a rank that plans for all


_ALL: dict[Mesh, Comparisons] = {}


def comparisons_on(mesh: Mesh) -> Comparisons:
    """The comparisons between the ranks of a mesh."""
    if mesh not in _ALL:
        _ALL[mesh] = Comparisons(mesh)
    return _ALL[mesh]


def with_comparisons(backward: Callable[..., T], func: Function, args: Args, kwargs: Kwargs) -> T:
    """Run a backward pass by its handler, and compare what is due on the meshes of the tensors where it begins."""
    if not _ALL:
        return backward(func, args, kwargs)
    meshes = {x._spec.layout.mesh: None for x in tensors_in((args, kwargs)) if isinstance(x, Wrapper)}
    if any(_is_apart(mesh) for mesh in meshes):
        return backward(func, args, kwargs)
    before = [(_ALL[mesh], _ALL[mesh].sent()) for mesh in meshes if mesh in _ALL]
    out = backward(func, args, kwargs)
    for each, sent in before:
        each.has_passed(sent)
    return out
