"""The runner of a pipeline on real ranks: each runs the actions of its stage, on microbatches that it cuts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import assert_never

from dshard.caches import cached
from dshard.comm import break_off, device_of, is_from_peer, is_published, leave_word, peek, put, runtime_of, share
from dshard.core.signature import Context, Function
from dshard.distribute import distribute_tensor
from dshard.errors import DShardError, MixedError, PipelineError, ScheduleError, ShapeError
from dshard.layout import Layout
from dshard.pipeline.channel import Channels
from dshard.pipeline.costs import StageCost, uniform
from dshard.pipeline.program import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Edge,
    Forward,
    Program,
    Receive,
    Send,
)
from dshard.pipeline.simulator import simulate
from dshard.pipeline.stage import Stage, backward, backward_input
from dshard.pipeline.tied import Tied
from dshard.placements import chunk
from dshard.tensor import DTensor
from dshard.validate import check_type


@dataclass(slots=True)
class Activations:
    """The tensors that a stage holds for one microbatch between its forward and the end of its backward."""

    inputs: dict[str, Tensor]
    outputs: tuple[Tensor, ...]
    weights: Callable[[], None] | None = None


class StageInput(torch.autograd.Function):
    """A received leaf of autograd -> an input of a stage, which may write to it in place; backward: its gradient."""

    @staticmethod
    def forward(ctx: Context, x: DTensor) -> DTensor:
        return DTensor._wrap(x._local_tensor, x._spec)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return grad


@dataclass(slots=True)
class _Step:
    """A running step: its program, its microbatches, the activations in flight, and the sum of weighted losses."""

    program: Program
    microbatches: Sequence[Microbatch]
    running: dict[int, Activations] = field(default_factory=dict)
    loss: Any = None


class Runner:
    """Runs the actions of a program for the stage of this rank, one after the other."""

    def __init__(
        self,
        stages: Sequence[Stage],
        number: int,
        name: str,
        edges: tuple[Edge, ...],
        loss: Function | None,
        timeout: float,
    ) -> None:
        self.stage, self.number, self._loss = stages[number], number, loss
        self._last = number == len(stages) - 1
        self._edges = {edge.value: edge for edge in edges if edge.dst == number}
        self._stages = stages
        runtime = runtime_of(self.stage.layout_mesh)
        assert runtime is not None
        self.rank, self._name = runtime.rank, name
        self._in_order = not runtime.backend.tags
        self.channels = Channels(name, runtime.rank, self._layout_at, timeout, in_order=self._in_order)
        self.seconds: list[tuple[Compute, float]] = []
        self.tied: tuple[Tied, ...] = ()
        self.groups: tuple[tuple[int, ...], ...] = ()
        self.failed: str | None = None

    def run(self, program: Program, microbatches: Sequence[Microbatch], shapes: Sequence[Hashable]) -> Tensor | None:
        """Run one step, and return the sum of the weighted losses on the last stage.

        Where no gradients are recorded, the step is its forward passes alone.
        """
        if self.failed is not None:
            raise PipelineError(
                f"rank {self.rank}, stage {self.number}: an earlier step of this pipeline has failed, the first to "
                f"fail was {self.failed}; what its stages then sent each other is lost: make the Pipeline anew, on all "
                "its ranks, or begin again from a checkpoint"
            )
        trains = torch.is_grad_enabled()
        self.channels.begin_step([(trains, shape) for shape in shapes])
        self._step = step = _Step(program, microbatches)
        self.seconds = []
        tied_parameters = self.tied if trains else ()
        for tied in tied_parameters:
            tied.set_aside()
        actions = in_one_order(program)[self.number] if self._in_order else program.actions(self.number)
        for action in actions:
            if trains or _is_forward(action):
                with self._naming(action):
                    self._do(action)
        with self._naming("the end of the step"):
            self.channels.end_all_sends()
        with self._naming("the gradients of tied parameters"):
            for tied in tied_parameters:
                tied.reduce()
        with self._naming("the end of the step"):
            return None if step.loss is None else step.loss.full_tensor()

    def shared(self, x: Tensor | None, stage: Stage, group: Any, what: str) -> Tensor:
        """Broadcast `x`, a number of a `stage`, to all ranks of the `group`; errors name `what` it is."""
        with self._naming(what):
            return share(x, stage.layout_mesh.ranks[0], group, device_of(self.stage.layout_mesh))

    def _do(self, action: Action) -> None:
        match action:
            case Receive(edge, microbatch):
                self.channels.begin_receive((edge, microbatch))
            case Send(edge, microbatch):
                self._send(edge, microbatch)
            case Forward() | Backward() | BackwardInput() | BackwardWeight():
                self._compute(action)
            case _:
                assert_never(action)

    def _compute(self, action: Compute) -> None:
        k = action.microbatch
        match action:
            case Forward():
                inputs = {name: self._take(name, k) for name in self.stage.takes}
                begin = perf_counter()
                operands = [StageInput.apply(x) if x.requires_grad else x for x in inputs.values()]  # type: ignore[no-untyped-call]
                self._step.running[k] = Activations(inputs, self._forward(operands, k))
            case Backward():
                outputs = self._with_gradients(k)
                begin = perf_counter()
                backward(outputs)
                self._free(k)
            case BackwardInput():
                outputs, running = self._with_gradients(k), self._step.running[k]
                begin = perf_counter()
                running.weights = backward_input(outputs, list(running.inputs.values()), self.stage.parameters())
                self._free(k)
            case BackwardWeight():
                begin = perf_counter()
                weights, self._step.running[k].weights = self._step.running[k].weights, None
                assert weights is not None
                weights()
        self.seconds.append((action, perf_counter() - begin))

    def _take(self, name: str, k: int) -> Tensor:
        """An input of the stage: a received value, as a leaf of autograd, or a value of the batch."""
        edge = self._edges.get(name)
        if edge is None:
            value = self._step.microbatches[k].values[name]
            mesh = self.stage.mesh
            placements = self.stage.input_layout(name, value.dim()).placements
            return distribute_tensor(value, mesh, placements, src_data_rank=None)
        received = self._receive(edge, k)
        header = self.channels.header((edge, k))
        assert received is not None
        assert header is not None
        return received.requires_grad_() if header.differentiable else received

    def _forward(self, operands: Sequence[Tensor], k: int) -> tuple[Tensor, ...]:
        assert self.stage.module is not None
        outputs = self.stage.outputs(self.stage.module(*operands), self.number)
        if not self._last:
            return outputs
        microbatch = self._step.microbatches[k]
        loss = outputs[0] if self._loss is None else self._loss(*outputs, *self._target(microbatch))
        if not isinstance(loss, DTensor) or loss.dim() > 0:
            raise ScheduleError(
                f"the loss is {type(loss)} of shape {tuple(loss.shape)}: it must be a DTensor of no dim"
            )
        loss = loss * microbatch.weight
        self._step.loss = loss.detach() if self._step.loss is None else self._step.loss + loss.detach()
        return (loss,)

    def _target(self, microbatch: Microbatch) -> tuple[Tensor, ...]:
        value = microbatch.values.get(TARGET)
        if value is None:
            return ()
        placements = self.stage.input_layout(TARGET, value.dim()).placements
        return (distribute_tensor(value, self.stage.mesh, placements, src_data_rank=None),)

    def _receive(self, edge: Edge, k: int) -> DTensor | None:
        with self._naming(Receive(edge, k)):
            return self.channels.receive((edge, k))

    def _with_gradients(self, k: int) -> list[tuple[Tensor, Tensor | None]]:
        """The outputs of the stage, each with the sum of its received gradients, or one for a loss."""
        outputs = self._step.running[k].outputs
        if self._last:
            return [(outputs[0], None)]
        pairs: list[tuple[Tensor, Tensor | None]] = []
        back = self._step.program.takes(Backward(k), self.number)
        for name, out in zip(self.stage.gives, outputs, strict=True):
            received = [self._receive(edge, k) for edge in back if edge.value == name]
            grads: list[Any] = [grad for grad in received if grad is not None]
            if grads:
                pairs.append((out, sum(grads[1:], start=grads[0])))
        return pairs

    def _send(self, edge: Edge, k: int) -> None:
        channels, item = self.channels, (edge, k)
        channels.end_send((edge, k - self._step.program.window(edge)))
        running = self._step.running[k]
        known = channels.header(item) is not None
        if edge.backward:
            channels.begin_send(item, self._gradient(edge, running.inputs[edge.value], item))
            running.inputs.pop(edge.value)
        else:
            channels.begin_send(item, running.outputs[list(self.stage.gives).index(edge.value)])  # type: ignore[arg-type]
        if not self._step.program.overlap and known:
            channels.end_send(item)

    def _gradient(self, edge: Edge, x: Any, item: tuple[Edge, int]) -> DTensor:
        """The gradient of an input, in the layout in which it is sent back; zeros if the input was not used."""
        header = self.channels.header(item)
        assert header is not None
        if not header.differentiable:
            return x  # type: ignore[no-any-return]
        grad: Any = torch.zeros_like(x) if x.grad is None else x.grad
        layout = self.channels.gradient_layout(edge.forth(), header)
        return grad.redistribute(placements=layout.placements)  # type: ignore[no-any-return]

    def _free(self, k: int) -> None:
        """Free activations after a backward, except gradients to send and tensors for a split weight backward."""
        running = self._step.running[k]
        running.outputs = ()
        running.inputs = {name: x for name, x in running.inputs.items() if name in self._edges}

    def _layout_at(self, edge: Edge, ndim: int) -> Layout:
        return self._stages[edge.dst].input_layout(edge.value, ndim)

    @contextmanager
    def _naming(self, action: object) -> Iterator[None]:
        """Add the action to an error raised in it, and other failed ranks to one of the backend; abort the step."""
        try:
            yield
        except BaseException as error:
            self.channels.drop_all()
            first_failure = peek(f"{self._name}/failed")
            here = f"rank {self.rank}, stage {self.number}, at {action}"
            self.failed = first_failure or f"{here}: {type(error).__name__}: {str(error)[:300]}"
            if first_failure is None:
                put(f"{self._name}/failed", self.failed)
            if not is_published(error):
                leave_word(error)
            self._abort()
            if not is_from_peer(error) and (isinstance(error, DShardError) or not isinstance(error, RuntimeError)):
                raise
            raise PipelineError(_failure(here, action, self._stages, self.number, error, first_failure)) from error

    def _abort(self) -> None:
        """Abort the step: peers that wait for this rank fail soon, and no message of this step reaches a later one."""
        runtime = runtime_of(self.stage.layout_mesh)
        assert runtime is not None
        for ranks in self.groups:
            break_off(ranks, runtime)


def _is_forward(action: Action) -> bool:
    return not action.edge.backward if isinstance(action, Receive | Send) else isinstance(action, Forward)


def _failure(
    here: str, action: object, stages: Sequence[Stage], number: int, error: BaseException, first_failure: str | None
) -> str:
    match action:
        case Receive(edge) | Send(edge):
            peers = {number, edge.src, edge.dst}
        case _:
            peers = {number}
    ranks = "; ".join(f"stage {i} on ranks {', '.join(map(str, stages[i].layout_mesh.ranks))}" for i in sorted(peers))
    first = "" if first_failure is None else f"; the first to fail was {first_failure}"
    return f"{here}, with {ranks}: {error}{first}"


TARGET = "target"
Reduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Some samples of each value of the batch, and the weight of their loss in that of the batch."""

    values: Mapping[str, Tensor]
    weight: float

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Cache key of the shapes sent between stages: equal for microbatches of equal shapes."""
        return tuple((name, tuple(x.shape), str(x.dtype)) for name, x in sorted(self.values.items()))


def cut_batch(values: Mapping[str, Tensor], n_microbatches: int, reduction: Reduction) -> Sequence[Microbatch]:
    """Cut the batch along dim 0 as `torch.chunk` does; the last microbatch may be smaller.

    With a mean loss a microbatch's weight is its share of the samples; with a sum it is one.
    """
    for name, x in values.items():
        check_type(x, Tensor, f"{name} of the batch", "give a torch.Tensor with the samples along dim 0")
        if isinstance(x, DTensor):
            raise MixedError(f"{name} is a DTensor: a pipeline takes the whole batch as plain tensors, on every rank")
        if x.requires_grad and torch.is_grad_enabled():
            raise ScheduleError(f"{name} of the batch needs a gradient: a pipeline gives none; pass {name}.detach()")
    sizes = {x.shape[0] if x.dim() else None for x in values.values()}
    if len(sizes) != 1 or None in sizes:
        listed = ", ".join(f"{name} {tuple(x.shape)}" for name, x in values.items())
        raise ShapeError(f"the batch has {listed or 'nothing'}: give tensors with as many samples each along dim 0")
    size = sizes.pop() or 0
    parts = [chunk(size, n_microbatches, i) for i in range(n_microbatches)]
    if not all(parts):
        raise ShapeError(
            f"{size} samples in {n_microbatches} microbatches, as torch.chunk cuts them, leave some without any: "
            f"use a multiple of {n_microbatches} samples, or fewer microbatches"
        )
    return [
        Microbatch(
            {name: x[part.start : part.stop] for name, x in values.items()},
            len(part) / size if reduction == "mean" else 1.0,
        )
        for part in parts
    ]


# -- a total order of all messages of a pipeline, in which every stage begins its own
# Kernels of two NCCL communicators may wait for each other's end, for example if they do not fit on the GPU together.
# So NCCL requires that ranks begin operations on several communicators in the same order
# (docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html). Stages that post receives early break
# this: a stage posts the receive of a gradient before it sends the activation that the gradient depends on. Here
# messages are in the order in which they are computed. Every message depends only on earlier ones, so stages cannot
# deadlock, even if each of them waits for the end of every action before the next.

_CROSSING = 1.0
"""Seconds that a value crosses, beside a forward of one second: later stages run so far behind the earlier ones. Of a
shorter crossing a stage would begin each receive only after it has sent what it computed last."""


@cached("pipeline actions", 64)
def in_one_order(program: Program) -> tuple[tuple[Action, ...], ...]:
    """The actions of every stage, with receives at their place in a total order of the messages of all stages.

    Stages compute and send as in `program.actions`. A receive begins where it does there, unless the order puts it
    earlier or later.

    >>> from dshard.pipeline import chain
    >>> for actions in in_one_order(Program("1f1b", 2, 2, chain(2))):
    ...     print(", ".join(map(str, actions)))
    F0, send x 0->1 of microbatch 0, F1, send x 0->1 of microbatch 1, receive gradient of x 1->0 of microbatch 0, receive gradient of x 1->0 of microbatch 1, B0, B1
    receive x 0->1 of microbatch 0, receive x 0->1 of microbatch 1, F0, B0, send gradient of x 1->0 of microbatch 0, F1, B1, send gradient of x 1->0 of microbatch 1
    """  # noqa: E501
    timeline = simulate(program, uniform(program.n_stages, program.edges, StageCost(), seconds=_CROSSING))
    spans = sorted(chain.from_iterable(timeline.spans), key=lambda span: (span.end, span.stage))
    order = [Send(edge, span.compute.microbatch) for span in spans for edge in program.gives(span.compute, span.stage)]
    return tuple(tuple(_actions(program, stage, order)) for stage in range(program.n_stages))


def _actions(program: Program, stage: int, order: Sequence[Send]) -> Iterator[Action]:
    """The actions of a stage, with its messages in `order`."""
    messages = deque(_at_stage(stage, message) for message in order if stage in (message.edge.src, message.edge.dst))
    posted: set[Send | Receive] = set()
    for action in program.actions(stage):
        match action:
            case Send():
                yield from _until({action}, messages)
            case Receive():
                posted.add(action)
            case compute:
                needed = {Receive(edge, compute.microbatch) for edge in program.takes(compute, stage)}
                yield from _until(needed, messages)
                yield compute
        while messages and messages[0] in posted:
            yield messages.popleft()


def _at_stage(stage: int, message: Send) -> Send | Receive:
    return message if message.edge.src == stage else Receive(message.edge, message.microbatch)


def _until(needed: Set[Send | Receive], messages: deque[Send | Receive]) -> Iterator[Action]:
    """Take messages up to the last of `needed`."""
    while not needed.isdisjoint(messages):
        yield messages.popleft()
