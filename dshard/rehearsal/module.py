"""The region of a module that `parallelize` has laid out: hooks around its forward pass, and what is known of it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from dshard.autograd.gathered_weights import GatheredUse, use_of
from dshard.comm import RECORDERS, Scoped, comparing, has_only_shape, simulated_ranks
from dshard.comm.events import LISTENERS, run_pending
from dshard.core.observe import OBSERVERS
from dshard.core.spec import is_for_shapes
from dshard.core.trees import tensors_in
from dshard.core.wrapper import Wrapper
from dshard.dispatch.planned_calls import PLANNED
from dshard.rehearsal.calls import autocast_now, is_own, is_ready, kind_of
from dshard.rehearsal.record import Record
from dshard.rehearsal.region import Run
from dshard.rehearsal.region_backward import begun
from dshard.rehearsal.region_recording import RegionRecording
from dshard.rehearsal.session import HERE, Entered
from dshard.torch_private import graph_task_id, is_transforming, n_dispatch_modes, pytree, saved_tensor_hooks

MAX_RECORDS, TRIES, PAUSE = 16, 2, 100
"""Records of a module, or of a stretch of its calls; recordings of one kind of inputs before it is left alone, and
calls until the next, at first."""
FREE, WORTH = 3, 32
"""Records, beside one, that are made at once; each later one waits for so many answered calls, which pay for it."""
_BEGINNING = Lock()
"""Held while a session begins: two threads must not find a record idle at once."""
_DEFAULT = os.environ.get("DSHARD_REHEARSE", "1") not in ("", "0")
_ON: Scoped[bool, bool] = Scoped("rehearsing", lambda entered: entered[-1] if entered else _DEFAULT)


@contextmanager
def rehearsing(on: bool = True) -> Iterator[None]:
    """Within the block parallelized modules are rehearsed, or not; outside they are, unless DSHARD_REHEARSE is 0."""
    with _ON.entered(on):
        yield


class _Known:
    """The knowledge of calls with inputs of one kind.

    Attributes:
        tries: Recordings since a run was answered as a whole.
        missed: Runs since then, or since the last recording.
        pause: Calls until the next recording.
        is_near: Whether most calls of the last run were answered.
        froze: Whether a recording has set what is there aside from the collection of garbage.
    """

    def __init__(self) -> None:
        self.calls = self.tries = self.missed = self.pause = 0
        self.is_near = self.froze = False
        self.record: Record | None = None


class Rehearsal:
    """How a module's calls are rehearsed.

    Attributes:
        calls: Calls of the module so far.
        answered: Those of which all calls were answered by a record.
        why_not: Why the last call was not one of these; empty if it was.
        weights: Gives the weights that are gathered for the call that begins, if any are.
    """

    def __init__(self, module: nn.Module, weights: Callable[[], Sequence[Tensor]] | None = None) -> None:
        self.name = type(module).__name__
        self.calls = self.answered = 0
        self.why_not = "it was not called"
        self.weights = weights
        self._known: dict[tuple[object, ...], _Known] = {}
        self._watched: list[_Known] = []  # of the call that runs by Python

    def __deepcopy__(self, memo: dict[int, object]) -> Rehearsal:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.name, copy.calls, copy.answered, copy.why_not = self.name, 0, 0, "it was not called"
        copy._known, copy._watched, copy.weights = {}, [], deepcopy(self.weights, memo)
        return copy

    @property
    def records(self) -> list[Record]:
        """The records, the last made last."""
        return [known.record for known in self._known.values() if known.record is not None]

    @property
    def code(self) -> str:
        """The functions that answer calls, and the backward programs."""
        sources = [source for record in self.records for source in record.code]
        programs = [program.code for record in self.records for _, program in record.programs]
        return "\n\n".join([*sources, *programs])

    def __repr__(self) -> str:
        return f"<rehearsed {self.name}: {self.answered} of {self.calls} calls; {_said(self.records)}>"

    # -- hooks

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward pass begins, with its inputs laid out."""
        if torch.compiler.is_dynamo_compiling() or (self.weights is not None and graph_task_id() >= 0):
            return  # within a backward pass a module is not called, but calls of it run again
        if HERE.entered:
            HERE.drop_ended()
        begun = self.begun(module, args, kwargs)
        if begun is not None:
            call = sys._getframe(1).f_back  # of torch, whose hooks of a call that failed run there themselves
            assert call is not None
            session, close = begun
            HERE.enter(Entered(call, close), session.session())

    def begun(
        self, module: nn.Module, args: Any, kwargs: Any, number: int = 0
    ) -> tuple[RegionRecording | Run, Callable[[bool], None]] | None:
        """The session of calls that begin with these inputs, and what closes it; None if they run by Python.

        They are the stretch of this `number` in their module's forward pass.
        """
        self.calls += 1
        with _BEGINNING:
            session, known = self._session(module, args, kwargs, number)
        return None if session is None or known is None else (session, partial(self._close, session, known))

    def leave(self, module: nn.Module, args: object, out: object) -> None:
        """The forward pass has ended, or failed."""
        if torch.compiler.is_dynamo_compiling():
            return
        if HERE.entered:
            caller = sys._getframe(1)
            failed = any(each.frame is caller for each in HERE.entered)
            if isinstance(HERE.answer, RegionRecording) and HERE.entered[-1].frame is caller.f_back:
                HERE.answer.has_given(out)
            HERE.leave((caller, caller.f_back), failed=failed)
        for watched in self._watched:
            if watched.record is not None:
                watched.record.watch(tensors_in(out))
        self._watched = []

    def _session(
        self, module: nn.Module, args: Any, kwargs: Any, number: int
    ) -> tuple[RegionRecording | Run | None, _Known | None]:
        flat, structure = args, None
        if kwargs or not {Tensor, Wrapper.public}.issuperset(map(type, args)):
            flat, structure = pytree.tree_flatten((args, kwargs))
        inputs = [x for x in flat if isinstance(x, Tensor)]
        if HERE.answer is not None:
            return None, None  # within a module that is rehearsed
        if LISTENERS:
            run_pending()
        weights = [] if self.weights is None else self.weights()
        inputs += weights
        hooks = saved_tensor_hooks(True)
        use = None if hooks is None else use_of(hooks)
        self.why_not = _why_eager() or _why_not_with(inputs)
        if hooks is not None and use is None:  # a checkpoint runs it again, and counts what it saved the first time
            self.why_not = self.why_not or "there are hooks of saved tensors around it, such as those of a checkpoint"
        if use is not None and not weights:
            self.why_not = self.why_not or "a module around it gathers weights"
        if self.why_not:
            return None, None
        ids = [*map(id, inputs)]
        key = (
            number,
            structure,
            tuple([_key_of(x) for x in flat if not isinstance(x, Tensor)]),
            tuple(map(kind_of, inputs)),
            tuple(map(ids.index, ids)),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), module.training, autocast_now(), use is None),
            PLANNED.of and PLANNED.at,
        )
        known = self._known.pop(key, None) or _Known()
        self._known[key] = known
        for old in [*self._known][: -4 * MAX_RECORDS]:
            del self._known[old]
        known.calls += 1
        record = known.record
        if record is not None and (record.running or record.passes.node_read or not record.own.is_current()):
            if record.running:
                self.why_not = "another thread runs the module"
                return None, None
            known.record = record = None
        if record is not None and record.passes.create_graph:
            record.passes.create_graph = False
            self._watched.append(known)
            self.why_not = "gradients of its last call were differentiated again"
            return None, None
        if record is not None and known.missed < 2:
            return begun(record, inputs, use), known
        if known.pause:
            known.pause -= 1
            self.why_not = "its calls differ each time"
            return (begun(record, inputs, use), known) if record is not None and known.is_near else (None, None)
        n_records = sum(each.record is not None for own, each in self._known.items() if own[0] == number)
        pays = self.answered >= WORTH * (n_records - FREE)
        if known.calls < 2 or (record is None and not (n_records < MAX_RECORDS and pays)):
            self.why_not = "the first call runs by Python"
            return None, None
        return self._recording(module, inputs, use, known), known

    def _recording(
        self, module: nn.Module, inputs: list[Tensor], use: GatheredUse | None, known: _Known
    ) -> RegionRecording:
        known.tries += 1
        self._watched.append(known)
        if known.tries >= TRIES:
            known.pause = PAUSE * 4 ** (known.tries - TRIES)
        known.missed = 0
        own = {
            id(x): x for m in module.modules() for x in (*m._parameters.values(), *m._buffers.values()) if x is not None
        }
        self.why_not = "this call is recorded"
        if not gc.get_freeze_count():
            gc.freeze()  # then what was there before takes no time when garbage is collected after the call
            known.froze = True
        record = known.record
        # with gradients a record ends at the first result of a call that it has not
        before = () if record is None or torch.is_grad_enabled() else record.contents.signatures(inputs)
        return RegionRecording(own, inputs, use, before)

    def _close(self, session: RegionRecording | Run, known: _Known, failed: bool) -> None:
        HERE.answer = None
        if isinstance(session, RegionRecording):
            self._keep(session, known, failed)
            return
        session.stop()
        if session.is_whole:
            known.missed = known.tries = known.pause = 0
        else:
            known.missed += 1
        known.is_near = session.n_answered > 0.75 * len(session.record.answers)
        self.answered += session.is_whole
        self.why_not = "" if session.is_whole else session.why_not or "the module made fewer calls"

    def _keep(self, recording: RegionRecording, known: _Known, failed: bool) -> None:
        """Keep the record of a call that has ended, unless it failed: what is alive then is not what autograd saved."""
        if not failed:
            gc.collect()  # so that what is alive is what autograd has saved, on all ranks
        if known.froze:
            gc.unfreeze()
            known.froze = False
        record = None if failed else Record(recording)
        recording.end()
        if record is None:
            self.why_not = "the call that was recorded failed"
            return
        if record.contents.calls:
            known.record = record
        self.why_not = f"this call was recorded: {record.why_not}" if record.why_not else self.why_not


