"""Run a pipeline on real ranks: each runs the actions of its stage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_never

from dshard.comm import break_off, device_of, is_heard, is_told, leave_word, peek, put, runtime_of, share
from dshard.errors import DShardError, PipelineError, ScheduleError
from dshard.layout import Layout
from dshard.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Edge,
    Forward,
    Receive,
    Send,
)
from dshard.pipeline.backward import backward, backward_input
from dshard.pipeline.channel import Channels
from dshard.pipeline.microbatches import TARGET, Microbatch
from dshard.pipeline.program import Program
from dshard.pipeline.stage import Stage
from dshard.pipeline.tied import Tied
from dshard.tensor import DTensor, distribute_tensor


@dataclass(slots=True)
class Running:
    """The tensors that a stage holds for one microbatch between its forward and the end of its backward."""

    inputs: dict[str, Tensor]
    outputs: tuple[Tensor, ...]
    weights: Callable[[], None] | None = None


class Runner:
    """Runs the actions of a program for the stage of this rank, one after the other."""

    def __init__(
        self,
        stages: Sequence[Stage],
        number: int,
        name: str,
        edges: tuple[Edge, ...],
        loss: Callable[..., Any] | None,
        timeout: float,
    ) -> None:
        self.stage, self.number, self._loss = stages[number], number, loss
        self._last = number == len(stages) - 1
        self._edges = {edge.value: edge for edge in edges if edge.dst == number}
        self._stages = stages
        runtime = runtime_of(self.stage.layout_mesh)
        assert runtime is not None
        self.rank, self._name = runtime.rank, name
        self.channels = Channels(name, runtime.rank, self._landing, timeout)
        self.seconds: list[tuple[Compute, float]] = []
        self.tied: tuple[Tied, ...] = ()
        self.groups: tuple[tuple[int, ...], ...] = ()
        self.failed: str | None = None

    def run(self, program: Program, microbatches: Sequence[Microbatch], shapes: Sequence[Hashable]) -> Tensor | None:
        """Run one step, and return the sum of the weighted losses on the last stage.

        Raises:
            PipelineError: an earlier step has failed.
        """
        if self.failed is not None:
            raise PipelineError(
                f"rank {self.rank}, stage {self.number}: an earlier step of this pipeline has failed, the first to "
                f"fail was {self.failed}; what its stages then sent each other is lost: make the Pipeline anew, on all "
                "its ranks, or begin again from a checkpoint"
            )
        self.channels.begin_step(shapes)
        self._microbatches, self._program = microbatches, program
        self._running: dict[int, Running] = {}
        self._total: Any = None
        self.seconds = []
        for tied in self.tied:
            tied.set_aside()
        for action in program.actions(self.number):
            with self._named(action):
                self._do(action)
        with self._named("the end of the step"):
            self.channels.settle_all()
        with self._named("the gradients of tied parameters"):
            for tied in self.tied:
                tied.reduce()
        with self._named("the end of the step"):
            return None if self._total is None else self._total.full_tensor()

    def shared(self, loss: Tensor | None, group: Any) -> Tensor:
        """Broadcast the loss of the last stage to all ranks of the `group`."""
        with self._named("the loss"):
            mesh = self._stages[-1].layout_mesh
            return share(loss, mesh.ranks[0], group, device_of(self.stage.layout_mesh))

    def _do(self, action: Action) -> None:
        match action:
            case Receive(edge, microbatch):
                self.channels.expect((edge, microbatch))
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
                self._running[k] = Running(inputs, self._forward(inputs, k))
            case Backward():
                outputs = self._with_gradients(k)
                begin = perf_counter()
                backward(outputs)
                self._let_go(k)
            case BackwardInput():
                outputs, running = self._with_gradients(k), self._running[k]
                begin = perf_counter()
                running.weights = backward_input(outputs, list(running.inputs.values()), self.stage.parameters())
                self._let_go(k)
            case BackwardWeight():
                begin = perf_counter()
                weights, self._running[k].weights = self._running[k].weights, None
                assert weights is not None
                weights()
        self.seconds.append((action, perf_counter() - begin))

    def _take(self, name: str, k: int) -> Tensor:
        """An input of the stage: a received value, as a leaf of autograd, or a value of the batch."""
        edge = self._edges.get(name)
        if edge is None:
            value = self._microbatches[k].values[name]
            mesh = self.stage.mesh
            return distribute_tensor(value, mesh, self.stage.landing(name, value.dim()).placements, src_data_rank=None)
        came = self._arrive(edge, k)
        header = self.channels.header((edge, k))
        assert came is not None
        assert header is not None
        return came.requires_grad_() if header.differentiable else came

    def _forward(self, inputs: Mapping[str, Tensor], k: int) -> tuple[Tensor, ...]:
        assert self.stage.module is not None
        outputs = self.stage.outputs(self.stage.module(*inputs.values()), self.number)
        if not self._last:
            return outputs
        microbatch = self._microbatches[k]
        loss = outputs[0] if self._loss is None else self._loss(*outputs, *self._target(microbatch))
        if not isinstance(loss, DTensor) or loss.dim() > 0:
            raise ScheduleError(
                f"the loss is {type(loss)} of shape {tuple(loss.shape)}: it must be a DTensor of no dim"
            )
        loss = loss * microbatch.weight
        self._total = loss.detach() if self._total is None else self._total + loss.detach()
        return (loss,)

    def _target(self, microbatch: Microbatch) -> tuple[Tensor, ...]:
        value = microbatch.values.get(TARGET)
        if value is None:
            return ()
        placements = self.stage.landing(TARGET, value.dim()).placements
        return (distribute_tensor(value, self.stage.mesh, placements, src_data_rank=None),)

    def _arrive(self, edge: Edge, k: int) -> DTensor | None:
        with self._named(Receive(edge, k)):
            return self.channels.arrive((edge, k))

    def _with_gradients(self, k: int) -> list[tuple[Tensor, Tensor | None]]:
        """The outputs of the stage, each with the sum of its received gradients; that of a loss is one."""
        outputs = self._running[k].outputs
        if self._last:
            return [(outputs[0], None)]
        found: list[tuple[Tensor, Tensor | None]] = []
        back = self._program.takes(Backward(k), self.number)
        for name, out in zip(self.stage.gives, outputs, strict=True):
            came = [self._arrive(edge, k) for edge in back if edge.value == name]
            grads: list[Any] = [grad for grad in came if grad is not None]
            if grads:
                found.append((out, sum(grads[1:], start=grads[0])))
        return found

    def _send(self, edge: Edge, k: int) -> None:
        channels, item = self.channels, (edge, k)
        channels.settle((edge, k - self._program.window(edge)))
        running = self._running[k]
        known = channels.header(item) is not None
        if edge.backward:
            channels.send(item, self._gradient(edge, running.inputs[edge.value], item))
            running.inputs.pop(edge.value)
        else:
            channels.send(item, running.outputs[list(self.stage.gives).index(edge.value)])  # type: ignore[arg-type]
        if not self._program.overlap and known:
            channels.settle(item)

    def _gradient(self, edge: Edge, x: Any, item: tuple[Edge, int]) -> DTensor:
        """The gradient of an input, in the layout in which it is sent back; zeros if the input was not used."""
        header = self.channels.header(item)
        assert header is not None
        if not header.differentiable:
            return x  # type: ignore[no-any-return]
        grad: Any = torch.zeros_like(x) if x.grad is None else x.grad
        layout = self.channels.returning(edge.forth(), header)
        return grad.redistribute(placements=layout.placements)  # type: ignore[no-any-return]

    def _let_go(self, k: int) -> None:
        """Free activations after a backward; gradients to send and those for a split weight backward stay."""
        running = self._running[k]
        running.outputs = ()
        running.inputs = {name: x for name, x in running.inputs.items() if name in self._edges}

    def _landing(self, edge: Edge, ndim: int) -> Layout:
        return self._stages[edge.dst].landing(edge.value, ndim)

    @contextmanager
    def _named(self, action: object) -> Iterator[None]:
        """Add the action to an error raised in it, and other failed ranks to one of the backend; abort the step."""
        try:
            yield
        except BaseException as error:
            self.channels.forget()
            told = peek(f"{self._name}/failed")
            here = f"rank {self.rank}, stage {self.number}, at {action}"
            self.failed = told or f"{here}: {type(error).__name__}: {str(error)[:300]}"
            if told is None:
                put(f"{self._name}/failed", self.failed)
            if not is_told(error):
                leave_word(error)
            self._break_off()
            if not is_heard(error) and (isinstance(error, DShardError) or not isinstance(error, RuntimeError)):
                raise
            raise PipelineError(_failure(here, action, self._stages, self.number, error, told)) from error

    def _break_off(self) -> None:
        """Abort the step: peers that wait for this rank fail soon, and get nothing of this step in a later one."""
        runtime = runtime_of(self.stage.layout_mesh)
        assert runtime is not None
        for ranks in self.groups:
            break_off(ranks, runtime)


def _failure(
    here: str, action: object, stages: Sequence[Stage], number: int, error: BaseException, told: str | None
) -> str:
    match action:
        case Receive(edge) | Send(edge):
            peers = {number, edge.src, edge.dst}
        case _:
            peers = {number}
    ranks = "; ".join(f"stage {i} on ranks {', '.join(map(str, stages[i].layout_mesh.ranks))}" for i in sorted(peers))
    first = "" if told is None else f"; the first to fail was {told}"
    return f"{here}, with {ranks}: {error}{first}"
