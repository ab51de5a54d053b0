"""Warnings from within an operator, at the line of the user's program, on one rank of the mesh."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

from dshard.comm.runtime import is_first_rank
from dshard.comm.user_code import user_frame
from dshard.mesh import Mesh


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