def _key_of(value: object) -> object:
    """The part of an argument that is no tensor which selects a record; the calls compare the rest."""
    plain = isinstance(value, bool | int | float | str | type(None) | torch.dtype | torch.device)
    return type(value), repr(value) if plain else None


def _why_eager() -> str:
    """Why no module is rehearsed now; empty if one may be."""
    if not _ON.value():
        return "it is turned off"
    if OBSERVERS or LISTENERS or RECORDERS or comparing():
        return "a trace, strict, explain, a replay or debug mode looks at the calls"
    if simulated_ranks() is not None or is_for_shapes():
        return "the ranks are simulated"
    if n_dispatch_modes() or is_transforming() or torch.compiler.is_compiling():
        return "the call is within a mode, a transform or a compiled region of torch"
    if torch.autograd.forward_ad._current_level >= 0:
        return "derivatives are taken forward"
    return ""


def _why_not_with(inputs: list[Tensor]) -> str:
    """Why these inputs are not rehearsed with; empty if they may be."""
    for x in inputs:
        if not isinstance(x, Wrapper) and type(x) is not Tensor:
            return f"an input is a {type(x).__name__}"
        if not (is_ready(x) and is_own(x)):
            return "an input is in flight, or a copy of a view"
        if isinstance(x, Wrapper) and has_only_shape(x._local_tensor):
            return "an input has no data on this rank"
    return ""


