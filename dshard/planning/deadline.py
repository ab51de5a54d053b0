"""When a search ends: seconds of the processor after which nothing new is tried, and what was begun is given up."""

from __future__ import annotations

from math import inf
from time import process_time


class TimeIsOver(Exception):
    """What was begun is given up, as the time for it is over."""


class Deadline:
    """Some seconds of the processor from now on."""

    def __init__(self, seconds: float = inf) -> None:
        self.seconds, self.begin = seconds, process_time()

    def spent(self) -> float:
        """The seconds since it was set."""
        return process_time() - self.begin

    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self.seconds - self.spent())

    def check(self) -> None:
        """Raise `TimeIsOver` where none is left."""
        if self.seconds < inf and not self.left():
            raise TimeIsOver


ENDLESS = Deadline()
"""It never comes."""
