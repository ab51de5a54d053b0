"""The current line of the user's program, and the operator or function that it called."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from contextlib import nullcontext
from os import sep
from pathlib import Path
from types import FrameType

import torch

from dshard.comm.runtime import is_first_rank
from dshard.mesh import Mesh

_OTHERS = (
    str(Path(__file__).parents[1]) + sep,
    str(Path(torch.__file__).parent) + sep,
    "<frozen",
    "<eval_with_key>",
    "<rehearsed",
    "<replay",
)
_PYTHON = str(Path(contextlib.__file__).parent) + sep
"""Prefixes of files that are not user code; installed packages, which lie within Python's folder, are user code."""

_WRAPPERS = ("front", "<lambda>", "<genexpr>")  # names of wrappers around functions that the program called
_TITLES = dict.fromkeys(("compiled_graph", "wait_in_graph"), "compiled graph") | {"replayed_step": "replayed step"}
_TITLES |= dict.fromkeys(("enter", "leave", "place"), "forward pass") | {"_until_all_end": "batches"}
"""Titles of user code that calls functions of dshard on behalf of the program, and of hooks of modules."""


_BACKWARD = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_OPERATOR_ENTRIES = ("__torch_dispatch__", "dispatch")  # that of a mode; that of DTensor


def user_line(frame: FrameType | None = None) -> str:
    """The innermost line of the running program that lies neither in dshard, torch nor Python: "file:number".

    A thread that runs autograd has no such line: there it is the line at which the main thread waits.
    """
    frame = user_frame(frame)
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_call(frame: FrameType | None = None) -> str:
    """The current call of the user's program, or of the thread at `frame`, and its line: "softmax at file:number".

    Within a function of torch the call is the operator; elsewhere it is the function of dshard that the program called.
    """
    name, frame = "", frame or sys._getframe(1)
    while frame is not None and not _is_users(frame):
        if frame.f_code.co_name == "__torch_function__" and "func" in frame.f_locals:
            name = getattr(frame.f_locals["func"], "__name__", "")
            break
        if frame.f_code.co_name in _OPERATOR_ENTRIES and "func" in frame.f_locals:
            name = str(frame.f_locals["func"])
        elif frame.f_code in _BACKWARD or (
            frame.f_code.co_filename.startswith(_OTHERS[0]) and frame.f_code.co_name not in _WRAPPERS
        ):
            name = frame.f_code.co_name
        frame = frame.f_back
    return f"{_TITLES.get(name, name) or 'dshard'} at {user_line(frame)}"


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The frame of `user_line`, from `frame` on, or None where there is none."""
    innermost = _innermost_user_frame(frame or sys._getframe(1))
    if innermost is None:
        innermost = _innermost_user_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    return innermost


def _innermost_user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and (frame.f_code.co_filename.startswith(_OTHERS) or not _is_users(frame)):
        frame = frame.f_back
    return frame


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if name.startswith(_OTHERS) or (name.startswith(_PYTHON) and "-packages" not in name):
        return False
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # which torch sets when it first writes there
    return not compiled or not name.startswith(compiled)


def warn_user(message: str, mesh: Mesh) -> None:
    """Warn at the user's line: on the first rank of the mesh, or in a process that stands for all ranks.

    The other ranks print nothing, but raise if their filters turn the warning into an error: a rank that raised alone
    would leave them waiting.
    """
    with nullcontext() if is_first_rank(mesh) else warnings.catch_warnings(record=True):
        warn_here(message)


def warn_here(message: str) -> None:
    """Warn at the user's line, on this rank."""
    frame = user_frame()
    if frame is None:  # a thread of torch's, and a main thread that has ended
        warnings.warn(message, stacklevel=3)
        return
    registry = frame.f_globals.setdefault(
        "__warningregistry__", {}
    )  # what Python has said at which lines of this module
    name, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "<exec>")  # Python drops what has none
    warnings.warn_explicit(message, UserWarning, name, frame.f_lineno, module, registry)
