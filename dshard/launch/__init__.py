"""Ranks for a job: started on this host, or those that a launcher such as torchrun has started already."""

from dshard.launch.group import choose_device, choose_ranks, joining, reporting, run
from dshard.launch.ranks import Send, run_ranks, screenful

__all__ = ["Send", "choose_device", "choose_ranks", "joining", "reporting", "run", "run_ranks", "screenful"]
