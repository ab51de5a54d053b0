"""Replay steps: what a step of local operators and collectives does, without the Python that says so.

`step_program` records a step below autograd and distributed tensors by a `local_recorder`, and makes a function of
that, with numbers of optimisers as inputs; `step_state` compares what is cheap to compare.

Design: docs/design/0020-replay.md
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from dshard.comm import (
    NOTED_ROWS,
    RECORDERS,
    MeshesOfRows,
    comparing,
    publish_failure,
    simulated_ranks,
    warn_here,
)
from dshard.comm.events import LISTENERS
from dshard.core.comparisons import nothing_compared
from dshard.core.context import static_sizes
from dshard.core.observe import OBSERVERS, OperatorMode
from dshard.errors import ArgumentError, ReplayError
from dshard.rehearsal.local_recorder import StepRecorder
from dshard.replay.step_program import (
    CheckingRecorder,
    StepCall,
    StepProgram,
    StepRecording,
    gradient_kind,
    matched,
    record,
)
from dshard.torch_private import dispatch_mode, is_transforming, n_dispatch_modes
from dshard.validate import check_callable

P = ParamSpec("P")
R = TypeVar("R")

_KEPT, _TRIES, _PAUSE = 8, 4, 100
"""Keys of which something is kept; recordings of a step before it is left to Python, and calls until the next."""
_MANY = 256
"""Keys that are numbered."""
_PATIENCE = 10
"""Calls after which a step that was never replayed is warned of."""


@overload
def replay(step: Callable[P, R], *, check_every: int = 100, cuda_graph: bool = False) -> Replay[P, R]: ...
@overload
def replay(*, check_every: int = 100, cuda_graph: bool = False) -> Callable[[Callable[P, R]], Replay[P, R]]: ...
def replay(step: Callable[P, R] | None = None, *, check_every: int = 100, cuda_graph: bool = False) -> Any:
    """Run a training step again and again without its Python: record it once, then replay its operators.

    `step` takes distributed and plain tensors, numbers and texts, and runs forward and backward passes, an optimiser,
    or any other operators. Its first call runs by Python, two more are recorded; if both did the same, later calls run
    the local operators and collectives of the recording: no module, no autograd, no distributed tensors between them.
    Results, gradients, buffers and random numbers are those of the step, to the bit.

        @dshard.replay
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

    It is a promise: what the step reads other than its arguments does not matter. Numbers among the options of
    optimisers, such as learning rates, do: a replay takes those that a schedule has set. What is cheap to compare is
    compared at every call, and recorded anew where it differs: arguments; settings of torch and dshard; modules that
    ran, with their parameters, buffers, hooks and plain attributes; groups and states of optimisers; variables of
    `step`; the rows of all ranks. One call in `check_every` is run by Python on all ranks, and compared: another
    operator, number or tensor there is a `ReplayError`, so that nothing is wrong for longer than so many calls.

    Steps that read a number on the host (`.item()`, a Python `if` on a tensor, an optimiser that counts its steps
    there: give it `fused=True` or `capturable=True`, or leave it outside), that differ from one call to the next, or
    return a tensor whose backward pass is yet to run, run by Python, as do calls within `trace`, `strict`, `explain`
    or a mode of torch: `why_not` says why, and a warning if no call is ever replayed. Other Python in a step, such as
    a `print`, runs when it is recorded or compared alone. Kernels that are no operators of torch are not seen.

    With `cuda_graph=True` replays launch a CUDA graph, captured at the first of them, with its NCCL collectives:
    arguments are copied to the graph's memory, results out of it. Gradients lie in it, until the next replay. Options
    of optimisers that change have to be tensors (`lr=torch.tensor(...)`, `capturable=True`).

    Raises:
        ArgumentError: `step` cannot be called, or `check_every` is no positive integer.
        ReplayError: by a call, see above; or a step under `cuda_graph=True` does something that no graph can do.
    """
    if type(check_every) is not int or check_every < 1:
        raise ArgumentError(f"replay: check_every={check_every!r}: give a number of calls, 1 or more")
    if step is None:
        return partial(replay, check_every=check_every, cuda_graph=cuda_graph)
    check_callable(step, "replay", "give a function that runs one step")
    return Replay(step, check_every, cuda_graph=cuda_graph)


class _Known:
    """The recordings of a step for arguments of one key, rows of all ranks, and gradients of one kind."""

    def __init__(self, key: object, due: int, calls_before: int) -> None:
        self.key, self.due, self.calls_before = key, due, calls_before
        self.tries = self.compared = 0
        self.last: StepRecording | None = None
        self.program: StepProgram | None = None
        self.why_not = "the first call runs by Python"

    def is_for(self, call: StepCall) -> bool:
        """Whether the leaves have gradients of the kinds that they had in the recording."""
        leaves = () if self.last is None else self.last.leaves
        return all(gradient_kind(leaf.source.in_call(call).grad) == leaf.before for leaf in leaves)

    def why_python(self) -> str:
        """Why the next call has to run by Python; empty if it need not.

        A program of which something has changed is dropped; its recording is the next one's to compare with.
        """
        if self.program is None:
            return self.why_not if self.calls_before else "this call is recorded"
        why = self.program.why_stale()
        if why:
            self.program = None
            if self.tries >= _TRIES:
                self.pause(why)
        return why

    def pause(self, why: str) -> None:
        """Leave the step to Python for many calls: it cannot be replayed as it is."""
        self.calls_before, self.tries, self.last, self.why_not = _PAUSE, 0, None, why

    def add(self, recording: StepRecording, call: StepCall, number: int, *, in_graph: bool) -> str:
        """Take the recording of a call: a program, if it equals the last one. What differs, or empty."""
        last, self.last, self.compared, self.tries = self.last, recording, number, self.tries + 1
        why = recording.recorder.why_not
        if last is not None and not why:
            self.last, why = matched(last, recording)
        if why:
            self.program = None
            if recording.recorder.why_not or self.tries >= _TRIES:
                self.pause(recording.recorder.why_not or f"two calls differ: {why}")
        elif last is not None and self.program is not None and last[-2:] == self.last[-2:]:
            self.program.recording = self.last  # with what the state holds now
        elif last is not None:
            self.program = StepProgram(self.last, call, in_graph=in_graph)
        return why


class Replay(Generic[P, R]):
    """A step that is recorded, and replayed: see `replay`.

    Attributes:
        calls: Calls so far.
        replays: Those that ran no Python of the step.
        why_not: Why the last call was not a replay; empty if it was.
    """

    def __init__(self, step: Callable[P, R], check_every: int = 100, *, cuda_graph: bool = False) -> None:
        self.step, self.check_every, self.cuda_graph = step, check_every, cuda_graph
        self.calls, self.replays, self.why_not = 0, 0, ""
        self._known: list[_Known] = []
        self._keys: list[object] = []
        self._rows = MeshesOfRows()
        self._has_warned = False
        update_wrapper(self, step)

    def replayed_step(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step, by a replay if there is a recording that holds.

        Raises:
            ReplayError: in a call that is compared the step has done something else than its replays, on this rank, or
                on one that this rank waits for.
        """
        self.calls += 1
        if simulated_ranks() is not None or is_transforming() or torch.compiler.is_compiling():
            self.why_not = "the ranks are simulated, or the call is within a transform or a compiled region of torch"
            return self.step(*args, **kwargs)
        with nothing_compared(), static_sizes():
            out = self._step(StepCall(args, kwargs), looks := _why_looked_at())
        if self.calls >= _PATIENCE and not (looks or self._has_warned or self.replays or self._programs):
            self._has_warned = True
            warn_here(f"{self._name} was not replayed in {self.calls} calls: {self.why_not}")
        return out

    __call__ = replayed_step  # whose name errors have, of ranks that wait in a replay

    def _step(self, call: StepCall, looks: str) -> R:
        unsuited = call.why_not()
        self.why_not = looks or unsuited
        numbers = self._rows.exchange(0 if self.why_not else self._number_of(call.key))
        is_due, known = False, None
        if not unsuited and 0 not in numbers:
            known = self._of(call, numbers)
            is_due = self.calls >= known.due
            known.due = self.calls + self.check_every if is_due else known.due  # alike on all ranks
            if not looks:
                self.why_not = known.why_python() or ("this call is compared with the program" if is_due else "")
                if not all(self._rows.exchange(int(not self.why_not))) and not self.why_not:
                    known = None
        if known is None or looks:
            self.why_not = self.why_not or "another rank runs the step by Python"
        elif known.program is not None and not self.why_not:
            self.replays += 1
            known.tries = 0
            return known.program.run(call)  # type: ignore[no-any-return]
        elif known.program is not None or not known.calls_before:
            return self._recorded(known, call)
        else:
            known.calls_before -= 1
        with NOTED_ROWS.entered(self._rows):
            return self.step(*call.args, **call.kwargs)

    def _recorded(self, known: _Known, call: StepCall) -> R:
        """Run the step by Python, and record it; where there is a program, it must do what that does."""
        program, since = known.program, known.compared
        wrong = f", and replays since call {since} may be wrong" if since < self.calls - 1 else ""

        def error(what: str) -> ReplayError:
            return ReplayError(
                f"call {self.calls} of {self._name} runs {what}: something has changed that the step reads beside its "
                f"arguments{wrong}; pass it as an argument, or leave the step to Python"
            )

        recorder = StepRecorder() if program is None else CheckingRecorder(program.recording, error)
        try:
            with NOTED_ROWS.entered(self._rows):
                result, recording = record(self.step, call, recorder)
            why = known.add(recording, call, self.calls, in_graph=self.cuda_graph)
            if why and program is not None:
                raise error(why)
            if known.program is not None and (unfit := known.program.why_not_captured):
                known.program = None
                raise ReplayError(
                    f"{self._name} cannot run in a CUDA graph: {unfit}; change that, or leave out cuda_graph=True"
                )
        except ReplayError as raised:
            if program is not None:
                known.program = None
                publish_failure(raised, program.ranks)
            raise
        self.why_not = known.why_not if known.calls_before else self.why_not
        return result  # type: ignore[no-any-return]

    def _number_of(self, key: object) -> int:
        """The number of a key on this rank, from 1 on; it tells other ranks which of its programs this rank has."""
        if not self._rows:
            return 1
        if key not in self._keys:
            self._keys = [*(self._keys if len(self._keys) < _MANY else ()), key]
        return 1 + self._keys.index(key)

    def _of(self, call: StepCall, numbers: tuple[int, ...]) -> _Known:
        key = call.key, numbers
        same = [known for known in self._known if known.key == key]
        for known in same:
            if known.is_for(call):
                return known
        self._known = [_Known(key, self.calls + self.check_every, 0 if same else 1), *self._known[: _KEPT - 1]]
        return self._known[0]

    @property
    def _name(self) -> str:
        return getattr(self.step, "__qualname__", None) or repr(self.step)

    @property
    def _programs(self) -> list[StepProgram]:
        return [known.program for known in self._known if known.program is not None]

    @property
    def code(self) -> str:
        """The programs that are replayed, as Python."""
        return "\n\n".join(program.code for program in self._programs)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{each.n_operators} operators and {each.n_collectives} collectives" for each in self._programs
        )
        return f"<replay of {self._name}: {self.replays} of {self.calls} calls replayed; {sizes or 'no program'}>"


def _why_looked_at() -> str:
    """Why this rank replays no step now, though others may; empty if it may, too."""
    if comparing():
        return "DSHARD_DEBUG=1 compares the calls of the ranks"
    if OBSERVERS or LISTENERS or RECORDERS:
        return "a trace, strict or explain looks at the step"
    n_modes = n_dispatch_modes()  # `count_traffic` has one of dshard's own, which looks at operators on local tensors
    if n_modes and (n_modes > 1 or type(dispatch_mode()) is not OperatorMode):
        return "the call is within a mode of torch"
    return ""
