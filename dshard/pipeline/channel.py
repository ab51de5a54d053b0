"""Asynchronous sends and receives of this rank's stage: begun early, waited for when needed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dshard.autograd.crossing import redistribute
from dshard.comm import Resharding, begin_reshard, device_of, fetch, put
from dshard.core.context import planning_context
from dshard.core.observe import ASKED, OBSERVERS, Decision, observed
from dshard.core.signature import Function
from dshard.core.spec import contiguous_spec
from dshard.errors import PipelineError
from dshard.layout import Layout, Shape
from dshard.pipeline.program import Edge
from dshard.reshard import ReshardPlan, plan_reshard
from dshard.rules.expand import Operand
from dshard.rules.strategy import completed_layout
from dshard.tensor import DTensor, as_dtensor

Item = tuple[Edge, int]


@dataclass(frozen=True, slots=True)
class Header:
    """Description of a value sent between stages: shape, dtype, source layout, and whether it needs a gradient."""

    layout: Layout
    shape: Shape
    dtype: torch.dtype
    differentiable: bool

    def __str__(self) -> str:
        grad = "" if self.differentiable else ", without gradient"
        return f"{self.dtype} of {tuple(self.shape)} laid out [{self.layout}]{grad}"


class Channels:
    """The sends and receives of this rank for its stage.

    Both ends of an edge begin their transfers in the same order. A receiver learns shape, dtype and layout once for
    each shape of a microbatch, by a `Header` stored under `name`: only then does receiving wait for sending to begin. A
    receive that must keep its place among other messages, `in_order`, waits for its header at once.
    """

    def __init__(
        self, name: str, rank: int, layout_at: Callable[[Edge, int], Layout], timeout: float, *, in_order: bool
    ) -> None:
        self._name, self._rank, self._layout_at, self.timeout = name, rank, layout_at, timeout
        self._in_order = in_order
        self._headers: dict[Hashable, Header] = {}
        self._shapes: Sequence[Hashable] = ()
        self._queue: defaultdict[tuple[int, int], deque[Item]] = defaultdict(deque)
        self._receiving: defaultdict[tuple[int, int], deque[tuple[Item, Resharding | None]]] = defaultdict(deque)
        self._received: dict[Item, Tensor | None] = {}
        self._sending: dict[Item, Resharding] = {}

    def begin_step(self, shapes: Sequence[Hashable]) -> None:
        """Begin a step of `len(shapes)` microbatches; those of one shape share their headers."""
        self._shapes = shapes

    def header(self, item: Item) -> Header | None:
        """The header of the value that `item` sends or receives; None if this rank does not know it yet."""
        return self._headers.get(self._key(item))

    def begin_receive(self, item: Item) -> None:
        """Begin to receive `item` into memory if its header is known, or as soon as it is."""
        self._queue[_pair(item)].append(item)
        if self._in_order:
            self._learn(item)
        self._begin_receives(_pair(item))

    def receive(self, item: Item) -> DTensor | None:
        """Wait for an expected value and return it; None for the gradient of a value that needs none."""
        queue = self._queue[_pair(item)]
        while item in queue:
            self._learn(queue[0])
            self._begin_receives(_pair(item))
        header = self.header(item)
        assert header is not None
        while item not in self._received:  # in the order in which it began: some of it is passed on within the mesh
            first, transfer = self._receiving[_pair(item)].popleft()
            self._received[first] = None if transfer is None else _finish(transfer)
        local = self._received.pop(item)
        if local is None:
            return None
        layout = self._plan(item[0], header).dst
        return DTensor._wrap(local, contiguous_spec(layout, header.shape, header.dtype, local.device))

    def begin_send(self, item: Item, x: DTensor) -> None:
        """Begin to send an activation, or the gradient of one that was received."""
        edge, _ = item
        header = self.header(item)
        if not edge.backward:
            x = _complete(x)
            header = self._announce(item, x)
        assert header is not None
        if header.differentiable or not edge.backward:
            self._sending[item] = self._begin(item, header, x)

    def end_send(self, item: Item) -> None:
        """Wait until the send of `item` is complete."""
        transfer = self._sending.pop(item, None)
        if transfer is not None:
            _finish(transfer)

    def end_all_sends(self) -> None:
        """Wait until all sends are complete."""
        for item in list(self._sending):
            self.end_send(item)

    def drop_all(self) -> None:
        """Drop all transfers in flight, after a failure."""
        self._queue.clear()
        self._receiving.clear()
        self._received.clear()
        self._sending.clear()

    def gradient_layout(self, edge: Edge, header: Header) -> Layout:
        """The layout in which the gradient of a value received along `edge` must be sent back."""
        return self._plan(edge.back(), header).src

    def _announce(self, item: Item, x: DTensor) -> Header:
        header = Header(x._spec.layout, tuple(x.shape), x.dtype, x.requires_grad)
        expected = self.header(item)
        if expected is None:
            self._headers[self._key(item)] = header
            if self._rank == header.layout.mesh.ranks[0]:
                put(self._post(item), header)
            self._begin_receives(_pair((item[0].back(), item[1])))
        elif expected != header:
            raise PipelineError(
                f"{item[0]} was {expected} and is now {header} for a batch of the same shape: what stages give "
                "each other may depend on the shape of the batch alone; after parameters were frozen or thawed, or "
                "their dtype or layout was changed, make the Pipeline anew, on all its ranks"
            )
        return header

    def _learn(self, item: Item) -> None:
        """Wait for the header of `item` unless it is known."""
        if self.header(item) is None:
            self._headers[self._key(item)] = fetch(self._post(item), self.timeout, f"{self._name}/failed")

    def _begin_receives(self, pair: tuple[int, int]) -> None:
        queue = self._queue[pair]
        while queue and (header := self.header(queue[0])) is not None:
            item = queue.popleft()
            expected = header.differentiable or not item[0].backward
            self._receiving[pair].append((item, self._begin(item, header, None) if expected else None))

    def _begin(self, item: Item, header: Header, x: DTensor | None) -> Any:
        plan = self._plan(item[0], header)
        local: Tensor = (
            torch.empty(0, dtype=header.dtype, device=device_of(plan.dst.mesh)) if x is None else x._local_tensor
        )
        begin = partial(begin_reshard, tag=int(item[0].backward), timeout=self.timeout)
        return _observed(plan, begin, (plan, local.detach()), crossing=plan)

    def _plan(self, edge: Edge, header: Header) -> ReshardPlan:
        forth = edge.forth()
        src, dst = header.layout, self._layout_at(forth, len(header.shape))
        if edge.backward:
            src, dst = dst.cotangent(), src.cotangent()
        topology = planning_context().topology_of(header.layout.mesh)
        return plan_reshard(src, dst, header.shape, header.dtype.itemsize, topology)

    def _key(self, item: Item) -> Hashable:
        return item[0].forth(), self._shapes[item[1]]

    def _post(self, item: Item) -> str:
        return f"{self._name}/{item[0].forth()}/{self._shapes[item[1]]!r}"


def _finish(transfer: Resharding) -> Tensor | None:
    return _observed(transfer.plan, transfer.finish, ())  # type: ignore[no-any-return]


def _observed(plan: ReshardPlan, run: Function, args: Sequence[object], crossing: ReshardPlan | None = None) -> Any:
    """Run `run(*args)`, which begins or ends a plan, observed as communication that the user requested."""
    if not OBSERVERS:
        return run(*args)
    operand, topology = Operand(plan.src, plan.shape, plan.itemsize), planning_context().topology_of(plan.src.mesh)
    decision = Decision("pipeline", (operand,), topology, crossing=crossing, why=ASKED)
    return observed(decision, run, args)


def _complete(x: DTensor) -> DTensor:
    """`x` with partial sums reduced, so that the sender has no further work once the send has begun."""
    layout = completed_layout(x._spec.layout)
    if layout == x._spec.layout:
        return x
    return as_dtensor(redistribute(x.detach(), layout)).requires_grad_(x.requires_grad)


def _pair(item: Item) -> tuple[int, int]:
    return item[0].src, item[0].dst
