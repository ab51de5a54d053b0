"""Modules around others that are rehearsed by themselves: each stretch of their calls between these is a region."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from dshard.core.signature import Args, Kwargs
from dshard.core.trees import tensors_in
from dshard.dispatch.planned_calls import outermost_checkpoint
from dshard.rehearsal.module import Rehearsal
from dshard.rehearsal.region import Run, run_behind
from dshard.rehearsal.region_recording import RegionRecording
from dshard.rehearsal.session import HERE, Entered, call_with_session, run_eagerly
from dshard.torch_private import graph_task_id, no_torch_function


class StretchRehearsal(Rehearsal):
    """How the calls of a module around others are rehearsed, which are rehearsed by themselves.

    A stretch of calls ends where one of these modules begins, and the next one begins with its result. It has a session
    of its own, from its first call on.
    """

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward pass begins, with its inputs laid out."""
        if torch.compiler.is_dynamo_compiling() or graph_task_id() >= 0:
            return
        if HERE.entered:
            HERE.drop_ended()
        if HERE.answer is None:
            call = sys._getframe(1).f_back  # of torch, as in `Rehearsal.enter`
            assert call is not None
            stretches = Stretches(self, module, (args, kwargs))
            HERE.enter(Entered(call, stretches.end, stretches), stretches.begin)


class Stretches:
    """The stretches of one call of a module; `given` is what the next one begins with.

    Each may use those of the module's inputs that need a gradient, as a residual sum does.
    """

    def __init__(self, rehearsal: StretchRehearsal, module: nn.Module, given: tuple[Any, Any]) -> None:
        self.rehearsal, self.module, self.given = rehearsal, module, given
        with no_torch_function():
            self.inputs = [x for x in tensors_in(given) if x.requires_grad]
        self.modes = _modes()
        self.number = self.within = 0
        self.session: RegionRecording | Run | None = None
        self.close: Callable[[bool], None] | None = None
        self.frame: object = None  # of a checkpoint in which a stretch has ended

    def begin(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run a call: the first in the modes of autograd of the module begins a session, with which others follow."""
        if HERE.drop_ended():
            return call_with_session(func, args, kwargs)
        HERE.answer = None
        if _modes() != self.modes or self.is_behind():
            try:
                return run_behind(self.frame, run_eagerly, func, args, kwargs)
            finally:
                HERE.answer = self.begin
        (given, by_name), self.given = self.given, _NOTHING
        begun = self.rehearsal.begun(self.module, given, by_name, self.number)
        if begun is None:
            return run_eagerly(func, args, kwargs)
        self.session, self.close = begun
        HERE.answer = self.session.session()
        return HERE.answer(func, args, kwargs)

    def next_from(self, out: object) -> None:
        """Let the next stretch begin, with what a module within has given."""
        self.number += 1
        self.given = ((out, *self.inputs), {})
        HERE.answer = self.begin

    def is_behind(self) -> bool:
        """Whether a checkpoint goes on in which a stretch has ended."""
        return self.frame is not None and outermost_checkpoint() is self.frame

    def end(self, failed: bool) -> None:
        """End the stretch."""
        session, close = self.session, self.close
        HERE.answer = self.session = self.close = None
        self.given = _NOTHING
        if session is None or close is None:
            return
        answered = session.answered() if isinstance(session, Run) else []
        if answered and answered[-1].checkpoint is not None:
            self.frame = outermost_checkpoint()
        close(failed)


_NOTHING: tuple[Any, Any] = ((), {})


def _modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def end_stretch(module: nn.Module, args: object) -> None:
    """A module within others begins: the stretch of calls of that around it ends."""
    stretches = None if torch.compiler.is_dynamo_compiling() else HERE.stretches
    if stretches is not None:
        stretches.within += 1
        if isinstance(stretches.session, RegionRecording):
            stretches.session.end_within_module()
        stretches.end(False)
        if stretches.is_behind():
            HERE.answer = partial(run_behind, stretches.frame, run_eagerly)


def begin_stretch(module: nn.Module, args: object, out: object) -> None:
    """A module within others has ended: what it gives begins the next stretch of calls of that around it."""
    stretches = None if torch.compiler.is_dynamo_compiling() else HERE.stretches
    if stretches is not None and stretches.within:
        stretches.within -= 1
        if not stretches.within:
            stretches.next_from(out)
