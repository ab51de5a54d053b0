"""Lists and dicts that calls are given as copies: what a call does to these, its caller's own have done to them."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from torch import Tensor

from dshard.core.trees import GivenCopy, give_back
from dshard.rehearsal.session import is_running


class GivenContainers:
    """The copies of containers that running calls of a module are given, by the frames in which their hooks run."""

    def __init__(self) -> None:
        self.calls: list[tuple[FrameType | None, list[GivenCopy]]] = []

    def put(self, call: FrameType | None, copies: list[GivenCopy]) -> None:
        """A call that begins is given these copies; `call` is None in a graph."""
        if copies:
            self.calls.append((call, copies))

    def give_back(self, call: FrameType | None, change: Callable[[Tensor], object]) -> None:
        """A call has ended: do to its caller's containers what it did to their copies, new tensors by `change`."""
        if not self.calls:
            return
        give_back([each for own, copies in self.calls if own is call for each in copies], change)
        self.calls = [
            each for each in self.calls if each[0] is not call and (each[0] is None or is_running(each[0]))
        ]  # or failed
