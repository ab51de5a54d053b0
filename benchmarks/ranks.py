"""What a rank does before anything is timed on it."""

from __future__ import annotations

import contextlib
import os

import torch


def settle() -> None:
    """One torch thread, scheduled as batch work: ranks that share cores then take turns of some length.

    Otherwise which of them wait for each other is decided anew in each run, and steps differ by half.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
