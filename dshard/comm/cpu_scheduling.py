"""How a process runs that shares its cores with other ranks."""

from __future__ import annotations

import contextlib
import os

import torch


def share_cores() -> None:
    """One torch thread, scheduled as batch work where the system knows that: ranks then take turns of some length.

    Otherwise which of them wait for each other is decided anew in each run, and steps differ by half.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