class RehearsedParts:
    """How the calls of several parts of a module are rehearsed, such as those that gather weights, in sum."""

    def __init__(self, module: nn.Module, parts: Sequence[Rehearsal]) -> None:
        self.name, self.parts = type(module).__name__, [*parts]

    @property
    def calls(self) -> int:
        """Calls of the parts so far."""
        return sum(part.calls for part in self.parts)

    @property
    def answered(self) -> int:
        """Those of which all calls were answered by a record."""
        return sum(part.answered for part in self.parts)

    @property
    def why_not(self) -> str:
        """Why the last call of the first part that was not answered was not."""
        return next((part.why_not for part in self.parts if part.why_not), "")

    @property
    def records(self) -> list[Record]:
        """The records of all parts."""
        return [record for part in self.parts for record in part.records]

    @property
    def code(self) -> str:
        """The functions that answer calls, and the backward programs."""
        return "\n\n".join([part.code for part in self.parts])

    def __repr__(self) -> str:
        return (
            f"<rehearsed {self.name}: {self.answered} of {self.calls} calls of {len(self.parts)} modules; "
            f"{_said(self.records)}>"
        )


def _said(records: Sequence[Record]) -> str:
    n_calls, patterns = sum(len(r.contents.calls) for r in records), sum(len(r.programs) for r in records)
    ran, derived = sum(r.passes.by_program for r in records), sum(r.passes.derived for r in records)
    return (
        f"{n_calls} calls of torch in {len(records)} records; backward: {patterns} patterns, "
        f"{ran} of {ran + derived} by program"
    )


def rehearsal_of(model: nn.Module) -> Rehearsal | RehearsedParts | None:
    """How the calls of a parallelized module are rehearsed; None for another."""
    return model.__dict__.get("rehearsed")
