"""Lists and dicts that calls are given as copies: what a call does to these, its caller's own have done to them."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

from torch import Tensor

from dshard.core.trees import GivenCopy, give_back
from dshard.rehearsal.session import is_running

GivenCopies: TypeAlias = list[tuple[FrameType | None, list[GivenCopy]]]
"""The copies of containers that running calls are given, by the frames in which their hooks run; None in a graph."""


def begin_call(given: GivenCopies, call: FrameType | None, copies: list[GivenCopy]) -> None:
    """A call that begins is given these copies."""
    if copies:
        given.append((call, copies))


def end_call(given: GivenCopies, call: FrameType | None, change: Callable[[Tensor], object]) -> None:
    """Do to the containers of a call's caller what it did to their copies, new tensors by `change`."""
    if given:
        give_back([each for own, copies in given if own is call for each in copies], change)
        given[:] = [(own, copies) for own, copies in given if own is not call and (own is None or is_running(own))]
