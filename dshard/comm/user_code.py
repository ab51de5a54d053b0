"""The line of the user's program that runs, and what it has called."""

from __future__ import annotations

import contextlib
import sys
import threading
from os import sep
from pathlib import Path
from types import FrameType

import torch

_OTHERS = (
    str(Path(__file__).parents[1]) + sep,
    str(Path(torch.__file__).parent) + sep,
    "<frozen",
    "<eval_with_key>",
)
_PYTHON = str(Path(contextlib.__file__).parent) + sep
"""How the names of files begin that are not those of a program's author: packages apart, which lie within Python's."""

_WRAPPERS = ("front", "<lambda>")  # of functions that the program has called


def user_line() -> str:
    """The innermost line of the running program that lies neither in dshard, torch nor Python: "file:number".

    A thread that runs autograd has none: there it is the line at which the main thread waits.
    """
    main = threading.main_thread().ident
    found = _user_frame(sys._getframe(1)) or _user_frame(sys._current_frames().get(main or 0))
    return "?" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def user_call() -> str:
    """What runs for the user's program, and its line: "softmax at file:number".

    Within a function of torch's that is the operator; elsewhere what the program has called in dshard.
    """
    name, frame = "", sys._getframe(1)
    while frame.f_back is not None and not _is_users(frame):
        if frame.f_code.co_name == "__torch_function__" and "func" in frame.f_locals:
            name = getattr(frame.f_locals["func"], "__name__", "")
            break
        if frame.f_code.co_name == "__torch_dispatch__" and "func" in frame.f_locals:
            name = str(frame.f_locals["func"])
        elif frame.f_code.co_filename.startswith(_OTHERS[0]) and frame.f_code.co_name not in _WRAPPERS:
            name = frame.f_code.co_name
        frame = frame.f_back
    return f"{name or 'dshard'} at {user_line()}"


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith(_OTHERS) and (not name.startswith(_PYTHON) or "-packages" in name)
