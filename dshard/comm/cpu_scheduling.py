"""Scheduling of processes that share cores with other ranks."""

from __future__ import annotations

import contextlib
import os

import torch


def share_cores() -> None:
    """Give this process one torch thread and, where the system has it, the batch scheduling policy.

    Batch work has longer time slices. With shorter ones, which ranks wait for each other differs from run to run, and
    seconds of a step by half.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
