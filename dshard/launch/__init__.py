"""Ranks for a job: processes started on this host, or by a launcher such as torchrun."""

from dshard.launch.group import Send, choose_device, choose_ranks, is_launched, is_reporting, run
from dshard.launch.rehearse import Rehearsed, rehearse

__all__ = [
    "Rehearsed",
    "Send",
    "choose_device",
    "choose_ranks",
    "is_launched",
    "is_reporting",
    "rehearse",
    "run",
]
